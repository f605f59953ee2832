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
)

// oneSlot admits one request at a time to a backend that answers in all the
// ways there are.
func oneSlot(t *testing.T, servers shards, window string) *caddyProcess {
	t.Helper()
	return startWith(t, servers.store(), zoneWith("slots", "algorithm concurrency", "events 1", "window "+window),
		"reverse_proxy "+startBackend(t)+" {\nflush_interval -1\n}")
}

// openWebSocket upgrades a connection, and returns it and how to read from it.
func (c *caddyProcess) openWebSocket(t *testing.T, key string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp", c.site)
	must(t, "dial", err)
	t.Cleanup(func() { _ = conn.Close() })
	must(t, "dial", conn.SetDeadline(time.Now().Add(waitLimit)))
	_, err = fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nX-Key: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n", c.site, key)
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
	servers := startShards(t, 1, 0)
	c := oneSlot(t, servers, "100h")
	// Again and again, for a slot that is lost would be missing.
	for i := range 3 {
		conn, r, resp := c.openWebSocket(t, "alice")
		must(t, "upgrade", errors.Join(want("status", resp.StatusCode, http.StatusSwitchingProtocols),
			want("remaining", remaining(resp), "0"), want("used", resp.Header.Get("X-RateLimit-Used"), "1")))
		echoes(t, conn, r, fmt.Sprint("hello ", i))
		must(t, "open WebSocket", want("number of leases", servers.content(t, "slots", "alice").used, 1))

		must(t, "request during the WebSocket", c.probe("/plain", "X-Key: alice").refuses("slots"))
		_, _, second := c.openWebSocket(t, "alice")
		must(t, "second WebSocket", want("status", second.StatusCode, http.StatusTooManyRequests))
		must(t, "another client", c.probe("/plain", "X-Key: bob").shows(http.StatusOK, 1, 1))
		echoes(t, conn, r, "still there")

		must(t, "close", conn.Close())
		servers.awaitUsed(t, "slots", "alice", 0)
		must(t, "request after the WebSocket", c.probe("/plain", "X-Key: alice").shows(http.StatusOK, 1, 1))
		servers.awaitUsed(t, "slots", "alice", 0)
	}
}

// TestWebSocketRenewsItsLease: the handler chain goes on while the connection is
// open, though the server no longer owns it.
func TestWebSocketRenewsItsLease(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startShards(t, 1, 0)
	c := oneSlot(t, servers, "5s")
	conn, r, _ := c.openWebSocket(t, "alice")
	leases := func() []int64 {
		return slices.Collect(maps.Values(servers.content(t, "slots", "alice").members))
	}
	taken := leases()
	must(t, "open WebSocket", want("number of leases", len(taken), 1))
	eventually(t, "the lease that was taken is over", func() error {
		return want("being so", servers.now(t) > taken[0], true)
	})
	must(t, "WebSocket after that", want("number of leases", len(leases()), 1))
	must(t, "request after that", c.probe("/plain", "X-Key: alice").refuses("slots"))
	echoes(t, conn, r, "still there")
}

func TestStreamHoldsOneSlot(t *testing.T) {
	servers := startShards(t, 1, 0)
	c := oneSlot(t, servers, "100h")
	for range 3 {
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/stream", nil)
		must(t, "stream", err)
		req.Header.Set("X-Key", "alice")
		resp, err := client.Do(req)
		must(t, "stream", err)
		must(t, "stream", errors.Join(want("status", resp.StatusCode, http.StatusOK), want("remaining", remaining(resp), "0")))
		// The response has begun, and so the request is settled.
		_, err = io.ReadFull(resp.Body, make([]byte, len("first")))
		must(t, "begin of the body", err)
		must(t, "stream", want("number of leases", servers.content(t, "slots", "alice").used, 1))
		must(t, "request during the stream", c.probe("/plain", "X-Key: alice").refuses("slots"))
		leave()
		_ = resp.Body.Close()
		servers.awaitUsed(t, "slots", "alice", 0)
		must(t, "request after the stream", c.probe("/plain", "X-Key: alice").shows(http.StatusOK, 1, 1))
		servers.awaitUsed(t, "slots", "alice", 0)
	}

	// A stream that comes to its end by itself.
	backend := startSlowBackend(t)
	c.mustLoad(zonesSite(servers.store(), zoneWith("slots", "algorithm concurrency", "events 1", "window 100h"),
		"reverse_proxy "+backend.server.Listener.Addr().String()+" {\nflush_interval -1\n}"))
	stream := backend.hold(t, c, "/stream", "X-Key: alice")
	must(t, "stream", want("number of leases", servers.content(t, "slots", "alice").used, 1))
	a := backend.finish(t, stream)[0]
	must(t, "stream", errors.Join(a.shows(http.StatusOK, 1, 1), want("body", a.body, "firstlast")))
	servers.awaitUsed(t, "slots", "alice", 0)
}
