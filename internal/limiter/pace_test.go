package limiter

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestPace follows what is common, soon where that becomes more.
func TestPace(t *testing.T) {
	z := boundZone{Zone: &Zone{}, zoneState: &zoneState{}}
	p := &z.pace
	if p.commonly(time.Minute) != 0 || p.mayTake(time.Minute) != untilKnown || !z.areCharged() {
		t.Errorf("at first: %v, at most %v, charged %v", p.commonly(time.Minute), p.mayTake(time.Minute), z.areCharged())
	}
	if z.Free.Add(http.StatusOK); z.areCharged() {
		t.Error("at first free requests are charged")
	}
	at := uint32(0)
	// note is about a request that ends a second after the one before.
	note := func(took time.Duration, isCut, isCharged bool) {
		at += 1000
		p.note(at, took, isCut, isCharged)
	}
	note(time.Hour, true, false)
	if p.commonly(time.Minute) != 0 {
		t.Error("a request that was cut short says how long requests take")
	}
	between := func(when string, least, most time.Duration) {
		t.Helper()
		if got := p.commonly(time.Minute); got < least || got > most {
			t.Errorf("%s: %v, want %v to %v", when, got, least, most)
		}
	}
	note(100*time.Millisecond, false, true)
	between("after one", 100*time.Millisecond, 100*time.Millisecond)
	note(time.Second, true, true)
	between("after a longer one that was cut short", 300*time.Millisecond, 350*time.Millisecond)
	for range 30 {
		note(2*time.Second, false, true)
	}
	between("after 30 longer ones", 1900*time.Millisecond, 2*time.Second)
	for range 10_000 {
		p.note(at+250, 10*time.Millisecond, false, true)
	}
	between("after a flood of short ones", 1800*time.Millisecond, 2*time.Second)
	for range 600 {
		note(10*time.Millisecond, false, true)
	}
	between("after 600 short ones", 10*time.Millisecond, 12*time.Millisecond)
	for n := range 1000 {
		took := 10 * time.Millisecond
		if n%10 == 0 {
			took = time.Second
		}
		note(took, false, true)
	}
	between("with one long one in ten", 500*time.Millisecond, time.Second)
	for range 100 {
		note(24*time.Hour, false, true)
	}
	between("beyond the window", time.Minute, time.Minute)
	for range 20 {
		note(time.Second, false, false)
	}
	if z.areCharged() {
		t.Error("after 20 free requests most are charged")
	}
}

// TestWaitOfEachAlgorithm: a new algorithm has its own, and not another one's. Each row says how long a request
// waits once running ones are charged that take 50 s, 10 s before the window ends, and the reset that a request
// of cost 2 shows instead of one of cost 1.
func TestWaitOfEachAlgorithm(t *testing.T) {
	const second = int64(1_000_000)
	for a := range store.Algorithms {
		want, hasRow := map[store.Algorithm]struct {
			wait  time.Duration
			reset int64
		}{
			store.FixedWindow:   {50 * time.Second, 60 * second},
			store.SlidingWindow: {70 * time.Second, 60 * second},
			store.SlidingLog:    {60 * time.Second, 60 * second},
			store.GCRA:          {60 * time.Second, 62 * second},
			store.Concurrency:   {60 * time.Second, 60 * second},
		}[a]
		if !hasRow {
			t.Errorf("%s has no row", a)
			continue
		}
		r := store.Request{Limit: &store.Limit{Algorithm: a, Window: time.Minute}, Events: 60, Cost: 1}
		st := store.State{Now: 50 * second, ResetOtherwise: 60 * second}
		if got := chargedWait(&st, r.Limit, 50*time.Second); got != want.wait {
			t.Errorf("%s: waits for %s, want %s", a, got, want.wait)
		}
		if got := resetAfter(&r, 2, 60*second, 50*second); got != want.reset {
			t.Errorf("%s: the reset is %d, want %d", a, got, want.reset)
		}
	}
}

// panicModule panics when its store is opened.
type panicModule struct{ deafModule }

func (panicModule) OpenStore(string) (store.Store, error) { panic("no store") }

// TestStoreOfInnerHandlerPanics: it is that panic which reaches the server, and the outer handler
// settles.
func TestStoreOfInnerHandlerPanics(t *testing.T) {
	for name, zone := range map[string]*Zone{"slot": {Algorithm: store.Concurrency}, "charge": {}, "at the end": {SettleAtEnd: true}} {
		t.Run(name, func(t *testing.T) {
			outer := newSite(t, zone)
			inner := newSite(t, &Zone{Algorithm: zone.Algorithm, SettleAtEnd: zone.SettleAtEnd})
			z := inner.Zones[0]
			z.Name, z.bound[ownStore].handle = "inner", &stores.Handle{Name: "inner", Module: panicModule{}, Logger: zap.NewNop()}
			func() {
				defer func() {
					if p := recover(); p != "no store" {
						t.Errorf("the panic is %v", p)
					}
				}()
				w := httptest.NewRecorder()
				r := caddyhttp.PrepareRequest(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil)
				_ = outer.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
					return inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
				}))
			}()
			want := int64(1)
			if name == "slot" {
				want = 0
			}
			if used := outer.used(); used != want {
				t.Errorf("%d are used, want %d", used, want)
			}
		})
	}
}

// TestWaitForWhatRuns: a client that waits as long as a refusal says is not refused again, by the
// same requests or by what they are charged.
func TestWaitForWhatRuns(t *testing.T) {
	const took = 3500 * time.Millisecond
	for name, test := range map[string]struct {
		zone *Zone
		free bool
	}{
		"fixed_window":   {&Zone{}, false},
		"sliding_window": {&Zone{Algorithm: store.SlidingWindow}, false},
		"sliding_log":    {&Zone{Algorithm: store.SlidingLog}, false},
		"gcra":           {&Zone{Algorithm: store.GCRA}, false},
		"at the end":     {&Zone{SettleAtEnd: true}, false},
		"free":           {&Zone{Free: StatusSet{}.Complement()}, true},
		"slot":           {&Zone{Algorithm: store.Concurrency}, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newSite(t, test.zone)
			z := m.Zones[0]
			z.Events.Number, z.Window = 1, 10*time.Second
			z.prepare()
			for range 3 {
				m.end(took)
				m.clock.Advance(30 * time.Second)
			}
			var wait time.Duration
			m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error {
				m.clock.Advance(500 * time.Millisecond)
				w := m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error { return nil })
				if w.Code != http.StatusTooManyRequests {
					t.Fatalf("status %d", w.Code)
				}
				seconds, err := time.ParseDuration(w.Header().Get("Retry-After") + "s")
				if err != nil {
					t.Fatal(err)
				}
				wait = seconds
				m.clock.Advance(took - 500*time.Millisecond)
				return nil
			})
			m.clock.Advance(wait - took + 500*time.Millisecond)
			if test.free && wait > 4*time.Second {
				t.Errorf("the wait is %v", wait)
			}
			if !m.end(0) {
				t.Errorf("refused again after %v", wait)
			}
		})
	}
}
