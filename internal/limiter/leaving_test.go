package limiter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// testSite is a handler with one zone, whose counts are in memory, and whose clock stands still.
type testSite struct {
	*Limiter
	t     *testing.T
	clock *storetest.Clock
	store *memory.Store
}

func newSite(t *testing.T, z *Zone) *testSite {
	t.Helper()
	m := &testSite{t: t, clock: storetest.NewClock(time.Unix(1_700_000_000, 0))}
	m.store = memory.New(memory.NewBuckets(), memory.Options{Now: m.clock.Now})
	m.Limiter = newTestHandler(t, z, m.store)
	m.Now = m.clock.Now
	return m
}

// used returns what counts in the zone's bucket.
func (m *testSite) used() int64 {
	z := m.Zones[0]
	key, _ := z.clientKey(nil, caddy.NewReplacer(), m.Limiter, true)
	return store.Answers(context.Background(), m.store.Peek, []store.Request{{Limit: &z.limit, ClientKey: key, Events: 10}})[0].Used
}

// serve serves one request whose context is ctx, and returns the client's response. A panic
// of the handlers is one of the server's.
func (m *testSite) serve(ctx context.Context, next caddyhttp.HandlerFunc) *httptest.ResponseRecorder {
	return serveBy(ctx, m.Limiter, next)
}

func serveBy(ctx context.Context, l *Limiter, next caddyhttp.Handler) (w *httptest.ResponseRecorder) {
	w = httptest.NewRecorder()
	defer func() { _ = recover() }()
	sent := httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
	r := caddyhttp.PrepareRequest(sent, caddy.NewReplacer(), w, nil)
	if err := l.ServeHTTP(w, r, next); err != nil {
		w.Code = statusOf(err)
	}
	return w
}

// statuses are a set of these.
func statuses(codes ...int) (s StatusSet) {
	for _, code := range codes {
		s.Add(code)
	}
	return s
}

// endings are how handlers end that have noticed that the client has left.
var endings = map[string]caddyhttp.HandlerFunc{
	"499":                 func(w http.ResponseWriter, _ *http.Request) error { w.WriteHeader(499); return nil },
	"an error 499":        func(http.ResponseWriter, *http.Request) error { return caddyhttp.Error(499, context.Canceled) },
	"an error 502":        func(http.ResponseWriter, *http.Request) error { return caddyhttp.Error(502, errors.New("EOF")) },
	"an error":            func(http.ResponseWriter, *http.Request) error { return context.Canceled },
	"nothing":             func(http.ResponseWriter, *http.Request) error { return nil },
	"a panic that aborts": func(http.ResponseWriter, *http.Request) error { panic(http.ErrAbortHandler) },
	"a status of gRPC": func(w http.ResponseWriter, _ *http.Request) error {
		w.Header().Set("Grpc-Status", "0")
		return nil
	},
	"early hints": func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusEarlyHints)
		return nil
	},
}

// TestLeavingIsNoStatus: a request whose client leaves before there is a status costs what it
// holds, whatever the zone says of statuses, and forgives nothing.
func TestLeavingIsNoStatus(t *testing.T) {
	all := StatusSet{}.Complement()
	zones := map[string]func() *Zone{
		"plain":            func() *Zone { return &Zone{} },
		"all free":         func() *Zone { return &Zone{Free: all} },
		"all free, before": func() *Zone { return &Zone{Free: all, ChargeBefore: true} },
		"all forgive":      func() *Zone { return &Zone{Forgives: all} },
		"forgive, before":  func() *Zone { return &Zone{Free: all, Forgives: all, ChargeBefore: true} },
		"batch":            func() *Zone { return &Zone{Free: all, ChargeBefore: true, Batch: 2} },
		"sliding_log":      func() *Zone { return &Zone{Free: all, Algorithm: store.SlidingLog} },
		"sliding_log, before": func() *Zone {
			return &Zone{Free: all, Forgives: all, Algorithm: store.SlidingLog, ChargeBefore: true}
		},
		"gcra":           func() *Zone { return &Zone{Free: all, Algorithm: store.GCRA, ChargeBefore: true} },
		"sliding_window": func() *Zone { return &Zone{Free: all, Algorithm: store.SlidingWindow} },
		"at the end":     func() *Zone { return &Zone{Free: all, SettleAtEnd: true} },
		"grpc":           func() *Zone { return &Zone{Free: all, SettleAtEnd: true, KnowsGRPC: true} },
	}
	for ending, next := range endings {
		for name, zone := range zones {
			t.Run(name+", "+ending, func(t *testing.T) {
				m := newSite(t, zone())
				for range 3 {
					m.serve(t.Context(), func(w http.ResponseWriter, _ *http.Request) error {
						w.WriteHeader(http.StatusTeapot)
						return nil
					})
				}
				before := m.used()
				for n := range int64(2) {
					ctx, leave := context.WithCancel(t.Context())
					m.serve(ctx, func(w http.ResponseWriter, r *http.Request) error {
						leave()
						return next(w, r)
					})
					if used := m.used(); used != before+n+1 {
						t.Errorf("%d are used after %d aborted requests, and %d before", used, n+1, before)
					}
				}
			})
		}
	}
}

