package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"
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
				servers := startLastingShards(t, 1, 0)
				zone := zoneWith("api", fmt.Sprint("events ", events), "algorithm "+algorithm, "charge "+charge, "on_error local")
				c := startCaddy(t, zonesSite(servers.store(), zone,
					"@unchanged path /unchanged\nrespond @unchanged 304\nrespond ok"))
				key := "X-Key: alice"
				for range before {
					must(t, "a request", want("status", c.probe("/", key).status, http.StatusOK))
				}
				servers.awaitUsed(t, "api", "alice", before)
				servers.kill(t)
				served := 0
				for range 2 * events {
					if c.probe("/unchanged", key).status == http.StatusNotModified && served >= events {
						t.Error("a request passed beyond the limit")
					}
					switch a := c.probe("/", key); a.status {
					case http.StatusOK:
						served++
					case http.StatusTooManyRequests:
					default:
						t.Errorf("status %d while the shard is away", a.status)
					}
				}
				if served != events {
					t.Errorf("%d were served while the shard was away, want %d", served, events)
				}
				servers.restart(t)
				servers.awaitUsed(t, "api", "alice", before+events)
			})
		}
	}
}
