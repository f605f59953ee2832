package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
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
	for i := range st.Problems {
		fmt.Fprintln(s.out, problemText(&st.Problems[i]))
	}
	if len(st.Problems) > 0 {
		fmt.Fprintln(s.out)
	}
	if len(st.Instances) > 1 {
		showInstances(s.out, st.Instances)
	}
	now := time.Now()
	t := newTable(s.out, "ZONE", "STORE", "ALGORITHM", "EVENTS", "WINDOW", "ENFORCED", "ALLOWED", "REFUSED", "WOULD REFUSE", "ERRORS", "LAST REFUSAL")
	for _, z := range st.Zones {
		d := z.Decisions
		name := z.Store
		events, enforced, moved := effective(&z)
		if z.Rollout != nil {
			name += ", " + moved + " " + z.Rollout.Store
		}
		t.row(z.Name, name, z.Algorithm, events, cmp.Or(z.Calendar, seconds(z.Window)), enforced,
			number(d["allowed"]), number(d["refused"]+d["blocked"]), number(d["would_refuse"]), number(d["error_allowed"]+d["error_refused"]), ago(z.LastRefused, now))
	}
	t.end()
	showShares(s.out, st.Zones)
	for i := range st.Stores {
		fmt.Fprintln(s.out)
		showStore(s.out, &st.Stores[i])
	}
	return nil
}

// problemText says what is wrong and, of several Caddys, where.
func problemText(p *adminapi.Problem) string {
	text := "problem"
	if p.Store != "" {
		text += " of store " + shown(p.Store)
	}
	text += ": " + shown(p.Text)
	if len(p.Addresses) > 0 {
		text += " (" + shown(strings.Join(p.Addresses, ", ")) + ")"
	}
	return text
}

// showInstances lists several Caddys, and why some are not part of the rest.
func showInstances(out io.Writer, all []adminapi.Instance) {
	t := newTable(out, "CADDY", "NAME", "VERSION", "UP FOR")
	for _, i := range all {
		switch {
		case i.Error != "":
			t.row(i.Address, "does not answer: "+i.Error)
		case i.Same != "":
			t.row(i.Address, "is the Caddy at "+i.Same)
		default:
			t.row(i.Address, i.Name, i.Version, seconds(i.Uptime))
		}
	}
	t.end()
	fmt.Fprintln(out)
}

// showShares lists the part of each of several Caddys in the decisions of the zones.
func showShares(out io.Writer, zones []adminapi.Zone) {
	if !slices.ContainsFunc(zones, func(z adminapi.Zone) bool { return len(z.Shares) > 0 }) {
		return
	}
	fmt.Fprintln(out)
	t := newTable(out, "ZONE", "CADDY", "SHARE", "ALLOWED", "REFUSED", "WOULD REFUSE", "ERRORS")
	sum := func(decisions map[string]int64) (n int64) {
		for _, m := range decisions {
			n += m
		}
		return n
	}
	for _, z := range zones {
		for _, s := range z.Shares {
			d := s.Decisions
			t.row(z.Name, s.Address, shareText(sum(d), sum(z.Decisions)), number(d["allowed"]), number(d["refused"]+d["blocked"]),
				number(d["would_refuse"]), number(d["error_allowed"]+d["error_refused"]))
		}
	}
	t.end()
}

// shareText is a part in percent.
func shareText(part, all int64) string {
	if all == 0 {
		return "-"
	}
	return strconv.FormatFloat(float64(part)/float64(all)*100, 'f', 0, 64) + "%"
}

// showUnanswered names the Caddys of several that are not part of a list, and why.
func (s *session) showUnanswered(errs []string) {
	for _, text := range errs {
		fmt.Fprintln(s.out, "no answer of", shown(text))
	}
}

