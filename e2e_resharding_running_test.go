package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestReshardingChargesWhatRuns: requests that run while a shard is added are
// charged where the buckets of their clients are by then.
func TestReshardingChargesWhatRuns(t *testing.T) {
	const clients, before, events = 12, 4, 10
	servers := caddytest.StartShards(t, 3, 0)
	for _, charge := range modes {
		t.Run(charge, func(t *testing.T) {
			backend := caddytest.StartSlowBackend(t)
			site := func(store string) string {
				return zonesSite(store, zoneWith("api-"+charge, fmt.Sprint("events ", events), "charge "+charge),
					"reverse_proxy "+backend.Server.Listener.Addr().String())
			}
			c := caddytest.Start(t, site(servers[:2].Store()))
			name := func(n int) string { return fmt.Sprint("client-", n) }
			var held []caddytest.Running
			for n := range clients {
				for range before {
					held = append(held, backend.Start(t, c, "/", "X-Key: "+name(n)))
				}
			}
			if status, text := c.Load(site(servers.Store("previous_shards a b"))); status != http.StatusOK {
				t.Fatalf("load: status %d: %s", status, text)
			}
			caddytest.Client.CloseIdleConnections()
			for n := range clients {
				// This brings the bucket, if the client has moved.
				backend.Finish(t, backend.Start(t, c, "/", "X-Key: "+name(n)))
			}
			backend.Finish(t, held...)
			moved := 0
			for n := range clients {
				var a bucketsOfPair
				eventually(t, name(n)+" is charged", func() error {
					a = bucketsOfPair{}
					c.AdminJSON(http.MethodGet, "/rate_limit/buckets/api-"+charge+"?key="+name(n), "", &a)
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
