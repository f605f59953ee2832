package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func setCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "set <zone> [<value>...]",
		Short: "Gives a client a limit of its own, or changes a zone, in all Caddys",
		Long: `
With values, gives a client a limit of its own in a zone: --events and --burst, for
some time or until unset. The values are those of get.

Without values, changes a zone in all Caddys that count in the same store: its
events and burst, for which share of the clients it is enforced, and which share a
rollout moves.

What is not named stays as it was set before; unset --burst ends a burst alone. A rule
has one end: a change that would move that of a setting it does not name is an error.
The store keeps it: it outlasts reloads and restarts, and comes before the config. Other
Caddys obey within a second (ledger_trust). If somebody else has changed the same
meanwhile, nothing is changed, and the error says who.
`,
		Example: "  $ caddy rate-limit set api --events 5000 --for 30d {header.X-Api-Key} k1\n  $ caddy rate-limit set api --enforce 25 --reason 'a quarter for now'",
		Args:    between(1, -1),
	}
	var flags overrideFlags
	flags.add(cmd)
	settings := map[string]*string{
		"events":  cmd.Flags().String("events", "", "How many events in a window, or unlimited"),
		"burst":   cmd.Flags().String("burst", "", "How many at once, with gcra"),
		"enforce": cmd.Flags().String("enforce", "", "For which percentage of the clients the zone is enforced"),
		"rollout": cmd.Flags().String("rollout", "", "Which percentage of the clients the rollout moves, of the handler's first zone"),
		"for":     cmd.Flags().String("for", "", "For how long, such as 30d; until unset without it"),
		"version": cmd.Flags().String("version", "", "Change only this version, as rules --json shows it"),
	}
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		query, list := url.Values{}, "zones"
		for name, value := range settings {
			if cmd.Flags().Changed(name) {
				query.Set(name, *value)
			}
		}
		if flags.namesClient(args) {
			list = "limits"
			for _, name := range []string{"enforce", "rollout"} {
				if query.Has(name) {
					return 0, fmt.Errorf("--%s is of a zone, and not of a client: leave out the values", name)
				}
			}
		}
		return 0, flags.change(s, http.MethodPost, list, args, query)
	})
	return cmd
}

func unsetCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unset <zone> [<value>...]",
		Short: "Ends what set has set of a client or a zone",
		Long: `
Ends the limit of a client or, without values, what was set of a zone: all of it, or
the settings that are named; a client has a burst alone to name. It exits with status 3
if there is nothing to end. If the config has no such zone any more, it needs --store.
`,
		Example: "  $ caddy rate-limit unset api {header.X-Api-Key} k1\n  $ caddy rate-limit unset api --enforce",
		Args:    between(1, -1),
	}
	var flags overrideFlags
	flags.add(cmd)
	for name, what := range map[string]string{"events": "the events and the burst", "burst": "the burst", "enforce": "the share for which it is enforced", "rollout": "the share that is moved"} {
		cmd.Flags().Bool(name, false, "End "+what+" alone")
	}
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		var settings []string
		for _, name := range []string{"events", "burst", "enforce", "rollout"} {
			if on, _ := cmd.Flags().GetBool(name); on {
				settings = append(settings, name)
			}
		}
		query, list := url.Values{}, "zones"
		if flags.namesClient(args) {
			list = "limits"
			if i := slices.IndexFunc(settings, func(name string) bool { return name != "burst" }); i >= 0 {
				return 0, fmt.Errorf("--%s is of a zone: of a client, only --burst ends alone", settings[i])
			}
		}
		if len(settings) > 0 {
			query.Set("settings", strings.Join(settings, ","))
		}
		return 0, flags.change(s, http.MethodDelete, list, args, query)
	})
	return cmd
}

// namesClient reports whether the arguments name a client, and not only a zone.
func (f *overrideFlags) namesClient(args []string) bool { return len(args) > 1 || f.clientKey != "" }

// mostOperator is how many bytes the admin API takes of who runs a command.
const mostOperator = 100

// operator is who runs the command, as this machine knows it.
func operator() string {
	who, err := user.Current()
	if err != nil {
		return ""
	}
	name := who.Username
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return strings.ToValidUTF8(name[:min(len(name), mostOperator)], "")
}

func rulesCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rules [<zone>]",
		Short: "Lists what was changed for zones and clients, exports and imports it",
		Long: `
Lists what operators have set in the stores of the running config, in one zone or in
all: rules of zones, limits, blocks and grants of clients.

--export prints rules and limits as JSON that does not change from day to day, for
version control. --import reads such a file, or - for standard input, makes what is in
it hold, and prints what it has changed; with --prune it ends the others, but not those of
zones that the config lacks. With --dry-run it only prints what it would change. It skips
what has ended, and zones that the config lacks; for these, and for what could not be
changed, it exits with status 1.
`,
		Example: "  $ caddy rate-limit rules api\n  $ caddy rate-limit rules --export > rules.json\n  $ caddy rate-limit rules --import rules.json --prune --dry-run",
		Args:    between(0, 1),
	}
	kind := cmd.Flags().String("kind", "", "Only these kinds, of zone, limit, block and grant, with commas")
	exports := cmd.Flags().Bool("export", false, "Print what --import reads")
	var im importFlags
	cmd.Flags().StringVar(&im.file, "import", "", "Make what is in this file hold")
	cmd.Flags().BoolVar(&im.prunes, "prune", false, "With --import, end rules and limits that are not in the file")
	cmd.Flags().BoolVar(&im.onlyTells, "dry-run", false, "With --import, change nothing")
	cmd.Flags().StringVar(&im.reason, "reason", "", "With --import, why, where the file says nothing")
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		query := zoneQuery(args)
		switch {
		case im.file != "" && (len(args) > 0 || *kind != "" || *exports):
			return 0, errors.New("--import is about all that the file has: leave out the zone, --kind and --export")
		case im.file != "":
			return im.run(s)
		case im.prunes || im.onlyTells:
			return 0, errors.New("--prune and --dry-run are for --import")
		case *exports:
			query.Set("kind", cmp.Or(*kind, "zone,limit"))
			return exportRules(s, query)
		case *kind != "":
			query.Set("kind", *kind)
		}
		return listRules(s, query)
	})
	return cmd
}

func listRules(s *session, query url.Values) (int, error) {
	var all adminapi.Overrides
	if err := s.call(http.MethodGet, root+"overrides?"+query.Encode(), nil, &all); err != nil {
		return 0, err
	}
	if s.raw {
		return codeWith(all.Errors), nil
	}
	now := time.Now()
	t := newTable(s.out, "ZONE", "STORE", "KIND", "CLIENT", "SET", "ENDS", "BY", "REASON")
	for i := range all.Overrides {
		o := &all.Overrides[i]
		t.row(o.Zone, o.Store, string(o.Kind), clientOf(o.Kind, &o.Client), settingText(o)+where(o.Addresses), until(o.Until, now), o.By, o.Reason)
	}
	t.end()
	s.showUnanswered(all.Unanswered)
	return s.tellErrors(all.Errors), nil
}

// where says which of several Caddys have something, if not all have.
func where(addresses []string) string {
	if len(addresses) == 0 {
		return ""
	}
	return " at " + strings.Join(addresses, ", ")
}

func codeWith(errs []string) int {
	if len(errs) > 0 {
		return exitShard
	}
	return 0
}

// tellErrors says of which stores not all is known, and returns the exit code.
func (s *session) tellErrors(errs []string) int {
	for _, text := range errs {
		fmt.Fprintln(s.out, "not all are known:", shown(text))
	}
	return codeWith(errs)
}

// clientOf is the client of an override of that kind, or - for a zone.
func clientOf(kind store.OverrideKind, client *adminapi.Client) string {
	if kind == store.OverrideZone {
		return "-"
	}
	return clientText(client)
}

// settingText says what an override changes.
func settingText(o *adminapi.Override) string {
	var words []string
	switch {
	case o.Events == store.Unlimited:
		words = append(words, "events unlimited")
	case o.Kind == store.OverrideGrant:
		words = append(words, "events +"+number(o.Events))
	case o.Events > 0:
		words = append(words, "events "+number(o.Events))
	}
	if o.Burst > 0 {
		words = append(words, "burst "+number(o.Burst))
	}
	if o.Enforce != nil {
		words = append(words, "enforce "+percentText(*o.Enforce))
	}
	if o.Rollout != nil {
		words = append(words, "rollout "+percentText(*o.Rollout))
	}
	return strings.Join(words, ", ")
}

func percentText(n float64) string { return strconv.FormatFloat(math.Abs(n), 'g', 6, 64) + "%" } // without -0

