package shardlimit_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestClientThatLeavesDuringTheTake: the rest of the chain does not run, and what
// was taken is given back.
func TestClientThatLeavesDuringTheTake(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	proxy := redistest.StartProxy(t, servers[0].Primary.Addr())
	backend := startArrivals(t)
	zones := ""
	algorithms := append([]string{"concurrency"}, counting...)
	for _, algorithm := range algorithms {
		zones += pathZone(algorithm, "algorithm "+algorithm, "charge before")
	}
	c := startWith(t, strings.Replace(servers.Store("check_timeout 100s"), servers[0].Primary.Addr(), proxy.Addr(), 1), zones, "reverse_proxy "+backend.addr)
	for _, algorithm := range algorithms {
		t.Run(algorithm, func(t *testing.T) {
			c.Probe("/"+algorithm, "X-Key: alice", "X-Name: "+algorithm)
			used := int64(1)
			if algorithm == "concurrency" {
				used = 0
			}
			servers.AwaitUsed(t, algorithm, "alice", used)
			arrived := len(backend.all())

			// Redis does what it is asked for at once; its reply takes longer.
			must(t, "delay", proxy.Delay(time.Minute))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			gone := c.Begin(ctx, "/"+algorithm, "X-Key: alice", "X-Name: gone")
			servers.AwaitUsed(t, algorithm, "alice", used+1)
			leave()
			must(t, "request", want("its client having left", errors.Is(<-gone.Err, context.Canceled), true))
			awaitLeaving(t, c)
			must(t, "end the delay", proxy.Delay(0))
			servers.AwaitUsed(t, algorithm, "alice", used)
			must(t, "next request", want("status", c.Probe("/"+algorithm, "X-Key: alice", "X-Name: "+algorithm).Status, http.StatusOK))
			must(t, "backend", want("number of requests", len(backend.all()), arrived+1))
		})
	}
	c.Stop()
	for _, algorithm := range algorithms {
		used := int64(2)
		if algorithm == "concurrency" {
			used = 0
		}
		must(t, "at the end", want("used of "+algorithm, servers.Content(t, algorithm, "alice").Used, used))
	}
}

// awaitLeaving waits until Caddy has noticed that the only client of a running
// request has left. Until then it tries to read from its connection.
func awaitLeaving(t *testing.T, c *caddytest.Caddy) {
	t.Helper()
	eventually(t, "caddy notices that the client has left", func() error {
		_, stacks := c.AdminCall(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", "")
		return want("number of clients", strings.Count(stacks, "(*connReader).backgroundRead(")-1, 0) // but for this one
	})
}
