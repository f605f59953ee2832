package cli

import (
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func blockCommand(host Host) *cobra.Command {
	cmd := beginCommand(host, "blocks", "for", &cobra.Command{
		Use:   "block <zone> [<value>...] <duration>",
		Short: "Refuses all requests of a client for some time",
		Long: `
Refuses all requests of a client in a zone for some time, in this Caddy at once
and in others that count in the same store within a second (ledger_trust). The
store keeps the block, so that a restart of Caddy does not end it. A block of the
same client replaces the one before. The first arguments are those of get; with
--all-zones, the client's name alone, as find has it.
`,
		Example: "  $ caddy rate-limit block api 203.0.113.7 1h --reason 'scraper'\n  $ caddy rate-limit block --all-zones 203.0.113.7 1h",
	})
	return everywhere(host, cmd, http.MethodPost, "blocks", 2)
}

// everywhere gives a command of a list the flag --all-zones, with which it has so many arguments.
func everywhere(host Host, cmd *cobra.Command, method, list string, arguments int) *cobra.Command {
	all, inOne, args := cmd.Flags().Bool("all-zones", false, "In all zones whose key can yield the client's name"), cmd.RunE, cmd.Args
	cmd.Args = func(cmd *cobra.Command, words []string) error {
		if *all {
			return between(arguments, arguments)(cmd, words)
		}
		return args(cmd, words)
	}
	cmd.RunE = func(cmd *cobra.Command, words []string) error {
		if !*all {
			return inOne(cmd, words)
		}
		return host.run(func(s *session, words []string) (int, error) {
			reason, _ := cmd.Flags().GetString("reason")
			query := url.Values{"name": words[:1], "by": {operator()}}
			if arguments > 1 {
				query.Set("for", words[1])
			}
			if reason != "" {
				query.Set("reason", reason)
			}
			var done adminapi.Overrides
			if err := s.call(method, root+list+"?"+query.Encode(), nil, &done); err != nil {
				return 0, err
			}
			s.showChanges(method, &done)
			return s.tellErrors(done.Errors), nil
		})(cmd, words)
	}
	return cmd
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
	cmd := endCommand(host, "blocks", &cobra.Command{
		Use:     "unblock <zone> [<value>...]",
		Short:   "Ends the block of a client",
		Long:    "\nEnds the block of a client. It exits with status 3 if there is none. The arguments\nare those of get; with --all-zones, the client's name alone. A client key that rules\nshows is for --client-key; if the config has no such zone any more, with --store.\n",
		Example: "  $ caddy rate-limit unblock api 203.0.113.7",
	})
	return everywhere(host, cmd, http.MethodDelete, "blocks", 1)
}

func ungrantCommand(host Host) *cobra.Command {
	cmd := endCommand(host, "grants", &cobra.Command{
		Use:     "ungrant <zone> [<value>...]",
		Short:   "Ends the grant of a client",
		Long:    "\nEnds the grant of a client. It exits with status 3 if there is none. The arguments\nare those of get; with --all-zones, the client's name alone.\n",
		Example: "  $ caddy rate-limit ungrant api 203.0.113.7",
	})
	return everywhere(host, cmd, http.MethodDelete, "grants", 1)
}

// endCommand completes cmd, which ends an override of a list.
func endCommand(host Host, list string, cmd *cobra.Command) *cobra.Command {
	cmd.Args = between(1, -1)
	var flags overrideFlags
	flags.add(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		return 0, flags.change(s, http.MethodDelete, list, args, url.Values{})
	})
	return cmd
}

func blocksCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "blocks",
		Short: "Lists the clients that are blocked, or were granted events",
		Long:  "\nLists the blocks and grants that are in force in the stores of the running config:\nrules --kind block,grant.\n",
		Args:  between(0, 0),
	}
	cmd.RunE = host.run(func(s *session, _ []string) (int, error) {
		return listRules(s, url.Values{"kind": {"block,grant"}})
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
	cmd.Flags().StringVar(&f.reason, "reason", "", "Why; it is shown by rules and audit, and in the log")
}

// change begins or ends an override, with more parameters.
func (f *overrideFlags) change(s *session, method, what string, args []string, query url.Values) error {
	if f.reason != "" {
		query.Set("reason", f.reason)
	}
	query.Set("by", operator())
	var all adminapi.Overrides
	if err := s.call(method, f.pathOf(what, args, query), nil, &all); err != nil {
		return err
	}
	s.showChanges(method, &all)
	return nil
}

// showChanges says what was set or removed.
func (s *session) showChanges(method string, all *adminapi.Overrides) {
	if s.raw {
		return
	}
	now := time.Now()
	for i := range all.Overrides {
		o := &all.Overrides[i]
		text := "no " + string(o.Kind) + " any more"
		if o.Kind == store.OverrideZone {
			text = "as in the config"
		}
		if o.ReplacedDamaged {
			text += ", which was damaged"
		}
		if method == http.MethodPost || o.Since > 0 {
			text = overrideText(o, now)
			if o.ReplacedDamaged {
				text += ", in place of one that was damaged"
			}
			if o.ReplacedUntil > 0 {
				text += ", in place of one that would end " + until(o.ReplacedUntil, now)
			}
		}
		client := ""
		if o.Kind != store.OverrideZone {
			client = shown(clientText(&o.Client)) + " in "
		}
		fmt.Fprintf(s.out, "%s: %szone %s of store %s%s\n", text, client, shown(o.Zone), shown(o.Store), copiesText(o.Copies))
		if o.Warning != "" {
			fmt.Fprintln(s.out, "  warning:", shown(o.Warning))
		}
	}
	s.showUnanswered(all.Unanswered)
}

// copiesText says on how many shards and replicas a change is, after a comma, or nothing.
func copiesText(c *store.Copies) string {
	if c == nil {
		return ""
	}
	text := fmt.Sprintf(", on %d/%d shards", c.Shards, c.OfShards)
	if c.OfReplicas > 0 {
		text += fmt.Sprintf(", %d/%d replicas", c.Replicas, c.OfReplicas)
	}
	return text
}

// overrideText says what an override does, and until when.
func overrideText(o *adminapi.Override, now time.Time) string {
	text := string(o.Kind)
	switch o.Kind {
	case store.OverrideGrant:
		text += " of " + number(o.Events)
	case store.OverrideZone:
		text = settingText(o)
	case store.OverrideLimit:
		text += " of " + settingText(o)
	}
	if o.Until > 0 {
		text += ", ends " + until(o.Until, now)
	}
	if o.Reason != "" {
		text += " (" + shown(o.Reason) + ")"
	}
	return text + shown(where(o.Addresses))
}