// exportRules prints what an import reads, in an order that does not change.
func exportRules(s *session, query url.Values) (int, error) {
	var all adminapi.Overrides
	quiet := *s
	quiet.raw = false
	if err := quiet.call(http.MethodGet, root+"overrides?"+query.Encode(), nil, &all); err != nil {
		return 0, err
	}
	if len(all.Errors) > 0 {
		return exitShard, fmt.Errorf("not all are known: %s", shown(all.Errors[0]))
	}
	if len(all.Unanswered) > 0 {
		return 0, fmt.Errorf("not all are known: no answer of %s", shown(all.Unanswered[0]))
	}
	if i := slices.IndexFunc(all.Overrides, func(o adminapi.Override) bool { return len(o.Addresses) > 0 }); i >= 0 {
		o := &all.Overrides[i]
		return 0, fmt.Errorf("the Caddys differ, so give one --address:%s%s", ruleLine("", o), shown(where(o.Addresses)))
	}
	now := float64(time.Now().UnixMicro()) / 1e6
	all.Overrides = slices.DeleteFunc(all.Overrides, func(o adminapi.Override) bool { return o.Until > 0 && o.Until <= now })
	for i := range all.Overrides {
		o := &all.Overrides[i]
		o.Since, o.By, o.Version, o.Note = 0, "", "", ""
	}
	text, err := json.MarshalIndent(adminapi.ImportedOverrides{Overrides: all.Overrides}, "", "  ")
	if err != nil {
		return 0, err
	}
	_, err = fmt.Fprintf(s.out, "%s\n", text)
	return 0, err
}

// importFlags are those of an import.
type importFlags struct {
	file, reason      string
	prunes, onlyTells bool
}

func (f *importFlags) run(s *session) (int, error) {
	text, err := readFile(f.file)
	if err != nil {
		return 0, err
	}
	query := url.Values{"by": {operator()}}
	for name, is := range map[string]bool{"prune": f.prunes, "dry_run": f.onlyTells} {
		if is {
			query.Set(name, "true")
		}
	}
	if f.reason != "" {
		query.Set("reason", f.reason)
	}
	var made adminapi.Imported
	if err := s.call(http.MethodPost, root+"overrides?"+query.Encode(), text, &made); err != nil {
		return 0, err
	}
	code := 0
	if len(made.Skipped) > 0 || slices.ContainsFunc(made.Changes, func(c adminapi.ImportedChange) bool { return c.Error != "" }) {
		code = exitFailed
	}
	if !s.raw {
		s.showImport(&made, f.onlyTells)
	}
	return code, nil
}

func readFile(name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(name)
}

// showImport prints changes as a difference.
func (s *session) showImport(made *adminapi.Imported, onlyTells bool) {
	var page bytes.Buffer
	failed := 0
	for i := range made.Changes {
		c := &made.Changes[i]
		if c.Before != nil {
			fmt.Fprintln(&page, ruleLine("-", c.Before))
		}
		if c.After != nil {
			fmt.Fprintln(&page, ruleLine("+", c.After))
		}
		if c.Error != "" {
			failed++
			fmt.Fprintln(&page, "  not changed:", shown(c.Error))
		}
		if c.Warning != "" {
			fmt.Fprintln(&page, "  warning:", shown(c.Warning))
		}
	}
	for i := range made.Skipped {
		c := &made.Skipped[i]
		fmt.Fprintf(&page, "  skipped: %s: %s\n", strings.TrimSpace(ruleLine("", c.After)), shown(c.Error))
	}
	what := "changed"
	if onlyTells {
		what = "to change"
	}
	fmt.Fprintf(&page, "%d %s, %d as they are", len(made.Changes)-failed, what, made.Unchanged)
	for _, n := range []struct {
		count int
		what  string
	}{{failed, "not changed"}, {made.Ended, "ended"}, {len(made.Skipped), "skipped"}} {
		if n.count > 0 {
			fmt.Fprintf(&page, ", %d %s", n.count, n.what)
		}
	}
	fmt.Fprintln(&page)
	_, _ = page.WriteTo(s.out)
}

func ruleLine(mark string, o *adminapi.Override) string {
	line := fmt.Sprintf("%s %s %s", mark, o.Kind, shown(o.Zone))
	if o.Kind != store.OverrideZone {
		line += " " + shown(clientText(&o.Client))
	}
	if text := settingText(o); text != "" {
		line += ": " + text
	}
	if o.Until > 0 {
		line += ", until " + time.UnixMicro(int64(o.Until*1e6)).UTC().Format(time.RFC3339)
	}
	return line
}

func auditCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit [<zone>]",
		Short: "Shows who has changed which rules, limits, blocks and grants",
		Long:  "\nShows the last 1,000 changes of what rules lists, in one zone or in all, the latest first.\n",
		Args:  between(0, 1),
	}
	n := cmd.Flags().IntP("number", "n", 50, "How many changes; 0 for all that are kept")
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		if *n < 0 {
			return 0, fmt.Errorf("--number %d: it must be from 0 on", *n)
		}
		query := zoneQuery(args)
		var all adminapi.Audit
		if err := s.call(http.MethodGet, root+"audit?"+query.Encode(), nil, &all); err != nil || s.raw {
			return codeWith(all.Errors), err
		}
		if *n > 0 {
			all.Changes = all.Changes[:min(*n, len(all.Changes))]
		}
		t := newTable(s.out, "WHEN", "ZONE", "KIND", "CLIENT", "BEFORE", "AFTER", "BY", "REASON")
		for i := range all.Changes {
			c := &all.Changes[i]
			t.row(time.UnixMicro(int64(c.At*1e6)).Format(time.DateTime), c.Zone, string(c.Kind), clientOf(c.Kind, &c.Client), auditedText(c.Before), auditedText(c.After), c.By, c.Reason)
		}
		t.end()
		s.showUnanswered(all.Unanswered)
		return s.tellErrors(all.Errors), nil
	})
	return cmd
}

