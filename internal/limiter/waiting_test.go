package limiter

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// clientKey is the template of a zone for each client, and eventsText that of a limit for each
// request; both are headers.
const (
	clientKey  = "{" + headerA + "}"
	eventsText = "{" + headerB + "}"
)

// queueSite is a chain of handlers that count in one store in memory, and wait.
type queueSite struct {
	t        *testing.T
	handles  []*stores.Handle
	limiters []*Limiter
	mu       sync.Mutex
	passed   []string
	// answer is called where the chain ends; nil answers 200.
	answer func(w http.ResponseWriter, r *http.Request)
	// counted is called, unless it is nil, with how much was read of the body of each request that
	// has come to listen, once that is answered.
	counted func(n int)
}

// newQueueSite returns a site with a handler for each list of zones, outer ones first.
func newQueueSite(t *testing.T, handlers ...[]*Zone) *queueSite {
	t.Helper()
	s := &queueSite{t: t}
	s.load(memory.New(memory.NewBuckets(), memory.Options{}), handlers...)
	return s
}

// load makes another config run on the store.
func (s *queueSite) load(buckets store.Store, handlers ...[]*Zone) {
	s.t.Helper()
	handle := &stores.Handle{Name: s.t.Name(), Module: deafModule{buckets}, Logger: zap.NewNop()}
	if _, err := handle.Enter(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(handle.Unload)
	handle.ZoneOverride("", time.Now) // what looks for them begins here, and not in a bubble
	s.handles, s.limiters = append(s.handles, handle), nil
	for _, zones := range handlers {
		for _, z := range zones {
			if z.Cost == (Quantity{}) {
				z.Cost.Number = 1
			}
			if z.MaxWaitQueue == 0 {
				z.MaxWaitQueue = DefaultMaxWaitQueue
			}
		}
		s.limiters = append(s.limiters, New(Config{Zones: zones, Logger: zap.NewNop(), Now: time.Now, Store: handle, LogRefusals: LogNone}))
	}
	handle.Run()
	for _, l := range s.limiters {
		l.Run()
	}
}

func (s *queueSite) buckets() store.Store { return s.handles[0].Module.(deafModule).store }

// sent is a request that was sent.
type sent struct{ result atomic.Pointer[result] }

type result struct {
	status  int
	waited  time.Duration
	headers http.Header
}

func (r *sent) ended() bool { return r.result.Load() != nil }

// got is what a request got, or nothing if it waits.
func (r *sent) got() result {
	if got := r.result.Load(); got != nil {
		return *got
	}
	return result{}
}

// is returns an error unless the request has ended like that.
func (r *sent) is(status int, waited time.Duration) error {
	if got := r.got(); got.status != status || got.waited.Round(time.Millisecond) != waited {
		return fmt.Errorf("status %d after %v, want %d after %v (%v)", got.status, got.waited, status, waited, got.headers)
	}
	return nil
}

// send sends a request of a client, which may have a limit of its own, and returns once it has
// ended or waits. It must be called in a bubble.
func (s *queueSite) send(ctx context.Context, client string, events ...int) *sent {
	done := new(sent)
	limiters := s.limiters
	go func() {
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
		r.Header.Set("A", client)
		for _, n := range events {
			r.Header.Set("B", strconv.Itoa(n))
		}
		began := time.Now()
		status, headers := s.serve(limiters, r)
		done.result.Store(&result{status, time.Since(began), headers})
	}()
	synctest.Wait()
	return done
}

// serve serves a request by some handlers.
func (s *queueSite) serve(limiters []*Limiter, r *http.Request) (int, http.Header) {
	w := httptest.NewRecorder()
	next := caddyhttp.Handler(caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		s.mu.Lock()
		s.passed = append(s.passed, r.Header.Get("A"))
		s.mu.Unlock()
		if s.answer != nil {
			s.answer(w, r)
		}
		return nil
	}))
	for _, l := range slices.Backward(limiters) {
		inner := next
		next = caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error { return l.ServeHTTP(w, r, inner) })
	}
	if err := next.ServeHTTP(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)); err != nil {
		return statusOf(err), w.Header()
	}
	return w.Code, w.Header()
}

