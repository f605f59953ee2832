package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestLocalCountsAreHandedOver: while its shard is away a Caddy counts alone, up
// to the same limit, and tells the shard when it is back; what was given back
// meanwhile is not told.
func TestLocalCountsAreHandedOver(t *testing.T) {
	const before, events = 3, 10
	for _, charge := range []string{"after", "before"} {
		for _, algorithm := range []string{"fixed_window", "sliding_window", "gcra"} {
			t.Run(charge+"/"+algorithm, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := caddytest.StartLastingShards(t, 1, 0)
				zone := zoneWith("api", fmt.Sprint("events ", events), "algorithm "+algorithm, "charge "+charge, "on_error local")
				c := caddytest.Start(t, zonesSite(servers.Store(), zone,
					"@unchanged path /unchanged\nrespond @unchanged 304\nrespond ok"))
				key := "X-Key: alice"
				for range before {
					must(t, "a request", want("status", c.Probe("/", key).Status, http.StatusOK))
				}
				servers.AwaitUsed(t, "api", "alice", before)
				servers.Kill(t)
				served := 0
				for range 2 * events {
					if c.Probe("/unchanged", key).Status == http.StatusNotModified && served >= events {
						t.Error("a request passed beyond the limit")
					}
					switch a := c.Probe("/", key); a.Status {
					case http.StatusOK:
						served++
					case http.StatusTooManyRequests:
					default:
						t.Errorf("status %d while the shard is away", a.Status)
					}
				}
				if served != events {
					t.Errorf("%d were served while the shard was away, want %d", served, events)
				}
				servers.Restart(t)
				servers.AwaitUsed(t, "api", "alice", before+events)
			})
		}
	}
}
