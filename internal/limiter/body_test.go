package limiter

import (
	"bufio"
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
		body := &countedBody{ReadCloser: r.Body}
		r.Body = body
		if s.counted != nil {
			defer func() { s.counted(body.n) }()
		}
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
	key, err := z.clientKey(caddyhttp.PrepareRequest(r, repl, w, nil), repl, s.limiters[0], true)
	if err == nil {
		err = s.buckets().Reset(context.Background(), store.Request{Limit: &z.limit, ClientKey: key})
	}
	AskAgain(ZoneID{s.t.Name(), z.Name}, key)
	return err
}

// TestClosedConnectionIsNoticed while its request waits: without a body, with a short one that is
// unread, and with one that never comes, for which it holds no place.
func TestClosedConnectionIsNoticed(t *testing.T) {
	s := newQueueSite(t, []*Zone{{Name: "zone", Key: []string{"static"}, Events: Quantity{Number: 1}, Window: time.Hour, MaxWait: 2 * time.Hour}})
	ended := make(chan int, 1)
	s.counted = func(n int) { ended <- n }
	addr := s.listen(func(http.ResponseWriter, *http.Request) {})
	if got := s.limiters[0].answeredWith(http.StatusOK).Code; got != http.StatusOK {
		t.Fatalf("the first request got %d", got)
	}
	for request, held := range map[string]int{
		"GET / HTTP/1.1\r\nHost: a\r\n\r\n":                                                      1,
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n":                               0,
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345":                          0,
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n1234567890":                     1,
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n":       0,
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4096\r\n\r\n" + strings.Repeat("x", 4096): 1,
	} {
		conn := s.dial(addr)
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		await(t, "it waits", func() bool { return s.held() == held })
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		await(t, fmt.Sprintf("%.80q has left", request), func() bool { return s.held() == 0 })
		<-ended
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
				conn, isAhead := send(), size <= maxReadAhead
				if isAhead {
					rest(conn)
				}
				await(t, "it waits", func() bool { return s.held() == 1 })
				if err := s.reset("static"); err != nil {
					t.Fatal(err)
				}
				await(t, "it goes on", func() bool { return s.held() == 0 })
				if !isAhead {
					rest(conn)
				}
				if read := <-got; read != body+"<nil>" {
					t.Errorf("%d bytes are read after waiting", len(read))
				}
			})
		}
	}
}

// countedBody counts the bytes that are read, as Caddy's access log does.
type countedBody struct {
	io.ReadCloser
	n int
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n += n
	return n, err
}

// TestBodyIsReadBeforeTheWait, so that the access log can count its bytes, and the connection serves
// another request.
func TestBodyIsReadBeforeTheWait(t *testing.T) {
	for _, test := range []struct {
		name   string
		end    func(s *queueSite)
		status int
	}{
		{"admitted", func(s *queueSite) {
			if err := s.reset("static"); err != nil {
				s.t.Fatal(err)
			}
		}, http.StatusOK},
		{"refused", func(s *queueSite) {
			z := s.limiters[0].Zones[0]
			room := z.bound[ownStore].room
			room.mu.Lock()
			defer room.mu.Unlock()
			for _, line := range room.lines {
				first := line.first
				room.remove(first)
				first.isDisplaced = true
				first.ring()
			}
		}, http.StatusTooManyRequests},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newQueueSite(t, []*Zone{{Name: "zone", Key: []string{"static"}, Events: Quantity{Number: 1}, Window: time.Hour, MaxWait: 2 * time.Hour}})
			counts := make(chan int, 2)
			s.counted = func(n int) { counts <- n }
			addr := s.listen(func(http.ResponseWriter, *http.Request) {})
			if got := s.limiters[0].answeredWith(http.StatusOK).Code; got != http.StatusOK {
				t.Fatalf("the first request got %d", got)
			}
			conn := s.dial(addr)
			if _, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(conn, "67890"); err != nil {
				t.Fatal(err)
			}
			await(t, "it waits", func() bool { return s.held() == 1 })
			test.end(s)
			await(t, "its wait has ended", func() bool { return s.held() == 0 })
			answers := bufio.NewReader(conn)
			mustAnswer(t, answers, test.status)
			if n := <-counts; n != 10 {
				t.Errorf("%d bytes of 10 are counted when the handlers have returned", n)
			}
			if err := s.reset("static"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			mustAnswer(t, answers, http.StatusOK)
		})
	}
}

// TestClientThatLeavesWithItsBodyUnsent reaches no handler.
func TestClientThatLeavesWithItsBodyUnsent(t *testing.T) {
	s := newQueueSite(t, []*Zone{{
		Name: "zone", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: time.Hour, MaxWait: 2 * time.Hour,
	}})
	counts, passed := make(chan int, 1), make(chan struct{}, 1)
	s.counted = func(n int) { counts <- n }
	addr := s.listen(func(http.ResponseWriter, *http.Request) { passed <- struct{}{} })
	if got := s.limiters[0].answeredWith(http.StatusOK).Code; got != http.StatusOK {
		t.Fatalf("the first request got %d", got)
	}
	conn := s.dial(addr)
	if _, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345"); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	<-counts
	if len(passed) > 0 {
		t.Error("the request reached a handler")
	}
	if held := s.held(); held > 0 {
		t.Errorf("%d places are held", held)
	}
}

func mustAnswer(t *testing.T, answers *bufio.Reader, status int) {
	t.Helper()
	resp, err := http.ReadResponse(answers, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Error(err)
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
	if resp.StatusCode != status {
		t.Errorf("status %d, want %d", resp.StatusCode, status)
	}
}