// mustAll requires that all requests have ended like that.
func mustAll(t *testing.T, what string, all []*sent, status int, waited time.Duration) {
	t.Helper()
	for i, r := range all {
		if err := r.is(status, waited); err != nil {
			t.Errorf("%s, request %d: %v", what, i, err)
		}
	}
}

func (s *queueSite) sendMany(t *testing.T, client string, n int) (all []*sent) {
	for range n {
		all = append(all, s.send(t.Context(), client))
	}
	return all
}

// inBubbles runs a test for each way to count that can wait.
func inBubbles(t *testing.T, test func(t *testing.T, algorithm store.Algorithm, before bool)) {
	t.Helper()
	for _, algorithm := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA} {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v, charge before %v", algorithm, before), func(t *testing.T) {
				test(t, algorithm, before)
			})
		}
	}
}

// TestClientThatWaitsForItsOwnLimitHoldsNobody in a zone that clients share, whenever it comes, and
// in whichever order the zones are.
func TestClientThatWaitsForItsOwnLimitHoldsNobody(t *testing.T) {
	inBubbles(t, func(t *testing.T, algorithm store.Algorithm, before bool) {
		for _, order := range []int{1, -1} {
			shared := &Zone{
				Name: "shared", Key: []string{"static"}, Algorithm: algorithm, ChargeBefore: before,
				Events: Quantity{Number: 5}, Window: time.Second, MaxWait: 4 * time.Second,
			}
			own := &Zone{
				Name: "own", Key: []string{clientKey}, Algorithm: algorithm, ChargeBefore: before,
				Events: Quantity{Number: 3}, Window: 20 * time.Second, MaxWait: time.Minute,
			}
			zones := []*Zone{shared, own}
			if order < 0 {
				slices.Reverse(zones)
			}
			s := newQueueSite(t, zones)
			synctest.Test(t, func(t *testing.T) {
				mustAll(t, "the client below its limit", s.sendMany(t, "bad", 3), http.StatusOK, 0)
				pass(2 * time.Second)
				synctest.Wait()
				var rush []*sent
				for i := range 7 {
					rush = append(rush, s.send(t.Context(), "rush"+strconv.Itoa(i)))
				}
				mustAll(t, "what fits of a rush", rush[:5], http.StatusOK, 0)
				if rush[5].ended() || rush[6].ended() {
					t.Error("what does not fit of a rush does not wait")
				}
				bad := s.sendMany(t, "bad", 2)
				pass(2 * time.Second)
				synctest.Wait()
				for i := range 3 {
					if err := s.send(t.Context(), "good"+strconv.Itoa(i)).is(http.StatusOK, 0); err != nil {
						t.Errorf("another client while the shared zone is idle: %v", err)
					}
				}
				pass(time.Minute)
				synctest.Wait()
				for _, r := range append(rush, bad...) {
					if r.got().status != http.StatusOK {
						t.Errorf("a request that could wait got %d", r.got().status)
					}
				}
			})
		}
	})
}

