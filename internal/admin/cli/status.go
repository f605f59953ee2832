package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

func statusCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Shows zones, stores, and how the shards are",
		Args:  between(0, 0),
	}
	var l live
	watch := cmd.Flags().BoolP("watch", "w", false, "Refresh until Ctrl-C")
	l.addFlags(cmd)
	cmd.RunE = host.run(func(s *session, _ []string) (int, error) {
		return 0, l.show(s, !*watch, showStatus)
	})
	return cmd
}

func showStatus(s *session) error {
	var st adminapi.Status
	if err := s.call(http.MethodGet, root, nil, &st); err != nil || s.raw {
		return err
	}
	for _, p := range st.Problems {
		fmt.Fprintf(s.out, "problem of store %s: %s\n", shown(p.Store), shown(p.Text))
	}
	if len(st.Problems) > 0 {
		fmt.Fprintln(s.out)
	}
	now := time.Now()
	t := newTable(s.out, "ZONE", "STORE", "ALGORITHM", "EVENTS", "WINDOW", "ENFORCED", "ALLOWED", "REFUSED", "WOULD REFUSE", "ERRORS", "LAST REFUSAL")
	for _, z := range st.Zones {
		d := z.Decisions
		name := z.Store
		if z.Rollout != nil {
			name += ", " + strconv.FormatFloat(z.Rollout.Percent, 'g', 6, 64) + "% " + z.Rollout.Store
		}
		t.row(z.Name, name, z.Algorithm, z.Events, cmp.Or(z.Calendar, seconds(z.Window)), strconv.FormatFloat(z.Enforce, 'g', 6, 64)+"%",
			number(d["allowed"]), number(d["refused"]+d["blocked"]), number(d["would_refuse"]), number(d["error_allowed"]+d["error_refused"]), ago(z.LastRefused, now))
	}
	t.end()
	for i := range st.Stores {
		fmt.Fprintln(s.out)
		showStore(s.out, &st.Stores[i])
	}
	return nil
}

func showStore(out io.Writer, st *adminapi.Store) {
	fmt.Fprintf(out, "store %s (%s)", shown(st.Name), shown(strings.TrimPrefix(st.Module, "rate_limit.stores.")))
	if st.Buckets != nil {
		fmt.Fprintf(out, ": %d buckets", *st.Buckets)
	}
	fmt.Fprintln(out)
	if l := st.Ledger; l != nil {
		fmt.Fprintf(out, "ledger: %d buckets, %d in flight, %d unsent, %d uncertain, %d refused and %d admitted without a call\n",
			l.Buckets, l.InFlight, l.Unsent, l.Uncertain, l.LocalRefusals, l.UnaskedAdmissions)
	}
	if len(st.Shards) == 0 {
		return
	}
	t := newTable(out, "SHARD", "KIND", "SERVER", "ROLE", "STATE", "BREAKERS", "LAG", "CHECKS", "CHARGES", "QUEUED")
	for i := range st.Shards {
		sh := &st.Shards[i]
		name, kind := sh.Name, sh.Kind
		if sh.Retired {
			kind += ", retired"
		}
		if !sh.Found || len(sh.Servers) == 0 {
			t.row(name, kind, "-", "-", "not found")
		}
		for j := range sh.Servers {
			v := &sh.Servers[j]
			lag := "-"
			if v.Lag != nil {
				lag = strconv.FormatFloat(*v.Lag, 'f', 1, 64) + "s"
			}
			t.row(name, kind, v.Address, string(v.Role), string(v.State), breakers(v.Breakers), lag,
				cmp.Or(seconds(v.Latency["checks"]), "-"), cmp.Or(seconds(v.Latency["charges"]), "-"), strconv.Itoa(v.Queued))
		}
	}
	t.end()
}

// breakers names the breakers that are not closed.
func breakers(states map[string]string) string {
	var open []string
	for _, purpose := range []string{"checks", "charges"} {
		if state := states[purpose]; state != "" && state != "closed" {
			open = append(open, purpose+" "+state)
		}
	}
	return cmp.Or(strings.Join(open, ", "), "closed")
}

func topCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top [<zone>]",
		Short: "Shows the clients that were refused most in the last minutes",
		Long: `
Shows the clients that were refused most in the last minutes, in one zone or in
all, and refreshes that each second until Ctrl-C. Into a file or a pipe, and with
--json, it shows them once; --count says how often.
`,
		Args: between(0, 1),
	}
	var l live
	n := cmd.Flags().IntP("number", "n", 20, "How many clients of each zone")
	l.addFlags(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		query := url.Values{"n": {strconv.Itoa(*n)}}
		if len(args) > 0 {
			query.Set("zone", args[0])
		}
		return 0, l.show(s, s.raw || !isTerminal(s.out), func(s *session) error { return showTop(s, query) })
	})
	return cmd
}

func showTop(s *session, query url.Values) error {
	var got struct {
		adminapi.Top
		adminapi.Tops
	}
	if err := s.call(http.MethodGet, root+"top?"+query.Encode(), nil, &got); err != nil || s.raw {
		return err
	}
	zones := got.Zones
	if query.Has("zone") {
		zones = []adminapi.Top{got.Top}
	}
	t := newTable(s.out, "ZONE", "REFUSED", "LAST REFUSAL", "STORE", "CLIENT")
	covered, now := 0.0, time.Now()
	for _, z := range zones {
		covered = max(covered, z.Since)
		for _, client := range z.Refused {
			t.row(z.Zone, number(client.Count), ago(client.LastRefused, now), client.Store, clientText(&client.Client))
		}
	}
	t.end()
	_, err := fmt.Fprintf(s.out, "in the last %s\n", cmp.Or(seconds(covered), "moment"))
	return err
}

// live says how often and how many times a view is shown.
type live struct {
	count    int // 0 for until an interrupt
	interval time.Duration
}

func (l *live) addFlags(cmd *cobra.Command) {
	cmd.Flags().IntVar(&l.count, "count", 0, "End after this many views")
	cmd.Flags().DurationVar(&l.interval, "interval", time.Second, "How often the view is refreshed")
}

// show refreshes a view: on a terminal in the same place, elsewhere one
// below the other. An interrupt ends it and is no error.
// Unless the flags say otherwise, once shows the view once.
func (l live) show(s *session, once bool, view func(out *session) error) error {
	switch {
	case l.count < 0:
		return fmt.Errorf("--count %d: it must be at least 1", l.count)
	case l.interval < 100*time.Millisecond:
		return fmt.Errorf("--interval %v: it must be at least 100ms", l.interval)
	case l.count == 0 && once:
		l.count = 1
	}
	ticks := time.NewTicker(l.interval)
	defer ticks.Stop()
	again := isTerminal(s.out) && !s.raw
	for n := 1; ; n++ {
		// Written as a whole, so that the terminal does not flicker.
		var page bytes.Buffer
		shot := *s
		shot.out = &page
		if err := view(&shot); err != nil {
			switch {
			case s.ctx.Err() != nil:
				return nil
			case n == 1 || l.count > 0 || !again:
				return err
			}
			// Caddy may be restarting, and that is when people watch.
			page.Reset()
			fmt.Fprintln(&page, "Error:", err)
		}
		switch {
		case again:
			fmt.Fprint(s.out, "\x1b[H\x1b[2J")
		case n > 1 && !s.raw:
			fmt.Fprintln(s.out)
		}
		if _, err := page.WriteTo(s.out); err != nil {
			return err
		}
		if n == l.count {
			return nil
		}
		select {
		case <-s.ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
