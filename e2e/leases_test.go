package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// slotsSite counts requests that run at the same time. Those to /held run until
// the backend ends them, and those to other paths end at once.
func slotsSite(servers caddytest.Shards, window string, backend *caddytest.SlowBackend) string {
	return zonesSite(servers.Store(), zoneWith("slots", "algorithm concurrency", "events 3", "window "+window), `
`+proxyTo("/held "+backend.Server.Listener.Addr().String())+`
@panic path /panic
test_answer @panic panic
@late path /panic-late
test_answer @late panic-late
error /error 503
respond ok
`)
}

func TestLeasesExpireAfterKill(t *testing.T) {
	t.Parallel() // it spends its time waiting
	const lease = 15_000_000
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	caddys := caddytest.StartMany(t, 2, slotsSite(servers, "15s", backend))
	leases := func() map[string]int64 { return servers.Content(t, "slots", "alice").Members }
	refused := func(when string) {
		t.Helper()
		for i, c := range caddys {
			a := c.Probe("/", "X-Key: alice")
			must(t, fmt.Sprintf("Caddy %d, %s", i, when), errors.Join(a.Refuses("slots"), a.Shows(http.StatusTooManyRequests, 3, 3),
				want("having a reset ahead", a.Reset > a.Sent.Unix(), true)))
		}
	}
	for range 3 {
		backend.Hold(t, caddys[0], "/held", "X-Key: alice")
	}
	taken := leases()
	must(t, "running requests", want("number of leases", len(taken), 3))
	refused("while three requests run")

	// They outlive the leases that they have taken.
	over := slices.Max(slices.Collect(maps.Values(taken)))
	eventually(t, "the leases that were taken are over", func() error {
		return want("server clock past their end", servers.Now(t) > over, true)
	})
	renewed := leases()
	must(t, "long requests", want("number of leases", len(renewed), 3))
	for id, until := range taken {
		must(t, "lease "+id, want("being renewed", renewed[id] > until, true))
	}
	refused("while three requests run for longer")

	// No process frees or renews what a killed Caddy holds.
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
	// The other Caddy, too, has to wait for the end of the first lease.
	first := slices.Min(slices.Collect(maps.Values(left)))
	must(t, "the first slot", want("being free only when its lease was over", servers.Now(t) > first, true))
	eventually(t, "all leases are over", func() error { return want("number of leases", len(leases()), 0) })
	var held []caddytest.Running
	for range 3 {
		held = append(held, backend.Hold(t, c, "/held", "X-Key: alice"))
	}
	refused("with the slots of the killed Caddy")
	for _, a := range backend.Finish(t, held...) {
		must(t, "request", want("status", a.Status, http.StatusOK))
	}
	servers.AwaitUsed(t, "slots", "alice", 0)
}

