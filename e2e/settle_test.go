package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// slowWriter is a backend whose responses tell their cost when they end.
type slowWriter struct {
	addr string
	// next lets a stream go on to its second event.
	next chan struct{}
}

func startSlowWriter(t *testing.T) *slowWriter {
	t.Helper()
	b := &slowWriter{next: make(chan struct{})}
	server := httptest.NewServer(b)
	t.Cleanup(server.Close)
	b.addr = server.Listener.Addr().String()
	return b
}

func (b *slowWriter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	event := func(data string) {
		fmt.Fprintf(w, "data: %s\n\n", data)
		_ = http.NewResponseController(w).Flush()
	}
	switch _, what, _ := strings.Cut(r.URL.Path[1:], "/"); what {
	case "json":
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"usage": {"total_tokens": 42}}`)
	case "nothing":
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{}`)
	case "trailer":
		w.Header().Set("Trailer", "X-Cost")
		io.WriteString(w, "text")
		w.Header().Set("X-Cost", "7")
	case "size":
		io.WriteString(w, strings.Repeat("x", 700))
	case "stream":
		w.Header().Set("Content-Type", "text/event-stream")
		event(`{"usage": null}`)
		select {
		case <-b.next:
		case <-r.Context().Done():
		}
		event(`{"usage": {"total_tokens": 11}}`)
	case "abort":
		w.Header().Set("Content-Type", "text/event-stream")
		event(`{"usage": {"total_tokens": 5}}`)
		panic(http.ErrAbortHandler)
	case "free":
		w.WriteHeader(http.StatusNotModified)
	}
}

// TestCostsAtTheEnd checks that costs that are known when a response has ended are charged, and that
// the response is neither delayed nor changed by it.
func TestCostsAtTheEnd(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 1)
	backend := startSlowWriter(t)
	const tokens = "cost {http.rate_limit.response.json.usage.total_tokens} 3"
	zones := "headers both\n"
	for _, mode := range modes {
		for name, cost := range map[string]string{
			"tokens": tokens, "size": "cost {http.rate_limit.response.size}", "trailer": "cost {http.response.trailer.X-Cost} 0",
		} {
			zones += pathZone(name+"."+mode, cost, "settle end", "events 10000", "charge "+mode)
		}
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "reverse_proxy "+backend.addr)
		for _, mode := range modes {
			used := map[string]int64{}
			// spends asks for something, and waits until that much more is used.
			spends := func(zone, what string, cost int64, ask func(path string)) {
				t.Helper()
				zone += "." + mode
				ask("/" + zone + "/" + what)
				used[zone] += cost
				eventually(t, zone+", "+what+" is charged", func() error {
					a := c.Probe("/"+zone+"/free", "X-Key: alice")
					return errors.Join(want("status", a.Status, http.StatusNotModified), want("used", a.Used, used[zone]))
				})
				awaitUsed(t, servers, store, zone, "alice", used[zone])
			}
			get := func(path string) {
				must(t, path, want("status", c.Get(path, "X-Key: alice").StatusCode, http.StatusOK))
			}
			spends("tokens", "json", 42, get)
			spends("tokens", "nothing", 3, get)
			spends("size", "size", 700, get)
			spends("trailer", "trailer", 7, get)
			spends("trailer", "size", 0, get)
			spends("tokens", "stream", 11, func(path string) {
				resp, body := openStream(t, c, path)
				line, err := body.ReadString('\n')
				must(t, "first event, before the second is sent", errors.Join(err, want("line", line, "data: {\"usage\": null}\n")))
				backend.next <- struct{}{}
				rest, err := io.ReadAll(body)
				must(t, "rest", errors.Join(err, want("text", string(rest), "\ndata: {\"usage\": {\"total_tokens\": 11}}\n\n")))
				must(t, "close", resp.Body.Close())
			})
			spends("tokens", "abort", 5, func(path string) {
				resp, body := openStream(t, c, path)
				_, _ = io.ReadAll(body)
				must(t, "close", resp.Body.Close())
			})
			spends("tokens", "stream", 3, func(path string) {
				// The client leaves before the cost is known.
				resp, body := openStream(t, c, path)
				_, err := body.ReadString('\n')
				must(t, "first event", err)
				must(t, "close", resp.Body.Close())
			})
		}
	})
}

func openStream(t *testing.T, c *caddytest.Caddy, path string) (*http.Response, *bufio.Reader) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.URL+path, http.NoBody)
	must(t, "request", err)
	req.Header.Set("X-Key", "alice")
	resp, err := c.Client.Do(req)
	must(t, path, err)
	return resp, bufio.NewReader(resp.Body)
}

// TestStatusesOfGRPC decide about the cost of calls.
func TestStatusesOfGRPC(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	backend := startGRPC(t)
	for name, test := range map[string]struct {
		option string
		costs  bool
	}{
		"free": {"free_status grpc:0", false}, "another is free": {"free_status grpc:5", true},
		"counted": {"count_status grpc:0 grpc:16", true}, "another is counted": {"count_status grpc:16", false},
	} {
		t.Run(name, func(t *testing.T) {
			zone := strings.ReplaceAll(name, " ", "_")
			c := caddytest.Start(t, grpcSite(servers.Store(), zoneWith(zone, "events 100", "settle end", test.option), backend))
			g := dialGRPC(t, c)
			used := int64(0)
			for range 3 {
				st, _ := g.call("alice")
				must(t, "call", st.Err())
				if test.costs {
					used++
				}
				servers.AwaitUsed(t, zone, "alice", used)
			}
			c.Stop()
			servers.AwaitUsed(t, zone, "alice", used)
		})
	}
}