// TestLineHasNoRequestsThatAreRefusedElsewhere: a client beyond its own limit makes the line of
// others no longer, neither with requests that are refused nor with those that would be, once
// those before them had passed.
func TestLineHasNoRequestsThatAreRefusedElsewhere(t *testing.T) {
	inBubbles(t, func(t *testing.T, algorithm store.Algorithm, before bool) {
		for _, wait := range []time.Duration{0, 2 * time.Hour} {
			for _, spent := range []int{0, 5} {
				s := newQueueSite(t, []*Zone{
					{
						Name: "shared", Key: []string{"static"}, Algorithm: algorithm, ChargeBefore: before,
						Events: Quantity{Number: 20}, Window: time.Second, MaxWait: 3 * time.Second,
					},
					{
						Name: "own", Key: []string{clientKey}, Algorithm: algorithm, ChargeBefore: before,
						Events: Quantity{Number: 5}, Window: time.Hour, MaxWait: wait,
					},
				})
				synctest.Test(t, func(t *testing.T) {
					s.sendMany(t, "bad", spent)
					pass(2 * time.Second)
					synctest.Wait()
					for i := range 21 {
						s.send(t.Context(), "rush"+strconv.Itoa(i))
					}
					bad := s.sendMany(t, "bad", 100)
					good := s.send(t.Context(), "good")
					pass(3 * time.Second)
					synctest.Wait()
					if !good.ended() || good.got().status != http.StatusOK {
						t.Errorf("own limits hold %v, %d spent: a client behind them: %v", wait, spent, good.is(http.StatusOK, 0))
					}
					served, refused := 0, 0
					for _, r := range bad {
						if r.got().status == http.StatusOK {
							served++
						} else if r.ended() && r.got().headers.Get("X-Ratelimit-Resource") == "own" && r.got().waited == 0 {
							refused++
						}
					}
					if want := 95 + spent; served > 5-spent || wait == 0 && refused != want {
						t.Errorf("own limits hold %v, %d spent: %d of the client's requests are served, %d refused at once; want %d and %d", wait, spent, served, refused, 5-spent, want)
					}
					pass(100 * time.Hour)
					synctest.Wait()
				})
			}
		}
	})
}

// TestRequestThatFitsPassesOneWithALowerLimit, and those with equal limits stay in order.
func TestRequestThatFitsPassesOneWithALowerLimit(t *testing.T) {
	inBubbles(t, func(t *testing.T, algorithm store.Algorithm, before bool) {
		s := newQueueSite(t, []*Zone{{
			Name: "zone", Key: []string{"static"}, Algorithm: algorithm, ChargeBefore: before,
			Events: Quantity{Text: eventsText, Number: 1}, Window: 10 * time.Second, MaxWait: time.Minute,
		}})
		synctest.Test(t, func(t *testing.T) {
			for range 5 {
				s.send(t.Context(), "fill", 5)
			}
			var low []*sent
			for i := range 3 {
				low = append(low, s.send(t.Context(), "low"+strconv.Itoa(i), 5))
			}
			for i := range 3 {
				if err := s.send(t.Context(), "high"+strconv.Itoa(i), 100).is(http.StatusOK, 0); err != nil {
					t.Errorf("a request that fits: %v", err)
				}
			}
			if slices.ContainsFunc(low, func(r *sent) bool { return r.ended() }) {
				t.Error("a request beyond its own limit does not wait")
			}
			pass(time.Minute)
			synctest.Wait()
			if want := []string{"high0", "high1", "high2", "low0", "low1", "low2"}; !slices.Equal(s.passed[5:], want) {
				t.Errorf("they passed in the order %q, want %q", s.passed[5:], want)
			}
		})
	})
}

// TestReservesWaitApart: an important request is not held behind less important ones.
func TestReservesWaitApart(t *testing.T) {
	z := &Zone{
		Name: "zone", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 10}, Window: 10 * time.Second, MaxWait: time.Minute,
		Reserves: []Reserve{{Percent: 50, Matchers: caddyhttp.MatcherSets{{caddyhttp.MatchHeader{"A": {"important"}}}}}},
	}
	s := newQueueSite(t, []*Zone{z})
	synctest.Test(t, func(t *testing.T) {
		mustAll(t, "less important", s.sendMany(t, "other", 5), http.StatusOK, 0)
		waits := s.send(t.Context(), "other")
		mustAll(t, "important", s.sendMany(t, "important", 5), http.StatusOK, 0)
		if waits.ended() {
			t.Errorf("a request beyond what is not reserved: %v", waits.is(http.StatusOK, 0))
		}
		pass(10 * time.Second)
		synctest.Wait()
		mustAll(t, "the first", []*sent{waits}, http.StatusOK, 10*time.Second)
	})
}

