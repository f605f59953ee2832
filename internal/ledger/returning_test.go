package ledger

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// worker sends requests one after the other, each of which gives back what it took.
type worker struct {
	*Ledger
	request func(id string) store.Request
	pause   time.Duration
}

// run sends n requests, and returns how many were refused.
func (w worker) run(name string, n int) (refused int) {
	for i := range n {
		r := w.request(fmt.Sprint(name, "-", i))
		st := store.Answers(context.Background(), w.Take, []store.Request{r})[0]
		if st.Err != nil || !st.Allowed {
			refused++
			continue
		}
		pass(w.pause)
		r.Receipt = st.Receipt
		w.RefundDetached([]*store.Request{new(r)})
	}
	return refused
}

// TestSequentialClientsAreNotRefused by what their last requests give back: as many of them as
// the limit allows, with every algorithm, at any speed, across a reload.
func TestSequentialClientsAreNotRefused(t *testing.T) {
	for a := range store.Algorithms {
		for _, batch := range []int64{0, 1} {
			if batch > 0 && algorithm.Of(a).Unbatched != "" {
				continue
			}
			for _, clients := range []int{1, 3, 8} {
				if a == store.GCRA && clients > 1 {
					// Refunds that overtake each other may give back less there.
					continue
				}
				for _, pause := range []time.Duration{0, 300 * time.Microsecond, 5 * time.Millisecond} {
					simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
						// Of a window on the clock no end comes near, because a refund of another
						// window gives nothing back to this one.
						limit := store.Limit{Zone: "zone", Algorithm: a, Window: 100 * time.Hour}
						other := New(l.registry, s, Options{})
						defer other.Leave()
						var refused atomic.Int64
						var wg sync.WaitGroup
						for i := range clients {
							wg.Go(func() {
								w := worker{[]*Ledger{l, other}[i%2], func(id string) store.Request {
									return store.Request{Limit: &limit, ClientKey: "alice", Events: int64(clients), Cost: 1, ID: id, Batch: batch}
								}, pause}
								refused.Add(int64(w.run(fmt.Sprint(i), 40)))
							})
						}
						wg.Wait()
						if n := refused.Load(); n > 0 {
							t.Errorf("%v, batch %d: %d of %d requests of %d sequential clients were refused, which run for %v", a, batch, n, clients*40, clients, pause)
						}
						l.Flush(t.Context())
						pass(3 * time.Second)
						synctest.Wait()
					})
				}
			}
		}
	}
}

// TestTooManyAreRefusedAtOnce: a take waits only for what is on its way, and no longer than that takes.
func TestTooManyAreRefusedAtOnce(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		limit := store.Limit{Zone: "zone", Algorithm: store.Concurrency, Window: time.Hour}
		request := func(id string, cost int64) store.Request {
			return store.Request{Limit: &limit, ClientKey: "alice", Events: 3, Cost: cost, ID: id}
		}
		take := func(id string, cost int64) (allowed bool, took time.Duration) {
			began := time.Now()
			st := store.Answers(t.Context(), l.Take, []store.Request{request(id, cost)})[0]
			return st.Allowed, time.Since(began)
		}
		for _, id := range []string{"a", "b", "c"} {
			take(id, 1)
		}
		if allowed, took := take("d", 1); allowed || took > 2*time.Millisecond {
			t.Errorf("with nothing on its way: allowed %v after %v", allowed, took)
		}
		l.RefundDetached([]*store.Request{new(request("a", 1))})
		if allowed, _ := take("e", 2); allowed {
			t.Error("two were taken for one that comes back")
		}
		var wg sync.WaitGroup
		var allowed atomic.Int64
		for i := range 5 {
			wg.Go(func() {
				if ok, _ := take(fmt.Sprint("f", i), 1); ok {
					allowed.Add(1)
				}
			})
		}
		wg.Wait()
		if n := allowed.Load(); n != 1 {
			t.Errorf("%d of 5 were allowed by one slot that comes back", n)
		}
		late := New(l.registry, &lateRefunds{s}, Options{})
		late.RefundDetached([]*store.Request{new(request("b", 1))})
		if allowed, took := take("g", 1); allowed || took < DefaultTimeout || took > DefaultTimeout+5*time.Millisecond {
			t.Errorf("while a refund is not answered in time: allowed %v after %v", allowed, took)
		}
		pass(2 * time.Second)
		late.Leave()
		synctest.Wait()
		if e := l.look(&store.Request{Limit: &limit, ClientKey: "alice"}); e != nil {
			if isReturning(e) {
				t.Error("nothing is on its way, and something is noted")
			}
			e.stripe.mu.Unlock()
		}
	})
}

