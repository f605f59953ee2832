package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// slotsSite counts requests that run at the same time. Those to /held run until
// the backend ends them, and those to other paths end at once.
func slotsSite(servers caddytest.Shards, window string, backend *caddytest.SlowBackend) string {
	return zonesSite(servers.Store(), zoneWith("slots", "algorithm concurrency", "events 3", "window "+window), `
reverse_proxy /held `+backend.Server.Listener.Addr().String()+`
@panic path /panic
test_answer @panic panic
@late path /panic-late
test_answer @late panic-late
error /error 503
respond ok
`)
}

func TestLeasesComeBackAfterKill(t *testing.T) {
	t.Parallel() // it spends its time waiting
	const lease = 5_000_000
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	caddys := caddytest.StartMany(t, 2, slotsSite(servers, "5s", backend))
	leases := func() map[string]int64 { return servers.Content(t, "slots", "alice").Members }
	refused := func(when string) {
		t.Helper()
		for i, c := range caddys {
			a := c.Probe("/", "X-Key: alice")
			must(t, fmt.Sprintf("Caddy %d, %s", i, when), errors.Join(a.Refuses("slots"), a.Shows(http.StatusTooManyRequests, 3, 3),
				want("having X-RateLimit-Reset", a.Header.Values("X-RateLimit-Reset") != nil, false)))
		}
	}
	for range 3 {
		backend.Hold(t, caddys[0], "/held", "X-Key: alice")
	}
	taken := leases()
	must(t, "running requests", want("number of leases", len(taken), 3))
	refused("while three requests run")

	// They run for longer than what they have taken.
	over := slices.Max(slices.Collect(maps.Values(taken)))
	eventually(t, "the leases that were taken are over", func() error {
		return want("being so", servers.Now(t) > over, true)
	})
	renewed := leases()
	must(t, "long requests", want("number of leases", len(renewed), 3))
	for id, until := range taken {
		must(t, "lease "+id, want("being renewed", renewed[id] > until, true))
	}
	refused("while three requests run for longer")

	// Nobody gives back what a killed Caddy holds, and nobody renews it.
	caddys[0].Kill()
	left := leases()
	killed := servers.Now(t)
	c := caddys[1]
	caddys = caddys[1:]
	for id, until := range left {
		must(t, "lease "+id, want("ending within a window", until <= killed+lease, true))
	}
	if earliest := slices.Min(slices.Collect(maps.Values(left))); killed < earliest {
		a := c.Probe("/", "X-Key: alice")
		if servers.Now(t) < earliest {
			must(t, "the other Caddy, at first", a.Refuses("slots"))
		}
	}
	eventually(t, "a slot is free", func() error {
		return want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK)
	})
	// This one, too, has to wait for the end of the first lease.
	first := slices.Min(slices.Collect(maps.Values(left)))
	must(t, "the first slot", want("being free only when its lease was over", servers.Now(t) > first, true))
	eventually(t, "all leases are over", func() error { return want("number of leases", len(leases()), 0) })
	var held []caddytest.Running
	for range 3 {
		held = append(held, backend.Hold(t, c, "/held", "X-Key: alice"))
	}
	refused("with the slots of the killed one")
	for _, a := range backend.Finish(t, held...) {
		must(t, "request", want("status", a.Status, http.StatusOK))
	}
	servers.AwaitUsed(t, "slots", "alice", 0)
}

// TestSlotsComeBackAtTheEnd: long before the lease would be over.
func TestSlotsComeBackAtTheEnd(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	c := caddytest.Start(t, slotsSite(servers, "100h", backend))
	used := func(n int64) {
		t.Helper()
		servers.AwaitUsed(t, "slots", "alice", n)
	}
	t.Run("of a response", func(t *testing.T) {
		held := []caddytest.Running{backend.Hold(t, c, "/held", "X-Key: alice"), backend.Hold(t, c, "/held", "X-Key: alice")}
		used(2)
		backend.Finish(t, held[0])
		used(1)
		backend.Finish(t, held[1])
		used(0)
	})
	t.Run("because the client leaves", func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		gone := c.Begin(ctx, "/held", "X-Key: alice")
		backend.Await(t)
		stays := backend.Hold(t, c, "/held", "X-Key: alice")
		used(2)
		leave()
		must(t, "request", want("its client having left", errors.Is(<-gone.Err, context.Canceled), true))
		used(1)
		backend.Finish(t, stays)
		used(0)
	})
	// More often than there are slots.
	for _, path := range []string{"/at-once", "/panic", "/panic-late"} {
		t.Run(path, func(t *testing.T) {
			for i := range 8 {
				// On a connection that was used before, the client would try
				// again.
				caddytest.Client.CloseIdleConnections()
				_, err := c.TryProbe(t.Context(), path, "X-Key: alice")
				must(t, fmt.Sprint("request ", i), want("being answered", err == nil, path == "/at-once"))
				used(0)
			}
		})
	}
	t.Run("of an error", func(t *testing.T) {
		for range 8 {
			must(t, "request", c.Probe("/error", "X-Key: alice").Shows(http.StatusServiceUnavailable, 3, 1))
			used(0)
		}
	})
	// Nothing takes a slot back that was given back.
	c.Stop()
	must(t, "at the end", want("number of leases", servers.Content(t, "slots", "alice").Used, 0))
}

// TestSlotOutlivesTheConfig: a request that runs during a reload keeps its slot
// and gives it back, also where the new config has no limiter.
func TestSlotOutlivesTheConfig(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	site := slotsSite(servers, "100h", backend)
	c := caddytest.Start(t, site)
	first := backend.Hold(t, c, "/held", "X-Key: alice")
	c.MustLoad(strings.Replace(site, "events 3", "events 2", 1))
	second := backend.Hold(t, c, "/held", "X-Key: alice")
	must(t, "request", c.Probe("/", "X-Key: alice").Shows(http.StatusTooManyRequests, 2, 2))
	for i, a := range backend.Finish(t, first, second) {
		must(t, "request", a.Shows(http.StatusOK, int64(3-i), int64(i+1)))
	}
	servers.AwaitUsed(t, "slots", "alice", 0)

	last := backend.Hold(t, c, "/held", "X-Key: alice")
	c.MustLoad(unlimitedSite)
	must(t, "running request", want("number of leases", servers.Content(t, "slots", "alice").Used, 1))
	must(t, "running request", backend.Finish(t, last)[0].Shows(http.StatusOK, 2, 1))
	servers.AwaitUsed(t, "slots", "alice", 0)
}