// TestOuterHandlersHoldNothingWhileAnInnerOneWaits: neither cost nor slots. They decide again
// before the request goes on.
func TestOuterHandlersHoldNothingWhileAnInnerOneWaits(t *testing.T) {
	inBubbles(t, func(t *testing.T, algorithm store.Algorithm, before bool) {
		for _, outer := range []store.Algorithm{algorithm, store.Concurrency} {
			for _, handlers := range []int{1, 2, 3} {
				shared := &Zone{
					Name: "shared", Key: []string{"static"}, Algorithm: outer, ChargeBefore: before,
					Events: Quantity{Number: 9}, Window: 10_000 * time.Hour,
				}
				between := &Zone{Name: "between", Key: []string{"static"}, ChargeBefore: before, Events: Quantity{Number: 9}, Window: time.Hour}
				own := &Zone{
					Name: "own", Key: []string{clientKey}, Algorithm: algorithm, ChargeBefore: before,
					Events: Quantity{Number: 2}, Window: 10 * time.Second, MaxWait: 30 * time.Second,
				}
				s := newQueueSite(t, [][][]*Zone{1: {{shared, between, own}}, 2: {{shared}, {between, own}}, 3: {{shared}, {between}, {own}}}[handlers]...)
				synctest.Test(t, func(t *testing.T) {
					mustAll(t, "the client below its limit", s.sendMany(t, "bad", 2), http.StatusOK, 0)
					bad := s.sendMany(t, "bad", 5)
					for i := range 5 {
						if err := s.send(t.Context(), "good"+strconv.Itoa(i)).is(http.StatusOK, 0); err != nil {
							t.Errorf("outer %v, %d handlers, another client: %v", outer, handlers, err)
						}
					}
					pass(time.Hour / 2)
					synctest.Wait()
					// The first two that waited have what is left of nine; the others are refused.
					statuses := map[int]int{}
					for _, r := range bad {
						if !r.ended() {
							t.Error("a request still waits")
						}
						statuses[r.got().status]++
					}
					if statuses[http.StatusOK] != 2 || statuses[http.StatusTooManyRequests] != 3 {
						t.Errorf("outer %v, %d handlers: of the client's five requests two fit: %v", outer, handlers, statuses)
					}
					for _, z := range []*Zone{shared, between} {
						want := int64(9)
						if z.isLease {
							want = 0
						}
						key, _ := z.clientKey(nil, caddy.NewReplacer(), s.limiters[0], true)
						r := store.Request{Limit: &z.limit, ClientKey: key, Events: 100}
						if used := store.Answers(t.Context(), s.buckets().(*memory.Store).Peek, []store.Request{r})[0].Used; used != want {
							t.Errorf("outer %v, %d handlers: %s counts %d, want %d", outer, handlers, z.Name, used, want)
						}
					}
				})
			}
		}
	})
}

// TestFreedRoomWakesTheLine: responses that turn out to be free, or that empty the bucket, and
// requests that end before their charge.
func TestFreedRoomWakesTheLine(t *testing.T) {
	const runs = time.Minute + 300*time.Millisecond // who waits asks again each second
	for _, before := range []bool{false, true} {
		for _, status := range []int{http.StatusNotModified, http.StatusNoContent} {
			t.Run(fmt.Sprintf("charge before %v, status %d", before, status), func(t *testing.T) {
				z := &Zone{
					Name: "zone", Key: []string{"static"}, ChargeBefore: before, Events: Quantity{Number: 2}, Window: time.Hour, MaxWait: 2 * time.Hour,
				}
				z.Free.Add(http.StatusNotModified)
				z.Forgives.Add(http.StatusNoContent)
				s := newQueueSite(t, []*Zone{z})
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					if r.Header.Get("A") == "free" {
						pass(runs)
						w.WriteHeader(status)
					}
				}
				synctest.Test(t, func(t *testing.T) {
					s.send(t.Context(), "charged")
					s.send(t.Context(), "free")
					waits := s.send(t.Context(), "waits")
					pass(2 * time.Minute)
					synctest.Wait()
					if err := waits.is(http.StatusOK, runs); err != nil {
						t.Error(err)
					}
					pass(3 * time.Hour)
					synctest.Wait()
				})
			})
		}
	}
}

