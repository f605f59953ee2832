package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// checkTimeout bounds a check by default.
const checkTimeout = 10 * time.Second

func checkCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [<config>]",
		Short: "Checks a config's stores, and routes around limiters, without running it",
		Long: `
Loads the stores of a config, calls their servers with the connections that it
describes, and shows whether they are fit for it: reachable, in their roles, with
the rights that the limiter needs, replicas that keep up, clocks that agree. It
says what would go wrong, and what to do about it. It writes no data, and needs
no running Caddy. It also warns of routes that make limits ineffective; the rest
of the config is for caddy validate. The config is the argument, that of --config,
or the Caddyfile in this folder.

It exits with status 1 if the stores do not load, or anything is unreachable or
wrong; with --strict also if there are warnings.
`,
		Example: "  $ caddy rate-limit check Caddyfile",
		Args:    between(0, 1),
	}
	timeout := cmd.Flags().Duration("timeout", checkTimeout, "How long the calls of servers may take together")
	isStrict := cmd.Flags().Bool("strict", false, "Exit with status 1 if there are warnings")
	cmd.RunE = host.runWith(nil, func(s *session, args []string) (int, error) {
		if *timeout <= 0 {
			return 0, fmt.Errorf("--timeout %v: it must be positive", *timeout)
		}
		ctx, cancel := context.WithTimeout(s.ctx, *timeout)
		defer cancel()
		file := ""
		if len(args) > 0 {
			file = args[0]
		}
		c, err := host.Check(ctx, cmd, file)
		if err != nil {
			return 0, err
		}
		if err := s.showCheck(&c); err != nil {
			return 0, err
		}
		if c.Result == adminapi.CheckError || *isStrict && c.Result == adminapi.CheckWarning {
			return exitFailed, nil
		}
		return 0, nil
	})
	return cmd
}

func (s *session) showCheck(c *adminapi.Check) error {
	if s.raw {
		out := json.NewEncoder(s.out)
		out.SetEscapeHTML(false)
		out.SetIndent("", "  ")
		return out.Encode(c)
	}
	counts := map[store.Severity]int{store.SeverityWarning: len(c.Routes)}
	for i := range c.Stores {
		s.showCheckedStore(&c.Stores[i])
		for _, f := range c.Stores[i].Findings {
			counts[f.Severity]++
		}
	}
	for _, f := range c.Routes {
		fmt.Fprintf(s.out, "%s: %s (%s, at %s)\n  remedy: %s\n", f.Severity, shown(f.Problem), f.Code, shown(f.Address), shown(f.Remedy))
	}
	if len(c.Stores) == 0 {
		_, err := fmt.Fprintln(s.out, "the config has no rate_limit, so there is no store to check")
		return err
	}
	_, err := fmt.Fprintf(s.out, "%s, %s\n", counted(counts[store.SeverityError], "error"), counted(counts[store.SeverityWarning], "warning"))
	return err
}

func counted(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}

func (s *session) showCheckedStore(st *adminapi.CheckedStore) {
	fmt.Fprintf(s.out, "store %s (%s)\n", shown(st.Name), shown(strings.TrimPrefix(st.Module, "rate_limit.stores.")))
	if len(st.Shards) > 0 {
		t := newTable(s.out, "SHARD", "KIND", "SERVER", "ROLE", "REACHABLE", "VERSION", "ROUND TRIP", "LAG", "CLOCK", "EVICTION", "PERSISTENCE", "RIGHTS")
		for i := range st.Shards {
			t.checkedShard(&st.Shards[i])
		}
		t.end()
	}
	for _, f := range st.Findings {
		where := ""
		if f.Shard != "" {
			where = "shard " + f.Shard + ": "
		}
		if f.Address != "" {
			where = "shard " + f.Shard + ", " + f.Address + ": "
		}
		fmt.Fprintf(s.out, "%s: %s%s\n  remedy: %s\n", f.Severity, shown(where), shown(f.Problem), shown(f.Remedy))
	}
	fmt.Fprintln(s.out)
}

func (t *table) checkedShard(shard *store.ShardDiagnosis) {
	kind := shard.Kind
	if shard.Retired {
		kind += ", retired"
	}
	if len(shard.Servers) == 0 {
		t.row(shard.Name, kind, "-", "-", "not found")
	}
	for i := range shard.Servers {
		v := &shard.Servers[i]
		reachable := "no"
		if v.Reachable {
			reachable = "yes"
		}
		t.row(shard.Name, kind, v.Address, string(v.Role), reachable, cmp.Or(v.Version, "-"), cmp.Or(seconds(v.RoundTrip), "-"),
			lagOf(v), skewOf(v), cmp.Or(v.EvictionPolicy, "-"), cmp.Or(v.Persistence, "-"), rightsOf(v))
	}
}

func lagOf(v *store.ServerDiagnosis) string {
	if v.Lag == nil {
		return "-"
	}
	return strconv.FormatFloat(*v.Lag, 'f', 1, 64) + "s"
}

func skewOf(v *store.ServerDiagnosis) string {
	if v.ClockSkew == nil {
		return "-"
	}
	// The sum is never the zero that prints as -0.
	return fmt.Sprintf("%+.3fs", math.Round(*v.ClockSkew*1000)/1000+0)
}

func rightsOf(v *store.ServerDiagnosis) string {
	switch {
	case v.MissingRights == nil:
		return "-"
	case len(v.MissingRights) == 0:
		return "all"
	default:
		return strconv.Itoa(len(v.MissingRights)) + " missing"
	}
}
