package shardlimit_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestSwallowedReplyDoesNotCountTwice lets a charge reach Redis, whose reply then
// is lost: either there is none before the charge is given up, or the
// connection breaks while there is time to send it again.
func TestSwallowedReplyDoesNotCountTwice(t *testing.T) {
	for _, pipelining := range []string{"on", "off"} {
		for _, timeout := range []string{"3s", "30s"} {
			t.Run("pipelining "+pipelining+", charge_timeout "+timeout, func(t *testing.T) {
				t.Parallel()
				primary := redistest.Start(t)
				proxy := redistest.StartProxy(t, primary.Addr())
				servers := caddytest.Shards{{Primary: primary}}
				backend := caddytest.StartSlowBackend(t)
				store := servers.Store("pipelining "+pipelining, "charge_timeout "+timeout)
				store = strings.Replace(store, primary.Addr(), proxy.Addr(), 1)
				c := caddytest.Start(t, proxySite(store, 10, backend.Server.Listener.Addr().String()))

				// The connection for charges is made before the fault; through
				// one that is made later nothing would arrive.
				must(t, "first request", backend.Finish(t, backend.Start(t, c, "/", "X-Key: warm"))[0].Is(http.StatusOK, 1))
				servers.AwaitCount(t, "api", "warm", 1)

				// The request is checked while all is well.
				request := backend.Start(t, c, "/", "X-Key: alice")
				must(t, "swallow replies", proxy.SwallowReplies())
				must(t, "alice", backend.Finish(t, request)[0].Is(http.StatusOK, 1))
				wanted := map[string]int64{"warm": 1, "alice": 1}
				servers.AwaitCounts(t, "api", wanted)
				givenUp := func() error {
					return errors.Join(want("uncertain charges", undelivered(c, "a", "uncertain"), 1), want("lost charges", undelivered(c, "a", "lost"), 0))
				}
				if timeout == "3s" {
					eventually(t, "the charge is given up", givenUp)
				}
				// This closes the connections that were open meanwhile.
				must(t, "pass", proxy.Pass())
				eventually(t, "the charge is given up", givenUp)

				// Whatever were to be sent again would be counted by now.
				eventually(t, "charges arrive again", func() error {
					backend.Finish(t, backend.Start(t, c, "/", "X-Key: probe"))
					return want("probe being charged", servers.Counts(t, "api")["probe"] > 0, true)
				})
				c.Stop()
				counts := servers.Counts(t, "api")
				for key, n := range wanted {
					must(t, "at the end", want("count of "+key, counts[key], n))
				}
			})
		}
	}
}