// TestTakesAreAskedOnce, however many are refused while others give back.
func TestTakesAreAskedOnce(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		const slots, clients, requests = 2, 50, 20
		limit := store.Limit{Zone: "zone", Algorithm: store.Concurrency, Window: time.Hour}
		var passed atomic.Int64
		var wg sync.WaitGroup
		for i := range clients {
			wg.Go(func() {
				w := worker{l, func(id string) store.Request {
					return store.Request{Limit: &limit, ClientKey: "alice", Events: slots, Cost: 1, ID: id}
				}, time.Millisecond}
				passed.Add(requests - int64(w.run(fmt.Sprint(i), requests)))
			})
		}
		wg.Wait()
		l.Flush(t.Context())
		// Each refund is a write as well.
		if n := passed.Load(); n < slots || int64(s.writes) > clients*requests+n {
			t.Errorf("%d of %d requests passed, with %d writes", n, clients*requests, s.writes)
		}
	})
}

// TestTakeWaitsForWhatWasSentBeforeIt, and for no more, and where there is room for nothing.
func TestTakeWaitsForWhatWasSentBeforeIt(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		late := New(l.registry, &lateRefunds{s}, Options{Timeout: 10 * time.Second})
		defer late.Leave()
		limit := store.Limit{Zone: "zone", Algorithm: store.SlidingLog, Window: time.Hour}
		request := func(id string, events int64) store.Request {
			return store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1, ID: id}
		}
		take := func(id string, events int64) (allowed bool, took time.Duration) {
			began := time.Now()
			st := store.Answers(t.Context(), late.Take, []store.Request{request(id, events)})[0]
			return st.Allowed, time.Since(began)
		}
		take("a", 2)
		take("b", 2)
		late.RefundDetached([]*store.Request{new(request("a", 2))})
		go func() {
			pass(500 * time.Millisecond)
			late.RefundDetached([]*store.Request{new(request("b", 2))})
		}()
		if allowed, took := take("c", 10); !allowed || took > 10*time.Millisecond {
			t.Errorf("where there is room: allowed %t after %v", allowed, took)
		}
		if allowed, took := take("d", 3); !allowed || took < 900*time.Millisecond || took > 1200*time.Millisecond {
			t.Errorf("behind a refund that takes a second, and before another one: allowed %t after %v", allowed, took)
		}
		pass(3 * time.Second)
		synctest.Wait()
	})
}

// lateRefunds is a simulation that takes a second to refund.
type lateRefunds struct{ *simulation }

func (s *lateRefunds) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	go func() {
		pass(time.Second)
		s.simulation.RefundReported(reqs, report)
	}()
}

// TestOneRefusalForGood ends a call: its other requests wait for nothing.
func TestOneRefusalForGood(t *testing.T) {
	simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
		slots := store.Limit{Zone: "slots", Algorithm: store.Concurrency, Window: time.Hour}
		window := store.Limit{Zone: "window", Algorithm: store.FixedWindow, Window: time.Hour}
		request := func(limit *store.Limit, id string) store.Request {
			return store.Request{Limit: limit, ClientKey: "alice", Events: 1, Cost: 1, ID: id}
		}
		store.Answers(t.Context(), l.Take, []store.Request{request(&slots, "a"), request(&window, "a")})
		l.RefundDetached([]*store.Request{new(request(&slots, "a"))})
		began := time.Now()
		store.Answers(t.Context(), l.Take, []store.Request{request(&slots, "b"), request(&window, "b")})
		if took := time.Since(began); took > 2*time.Millisecond {
			t.Errorf("the call took %v", took)
		}
		l.Flush(t.Context())
		synctest.Wait()
	})
}

// TestResetIsThereForTheNextTake: a take that a full bucket refuses waits for the reset in
// flight.
func TestResetIsThereForTheNextTake(t *testing.T) {
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA} {
		simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
			limit := store.Limit{Zone: "zone", Algorithm: a, Window: time.Hour}
			request := func(id string) store.Request {
				return store.Request{Limit: &limit, ClientKey: "alice", Events: 1, Cost: 1, ID: id}
			}
			slow := New(l.registry, &resettingStore{simulation: s}, Options{})
			defer slow.Leave()
			slow.Run()
			var got []bool
			for i := range 3 {
				got = append(got, store.Answers(t.Context(), slow.Take, []store.Request{request(fmt.Sprint(i))})[0].Allowed)
			}
			go func() { _ = slow.Reset(context.Background(), request("")) }()
			synctest.Wait()
			got = append(got, store.Answers(t.Context(), slow.Take, []store.Request{request("last")})[0].Allowed)
			if !slices.Equal(got, []bool{true, false, false, true}) {
				t.Errorf("%v: allowed are %v", a, got)
			}
			slow.Flush(t.Context())
		})
	}
}