func auditedText(o *adminapi.Override) string {
	if o == nil {
		return "-"
	}
	text := cmp.Or(settingText(o), "blocked")
	if o.Until > 0 {
		text += " until " + time.UnixMicro(int64(o.Until*1e6)).Format(time.DateTime)
	}
	return text
}

func findCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "find <name>",
		Short: "Shows a client's buckets in all zones",
		Long: `
Shows the buckets of a client in all zones whose key can yield its name: what the
placeholder of the key has for it, such as an IP address, or an API key.
`,
		Example: "  $ caddy rate-limit find 203.0.113.7",
		Args:    between(1, 1),
	}
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		var found adminapi.Found
		if err := s.call(http.MethodGet, root+"clients?"+url.Values{"name": args}.Encode(), nil, &found); err != nil || s.raw {
			return codeWith(found.Errors), err
		}
		for i := range found.Zones {
			if i > 0 {
				fmt.Fprintln(s.out)
			}
			s.showBuckets(&found.Zones[i])
		}
		for _, text := range found.Errors {
			fmt.Fprintln(s.out, shown(text))
		}
		s.showUnanswered(found.Unanswered)
		if len(found.Zones) == 0 && len(found.Errors) == 0 {
			fmt.Fprintln(s.out, "no zone's key can yield that name")
			return exitUnknown, nil
		}
		return codeWith(found.Errors), nil
	})
	return cmd
}

func nearCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "near [<zone>]",
		Short: "Shows the clients that are near their limit",
		Long: `
Shows the clients that have used most of their limit and not all of it (80%, or the
zone's warn), in one zone or in all, of those that this Caddy has served. Of several
Caddys that share a store, it shows for which the client is near, and the count that
each saw last: how much each has admitted is not known.
`,
		Args: between(0, 1),
	}
	n := cmd.Flags().IntP("number", "n", 20, "How many clients of each zone")
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		query := zoneQuery(args)
		query.Set("n", strconv.Itoa(*n))
		var got struct {
			adminapi.Near
			Zones []adminapi.Near
		}
		if err := s.call(http.MethodGet, root+"near?"+query.Encode(), nil, &got); err != nil || s.raw {
			return 0, err
		}
		zones := got.Zones
		if query.Has("zone") {
			zones = []adminapi.Near{got.Near}
		}
		s.showNear(zones)
		s.showUnanswered(got.Unanswered)
		return 0, nil
	})
	return cmd
}

func (s *session) showNear(zones []adminapi.Near) {
	now := time.Now()
	isShared := slices.ContainsFunc(zones, func(z adminapi.Near) bool {
		return slices.ContainsFunc(z.Clients, func(c adminapi.NearClient) bool { return len(c.Seen) > 0 })
	})
	header := []string{"ZONE", "USED", "LIMIT", "RESET", "STORE", "CLIENT"}
	if isShared {
		header = append(header, "SEEN BY")
	}
	t := newTable(s.out, header...)
	for _, z := range zones {
		for _, c := range z.Clients {
			row := []string{z.Zone, number(c.Used), number(c.Limit), until(c.Reset, now), storeText(c.Store, c.Address), clientText(&c.Client)}
			if isShared {
				row = append(row, seenText(c.Seen))
			}
			t.row(row...)
		}
	}
	t.end()
	if isShared {
		fmt.Fprintln(s.out, "SEEN BY is the count as each Caddy saw it last; how much each has admitted is not known: a shared store has one count")
	}
	for _, z := range zones {
		if z.Full > 0 {
			fmt.Fprintf(s.out, "%s: %d clients at their limit\n", shown(z.Zone), z.Full)
		}
		for _, name := range z.Unlisted {
			fmt.Fprintf(s.out, "%s: not known of store %s\n", shown(z.Zone), shown(name))
		}
	}
}

// seenText is what several Caddys have seen of a client in a store that they share.
func seenText(seen []adminapi.Sighting) string {
	var parts []string
	for _, s := range seen {
		parts = append(parts, s.Address+" "+number(s.Used))
	}
	return cmp.Or(strings.Join(parts, ", "), "-")
}

// storeText names a store and, if that is in the memory of one of several Caddys, its address.
func storeText(store, address string) string {
	if address == "" {
		return store
	}
	return store + " at " + address
}