// TestPlaceGoesToTheClientWithFewer: the request that gives way is told the truth.
func TestPlaceGoesToTheClientWithFewer(t *testing.T) {
	inBubbles(t, func(t *testing.T, algorithm store.Algorithm, before bool) {
		s := newQueueSite(t, []*Zone{{
			Name: "zone", Key: []string{clientKey}, Algorithm: algorithm, ChargeBefore: before,
			Events: Quantity{Number: 2}, Window: 10 * time.Second, MaxWait: time.Hour, MaxWaitQueue: 6,
		}})
		synctest.Test(t, func(t *testing.T) {
			greedy := s.sendMany(t, "greedy", 9)
			if err := greedy[8].is(http.StatusTooManyRequests, 0); err != nil {
				t.Errorf("a request beyond all places: %v", err)
			}
			mustAll(t, "another client", s.sendMany(t, "other", 2), http.StatusOK, 0)
			others := s.sendMany(t, "other", 4)
			for i, r := range others {
				if isRefused := i == 3; r.ended() != isRefused {
					t.Errorf("the other client's request %d waits: %v", i, !r.ended())
				}
			}
			for i, r := range greedy[2:8] {
				if isDisplaced := i >= 3; r.ended() != isDisplaced {
					t.Errorf("the request at place %d has ended: %v", i, r.ended())
				}
			}
			for _, r := range greedy[5:] {
				// Three are before it, one window apart at least for each two.
				if after, err := strconv.Atoi(r.got().headers.Get("Retry-After")); r.got().status != http.StatusTooManyRequests || err != nil || after < 10 || after > 40 {
					t.Errorf("a request that gave way got %d, Retry-After %q", r.got().status, r.got().headers.Get("Retry-After"))
				}
			}
			pass(time.Hour)
			synctest.Wait()
			for _, r := range append(greedy[2:5], others[:3]...) {
				if r.got().status != http.StatusOK {
					t.Errorf("a request that kept its place got %d", r.got().status)
				}
			}
		})
	})
}

// hastyStore answers no check whose caller does not wait.
type hastyStore struct{ *memory.Store }

func (s hastyStore) Check(ctx context.Context, asks []*store.Ask) {
	if ctx.Err() != nil {
		setAll(asks, store.State{Err: store.ErrNotExecuted})
		return
	}
	s.Store.Check(ctx, asks)
}

// TestGivingWayCallsNoStore: the answer is the one at lining up, less the time since.
func TestGivingWayCallsNoStore(t *testing.T) {
	s := &queueSite{t: t}
	s.load(hastyStore{memory.New(memory.NewBuckets(), memory.Options{})}, []*Zone{{
		Name: "zone", Key: []string{clientKey}, Events: Quantity{Number: 1}, Window: 10 * time.Second, MaxWait: time.Hour, MaxWaitQueue: 2,
	}})
	synctest.Test(t, func(t *testing.T) {
		greedy := s.sendMany(t, "greedy", 3)
		pass(4 * time.Second)
		s.sendMany(t, "other", 2)
		if got := greedy[2].got(); got.status != http.StatusTooManyRequests || got.headers.Get("Retry-After") != "16" {
			t.Errorf("a request that gave way got %d, %v", got.status, got.headers)
		}
		pass(time.Hour)
		synctest.Wait()
	})
}