// TestSlotsAreFreedAtTheEnd checks that a slot is free long before its lease would expire.
func TestSlotsAreFreedAtTheEnd(t *testing.T) {
	t.Parallel()
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
	// There are more requests than slots.
	for _, path := range []string{"/at-once", "/panic", "/panic-late"} {
		t.Run(path, func(t *testing.T) {
			for i := range 8 {
				// On a reused connection the client would retry.
				c.Client.CloseIdleConnections()
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
	// No late call takes a freed slot.
	c.Unload()
	must(t, "at the end", want("number of leases", servers.Content(t, "slots", "alice").Used, 0))
}

// TestSlotOutlivesTheConfig checks that a request that runs during a reload keeps its slot and
// frees it, also if the new config has no limiter.
func TestSlotOutlivesTheConfig(t *testing.T) {
	t.Parallel()
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

// TestSlotIsRenewedWhileOthersAreSettled checks a request that is settled in one zone while its
// slot in another one is renewed.
func TestSlotIsRenewedWhileOthersAreSettled(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		// The slot is renewed every third of a second.
		for range 3 {
			time.Sleep(300 * time.Millisecond) // the response outlasts renewals
			_, _ = w.Write([]byte("some"))
			_ = http.NewResponseController(w).Flush()
		}
	}))
	defer backend.Close()
	forStores(t, bothStores(caddytest.StartShards(t, 2, 1)), func(t *testing.T, store string) {
		c := startWith(t, store, zoneWith("counted", "charge before")+zoneWith("running", "events 10", "window 1s", "algorithm concurrency"),
			proxyTo(backend.Listener.Addr().String(), "flush_interval -1"))
		must(t, "a long response", want("status", c.Get("/", "X-Key: alice").StatusCode, http.StatusOK))
		c.Unload()
	})
}

// oneSlot admits one request at a time to startBackend.
func oneSlot(t *testing.T, servers caddytest.Shards, window string) *caddytest.Caddy {
	t.Helper()
	return startWith(t, servers.Store(), zoneWith("slots", "algorithm concurrency", "events 1", "window "+window),
		proxyTo(startBackend(t), "flush_interval -1"))
}

// openWebSocket upgrades a connection and returns it with its reader and the response.
func openWebSocket(t *testing.T, c *caddytest.Caddy, key string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp", c.Addr)
	must(t, "dial", err)
	t.Cleanup(func() { _ = conn.Close() })
	must(t, "dial", conn.SetDeadline(time.Now().Add(caddytest.Patience)))
	_, err = fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nX-Key: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n", c.Addr, key)
	must(t, "ask for the upgrade", err)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	must(t, "read the answer", err)
	return conn, r, resp
}

// echoes checks that a WebSocket works.
func echoes(t *testing.T, conn net.Conn, r *bufio.Reader, text string) {
	t.Helper()
	_, err := io.WriteString(conn, text)
	must(t, "write", err)
	b := make([]byte, len(text))
	_, err = io.ReadFull(r, b)
	must(t, "read", errors.Join(err, want("echo", string(b), text)))
}

func TestWebSocketHoldsOneSlot(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := oneSlot(t, servers, "100h")
	// A lost slot would be missing in the next round.
	for i := range 3 {
		conn, r, resp := openWebSocket(t, c, "alice")
		must(t, "upgrade", errors.Join(want("status", resp.StatusCode, http.StatusSwitchingProtocols),
			want("remaining", caddytest.Remaining(resp), "0"), want("used", resp.Header.Get("X-RateLimit-Used"), "1")))
		echoes(t, conn, r, fmt.Sprint("hello ", i))
		must(t, "open WebSocket", want("number of leases", servers.Content(t, "slots", "alice").Used, 1))

		must(t, "request during the WebSocket", c.Probe("/plain", "X-Key: alice").Refuses("slots"))
		_, _, second := openWebSocket(t, c, "alice")
		must(t, "second WebSocket", want("status", second.StatusCode, http.StatusTooManyRequests))
		must(t, "another client", c.Probe("/plain", "X-Key: bob").Shows(http.StatusOK, 1, 1))
		echoes(t, conn, r, "still there")

		must(t, "close", conn.Close())
		servers.AwaitUsed(t, "slots", "alice", 0)
		must(t, "request after the WebSocket", c.Probe("/plain", "X-Key: alice").Shows(http.StatusOK, 1, 1))
		servers.AwaitUsed(t, "slots", "alice", 0)
	}
}

// TestWebSocketRenewsItsLease while the connection is open, although the server no longer owns it.
func TestWebSocketRenewsItsLease(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartShards(t, 1, 0)
	c := oneSlot(t, servers, "15s")
	conn, r, _ := openWebSocket(t, c, "alice")
	leases := func() []int64 {
		return slices.Collect(maps.Values(servers.Content(t, "slots", "alice").Members))
	}
	taken := leases()
	must(t, "open WebSocket", want("number of leases", len(taken), 1))
	eventually(t, "the lease that was taken is over", func() error {
		return want("server clock past their end", servers.Now(t) > taken[0], true)
	})
	must(t, "WebSocket after that", want("number of leases", len(leases()), 1))
	must(t, "request after that", c.Probe("/plain", "X-Key: alice").Refuses("slots"))
	echoes(t, conn, r, "still there")
}

// TestEndFreesSlots: at an orderly end of the process upgraded connections give their slots back, even if they are of an
// earlier config, have outlasted their proxy, or have slots in a store that no config uses. At a reload they keep them.
func TestEndFreesSlots(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		proxy  string
		before func(c *caddytest.Caddy)
	}{
		"closed by the proxy":           {},
		"outlasting the proxy":          {proxy: "stream_close_delay 5m"},
		"no config has the store":       {"stream_close_delay 5m", func(c *caddytest.Caddy) { c.MustLoad(unlimitedSite) }},
		"by the admin API":              {"stream_close_delay 5m", func(c *caddytest.Caddy) { c.AdminCall(http.MethodPost, "/stop", "", "") }},
		"a config without a zone of it": {"stream_close_delay 5m", func(c *caddytest.Caddy) { c.MustLoad(apiSite("", 5, "1h")) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 2, 0)
			site := func(events int) string {
				return zonesSite(servers.Store(), zoneWith("slots", "algorithm concurrency", fmt.Sprint("events ", events), "window 100h"),
					proxyTo(startBackend(t), "flush_interval -1", test.proxy))
			}
			c := caddytest.Start(t, site(2))
			clients := []string{"alice", "bob", "carol", "dave", "eve"}
			open := func(n int64) {
				t.Helper()
				for _, client := range clients {
					_, _, resp := openWebSocket(t, c, client)
					must(t, client, want("status", resp.StatusCode, http.StatusSwitchingProtocols))
					must(t, client, want("number of leases", servers.Content(t, "slots", client).Used, n))
				}
			}
			open(1)
			if test.proxy != "" {
				// Otherwise the proxy closes them now.
				c.MustLoad(site(3))
				open(2)
			}
			if test.before != nil {
				test.before(c)
			}
			c.Stop()
			for _, client := range clients {
				must(t, client, want("number of leases at the end", servers.Content(t, "slots", client).Used, 0))
			}
			must(t, "log", want("reporting losses", strings.Contains(c.Logs.String(), "were lost at exit"), false))
			for _, s := range servers {
				present, err := s.Primary.Client().ZCard(t.Context(), "rl:#present").Result()
				must(t, "Redis", errors.Join(err, want("number of Caddys that are said to run", present, 0)))
			}
		})
	}
}