// effective returns what holds of a zone: what was set, and in parentheses what the config says; or, if
// Caddys differ, what the config says, and in parentheses what was set where.
func effective(z *adminapi.Zone) (events, enforced, moved string) {
	events, enforced = z.Events, percentText(z.Enforce)
	if z.Rollout != nil {
		if moved = percentText(z.Rollout.Percent); z.Rollout.By != "" {
			moved = "as " + z.Rollout.By + ":"
		}
	}
	tell := func(rule *adminapi.Override, set func(now string, config *string)) {
		switch {
		case rule == nil:
			return
		case rule.Events == store.Unlimited:
			set("unlimited", &events)
		case rule.Events > 0:
			set(number(rule.Events), &events)
		}
		if rule.Enforce != nil {
			set(percentText(*rule.Enforce), &enforced)
		}
		if rule.Rollout != nil && (z.Rollout == nil || z.Rollout.By == "") {
			set(percentText(*rule.Rollout), &moved)
		}
	}
	tell(z.Rule, func(now string, config *string) { *config = now + " (set; config " + *config + ")" })
	for _, share := range z.Shares {
		tell(share.Rule, func(now string, config *string) { *config += " (" + now + " at " + share.Address + ")" })
	}
	return events, enforced, moved
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
	if len(states) == 0 {
		return "-"
	}
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
all, and refreshes that each second until Ctrl-C, as many as the terminal has room
for. Into a file or a pipe, and with --json, it shows them all once; --count says how
often.
`,
		Args: between(0, 1),
	}
	var l live
	n := cmd.Flags().IntP("number", "n", 20, "How many clients of each zone")
	l.addFlags(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		query := zoneQuery(args)
		query.Set("n", strconv.Itoa(*n))
		return 0, l.show(s, s.raw || !isTerminal(s.out), func(s *session) error { return showTop(s, query) })
	})
	return cmd
}

// zoneQuery is the parameters of a call about the zone that is the first argument, or about all.
func zoneQuery(args []string) url.Values {
	if len(args) == 0 {
		return url.Values{}
	}
	return url.Values{"zone": args[:1]}
}

func showTop(s *session, query url.Values) error {
	var got struct {
		adminapi.Top
		Zones []adminapi.Top
	}
	if err := s.call(http.MethodGet, root+"top?"+query.Encode(), nil, &got); err != nil || s.raw {
		return err
	}
	zones := got.Zones
	if query.Has("zone") {
		zones = []adminapi.Top{got.Top}
	}
	type refused struct {
		zone string
		*adminapi.RefusedClient
	}
	var all []refused
	covered, now, isFleet := 0.0, time.Now(), false
	for _, z := range zones {
		covered = max(covered, z.Since)
		for i := range z.Refused {
			all = append(all, refused{z.Zone, &z.Refused[i]})
			isFleet = isFleet || len(z.Refused[i].Shares) > 0
		}
	}
	slices.SortStableFunc(all, func(a, b refused) int { return cmp.Compare(b.Count, a.Count) })
	fmt.Fprintf(s.out, "refused most in the last %s\n", cmp.Or(seconds(covered), "moment"))
	s.showUnanswered(got.Unanswered)
	header := []string{"ZONE", "REFUSED", "LAST REFUSAL", "STORE", "CLIENT"}
	if isFleet {
		header = append(header, "BY")
	}
	t := newTable(s.out, header...)
	for _, c := range all {
		row := []string{c.zone, number(c.Count), ago(c.LastRefused, now), c.Store, clientText(&c.Client)}
		if isFleet {
			row = append(row, sharesText(c.RefusedClient))
		}
		t.row(row...)
	}
	t.end()
	return nil
}

// sharesText is the part of each of several Caddys in the refusals of a client.
func sharesText(c *adminapi.RefusedClient) string {
	var parts []string
	for _, s := range c.Shares {
		parts = append(parts, s.Address+" "+shareText(s.Count, c.Count))
	}
	return strings.Join(parts, ", ")
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
			shot := fit(page.String(), sizeOf(s.out))
			page.Reset()
			page.WriteString(shot)
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

// size is that of a terminal; 0 is no bound.
type size struct{ width, height int }

func sizeOf(out io.Writer) (s size) {
	if f, ok := out.(*os.File); ok {
		s.width, s.height, _ = term.GetSize(int(f.Fd())) // 0 if it is not known
	}
	return s
}

// fit cuts a page so that a terminal shows it from its first line on. The last line is for the cursor.
func fit(page string, of size) string {
	lines := strings.Split(strings.TrimSuffix(page, "\n"), "\n")
	if most := max(of.height-1, 2); of.height > 0 && len(lines) > most {
		more := len(lines) - most + 1
		lines = append(lines[:most-1], fmt.Sprintf("and %s", counted(more, "more line")))
	}
	for i, line := range lines {
		if text := []rune(line); of.width > 0 && len(text) > of.width {
			lines[i] = string(text[:of.width-1]) + "…"
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