// TestRequestStaysInItsLine, where it has a place, whichever of its zones others wait in.
func TestRequestStaysInItsLine(t *testing.T) {
	rooms := []*waitingRoom{newWaitingRoom(), newWaitingRoom()}
	e := &evaluation{limiter: &Limiter{Config: Config{Now: time.Now}}, open: new(stores.Opened)}
	for _, room := range rooms {
		zone := &boundZone{Zone: &Zone{MaxWait: time.Hour}, zoneState: &zoneState{room: room}}
		e.zones = append(e.zones, &inZone{boundZone: zone, of: e, ask: store.Ask{Request: store.Request{Cost: 1}}, spend: spend{stored: phaseUncertain}})
	}
	for _, at := range rooms {
		w := &waiter{arrived: time.Now(), room: at}
		line, waits := (&tracker{own: []*evaluation{e}}).findLine(w, []int64{1, 1}, httptest.NewRequest(http.MethodGet, "/", nil))
		if !waits || line == nil || line.room != at {
			t.Errorf("a request of line %d goes elsewhere", slices.Index(rooms, at))
		}
	}
}

// TestObserversHoldNobody: a zone that only observes the client neither lets it wait nor keeps it from
// passing, and is charged once.
func TestObserversHoldNobody(t *testing.T) {
	none := 0.0
	s := newQueueSite(t, []*Zone{
		{Name: "observes", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: time.Hour, MaxWait: time.Hour, Enforce: &none},
		{Name: "zone", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: time.Second, MaxWait: time.Minute},
	})
	synctest.Test(t, func(t *testing.T) {
		for range 3 {
			s.send(t.Context(), "client")
		}
		pass(2 * time.Second)
		synctest.Wait()
		if n := len(s.passed); n != 3 {
			t.Errorf("%d requests have passed, want 3", n)
		}
	})
}

// TestClientThatLeavesMakesRoom in the line, first or not.
func TestClientThatLeavesMakesRoom(t *testing.T) {
	for _, place := range []int{0, 1} {
		s := newQueueSite(t, []*Zone{{
			Name: "zone", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: time.Second, MaxWait: time.Minute,
		}})
		synctest.Test(t, func(t *testing.T) {
			s.send(t.Context(), "fill")
			var all []*sent
			ctx, leave := context.WithCancel(t.Context())
			for i := range 3 {
				its := t.Context()
				if i == place {
					its = ctx
				}
				all = append(all, s.send(its, strconv.Itoa(i)))
			}
			pass(time.Second / 2)
			synctest.Wait()
			leave()
			synctest.Wait()
			if err := all[place].is(statusClientClosedRequest, time.Second/2); err != nil {
				t.Errorf("the client that left: %v", err)
			}
			pass(10 * time.Second)
			synctest.Wait()
			all = slices.Delete(all, place, place+1)
			for i, r := range all {
				if err := r.is(http.StatusOK, time.Duration(i+1)*time.Second); err != nil {
					t.Errorf("the one at place %d: %v", i, err)
				}
			}
		})
	}
}

