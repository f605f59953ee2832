package limiter

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// listen serves a site over HTTP/1, and returns its address.
func (s *queueSite) listen(chain http.HandlerFunc) string {
	s.t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
		if err := s.limiters[0].ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			chain(w, r)
			return nil
		})); err != nil {
			w.WriteHeader(statusOf(err))
		}
	}))
	s.t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

func (s *queueSite) held() int {
	room := s.limiters[0].Zones[0].bound[ownStore].room
	room.mu.Lock()
	defer room.mu.Unlock()
	return room.held
}

func (s *queueSite) dial(addr string) net.Conn {
	s.t.Helper()
	conn, err := new(net.Dialer).DialContext(s.t.Context(), "tcp", addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// reset empties a client's bucket as an operator would.
func (s *queueSite) reset(client string) error {
	z := s.limiters[0].Zones[0]
	r := httptest.NewRequestWithContext(s.t.Context(), http.MethodGet, "/", nil)
	r.Header.Set("A", client)
	w := httptest.NewRecorder()
	repl := caddy.NewReplacer()
	key, err := z.clientKey(caddyhttp.PrepareRequest(r, repl, w, nil), repl, s.limiters[0])
	if err == nil {
		err = s.buckets().(store.Resetter).Reset(context.Background(), store.Request{Limit: &z.limit, ClientKey: key})
	}
	AskAgain(ZoneID{s.t.Name(), z.Name}, key)
	return err
}

// TestClosedConnectionIsNoticed while its request waits: without a body, with a short one that is
// unread, and with one that never comes.
func TestClosedConnectionIsNoticed(t *testing.T) {
	s := newQueueSite(t, []*Zone{{Name: "zone", Key: []string{"static"}, Events: Quantity{Number: 1}, Window: time.Hour, MaxWait: 2 * time.Hour}})
	addr := s.listen(func(http.ResponseWriter, *http.Request) {})
	if got := s.limiters[0].answeredWith(http.StatusOK).Code; got != http.StatusOK {
		t.Fatalf("the first request got %d", got)
	}
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n1234567890",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4096\r\n\r\n" + strings.Repeat("x", 4096),
	} {
		conn := s.dial(addr)
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		await(t, "it waits", func() bool { return s.held() == 1 })
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		await(t, fmt.Sprintf("%.80q has left", request), func() bool { return s.held() == 0 })
	}
}

// TestBodyIsWholeAfterWaiting, however it came, and however it is read.
func TestBodyIsWholeAfterWaiting(t *testing.T) {
	for _, size := range []int{1, 10, maxReadAhead - 1, maxReadAhead, maxReadAhead + 1, 300_000} {
		for _, late := range []int{0, 1, size} {
			t.Run(fmt.Sprintf("%d bytes, %d late", size, late), func(t *testing.T) {
				s := newQueueSite(t, []*Zone{{
					Name: "zone", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: time.Hour, MaxWait: 2 * time.Hour,
				}})
				body := strings.Repeat("0123456789abcde\n", size/16+1)[:size]
				got := make(chan string, 2)
				addr := s.listen(func(_ http.ResponseWriter, r *http.Request) {
					read, err := io.ReadAll(r.Body)
					got <- fmt.Sprint(string(read), err)
				})
				send := func() net.Conn {
					conn := s.dial(addr)
					if _, err := fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", size, body[:size-late]); err != nil {
						t.Fatal(err)
					}
					return conn
				}
				rest := func(conn net.Conn) {
					if _, err := io.WriteString(conn, body[size-late:]); err != nil {
						t.Fatal(err)
					}
				}
				rest(send())
				if read := <-got; read != body+"<nil>" {
					t.Fatal("a body that needs not wait is not whole")
				}
				conn := send()
				await(t, "it waits", func() bool { return s.held() == 1 })
				if err := s.reset("static"); err != nil {
					t.Fatal(err)
				}
				await(t, "it goes on", func() bool { return s.held() == 0 })
				rest(conn)
				if read := <-got; read != body+"<nil>" {
					t.Errorf("%d bytes are read after waiting", len(read))
				}
			})
		}
	}
}
