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

			// The connection for charges is made before the fault; through one
			// that is made later nothing would arrive.
			must(t, "first request", backend.finish(t, backend.start(t, c, "/", "X-Key: warm"))[0].is(http.StatusOK, 1))
			servers.awaitCount(t, "api", "warm", 1)

			// The request is checked while all is well.
			request := backend.start(t, c, "/", "X-Key: alice")
			must(t, "swallow replies", proxy.SwallowReplies())
			must(t, "alice", backend.finish(t, request)[0].is(http.StatusOK, 1))
			wanted := map[string]int64{"warm": 1, "alice": 1}
			servers.awaitCounts(t, "api", wanted)
			eventually(t, "the charge is given up", func() error {
				return errors.Join(want("uncertain charges", c.undelivered("a", "uncertain"), 1), want("lost charges", c.undelivered("a", "lost"), 0))
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
