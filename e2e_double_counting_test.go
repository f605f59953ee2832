package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestSwallowedReplyDoesNotCountTwice lets charges reach Redis, whose replies
// then are lost.
func TestSwallowedReplyDoesNotCountTwice(t *testing.T) {
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			t.Parallel()
			primary := redistest.Start(t)
			proxy := redistest.StartProxy(t, primary.Addr())
			backend := startSlowBackend(t)
			store := fmt.Sprintf(`rate_limit {
		store redis {
			shard a {
				primary %s
			}
			check_timeout 10s
			charge_timeout 1500ms
			dial_timeout 10s
			%s
		}
	}`, proxy.Addr(), pipelining)
			c := startCaddy(t, proxySite(store, 10, backend.server.Listener.Addr().String()))
			servers := shards{{Primary: primary}}

			// The connections are made before the fault.
			must(t, "first request", backend.finish(t, backend.start(t, c, "/", "X-Key: warm"))[0].is(http.StatusOK, 1))
			servers.awaitCount(t, "api", "warm", 1)

			// Both are checked while all is well.
			clients := []string{"alice", "bob"}
			var requests []running
			for _, key := range clients {
				requests = append(requests, backend.start(t, c, "/", "X-Key: "+key))
			}
			must(t, "swallow replies", proxy.SwallowReplies())
			for i, a := range backend.finish(t, requests...) {
				must(t, clients[i], a.is(http.StatusOK, 1))
			}
			wanted := map[string]int64{"warm": 1, "alice": 1, "bob": 1}
			servers.awaitCounts(t, "api", wanted)
			eventually(t, "the charges are given up", func() error {
				return errors.Join(want("uncertain charges", c.undelivered("a", "uncertain"), 2), want("lost charges", c.undelivered("a", "lost"), 0))
			})
			servers.awaitCounts(t, "api", wanted)

			must(t, "pass", proxy.Pass())
			// Whatever were still to be sent again would now be counted.
			eventually(t, "charges arrive again", func() error {
				backend.finish(t, backend.start(t, c, "/", "X-Key: probe"))
				return want("probe being charged", servers.counts(t, "api")["probe"] > 0, true)
			})
			c.stop()
			counts := servers.counts(t, "api")
			for key, n := range wanted {
				must(t, "at the end", want("count of "+key, counts[key], n))
			}
		})
	}
}
