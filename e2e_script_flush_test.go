package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestClientsDoNotNoticeScriptFlush(t *testing.T) {
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
			var enough atomic.Bool
			together(t, workers+1, func(worker int) error {
				if worker == workers {
					defer enough.Store(true)
					for range flushes {
						awaitGrowth(&admitted, 40)
						if err := flushScripts(t, nodes); err != nil {
							return err
						}
					}
					awaitGrowth(&admitted, 40)
					return nil
				}
				for i := 0; !enough.Load(); i++ {
					key := fmt.Sprintf("client-%d", i%10)
					a, err := c.tryAsk("/", "X-Key: "+key)
					if err != nil {
						return err
					}
					if a.status != http.StatusOK || !a.isLimited() {
						return fmt.Errorf("status %d, headers %v", a.status, a.header)
					}
					admitted.add(key)
				}
				return nil
			})
			servers.awaitCounts(t, "api", admitted.n)
			for _, shard := range []string{"a", "b"} {
				must(t, "metric", errors.Join(
					want("lost charges", c.undelivered(shard, "lost"), 0), want("uncertain charges", c.undelivered(shard, "uncertain"), 0)))
			}
			t.Logf("%d requests, %d times SCRIPT FLUSH on %d servers", admitted.total(), flushes, len(nodes))
		})
	}
}

func flushScripts(t *testing.T, nodes []*redistest.Server) error {
	for _, node := range nodes {
		if err := node.Client().ScriptFlush(t.Context()).Err(); err != nil {
			return err
		}
	}
	return nil
}
