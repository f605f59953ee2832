package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"
)

// TestReshardingChargesWhatRuns: requests that run while a shard is added are
// charged where the buckets of their clients are by then.
func TestReshardingChargesWhatRuns(t *testing.T) {
	const clients, before, events = 12, 4, 10
	servers := startShards(t, 3, 0)
	for _, charge := range modes {
		t.Run(charge, func(t *testing.T) {
			backend := startSlowBackend(t)
			site := func(store string) string {
				return zonesSite(store, zoneWith("api-"+charge, fmt.Sprint("events ", events), "charge "+charge),
					"reverse_proxy "+backend.server.Listener.Addr().String())
			}
			c := startCaddy(t, site(servers[:2].store()))
			name := func(n int) string { return fmt.Sprint("client-", n) }
			var held []running
			for n := range clients {
				for range before {
					held = append(held, backend.start(t, c, "/", "X-Key: "+name(n)))
				}
			}
			if status, text := c.load(site(servers.store("previous_shards a b"))); status != http.StatusOK {
				t.Fatalf("load: status %d: %s", status, text)
			}
			client.CloseIdleConnections()
			for n := range clients {
				// This brings the bucket, if the client has moved.
				backend.finish(t, backend.start(t, c, "/", "X-Key: "+name(n)))
			}
			backend.finish(t, held...)
			moved := 0
			for n := range clients {
				var a bucketsOfPair
				eventually(t, name(n)+" is charged", func() error {
					a = bucketsOfPair{}
					c.adminJSON(http.MethodGet, "/rate_limit/buckets/api-"+charge+"?key="+name(n), "", &a)
					b, _, err := a.Buckets[0].primary()
					if err != nil {
						return err
					}
					return want("its count", b.used, before+1)
				})
				if a.Buckets[0].Former != nil {
					moved++
				}
			}
			must(t, "resharding", want("having moved clients", moved > 0, true))
		})
	}
}