// TestEndFreesSlotsOfAShardThatReturns within the time that the end takes.
func TestEndFreesSlotsOfAShardThatReturns(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 0)
	c := caddytest.Start(t, zonesSite(servers.Store(), zoneWith("slots", "algorithm concurrency", "events 9", "window 100h"),
		proxyTo(startBackend(t), "flush_interval -1", "stream_close_delay 5m")))
	for range 5 {
		_, _, resp := openWebSocket(t, c, "alice")
		must(t, "upgrade", want("status", resp.StatusCode, http.StatusSwitchingProtocols))
	}
	servers.Kill(t)
	c.Terminate()
	time.Sleep(500 * time.Millisecond) // longer than the attempts of a call
	servers.Restart(t)
	c.AwaitEnd()
	must(t, "log", want("number of lost slots", len(lostOf(t, c, "slots")), 0))
	must(t, "Redis", want("number of leases", servers.Content(t, "slots", "alice").Used, 0))
}

// TestEndClosesGuestStores although an upgraded connection uses one.
func TestEndClosesGuestStores(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("rate_limit {\nstore guest {\n}\n}", zoneWith("slots", "algorithm concurrency", "events 9", "window 100h"),
		proxyTo(startBackend(t), "flush_interval -1", "stream_close_delay 5m")))
	_, _, resp := openWebSocket(t, c, "alice")
	must(t, "upgrade", want("status", resp.StatusCode, http.StatusSwitchingProtocols))
	c.Stop()
	must(t, "log", want("times that the store was closed", strings.Count(c.Logs.String(), "the guest store is closed"), 1))
}