// resettingStore is a simulation that takes some time to empty a bucket.
type resettingStore struct{ *simulation }

func (s *resettingStore) Reset(_ context.Context, r store.Request) error {
	pass(10 * time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.primary, keyOf(&r))
	delete(s.replica, keyOf(&r))
	return nil
}

// TestOwnRefundIsNotAwaited: a take that only what was admitted alone refuses is asked once, and
// does not wait for what it gives back itself.
func TestOwnRefundIsNotAwaited(t *testing.T) {
	for _, limit := range kinds {
		simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
			limit.Zone, limit.Window = "zone", 100*time.Hour
			r := store.Request{Limit: &limit, ClientKey: "alice", Events: 1, Cost: 1, ID: "1"}
			l.AdmitAlone(&r)
			l.SettleUnknown([]*store.Request{new(r)}, []int64{1}, nil)
			before, began := s.sent(), time.Now()
			r.ID = "2"
			st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]
			took := time.Since(began)
			l.Flush(t.Context())
			// The second write is the refund.
			if n := s.sent() - before; st.Err != nil || st.Allowed || n != 2 || took > 2*time.Millisecond {
				t.Errorf("%s, align %t: %d writes, answered after %v: %+v", limit.Algorithm, limit.Align, n, took, st)
			}
		})
	}
}

// TestClientThatLeavesWaitsForNothing that comes back.
func TestClientThatLeavesWaitsForNothing(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		late := New(l.registry, &lateRefunds{s}, Options{})
		defer late.Leave()
		limit := store.Limit{Zone: "zone", Algorithm: store.Concurrency, Window: time.Hour}
		r := store.Request{Limit: &limit, ClientKey: "alice", Events: 1, Cost: 1, ID: "a"}
		store.Answers(t.Context(), l.Take, []store.Request{r})
		late.RefundDetached([]*store.Request{new(r)})
		ctx, leave := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer leave()
		before, began := s.sent(), time.Now()
		r.ID = "b"
		st := store.Answers(ctx, l.Take, []store.Request{r})[0]
		if took := time.Since(began); took < 5*time.Millisecond || took > 10*time.Millisecond || st.Err != nil || st.Allowed || s.sent() != before+1 {
			t.Errorf("answered after %v and %d takes: %+v", took, s.sent()-before, st)
		}
		pass(2 * time.Second)
		synctest.Wait()
	})
}

// isReturning reports whether something is on its way back to a bucket.
func isReturning(e *entry) bool {
	return !inside(e, "extra").IsNil() && !inside(e, "extra", "returning").IsNil()
}

// TestViewsShowWhatHasComeBack: once nothing is in flight, lists and accounts show what the primary has
// counted, after refunds at the same time as takes and charges, batches that were returned, and resets.
func TestViewsShowWhatHasComeBack(t *testing.T) {
	for _, kind := range kinds {
		for seed := range uint64(40) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(seed)
				l := New(NewRegistry(nil), s, Options{})
				defer l.Leave()
				rng := rand.New(rand.NewPCG(seed, 3))
				limit := kind
				// No window ends meanwhile.
				limit.Zone, limit.Window = "zone", 100*time.Hour
				request := store.Request{Limit: &limit, ClientKey: "alice", Events: 30}
				if algorithm.Of(limit.Algorithm).Unbatched == "" {
					request.Batch = int64(seed%2) * 4
				}
				for round := range 6 {
					for n := range 8 {
						r, pause, ends := request, rng.IntN(3000), rng.IntN(4)
						r.Cost, r.ID = 1+rng.Int64N(4), fmt.Sprint(round, n)
						go func() {
							pass(time.Duration(pause) * time.Microsecond)
							st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]
							switch r.Receipt = st.Receipt; {
							case st.Allowed && ends < 3:
								l.RefundDetached([]*store.Request{new(r)})
							case st.Allowed:
								r.Cost, r.ID = 1, r.ID+"more"
								l.ChargeDetached([]*store.Request{new(r)})
							}
						}()
					}
					pass(3 * time.Second)
					if round == 3 {
						redistest.Must(t, l.Reset(t.Context(), request))
					}
					want, listed := s.used(request), int64(0)
					l.Walk([]store.Request{request}, hasLimit, func(_ int, _ string, st *store.State) { listed = st.Used })
					if a := l.Account(&request); listed != want || a.Used != want || a.InFlight+a.Unsent+a.Reserved != 0 {
						t.Fatalf("%s, seed %d, round %d: listed with %d, and %+v, of %d that the primary has counted", limit.Algorithm, seed, round, listed, a, want)
					}
				}
			})
		}
	}
}

