package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
)

func TestClientsDoNotNoticeScriptFlush(t *testing.T) {
	t.Parallel()
	const workers, flushes = 4, 12
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			servers := startShards(t, 2, 1)
			c := startCaddy(t, apiSite(servers.store(pipelining), 1_000_000, "1h"))
			nodes := servers.replicas()
			for _, shard := range servers {
				nodes = append(nodes, shard.Primary)
			}
			var admitted tally
			stop := startTraffic(t, workers, func(_, i int) error {
				key := fmt.Sprintf("client-%d", i%10)
				a, err := c.tryAsk("/", "X-Key: "+key)
				if err != nil {
					return err
				}
				if a.status != http.StatusOK || !a.isLimited() {
					return fmt.Errorf("status %d, headers %v", a.status, a.header)
				}
				admitted.add(key)
				return nil
			})
			for range flushes {
				admitted.awaitGrowth(t, 40)
				for _, node := range nodes {
					must(t, "flush scripts", node.Client().ScriptFlush(t.Context()).Err())
				}
			}
			admitted.awaitGrowth(t, 40)
			stop()
			servers.awaitCounts(t, "api", admitted.n)
			for _, shard := range []string{"a", "b"} {
				must(t, "metric", errors.Join(
					want("lost charges", c.undelivered(shard, "lost"), 0), want("uncertain charges", c.undelivered(shard, "uncertain"), 0)))
			}
			t.Logf("%d requests, %d times SCRIPT FLUSH on %d servers", admitted.total(), flushes, len(nodes))
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
			servers := startShards(t, 1, 0)
			backend := startSlowBackend(t)
			c := startCaddy(t, proxySite(servers.store(pipelining), 100, backend.server.Listener.Addr().String()))
			var all []running
			for range requests {
				all = append(all, backend.start(t, c, "/", "X-Key: alice"))
			}
			var flushes tally
			primary := servers[0].Primary.Client()
			stop := startTraffic(t, 4, func(int, int) error {
				flushes.add("")
				return primary.ScriptFlush(t.Context()).Err()
			})
			flushes.awaitGrowth(t, 100)
			for _, a := range backend.finish(t, all...) {
				must(t, "request", want("status", a.status, http.StatusOK))
			}
			flushes.awaitGrowth(t, 1000)
			stop()
			servers.awaitCount(t, "api", "alice", requests)
			must(t, "metric", errors.Join(
				want("lost charges", c.undelivered("a", "lost"), 0), want("uncertain charges", c.undelivered("a", "uncertain"), 0)))
			t.Logf("%d times SCRIPT FLUSH", flushes.total())
		})
	}
}
