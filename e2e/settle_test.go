package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// slowWriter is a backend whose responses have their cost at their end.
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

// compressedUsage is a document in gzip.
func compressedUsage() []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = io.WriteString(w, `{"usage": {"total_tokens": 42}}`)
	w.Close()
	return b.Bytes()
}

func (b *slowWriter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	event := func(data string) {
		fmt.Fprintf(w, "data: %s\n\n", data)
		_ = http.NewResponseController(w).Flush()
	}
	switch _, what, _ := strings.Cut(r.URL.Path[1:], "/"); what {
	case "json":
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"usage": {"total_tokens": 42}}`)
	case "nothing":
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{}`)
	case "trailer":
		w.Header().Set("Trailer", "X-Cost")
		_, _ = io.WriteString(w, "text")
		w.Header().Set("X-Cost", "7")
	case "size":
		_, _ = io.WriteString(w, strings.Repeat("x", 700))
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
	case "compressed":
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(compressedUsage())
	case "undecodable":
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = io.WriteString(w, `{"usage": {"total_tokens": 42}}`)
	case "long":
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"text": "`+strings.Repeat("word ", 100_000)+`", "usage": {"total_tokens": 42}}`)
	case "broken":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadGateway)
		_, _ = io.WriteString(w, `{"usage": {"total_tokens": 42}}`)
	case "file":
		http.ServeContent(w, r, "file", time.Time{}, strings.NewReader(strings.Repeat("x", 1000)))
	case "upgrade":
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\nhello")
		conn.Close()
	}
}

// TestCostsAtTheEnd checks that costs that are known when a response has ended are charged, and that
// the response is neither delayed nor changed by it.
func TestCostsAtTheEnd(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	backend := startSlowWriter(t)
	const tokens = "cost {http.rate_limit.response.json.usage.total_tokens} 3"
	zones := "headers both\n"
	for _, mode := range modes {
		for name, cost := range map[string]string{
			"tokens": tokens, "size": "cost {http.rate_limit.response.size}", "trailer": "cost {http.response.trailer.X-Cost} 0",
		} {
			zones += pathZone(name+"."+mode, cost, "events 10000", "charge "+mode)
		}
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, proxyTo(backend.addr))
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

// TestCostsAtTheEndOfUnusualResponses: of those that are compressed, handed over, partial or empty,
// and where several zones and handlers wait for the end.
func TestCostsAtTheEndOfUnusualResponses(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	backend := startSlowWriter(t)
	names := []string{"tokens", "size", "slots"}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		for _, mode := range modes {
			more := []string{"events 10000", "charge " + mode, "count_status not 5xx"}
			zones := zoneWith("tokens."+mode, append(more, "cost {http.rate_limit.response.json.usage.total_tokens} 3")...) +
				zoneWith("slots."+mode, "algorithm concurrency", "events 3")
			inner := zoneWith("size."+mode, append(more, "cost {http.rate_limit.response.size} 2")...)
			c := startWith(t, store, zones, "rate_limit {\n"+inner+"}\n"+proxyTo(backend.addr))
			used := map[string]int64{}
			spends := func(what string, tokens, size int64, headers ...string) {
				t.Helper()
				method := http.MethodGet
				if what == "head" {
					method, what = http.MethodHead, "size"
				}
				req, err := http.NewRequestWithContext(t.Context(), method, c.URL+"/x/"+what, http.NoBody)
				must(t, what, err)
				req.Header.Set("X-Key", "alice")
				for _, line := range headers {
					name, value, _ := strings.Cut(line, ": ")
					req.Header.Set(name, value)
				}
				resp, err := c.Client.Do(req)
				must(t, what, err)
				_, _ = io.Copy(io.Discard, resp.Body)
				must(t, what, resp.Body.Close())
				for name, cost := range map[string]int64{"tokens": tokens, "size": size, "slots": 0} {
					used[name] += cost
				}
				for _, name := range names {
					zone := name + "." + mode
					eventually(t, what+" is charged in "+zone, func() error {
						return want("used", bucketUsed(c, zone, "alice"), used[name])
					})
				}
			}
			spends("compressed", 42, int64(len(compressedUsage())), "Accept-Encoding: gzip")
			spends("undecodable", 3, int64(len(`{"usage": {"total_tokens": 42}}`)), "Accept-Encoding: gzip")
			spends("undecodable", 3, int64(len(`{"usage": {"total_tokens": 42}}`)), "Accept-Encoding: gzip")
			must(t, "log", want("entries about the encoding", strings.Count(c.Logs.String(), `"cause":"encoding"`), 1))
			spends("broken", 0, 0)
			spends("head", 3, 0)
			spends("file", 3, 100, "Range: bytes=100-199")
			spends("file", 3, 1000)
			spends("upgrade", 3, 2, "Connection: Upgrade", "Upgrade: test")
			for cause, count := range map[string]string{"encoding": "2", "not_found": "2", "not_json": "2", "broken_off": "0"} {
				must(t, "metric", want(cause, c.Metric(fmt.Sprintf(`caddy_rate_limit_unreadable_total{cause=%q,option="cost",zone="tokens.%s"}`, cause, mode)), count))
			}
			c.Unload()
		}
	})
}

// TestEncodedAnswersAreRead: no client makes its answer cheaper by the encoding that it asks for,
// whichever handler encodes.
func TestEncodedAnswersAreRead(t *testing.T) {
	t.Parallel()
	backend := startSlowWriter(t)
	c := caddytest.Start(t, zonesSite("", zoneWith("tokens", "events 10000", "cost {http.rate_limit.response.json.usage.total_tokens} 3"), "encode zstd gzip\n"+proxyTo(backend.addr)))
	used := int64(0)
	for _, encoding := range []string{"", "identity", "gzip", "zstd", "br", "zstd, gzip", "deflate"} {
		a := c.Get("/x/long", "X-Key: alice", "Accept-Encoding: "+encoding)
		used += 42
		must(t, encoding, want("status", a.StatusCode, http.StatusOK))
		eventually(t, encoding, func() error { return want("used", bucketUsed(c, "tokens", "alice"), used) })
	}
}

// TestCostsAtTheEndOverHTTP2, of a document and of a stream, which arrives as it is sent.
func TestCostsAtTheEndOverHTTP2(t *testing.T) {
	t.Parallel()
	backend := startSlowWriter(t)
	zone := zoneWith("tokens", "events 10000", "cost {http.rate_limit.response.json.usage.total_tokens} 3")
	site := strings.Replace(zonesSite("", zone, proxyTo(backend.addr)), "{{global}}", "{{global}}\nservers {\nprotocols h1 h2c\n}", 1)
	c := caddytest.Start(t, site)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols}
	t.Cleanup(transport.CloseIdleConnections)
	c.Client = &http.Client{Transport: transport, Timeout: caddytest.Patience}
	resp := c.Get("/x/json", "X-Key: alice")
	must(t, "a document", errors.Join(want("status", resp.StatusCode, http.StatusOK), want("protocol", resp.ProtoMajor, 2)))
	resp, body := openStream(t, c, "/x/stream")
	_, err := body.ReadString('\n')
	must(t, "first event, before the second is sent", err)
	backend.next <- struct{}{}
	_, err = io.ReadAll(body)
	must(t, "rest", errors.Join(err, resp.Body.Close(), want("protocol", resp.ProtoMajor, 2)))
	eventually(t, "both are charged", func() error { return want("used", bucketUsed(c, "tokens", "alice"), 42+11) })
}

// bucketUsed returns what a client has used, by its primary or the memory store.
func bucketUsed(c *caddytest.Caddy, zone, client string) int64 {
	c.T.Helper()
	for _, server := range bucketsOf(c, http.MethodGet, zone+"?key="+client).Buckets[0].Servers {
		if server.Role != "replica" && server.State != nil {
			return server.State.Used
		}
	}
	return 0
}

// TestStreamsOutliveWhatWasBefore: a reload, and an outage, while a stream runs whose cost is known
// at its end.
func TestStreamsOutliveWhatWasBefore(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for _, onError := range []string{"allow", "local"} {
			t.Run(mode+"/"+onError, func(t *testing.T) {
				servers := caddytest.StartLastingShards(t, 1, 0)
				backend := startSlowWriter(t)
				zone := zoneWith("tokens", "events 10000", "charge "+mode, "cost {http.rate_limit.response.json.usage.total_tokens} 3")
				site := zonesSite(servers.Store("on_error "+onError, "check_timeout 1m", "charge_timeout 1m"), zone, proxyTo(backend.addr))
				c := caddytest.Start(t, site)
				must(t, "a request", want("status", c.Get("/x/json", "X-Key: alice").StatusCode, http.StatusOK))
				servers.AwaitUsed(t, "tokens", "alice", 42)
				resp, body := openStream(t, c, "/x/stream")
				_, err := body.ReadString('\n')
				must(t, "first event", err)
				c.MustLoad(site + "# another\n")
				servers.Kill(t)
				backend.next <- struct{}{}
				_, err = io.ReadAll(body)
				must(t, "rest", errors.Join(err, resp.Body.Close()))
				servers.Restart(t)
				servers.AwaitUsed(t, "tokens", "alice", 42+11)
			})
		}
	}
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
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	backend := startGRPC(t)
	for name, test := range map[string]struct {
		option string
		costs  bool
	}{
		"free": {"count_status not grpc:0", false}, "another is free": {"count_status not grpc:5", true},
		"counted": {"count_status grpc:0 grpc:16", true}, "another is counted": {"count_status grpc:16", false},
	} {
		t.Run(name, func(t *testing.T) {
			zone := strings.ReplaceAll(name, " ", "_")
			c := caddytest.Start(t, grpcSite(servers.Store(), zoneWith(zone, "events 100", test.option), backend))
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
			c.Unload()
			servers.AwaitUsed(t, zone, "alice", used)
		})
	}
}
