package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

func getCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get <zone> [<value>...]",
		Short: "Shows a client's bucket, on each server",
		Long: `
Shows the bucket of a client in a zone: on the primary, on each replica, and
what the running Caddy knows beyond that.

The values are those of the placeholders of the zone's key, in their order, such
as the client's IP address. Before them may stand the text of the key that they
belong to, as top and simulate show a client. --client-key gives the client key
itself, as --json and the log have it. A zone without placeholders in its key
needs none of these.

It exits with status 3 if there is no such zone, and with 4 if no server of the
bucket's shard answers.
`,
		Example: "  $ caddy rate-limit get api 203.0.113.7\n  $ caddy rate-limit get login {header.X-Api-Key} alice\n  $ caddy rate-limit get login --client-key Q1x:alice",
		Args:    between(1, -1),
	}
	var flags bucketFlags
	flags.add(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		var b adminapi.Buckets
		err := s.call(http.MethodGet, flags.path(args), nil, &b)
		if err != nil {
			return 0, err
		}
		if !s.raw {
			s.showBuckets(&b)
			s.showUnanswered(b.Unanswered)
		}
		if slices.ContainsFunc(b.Buckets, isUnreachable) {
			return exitShard, nil
		}
		return 0, nil
	})
	return cmd
}

// isUnreachable reports whether no server of a bucket's shard answers.
func isUnreachable(b adminapi.Bucket) bool {
	return len(b.Servers) > 0 && !slices.ContainsFunc(b.Servers, func(server adminapi.Copy) bool { return server.Error == "" })
}

func resetCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reset <zone> [<value>...]",
		Short: "Empties a client's bucket",
		Long: `
Empties the bucket of a client in a zone, so that the client begins anew, in this
Caddy at once and in others that count in the same shards within a second. It
does not ask whether you are sure. The arguments are those of get.

It exits with status 3 if there is no such zone, and with 4 if the bucket's shard
cannot be reached; then the buckets on it may still be there, and those on others
are empty.
`,
		Example: "  $ caddy rate-limit reset api 203.0.113.7",
		Args:    between(1, -1),
	}
	var flags bucketFlags
	flags.add(cmd)
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		var all adminapi.Resets
		if err := s.call(http.MethodDelete, flags.path(args), nil, &all); err != nil || s.raw {
			return 0, err
		}
		for _, b := range all.Buckets {
			what, where := "nothing to delete", ""
			if b.Deleted {
				what = "deleted"
			}
			if b.Shard != "" {
				where = ", shard " + shown(b.Shard)
			}
			fmt.Fprintf(s.out, "%s: %s in zone %s of store %s%s\n", what, shown(clientText(&b.Client)), shown(all.Zone), shown(all.Store), where)
		}
		s.showUnanswered(all.Unanswered)
		return 0, nil
	})
	return cmd
}

// bucketFlags are the flags that, with the arguments, select buckets.
type bucketFlags struct{ clientKey, store string }

func (f *bucketFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.clientKey, "client-key", "", "The client key, instead of values")
	cmd.Flags().StringVar(&f.store, "store", "", "The store, where a zone counts in several")
}

// path returns the path of the buckets in the admin API.
func (f *bucketFlags) path(args []string) string { return f.pathOf("buckets", args, url.Values{}) }

// pathOf returns a path of a zone and a client in the admin API, with more parameters.
func (f *bucketFlags) pathOf(what string, args []string, query url.Values) string {
	for _, value := range args[1:] {
		query.Add("key", value)
	}
	if f.clientKey != "" {
		query.Set("client_key", f.clientKey)
	}
	if f.store != "" {
		query.Set("store", f.store)
	}
	return root + what + "/" + url.PathEscape(args[0]) + "?" + query.Encode()
}

func (s *session) showBuckets(all *adminapi.Buckets) {
	now := time.Now()
	for i, b := range all.Buckets {
		if i > 0 {
			fmt.Fprintln(s.out)
		}
		fmt.Fprintf(s.out, "%s in zone %s of store %s", shown(clientText(&b.Client)), shown(all.Zone), shown(all.Store))
		if b.Shard != "" {
			fmt.Fprintf(s.out, ", shard %s", shown(b.Shard))
		}
		fmt.Fprintln(s.out)
		t := newTable(s.out, "SERVER", "ROLE", "LIMIT", "USED", "REMAINING", "RESET", "PENALTY")
		t.copies(&b.Copies, "", now)
		if b.Previous != nil {
			t.copies(b.Previous, "former ", now)
		}
		if b.Local != nil {
			t.state(b.Local, "(memory)", "local", now)
		}
		t.end()
		for _, o := range b.Overrides {
			fmt.Fprintln(s.out, overrideText(&o, now))
		}
		if b.LastRefused > 0 {
			fmt.Fprintln(s.out, "last refused", ago(b.LastRefused, now))
		}
		if l := b.Ledger; l != nil {
			fmt.Fprintf(s.out, "ledger: %d used, %d in flight, %d unsent, %d reserved", l.Used, l.InFlight, l.Unsent, l.Reserved)
			if l.Full {
				fmt.Fprint(s.out, ", known to be full")
			}
			fmt.Fprintln(s.out)
		}
	}
}

