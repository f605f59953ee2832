package ledger

import (
	"context"
	"errors"
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

// TestTooManyAreRefusedAtOnce: a take waits only for what is on its way, and no longer than
// that takes, and a take of more than comes back does not wait.
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
		if allowed, took := take("e", 2); allowed || took > 2*time.Millisecond {
			t.Errorf("of more than comes back: allowed %v after %v", allowed, took)
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

// TestTakesAreRepeatedForWhatComesBack and no more, however many are refused meanwhile.
func TestTakesAreRepeatedForWhatComesBack(t *testing.T) {
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
		// Each request takes once, and each refund is one write.
		n := passed.Load()
		if again := int64(s.writes) - clients*requests - n; n < slots || again > n {
			t.Errorf("%d requests passed, and takes were repeated %d times", n, again)
		}
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

// failingTakes is a simulation in which the takes from one on fail with an error.
type failingTakes struct {
	*simulation
	takes, from int
	err         error
}

func (s *failingTakes) Take(ctx context.Context, asks []*store.Ask) {
	if s.takes++; s.takes >= s.from {
		failAll(asks, s.err)
		return
	}
	s.simulation.Take(ctx, asks)
}

// TestRefusalStandsIfItsRepetitionFails, unless that may have spent something.
func TestRefusalStandsIfItsRepetitionFails(t *testing.T) {
	for err, stands := range map[error]bool{errDown: true, errLost: false} {
		synctest.Test(t, func(t *testing.T) {
			s := &failingTakes{newSimulation(1), 0, 3, err}
			l := New(NewRegistry(nil), s, Options{})
			limit := store.Limit{Zone: "zone", Algorithm: store.Concurrency, Window: time.Hour}
			r := store.Request{Limit: &limit, ClientKey: "alice", Events: 1, Cost: 1, ID: "a"}
			store.Answers(t.Context(), l.Take, []store.Request{r})
			l.RefundDetached([]*store.Request{new(r)})
			r.ID = "b"
			st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]
			if s.takes != 3 || st.Allowed || errors.Is(st.Err, err) == stands || stands && st.Limit != 1 {
				t.Errorf("%v: after %d takes: %+v", err, s.takes, st)
			}
			l.Flush(t.Context())
			l.Leave()
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
		if took := time.Since(began); took != 5*time.Millisecond || st.Err != nil || st.Allowed || s.sent() != before+1 {
			t.Errorf("answered after %v and %d takes: %+v", took, s.sent()-before, st)
		}
		pass(2 * time.Second)
		synctest.Wait()
	})
}

// isReturning reports whether something is on its way back to a bucket.
func isReturning(e *entry) bool { return !inside(e, "extra", "returning").IsNil() }

// TestWithdrawnClaimIsLeftToOthers: what has arrived for a take that gives up is for the takes
// behind it, and without one for whoever comes.
func TestWithdrawnClaimIsLeftToOthers(t *testing.T) {
	simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
		r := requestOf("alice", 10)
		m := l.moment()
		e := l.enter(&r, &m)
		for _, cost := range []int64{1, 1, 3} {
			e.RefundSent(cost, &m)
		}
		e.release(&m)
		claimed := func(cost int64) *core.Claim {
			r := r
			r.Cost = cost
			k := &taking{call: call{ledger: l, asks: store.Asks([]store.Request{r})}}
			return k.claimReturn(0, l.registry.now())
		}
		receive := func(cost int64) { l.endRefund(e, &store.Request{Limit: r.Limit, Cost: cost}, new(store.State), m.Now) }
		first, second := claimed(2), claimed(1)
		receive(1)
		k := &taking{call: call{ledger: l}}
		k.withdraw([]*core.Claim{first})
		if len(second.Call.(*call).turns) == 0 {
			t.Error("the second take waits, although the first one has left it enough")
		}
		third := claimed(2)
		receive(1)
		k.withdraw([]*core.Claim{third})
		if c := claimed(4); c != nil {
			t.Error("4 were claimed while 3 are on their way")
		}
		receive(3)
		if isReturning(e) {
			t.Error("nothing is on its way, and something is noted")
		}
	})
}

// TestClaimIsUndoneIfAnotherRequestIsRefused: what has come back to one bucket is there for the
// next take, if the other bucket of a call refuses it.
func TestClaimIsUndoneIfAnotherRequestIsRefused(t *testing.T) {
	simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
		first, second := requestOf("alice", 10), requestOf("bob", 10)
		first.Cost = 1
		m := l.moment()
		now := m.Now
		e := l.enter(&first, &m)
		e.RefundSent(1, &m)
		e.RefundArrived(&first, new(store.State), now, &m)
		e.release(&m)
		both := &taking{call: call{ledger: l, asks: store.Asks([]store.Request{first, second})}}
		one := &taking{call: call{ledger: l, asks: store.Asks([]store.Request{first})}}
		for _, c := range []struct {
			t    *taking
			want int
		}{{both, 0}, {one, 1}, {one, 0}} {
			refused := new(core.Retakes).ToRepeat(c.t.asks)
			if claims, _ := c.t.claimReturns(refused, now); len(claims) != c.want {
				t.Errorf("a call of %d requests repeats %d, want %d", len(c.t.asks), len(claims), c.want)
			}
		}
	})
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