// TestLeavingCostsWhatIsKnown of the cost, or what the request holds, if that is more.
func TestLeavingCostsWhatIsKnown(t *testing.T) {
	for text, want := range map[string]int64{
		"{http.response.header.X-Cost}": 3, "{http.request.header.None}": 3, "5": 5,
		"{http.rate_limit.response.json.usage}": 3, "{http.rate_limit.response.duration_ms}": 250, "{http.vars.cost}": 7,
	} {
		for _, atEnd := range []bool{false, true} {
			if !atEnd && strings.Contains(text, responsePrefix) {
				continue
			}
			t.Run(fmt.Sprint(text, " at end ", atEnd), func(t *testing.T) {
				m := newSite(t, &Zone{SettleAtEnd: atEnd})
				m.Zones[0].Cost = Quantity{Text: text, Number: 3}
				m.Zones[0].prepare()
				ctx, leave := context.WithCancel(t.Context())
				m.serve(ctx, func(w http.ResponseWriter, r *http.Request) error {
					caddyhttp.SetVar(r.Context(), "cost", 7)
					m.clock.Advance(250 * time.Millisecond)
					leave()
					w.WriteHeader(499)
					return nil
				})
				if used := m.used(); used != want {
					t.Errorf("%d are used, want %d", used, want)
				}
			})
		}
	}
}

// TestVerdictsOfTheServer: a timeout of the server decides as always, but no status after the
// client has left.
func TestVerdictsOfTheServer(t *testing.T) {
	timedOut, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	left, leave := context.WithCancel(t.Context())
	leave()
	for name, test := range map[string]struct {
		ctx    context.Context
		status int
		isErr  bool
		want   int64
	}{
		"a timeout":                   {timedOut, 504, true, 0},
		"a timeout that is written":   {timedOut, 504, false, 0},
		"499 from a backend":          {t.Context(), 499, false, 0},
		"an error 499, nobody left":   {t.Context(), 499, true, 0},
		"a free status, left":         {left, 304, false, 1},
		"a counted status, left":      {left, 401, false, 1},
		"an error that is free, left": {left, 503, true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := newSite(t, &Zone{Free: statuses(401).Complement()})
			m.serve(test.ctx, func(w http.ResponseWriter, _ *http.Request) error {
				if test.isErr {
					return caddyhttp.Error(test.status, errors.New("test"))
				}
				w.WriteHeader(test.status)
				return nil
			})
			if used := m.used(); used != test.want {
				t.Errorf("%d are used, want %d", used, test.want)
			}
		})
	}
}

// TestLeavingBeforeAnyHandler costs nothing: the limiter has noticed it itself.
func TestLeavingBeforeAnyHandler(t *testing.T) {
	left, leave := context.WithCancel(t.Context())
	leave()
	for name, zone := range map[string]*Zone{"take": {ChargeBefore: true}, "slot": {Algorithm: store.Concurrency}} {
		t.Run(name, func(t *testing.T) {
			m := newSite(t, zone)
			w := m.serve(left, func(http.ResponseWriter, *http.Request) error {
				t.Error("a handler runs")
				return nil
			})
			if used, cache := m.used(), w.Header().Get("Cache-Control"); used != 0 || w.Code != 499 || cache != "no-store" {
				t.Errorf("status %d, %d used, Cache-Control %q", w.Code, used, cache)
			}
		})
	}
}

// failingStore is a deafStore whose checks fail.
type failingStore struct{ *deafStore }

func (failingStore) Check(_ context.Context, asks []*store.Ask) {
	setAll(asks, store.State{Err: store.ErrNotExecuted})
}

// TestLeavingWhileTheStoreFails: the request ends, whatever on_error says, and is no error of the store.
func TestLeavingWhileTheStoreFails(t *testing.T) {
	left, leave := context.WithCancel(t.Context())
	leave()
	for _, onError := range []string{stores.OnErrorAllow, stores.OnErrorDeny, stores.OnErrorLocal} {
		l := newTestHandler(t, &Zone{OnError: onError}, failingStore{new(deafStore)})
		w := serveBy(left, l, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			t.Errorf("on_error %s: a handler runs", onError)
			return nil
		}))
		if w.Code != statusClientClosedRequest {
			t.Errorf("on_error %s: status %d", onError, w.Code)
		}
	}
}

// TestLeavingBehindTwoHandlers is noticed by both, whichever of them decides first.
func TestLeavingBehindTwoHandlers(t *testing.T) {
	for ending, next := range endings {
		t.Run(ending, func(t *testing.T) {
			all := StatusSet{}.Complement()
			outer := newSite(t, &Zone{Free: all})
			// The name of the test is that of the store.
			t.Run("inner", func(t *testing.T) {
				inner := newSite(t, &Zone{Free: all, ChargeBefore: true})
				ctx, leave := context.WithCancel(t.Context())
				outer.serve(ctx, func(w http.ResponseWriter, r *http.Request) error {
					return inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
						leave()
						return next(w, r)
					}))
				})
				if a, b := outer.used(), inner.used(); a != 1 || b != 1 {
					t.Errorf("%d and %d are used", a, b)
				}
			})
		})
	}
}

// TestCallThatIsCutShort has no status of gRPC, whatever that of HTTP is.
func TestCallThatIsCutShort(t *testing.T) {
	for name, test := range map[string]struct {
		kind    string
		trailer string
		want    int64
	}{
		"without a status": {"application/grpc", "", 1},
		"with a status":    {"application/grpc+proto", "0", 0},
		"not a call":       {"text/plain", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			m := newSite(t, &Zone{Free: statuses(StatusGRPC+16, 401).Complement(), SettleAtEnd: true, KnowsGRPC: true})
			ctx, leave := context.WithCancel(t.Context())
			m.serve(ctx, func(w http.ResponseWriter, _ *http.Request) error {
				w.Header().Set("Content-Type", test.kind)
				w.WriteHeader(http.StatusOK)
				if test.trailer != "" {
					w.Header().Set(http.TrailerPrefix+"Grpc-Status", test.trailer)
				}
				leave()
				panic(http.ErrAbortHandler)
			})
			if used := m.used(); used != test.want {
				t.Errorf("%d are used, want %d", used, test.want)
			}
		})
	}
}
