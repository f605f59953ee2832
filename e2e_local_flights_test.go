package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// gate is a backend that answers nobody before it is opened. The path /open is
// always answered.
type gate struct {
	server *httptest.Server
	inside atomic.Int64
	opened chan struct{}
	open   func()
}

func startGate(t *testing.T) *gate {
	t.Helper()
	g := &gate{opened: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.opened) })
	g.server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/open" {
			g.inside.Add(1)
			<-g.opened
		}
	}))
	t.Cleanup(func() {
		g.open()
		g.server.Close()
	})
	return g
}

// TestLocalCountsAdmitNoMoreThanTheLimit at once, and what they have in flight
// counts in the shard that is back.
func TestLocalCountsAdmitNoMoreThanTheLimit(t *testing.T) {
	const limit, requests = 100, 256
	for _, charge := range modes {
		for _, algorithm := range counting {
			t.Run(charge+"/"+algorithm, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := caddytest.StartLastingShards(t, 1, 0)
				g := startGate(t)
				zone := zoneWith("api", fmt.Sprint("events ", limit), "algorithm "+algorithm, "charge "+charge, "on_error local")
				c := caddytest.Start(t, zonesSite(servers.Store("check_timeout 1s"), zone, "reverse_proxy "+g.server.Listener.Addr().String()))
				// A window is open, and the connections are.
				must(t, "a request", want("status", c.Probe("/open", "X-Key: alice").Status, http.StatusOK))
				servers.AwaitUsed(t, "api", "alice", 1)
				servers.Kill(t)

				var refused, served atomic.Int64
				var all sync.WaitGroup
				for range requests {
					all.Go(func() {
						switch a, _ := c.TryProbe(context.Background(), "/", "X-Key: alice"); a.Status {
						case http.StatusOK:
							served.Add(1)
						case http.StatusTooManyRequests:
							refused.Add(1)
						}
					})
				}
				t.Cleanup(func() {
					g.open()
					all.Wait()
				})
				eventually(t, "all are refused or at the backend", func() error {
					return want("number of them", g.inside.Load()+refused.Load(), requests)
				})
				must(t, "while the shard is away", want("number of requests that were admitted", g.inside.Load(), limit))

				servers.Restart(t)
				others := 0
				eventually(t, "the shard answers", func() error {
					before := c.MetricSum("caddy_rate_limit_store_errors_total")
					others++ // of one that came before the limiter may know enough
					c.Probe("/open", fmt.Sprint("X-Key: other-", others))
					return want("failed calls", c.MetricSum("caddy_rate_limit_store_errors_total"), before)
				})
				if charge == "after" {
					a := c.Probe("/open", "X-Key: alice")
					must(t, "a request to the shard that is back", a.Shows(http.StatusTooManyRequests, limit, 1+limit))
				}
				g.open()
				all.Wait()
				must(t, "in the end", want("number of requests that were served", served.Load(), limit))
				servers.AwaitUsed(t, "api", "alice", 1+limit)
			})
		}
	}
}