// copies adds a row for each copy. The prefix is that of the roles.
func (t *table) copies(c *adminapi.Copies, prefix string, now time.Time) {
	for i := range c.Servers {
		server := &c.Servers[i]
		address, role := cmp.Or(server.Address, "(memory)"), prefix+string(server.Role)
		if server.Error != "" {
			t.row(address, role, "error: "+server.Error)
		} else {
			t.state(server.State, address, role, now)
		}
	}
}

func (t *table) state(st *adminapi.State, address, role string, now time.Time) {
	if st == nil {
		t.row(address, role, "-", "0", "-", "-", "-")
		return
	}
	t.row(address, role, known(st.Limit), known(st.Used), known(st.Remaining), until(st.Reset, now), until(st.Penalty, now))
}

// known is the text of a number that may be unknown.
func known(n *int64) string {
	if n == nil {
		return "unknown"
	}
	return number(*n)
}

func simulateCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "simulate <url>",
		Short: "Predicts whether a request would pass (nothing is counted)",
		Long: `
Predicts which zones would count a request, under which client keys, and whether
it would pass. Nothing is counted. The URL is a whole one, or a path if Caddy
serves one site.

It exits with status 0 if the request would pass, and with 2 if it would be
refused.
`,
		Example: "  $ caddy rate-limit simulate https://example.com/api -H 'X-Api-Key: k1' --remote-addr 203.0.113.7",
		Args:    between(1, 1),
	}
	var request adminapi.SimulatedRequest
	var headers []string
	cmd.Flags().StringVarP(&request.Method, "method", "X", http.MethodGet, "The method")
	cmd.Flags().StringArrayVarP(&headers, "header", "H", nil, `A header, such as "X-Api-Key: k1"; may be repeated`)
	cmd.Flags().StringVar(&request.RemoteAddr, "remote-addr", "", "The address that the request comes from (default 127.0.0.1)")
	cmd.Flags().StringVar(&request.Server, "server", "", "The name of the server in Caddy's config, where that is not clear")
	cmd.RunE = host.run(func(s *session, args []string) (int, error) {
		request.URL, request.Headers = args[0], http.Header{}
		for _, h := range headers {
			name, value, ok := strings.Cut(h, ":")
			if !ok {
				return 0, fmt.Errorf("--header %q: it must be a name and a value, such as \"X-Api-Key: k1\"", h)
			}
			request.Headers[name] = append(request.Headers[name], strings.TrimSpace(value))
		}
		body, err := json.Marshal(request)
		if err != nil {
			return 0, err
		}
		var sim adminapi.Simulation
		if err := s.call(http.MethodPost, root+"simulate", body, &sim); err != nil {
			return 0, err
		}
		if !s.raw {
			s.showSimulation(&sim)
		}
		switch {
		case sim.Decision == "refused" || sim.Decision == "blocked" || sim.Decision == "error_refused":
			return exitRefused, nil
		case sim.Error != "":
			// Whether it would pass is unknown.
			return exitFailed, nil
		}
		return 0, nil
	})
	return cmd
}

func (s *session) showSimulation(sim *adminapi.Simulation) {
	fmt.Fprint(s.out, sim.Decision)
	switch {
	case sim.Zone == "":
	case sim.Decision == "allowed":
		fmt.Fprintf(s.out, ", held by zone %s", shown(sim.Zone))
	default:
		fmt.Fprintf(s.out, " by zone %s", shown(sim.Zone))
	}
	if wait := seconds(sim.Wait); wait != "" {
		fmt.Fprintf(s.out, ", wait %s", wait)
	}
	fmt.Fprintln(s.out)
	if len(sim.Zones) == 0 {
		fmt.Fprintln(s.out, "no zone counts the request")
	} else {
		now := time.Now()
		t := newTable(s.out, "ZONE", "STORE", "CLIENT", "LIMIT", "USED", "REMAINING", "COST", "RESET", "OUTCOME", "REASON")
		for _, z := range sim.Zones {
			t.row(z.Name, z.Store, clientText(&z.Client), number(z.Limit), number(z.Used), number(z.Remaining), number(z.Cost),
				until(z.Reset, now), z.Outcome, cmp.Or(z.Error, z.Reason))
		}
		t.end()
	}
	if len(sim.PassedOver) > 0 {
		fmt.Fprintf(s.out, "not run, though they may answer or change a request: %s\n", shown(strings.Join(sim.PassedOver, ", ")))
	}
	if sim.Error != "" {
		fmt.Fprintf(s.out, "the request ends with an error: %s\n", shown(sim.Error))
	}
}