// TestLateGoroutines: views agree with the store once all is answered, although a goroutine may read the
// time of an event long before it gets the bucket's lock.
func TestLateGoroutines(t *testing.T) {
	for a := range store.Algorithms {
		if algorithm.Of(a).Lease {
			continue
		}
		for seed := range uint64(400) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(seed)
				late := rand.New(rand.NewPCG(seed, 2))
				var mu sync.Mutex
				l := New(NewRegistry(func() time.Time {
					now := time.Now()
					mu.Lock()
					d := time.Duration(max(late.IntN(40_000)-35_000, 0)) * time.Microsecond
					mu.Unlock()
					pass(d)
					return now
				}), s, Options{})
				defer l.Leave()
				limit := store.Limit{Zone: "zone", Algorithm: a, Window: 100 * time.Hour}
				request := func(id string) store.Request {
					return store.Request{Limit: &limit, ClientKey: "alice", Events: 1000, Cost: 1, ID: id}
				}
				var wg sync.WaitGroup
				for i := range 7 {
					wg.Go(func() {
						pass(time.Duration(300*i) * time.Microsecond)
						r := request(fmt.Sprint(i))
						st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]
						if r.Receipt = st.Receipt; i%3 > 0 {
							l.RefundDetached([]*store.Request{&r})
						}
					})
				}
				wg.Wait()
				synctest.Wait()
				pass(time.Second) // GCRA counts a part of an event as a whole one
				r := request("")
				counted := s.used(r)
				if known := l.Account(&r); known == nil || known.Used != counted {
					t.Errorf("%v, seed %d: the ledger knows of %+v, and the store of %d", a, seed, known, counted)
				}
			})
		}
	}
}

// TestInstantsOfABucket never run backwards, although an event may get the bucket's lock before another
// one that happened earlier.
func TestInstantsOfABucket(t *testing.T) {
	l := New(NewRegistry(nil), newSimulation(1), Options{})
	defer l.Leave()
	r := requestOf("alice", 1)
	m := core.Moment{Now: 105}
	e := l.enter(&r, &m)
	e.release(&m)
	for name, begin := range map[string]func(m *core.Moment){
		"enter":   func(m *core.Moment) { l.enter(&r, m) },
		"find":    func(m *core.Moment) { l.find(&r, m) },
		"acquire": func(m *core.Moment) { e.acquire(m) },
	} {
		m := core.Moment{Now: 100}
		begin(&m)
		e.release(&m)
		if m.Now != 105 {
			t.Errorf("%s: an event at 100 after one at 105 is at %d", name, m.Now)
		}
	}
}

// TestLeasesThatFitWaitForNothing: a lease that fits is taken while releases are in flight.
func TestLeasesThatFitWaitForNothing(t *testing.T) {
	for capacity, waits := range map[int64]bool{3: true, 10: false} {
		simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
			limit := store.Limit{Zone: "zone", Algorithm: store.Concurrency, Window: time.Hour}
			request := func(id string) store.Request {
				return store.Request{Limit: &limit, ClientKey: "alice", Events: capacity, Cost: 1, ID: id}
			}
			first := request("first")
			if st := takeAll(l, []store.Request{first})[0]; !st.Allowed {
				t.Fatalf("%+v", st)
			}
			l.RefundDetached([]*store.Request{&first})
			second := request("second")
			e := l.look(&second)
			m := l.moment()
			if got := e.AwaitReturn(core.Waiter{Request: &second, Call: t}, &m); got != waits {
				t.Errorf("of %d: a lease that is taken while another comes back waits: %v", capacity, got)
			}
			e.WaitNot(core.Waiter{Request: &second, Call: t})
			e.stripe.mu.Unlock()
			l.Flush(t.Context())
		})
	}
}
