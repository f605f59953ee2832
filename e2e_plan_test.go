package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestPlanUpgradeKeepsTheCount: how many events there may be is not part of a
// bucket.
func TestPlanUpgradeKeepsTheCount(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	zones, names := "", []string{}
	for _, algorithm := range counting {
		for _, mode := range modes {
			name := algorithm + "." + mode
			names = append(names, name)
			zones += pathZone(name, "algorithm "+algorithm, "charge "+mode, "events {header.X-Plan-Limit} 10")
		}
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond ok")
			for _, zone := range names {
				used := int64(0)
				// charges makes n requests that fit into a plan; "" is none.
				charges := func(n int, plan string, limit int64) {
					t.Helper()
					for range n {
						used++
						what := fmt.Sprintf("%s, plan %q, request %d", zone, plan, used)
						must(t, what, c.Probe("/"+zone, "X-Key: alice", "X-Plan-Limit: "+plan).Shows(http.StatusOK, limit, used))
						if store != "" {
							servers.AwaitUsed(t, zone, "alice", used)
							servers.AwaitReplicas(t)
						}
					}
				}
				refused := func(plan string, limit int64) {
					t.Helper()
					a := c.Probe("/"+zone, "X-Key: alice", "X-Plan-Limit: "+plan)
					must(t, fmt.Sprintf("%s, plan %q, a request too many", zone, plan), errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, limit, used)))
					if store != "" {
						must(t, zone, want("used in Redis", servers.Content(t, zone, "alice").Used, used))
					}
				}
				charges(9, "", 10)
				charges(1, "10", 10)
				refused("10", 10)
				// Up: what is used stays used.
				charges(3, "15", 15)
				charges(1, "1000", 1000)
				charges(1, "15", 15)
				refused("15", 15)
				// Down: it is more than the plan has, for as long as it counts.
				refused("12", 12)
				refused("", 10)
				refused("1", 1)
				charges(2, "17", 17)
				refused("17", 17)
			}
		})
	}
}
