package guarantees

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// roam is the way of a client from Caddy to Caddy. It has each Caddy but the last to itself
// for some time, spends its limit at the last one, and comes back to the others.
type roam struct {
	name string
	pace time.Duration // between two visits to the same Caddy
	// visits are those to each Caddy but the last. With fewer Caddys the first are left out.
	visits []int
	// rest is the pause before it comes back. If there is one, replicas show by then what
	// the client spent.
	rest time.Duration
}

// The names of the ways.
const (
	seldom = "seldom"
	often  = "often"
)

var roams = []roam{
	// The pauses are longer than ledger_trust, so that each admission without a check is on
	// an older answer. When the client comes back, the last answer of each Caddy is younger
	// than the time for which the client had come there before.
	{name: seldom, pace: 6 * ledger.DefaultTrust / 5, visits: []int{21, 10, 5}, rest: 3 * ledger.DefaultTrust / 2},
	// It comes back before ledger_trust is over, unless the machine is slow.
	{name: often, pace: ledger.DefaultTrust / 10, visits: []int{0, 0, 15}},
}

// The load of clients that roam.
const (
	roamers         = 3  // of each limit
	roamConnections = 16 // where a client spends its limit
	// roamWindow is long enough that answers as old as the longest way count.
	roamWindow = 5 * time.Minute
)

var (
	roamCounts = []int{2, 4}
	roamLags   = []time.Duration{0, time.Second}
)

// roamLimits are the limits whose buckets Caddys know well enough to admit without a check.
func roamLimits() (all []limit) {
	for _, l := range limits() {
		if l.charge != after || !l.isCopied() {
			continue
		}
		l.window = roamWindow
		if l.burst > 0 {
			l.burst = l.events
		}
		all = append(all, l)
	}
	return all
}

// roamGroups are all cells of clients that roam.
func roamGroups(limits []limit) (all [][]cell) {
	for _, lag := range roamLags {
		for _, caddys := range roamCounts {
			for _, way := range roams {
				var group []cell
				for _, l := range limits {
					c := cell{limit: l, caddys: caddys, lag: lag, connections: roamConnections, roam: way.name}
					group = append(group, slices.Repeat([]cell{c}, roamers)...)
				}
				all = append(all, group)
			}
		}
	}
	return all
}

// runRoam sends the requests of a client that roams, and returns the responses.
func (c cell) runRoam(ctx context.Context, sites []*site.Site, name string) (seen []response) {
	way := roams[slices.IndexFunc(roams, func(r roam) bool { return r.name == c.roam })]
	last := len(sites) - 1
	t := &sender{client: name, zone: c.limit.zone(), sites: sites}
	client := traffic.NewClient(c.connections)
	defer client.CloseIdleConnections()
	for caddy, visits := range way.visits[len(way.visits)-last:] {
		for range visits {
			if len(seen) > 0 {
				_ = traffic.Pause(ctx, way.pace)
			}
			seen = append(seen, t.ask(client, caddy))
		}
	}
	seen = append(seen, c.spend(ctx, t, client, last)...)
	if way.rest > 0 {
		_ = traffic.Pause(ctx, way.rest+c.lag)
	}
	for caddy := range last {
		seen = append(seen, c.spend(ctx, t, client, caddy)...)
	}
	return seen
}

// spend sends requests to a Caddy until each connection is refused, but no more than the
// limit from each.
func (c cell) spend(ctx context.Context, t *sender, client *http.Client, caddy int) []response {
	seen := make([][]response, c.connections)
	_ = traffic.Together(c.connections, func(i int) error {
		for range c.limit.events {
			r := t.ask(client, caddy)
			if seen[i] = append(seen[i], r); !r.isAdmitted() || ctx.Err() != nil {
				break
			}
		}
		return nil
	})
	return slices.Concat(seen...)
}

// unchecked is how many requests to the zone of a client that roams were admitted without
// a check, at all Caddys but the last, since the earlier figures.
func (c cell) unchecked(m, earlier []caddyproc.Metrics) (n int64) {
	const unasked = "caddy_rate_limit_ledger_unasked_admissions_total"
	of := `store="` + c.limit.zone() + `"`
	for i := range len(m) - 1 {
		n += int64(m[i].Sum(unasked, of) - earlier[i].Sum(unasked, of))
	}
	return n
}
