package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestReserve: what is kept for more important requests is not there for others.
func TestReserve(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	zones, names := "", []string{}
	for _, algorithm := range counting {
		for _, mode := range modes {
			name := algorithm + "." + mode
			names = append(names, name)
			zones += pathZone(name, "algorithm "+algorithm, "charge "+mode, "events 10",
				"reserve 20 {\nheader X-Tier gold\n}", "reserve 30 {\nheader X-Tier silver\n}")
		}
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond ok")
			for _, zone := range names {
				used := int64(0)
				admitted := func(n int, tier string, limit int64) {
					t.Helper()
					for range n {
						used++
						must(t, fmt.Sprintf("%s, %s, request %d", zone, tier, used), c.Probe("/"+zone, "X-Key: alice", "X-Tier: "+tier).Shows(http.StatusOK, limit, used))
						if store != "" {
							servers.AwaitUsed(t, zone, "alice", used)
							servers.AwaitReplicas(t)
						}
					}
				}
				refused := func(tier string, limit int64) {
					t.Helper()
					a := c.Probe("/"+zone, "X-Key: alice", "X-Tier: "+tier)
					must(t, fmt.Sprintf("%s, %s, a request too many", zone, tier), errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, limit, used)))
				}
				admitted(2, "none", 5)
				admitted(1, "gold", 10)
				admitted(1, "silver", 8)
				admitted(1, "none", 5)
				refused("none", 5)
				admitted(1, "silver", 8)
				refused("none", 5)
				admitted(2, "silver", 8)
				refused("silver", 8)
				refused("none", 5)
				admitted(2, "gold", 10)
				refused("gold", 10)
				refused("silver", 8)
				refused("none", 5)
			}
		})
	}
}

// TestReserveOfBurstsAndSlots: it is a part of what there may be at once.
func TestReserveOfBurstsAndSlots(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	zones := pathZone("slots", "algorithm concurrency", "events 3", "reserve 34 {\nheader X-Tier gold\n}")
	for _, mode := range modes {
		zones += pathZone("bursts."+mode, "algorithm gcra", "events 1000", "burst 4", "charge "+mode, "reserve 100 {\nheader X-Tier gold\n}")
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "reverse_proxy /slots "+backend.Server.Listener.Addr().String()+"\nrespond ok")
			for _, mode := range modes {
				// All of it is kept: nothing is ever there for others.
				zone := "bursts." + mode
				must(t, zone, probeNever(c, "/"+zone, "X-Key: alice").Shows(http.StatusTooManyRequests, 0, 0))
				for used := range int64(4) {
					must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Tier: gold").Shows(http.StatusOK, 4, used+1))
					if store != "" {
						servers.AwaitUsed(t, zone, "alice", used+1)
					}
				}
				must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Tier: gold").Refuses(zone))
			}
			// 34 percent of three slots are two, and one is left.
			held := []caddytest.Running{backend.Hold(t, c, "/slots", "X-Key: alice")}
			must(t, "slots", c.Probe("/slots", "X-Key: alice").Shows(http.StatusTooManyRequests, 1, 1))
			held = append(held, backend.Hold(t, c, "/slots", "X-Key: alice", "X-Tier: gold"), backend.Hold(t, c, "/slots", "X-Key: alice", "X-Tier: gold"))
			must(t, "slots", c.Probe("/slots", "X-Key: alice", "X-Tier: gold").Shows(http.StatusTooManyRequests, 3, 3))
			for i, a := range backend.Finish(t, held...) {
				must(t, "slots", a.Shows(http.StatusOK, []int64{1, 3, 3}[i], int64(i)+1))
			}
		})
	}
}