// TestOperatorsReachRequestsThatWait: a reload, a grant, a block and a reset count for them at once.
func TestOperatorsReachRequestsThatWait(t *testing.T) {
	// The third waits for nearly two windows.
	zone := func(events int64, window time.Duration) []*Zone {
		return []*Zone{{Name: "zone", Key: []string{clientKey}, ChargeBefore: true, Events: Quantity{Number: events}, Window: window, MaxWait: 3 * time.Hour}}
	}
	for name, test := range map[string]struct {
		change func(s *queueSite, key string) error
		// statuses are those of the three requests that wait; 0 is one that waits on.
		statuses []int
	}{
		"more events": {func(s *queueSite, _ string) error {
			s.load(s.buckets(), zone(4, time.Hour))
			return nil
		}, []int{200, 200, 0}},
		"no events": {func(s *queueSite, _ string) error {
			s.load(s.buckets(), zone(0, time.Hour))
			return nil
		}, []int{429, 429, 429}},
		"another window, with other buckets": {func(s *queueSite, _ string) error {
			s.load(s.buckets(), zone(100, time.Minute))
			return nil
		}, []int{0, 0, 0}},
		"grant": {func(s *queueSite, key string) error {
			until := time.Now().Add(time.Hour).UnixMicro()
			return s.handles[0].SetOverride(context.Background(), store.Override{Kind: store.OverrideGrant, Zone: "zone", ClientKey: key, Events: 1, Until: until})
		}, []int{200, 0, 0}},
		"block": {func(s *queueSite, key string) error {
			until := time.Now().Add(time.Hour).UnixMicro()
			return s.handles[0].SetOverride(context.Background(), store.Override{Kind: store.OverrideBlock, Zone: "zone", ClientKey: key, Until: until})
		}, []int{429, 429, 429}},
		"reset": {func(s *queueSite, _ string) error { return s.reset("alice") }, []int{200, 200, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newQueueSite(t, zone(2, time.Hour))
			// Not in a bubble, because what looks for overrides outlives it.
			ctx, leave := context.WithCancel(t.Context())
			var running sync.WaitGroup
			defer running.Wait()
			defer leave()
			ended := make(chan int, 5)
			for n := range 5 {
				r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
				r.Header.Set("A", "alice")
				limiters := s.limiters
				running.Go(func() {
					status, _ := s.serve(limiters, r)
					ended <- status
				})
				if n < 2 {
					if status := <-ended; status != http.StatusOK {
						t.Fatalf("a request that fits got %d", status)
					}
				}
			}
			await(t, "three wait", func() bool { return s.held() == 3 })
			if err := test.change(s, s.limiters[0].Zones[0].templates[0].tag+":alice"); err != nil {
				t.Fatal(err)
			}
			left := 0
			for _, status := range test.statuses {
				if status == 0 {
					left++
				} else if got := <-ended; got != status {
					t.Errorf("a request got %d, want %d", got, status)
				}
			}
			await(t, "the others wait", func() bool { return s.held() == left })
			select {
			case status := <-ended:
				t.Errorf("one more ended, with %d", status)
			default:
			}
		})
	}
}

// await waits for a condition outside of bubbles.
func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) { // nothing tells when it is
		if time.Now().After(deadline) {
			t.Fatal("not within a minute: " + what)
		}
	}
}

// TestRejectedConfigHasNoSayInLimits: once its store is closed, the config before counts.
func TestRejectedConfigHasNoSayInLimits(t *testing.T) {
	zone := func(events int64) []*Zone {
		return []*Zone{{Name: "zone", Key: []string{"static"}, Events: Quantity{Number: events}, Window: time.Hour}}
	}
	s := newQueueSite(t, zone(2))
	z := &s.limiters[0].Zones[0].bound[ownStore]
	s.load(s.buckets(), zone(100))
	if got := z.latest().Events.Number; got != 100 {
		t.Errorf("the latest config admits %d, want 100", got)
	}
	s.handles[1].Unload()
	if got := z.latest().Events.Number; got != 2 {
		t.Errorf("after it has ended, %d are admitted, want 2", got)
	}
	// The cleanup must not end it again.
	if _, err := s.handles[1].Enter(); err != nil {
		t.Fatal(err)
	}
}

// TestOverflowWaitsInOneLine, that of the bucket that they share.
func TestOverflowWaitsInOneLine(t *testing.T) {
	z := &Zone{Events: Quantity{Number: 1}, Window: time.Hour, ChargeBefore: true, MaxWait: time.Millisecond, MaxWaitQueue: 10}
	w := newBoundedWorld(t, 1, z)
	var got bytes.Buffer
	for _, client := range []string{"known", "new", "newer", "known"} {
		fmt.Fprint(&got, w.ask(client, 2), " ")
	}
	if want := "200 200 429 429 "; got.String() != want {
		t.Errorf("statuses %s, want %s", &got, want)
	}
}

// pass lets d pass on the clock of the bubble that the test runs in. Outside of one it would
// sleep: the clocks of bubbles begin in the year 2000.
func pass(d time.Duration) {
	if time.Now().Year() > 2010 {
		panic("pass outside of a synctest bubble")
	}
	time.Sleep(d) // in the bubble's time
}