// TestEndTellsWhatIsLost, by zone and kind, of a shard that is away.
func TestEndTellsWhatIsLost(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 0)
	c := caddytest.Start(t, zonesSite(servers.Store(),
		zoneWith("slots", "algorithm concurrency", "events 9", "window 100h", "match {\npath /ws\n}")+
			zoneWith("api", "events 1000", "match {\npath /plain\n}"),
		proxyTo(startBackend(t), "flush_interval -1", "stream_close_delay 5m")))
	for range 3 {
		_, _, resp := openWebSocket(t, c, "alice")
		must(t, "upgrade", want("status", resp.StatusCode, http.StatusSwitchingProtocols))
	}
	servers.Kill(t)
	for range 5 {
		must(t, "request", want("status", c.Ask("/plain", "X-Key: bob").Status, http.StatusOK))
	}
	uncertain := int64(0)
	eventually(t, "all charges wait or are over", func() error {
		uncertain = undelivered(c, "a", "uncertain")
		return want("charges", fmt.Sprint(c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`), " wait"), fmt.Sprint(5-uncertain, " wait"))
	})
	c.Stop()
	must(t, "log", errors.Join(
		want("losses", fmt.Sprint(lostOf(t, c, "slots"), lostOf(t, c, "charges")), fmt.Sprintf("map[slots:3] map[api:%d]", 5-uncertain)),
		want("losses of refunds", len(lostOf(t, c, "refunds")), 0)))
	servers.Restart(t)
	must(t, "Redis", want("number of leases", servers.Content(t, "slots", "alice").Used, 3))
}

// lostOf returns how much of a kind Caddy logged as lost at exit, by zone.
func lostOf(t *testing.T, c *caddytest.Caddy, kind string) map[string]int64 {
	t.Helper()
	lost := map[string]int64{}
	for _, entry := range entriesOf(c, kind+" were lost at exit") {
		must(t, "log", want("store", entry["store"], any("default")))
		lost[entry["zone"].(string)] += int64(entry[kind].(float64))
	}
	return lost
}

func TestStreamHoldsOneSlot(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := oneSlot(t, servers, "100h")
	for round := range 3 {
		// Streams that one client aborts count for a while.
		client := fmt.Sprint("alice", round)
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/stream", nil)
		must(t, "stream", err)
		req.Header.Set("X-Key", client)
		resp, err := c.Client.Do(req)
		must(t, "stream", err)
		must(t, "stream", errors.Join(want("status", resp.StatusCode, http.StatusOK), want("remaining", caddytest.Remaining(resp), "0")))
		// The response has begun, and so the request is settled.
		_, err = io.ReadFull(resp.Body, make([]byte, len("first")))
		must(t, "begin of the body", err)
		must(t, "stream", want("number of leases", servers.Content(t, "slots", client).Used, 1))
		must(t, "request during the stream", c.Probe("/plain", "X-Key: "+client).Refuses("slots"))
		leave()
		_ = resp.Body.Close()
		servers.AwaitUsed(t, "slots", client, 0)
		must(t, "request after the stream", c.Probe("/plain", "X-Key: "+client).Shows(http.StatusOK, 1, 1))
		servers.AwaitUsed(t, "slots", client, 0)
	}

	// This stream ends by itself.
	backend := caddytest.StartSlowBackend(t)
	c.MustLoad(zonesSite(servers.Store(), zoneWith("slots", "algorithm concurrency", "events 1", "window 100h"),
		proxyTo(backend.Server.Listener.Addr().String(), "flush_interval -1")))
	stream := backend.Hold(t, c, "/stream", "X-Key: alice")
	must(t, "stream", want("number of leases", servers.Content(t, "slots", "alice").Used, 1))
	a := backend.Finish(t, stream)[0]
	must(t, "stream", errors.Join(a.Shows(http.StatusOK, 1, 1), want("body", a.Body, "firstlast")))
	servers.AwaitUsed(t, "slots", "alice", 0)
}
