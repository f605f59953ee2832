package shardlimit_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// oneSlot admits one request at a time to a backend that answers in all the
// ways there are.
func oneSlot(t *testing.T, servers caddytest.Shards, window string) *caddytest.Caddy {
	t.Helper()
	return startWith(t, servers.Store(), zoneWith("slots", "algorithm concurrency", "events 1", "window "+window),
		"reverse_proxy "+startBackend(t)+" {\nflush_interval -1\n}")
}

// openWebSocket upgrades a connection, and returns it and how to read from it.
func openWebSocket(t *testing.T, c *caddytest.Caddy, key string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp", c.Addr)
	must(t, "dial", err)
	t.Cleanup(func() { _ = conn.Close() })
	must(t, "dial", conn.SetDeadline(time.Now().Add(caddytest.WaitLimit)))
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
	servers := caddytest.StartShards(t, 1, 0)
	c := oneSlot(t, servers, "100h")
	// Again and again, for a slot that is lost would be missing.
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

// TestWebSocketRenewsItsLease: the handler chain goes on while the connection is
// open, though the server no longer owns it.
func TestWebSocketRenewsItsLease(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartShards(t, 1, 0)
	c := oneSlot(t, servers, "5s")
	conn, r, _ := openWebSocket(t, c, "alice")
	leases := func() []int64 {
		return slices.Collect(maps.Values(servers.Content(t, "slots", "alice").Members))
	}
	taken := leases()
	must(t, "open WebSocket", want("number of leases", len(taken), 1))
	eventually(t, "the lease that was taken is over", func() error {
		return want("being so", servers.Now(t) > taken[0], true)
	})
	must(t, "WebSocket after that", want("number of leases", len(leases()), 1))
	must(t, "request after that", c.Probe("/plain", "X-Key: alice").Refuses("slots"))
	echoes(t, conn, r, "still there")
}

func TestStreamHoldsOneSlot(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	c := oneSlot(t, servers, "100h")
	for range 3 {
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/stream", nil)
		must(t, "stream", err)
		req.Header.Set("X-Key", "alice")
		resp, err := caddytest.Client.Do(req)
		must(t, "stream", err)
		must(t, "stream", errors.Join(want("status", resp.StatusCode, http.StatusOK), want("remaining", caddytest.Remaining(resp), "0")))
		// The response has begun, and so the request is settled.
		_, err = io.ReadFull(resp.Body, make([]byte, len("first")))
		must(t, "begin of the body", err)
		must(t, "stream", want("number of leases", servers.Content(t, "slots", "alice").Used, 1))
		must(t, "request during the stream", c.Probe("/plain", "X-Key: alice").Refuses("slots"))
		leave()
		_ = resp.Body.Close()
		servers.AwaitUsed(t, "slots", "alice", 0)
		must(t, "request after the stream", c.Probe("/plain", "X-Key: alice").Shows(http.StatusOK, 1, 1))
		servers.AwaitUsed(t, "slots", "alice", 0)
	}

	// A stream that comes to its end by itself.
	backend := caddytest.StartSlowBackend(t)
	c.MustLoad(zonesSite(servers.Store(), zoneWith("slots", "algorithm concurrency", "events 1", "window 100h"),
		"reverse_proxy "+backend.Server.Listener.Addr().String()+" {\nflush_interval -1\n}"))
	stream := backend.Hold(t, c, "/stream", "X-Key: alice")
	must(t, "stream", want("number of leases", servers.Content(t, "slots", "alice").Used, 1))
	a := backend.Finish(t, stream)[0]
	must(t, "stream", errors.Join(a.Shows(http.StatusOK, 1, 1), want("body", a.Body, "firstlast")))
	servers.AwaitUsed(t, "slots", "alice", 0)
}
