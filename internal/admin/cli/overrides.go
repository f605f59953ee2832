package cli

import (
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

func blockCommand(host Host) *cobra.Command {
	return beginCommand(host, "blocks", "for", &cobra.Command{
		Use:   "block <zone> [<value>...] <duration>",
		Short: "Refuses all requests of a client for some time",
		Long: `
Refuses all requests of a client in a zone for some time, in this Caddy at once
and in others that count in the same store within a second (ledger_trust). The
store keeps the block, so that a restart of Caddy does not end it. A block of the
same client replaces the one before. The first arguments are those of get.
`,
		Example: "  $ caddy rate-limit block api 203.0.113.7 1h --reason 'scraper'",
	})
}

func grantCommand(host Host) *cobra.Command {
	return beginCommand(host, "grants", "events", &cobra.Command{
		Use:   "grant <zone> [<value>...] <events>",
		Short: "Admits more events of a client in its window",
		Long: `
Admits that many more events of a client until its window ends, or for the
length of a window if none is open; with gcra, more at once. A grant of the same
client replaces the one before. The first arguments are those of get.
`,
		Example: "  $ caddy rate-limit grant api 203.0.113.7 1000 --reason 'ticket 4711'",
	})
}

// beginCommand completes cmd, which begins an override of a list; its last argument is a
// parameter of the call.
func beginCommand(host Host, list, parameter string, cmd *cobra.Command) *cobra.Command {
	cmd.Args = between(2, -1)
	var flags overrideFlags
	flags.add(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		last := len(args) - 1
		return 0, flags.change(s, http.MethodPost, list, args[:last], url.Values{parameter: args[last:]})
	})
	return cmd
}

func unblockCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "unblock <zone> [<value>...]",
		Short:   "Ends the block of a client",
		Long:    "\nEnds the block of a client. It exits with status 3 if there is none. The arguments\nare those of get. A client key that blocks shows is for --client-key; if the config\nhas no such zone any more, with --store.\n",
		Example: "  $ caddy rate-limit unblock api 203.0.113.7",
		Args:    between(1, -1),
	}
	var flags overrideFlags
	flags.bucketFlags.add(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		return 0, flags.change(s, http.MethodDelete, "blocks", args, url.Values{})
	})
	return cmd
}

func blocksCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "blocks",
		Short: "Lists the clients that are blocked, or were granted events",
		Long:  "\nLists the blocks and grants that are in force in the stores of the running config.\n",
		Args:  between(0, 0),
	}
	cmd.RunE = host.run(func(s *session, _ []string) (int, error) {
		var all adminapi.Overrides
		if err := s.call(http.MethodGet, root+"overrides", nil, &all); err != nil {
			return 0, err
		}
		code := 0
		if len(all.Errors) > 0 {
			code = exitShard
		}
		if s.raw {
			return code, nil
		}
		now := time.Now()
		t := newTable(s.out, "ZONE", "STORE", "KIND", "CLIENT", "EVENTS", "ENDS", "BY", "REASON")
		for _, o := range all.Overrides {
			events := ""
			if o.Events > 0 {
				events = "+" + number(o.Events)
			}
			t.row(o.Zone, o.Store, string(o.Kind), clientText(&o.Client), events, until(o.Until, now), o.By, o.Reason)
		}
		t.end()
		for _, text := range all.Errors {
			fmt.Fprintln(s.out, "not all are known of store", shown(text))
		}
		return code, nil
	})
	return cmd
}

// overrideFlags are the flags that, with the arguments, select a client to change
// something for.
type overrideFlags struct {
	bucketFlags
	reason string
}

func (f *overrideFlags) add(cmd *cobra.Command) {
	f.bucketFlags.add(cmd)
	cmd.Flags().StringVar(&f.reason, "reason", "", "Why; it is shown by blocks and in the log")
}

// change begins or ends an override, with more parameters.
func (f *overrideFlags) change(s *session, method, what string, args []string, query url.Values) error {
	if f.reason != "" {
		query.Set("reason", f.reason)
	}
	var all adminapi.Overrides
	if err := s.call(method, f.pathOf(what, args, query), nil, &all); err != nil || s.raw {
		return err
	}
	now := time.Now()
	for _, o := range all.Overrides {
		text := "no " + string(o.Kind) + " any more"
		if method == http.MethodPost {
			text = overrideText(&o, now)
			if o.ReplacedUntil > 0 {
				text += ", in place of one that would end " + until(o.ReplacedUntil, now)
			}
		}
		fmt.Fprintf(s.out, "%s: %s in zone %s of store %s\n", text, shown(clientText(&o.Client)), shown(o.Zone), shown(o.Store))
	}
	return nil
}

// overrideText says what an override does, and until when.
func overrideText(o *adminapi.Override, now time.Time) string {
	text := string(o.Kind)
	if o.Events > 0 {
		text += " of " + number(o.Events)
	}
	text += ", ends " + until(o.Until, now)
	if o.Reason != "" {
		text += " (" + shown(o.Reason) + ")"
	}
	return text
}
