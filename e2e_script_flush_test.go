package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func TestClientsDoNotNoticeScriptFlush(t *testing.T) {
	t.Parallel()
	const workers, flushes = 4, 12
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			servers := caddytest.StartShards(t, 2, 1)
			c := caddytest.Start(t, apiSite(servers.Store(pipelining), 1_000_000, "1h"))
			nodes := servers.Replicas()
			for _, shard := range servers {
				nodes = append(nodes, shard.Primary)
			}
			var admitted caddytest.Tally
			stop := caddytest.StartTraffic(t, workers, func(_, i int) error {
				key := fmt.Sprintf("client-%d", i%10)
				a, err := c.TryAsk("/", "X-Key: "+key)
				if err != nil {
					return err
				}
				if a.Status != http.StatusOK || !a.IsLimited() {
					return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
				}
				admitted.Add(key)
				return nil
			})
			for range flushes {
				admitted.AwaitGrowth(t, 40)
				for _, node := range nodes {
					must(t, "flush scripts", node.Client().ScriptFlush(t.Context()).Err())
				}
			}
			admitted.AwaitGrowth(t, 40)
			stop()
			servers.AwaitCounts(t, "api", admitted.N)
			for _, shard := range []string{"a", "b"} {
				must(t, "metric", errors.Join(
					want("lost charges", undelivered(c, shard, "lost"), 0), want("uncertain charges", undelivered(c, shard, "uncertain"), 0)))
			}
			t.Logf("%d requests, %d times SCRIPT FLUSH on %d servers", admitted.Total(), flushes, len(nodes))
		})
	}
}

// TestScriptFlushStormLosesNoCharge takes the scripts away faster than they
// can be loaded, which charges outlast.
func TestScriptFlushStormLosesNoCharge(t *testing.T) {
	t.Parallel()
	const requests = 20
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			servers := caddytest.StartShards(t, 1, 0)
			backend := caddytest.StartSlowBackend(t)
			c := caddytest.Start(t, proxySite(servers.Store(pipelining), 100, backend.Server.Listener.Addr().String()))
			var all []caddytest.Running
			for range requests {
				all = append(all, backend.Start(t, c, "/", "X-Key: alice"))
			}
			var flushes caddytest.Tally
			primary := servers[0].Primary.Client()
			stop := caddytest.StartTraffic(t, 4, func(int, int) error {
				flushes.Add("")
				return primary.ScriptFlush(t.Context()).Err()
			})
			flushes.AwaitGrowth(t, 100)
			for _, a := range backend.Finish(t, all...) {
				must(t, "request", want("status", a.Status, http.StatusOK))
			}
			flushes.AwaitGrowth(t, 1000)
			stop()
			servers.AwaitCount(t, "api", "alice", requests)
			must(t, "metric", errors.Join(
				want("lost charges", undelivered(c, "a", "lost"), 0), want("uncertain charges", undelivered(c, "a", "uncertain"), 0)))
			t.Logf("%d times SCRIPT FLUSH", flushes.Total())
		})
	}
}
