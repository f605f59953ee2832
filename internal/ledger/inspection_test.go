package ledger

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// word is the primary's answer about a bucket.
func (s *simulation) word(r store.Request) store.State { return s.wordIn(r, 0) }

// wordIn is the primary's answer after d, if nothing is spent.
func (s *simulation) wordIn(r store.Request, d time.Duration) store.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return algorithm.Peek.Run(bucketIn(s.primary, &r), &r, s.now()+d.Microseconds())
}

// TestForesee requires the answer of Admit, with requests in flight, and with pending charges and such as are
// on their way, and that nothing changes.
func TestForesee(t *testing.T) {
	for _, kind := range kinds {
		if kind.Algorithm == store.Concurrency {
			continue // concurrency takes
		}
		for seed := range uint64(50) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(seed)
				l := New(NewRegistry(nil), s, Options{})
				defer l.Leave()
				rng := rand.New(rand.NewPCG(seed, 2))
				limit := kind
				limit.Zone, limit.Window = "zone", time.Minute
				var held []store.Request
				for n := range 40 {
					r := store.Request{Limit: &limit, ClientKey: "alice", Events: 10, Cost: 1 + rng.Int64N(3), ID: strconv.Itoa(n)}
					before, asked := l.snapshot(&r), [2]int{s.checks, s.writes}
					began := time.Now()
					foreseen := l.Foresee(r, false, s.word)
					waited := time.Now().After(began)
					if after := l.snapshot(&r); !waited && !reflect.DeepEqual(before, after) || asked[0] != s.checks || !waited && asked[1] != s.writes {
						t.Fatalf("%s, seed %d: %+v became %+v", limit.Algorithm, seed, before, after)
					}
					// Events that come back during Admit cannot be foreseen.
					isStill := s.word(r).Used == s.wordIn(r, 10*time.Millisecond).Used
					// What is on its way then may arrive during Admit, which shows.
					isShown := l.arrival(&r) == nil
					st := admit(l, r)
					if differs := foreseen.Allowed != st.Allowed || isShown && (foreseen.InFlight != st.InFlight || foreseen.Used != st.Used || foreseen.Remaining != st.Remaining); differs && isStill {
						t.Fatalf("%s, seed %d, step %d: foreseen is %+v, got %+v", limit.Algorithm, seed, n, foreseen, st)
					}
					if st.Allowed {
						held = append(held, r)
					}
					if len(held) > 0 && rng.IntN(2) == 0 {
						l.Settle(storetest.Posts(held[:1]), []int64{held[0].Cost})
						held = held[1:]
					}
					pass(time.Duration(rng.IntN(2)*rng.IntN(3000)) * time.Millisecond)
				}
				for _, r := range held {
					l.Settle([]*store.Request{new(r)}, []int64{r.Cost})
				}
				pass(time.Second)
			})
		}
	}
}

// hasLimit leaves out buckets without a limit.
func hasLimit(_ int, r *store.Request) bool { return r.Events > 0 }

// TestWalk shows what clients have used by what is known, with requests in flight and
// pending charges, and changes nothing.
func TestWalk(t *testing.T) {
	for _, kind := range kinds {
		if kind.Algorithm == store.Concurrency {
			continue // concurrency takes
		}
		simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
			defer l.Leave()
			limit, other, third := kind, kind, kind
			limit.Zone, limit.Window, other.Zone, other.Window, third.Zone, third.Window = "zone", time.Hour, "other", time.Hour, "third", time.Hour
			const clients = 600
			keys := make([]string, clients)
			for i := range keys {
				keys[i] = strconv.Itoa(i)
			}
			request := func(i int) store.Request {
				return store.Request{Limit: &limit, ClientKey: keys[i], Events: 10, Cost: int64(1 + i%5), ID: strconv.Itoa(i)}
			}
			visited := func(when string) {
				t.Helper()
				before, used := l.Figures(), map[string]int64{}
				l.Walk([]store.Request{{Limit: &other, Events: 5}, {Limit: &limit, Events: 10}}, hasLimit, func(i int, clientKey string, st *store.State) {
					if _, seen := used[clientKey]; seen || i != 1 || st.Limit != 10 || st.Remaining != 10-st.Used {
						t.Errorf("%s, %s: visited for %d is %s, with %+v", limit.Algorithm, when, i, clientKey, st)
					}
					used[clientKey] = st.Used
				})
				for i := range clients {
					if got := used[keys[i]]; got != int64(1+i%5) {
						t.Fatalf("%s, %s: client %d has used %d, want %d", limit.Algorithm, when, i, got, 1+i%5)
					}
				}
				if after := l.Figures(); len(used) != clients || after != before {
					t.Errorf("%s, %s: visited are %d, %+v became %+v", limit.Algorithm, when, len(used), before, after)
				}
			}
			admit(l, store.Request{Limit: &third, ClientKey: "client", Events: 10, Cost: 1, ID: "x"})
			for i := range clients {
				admit(l, request(i))
			}
			visited("in flight")
			for i := range clients {
				l.Settle([]*store.Request{new(request(i))}, nil)
			}
			visited("not yet charged")
			pass(time.Second)
			visited("charged")
		})
	}
}

// TestWalkLetsRequestsPass between some entries of a stripe and the next. Entries that come
// meanwhile neither hide others nor repeat them.
func TestWalkLetsRequestsPass(t *testing.T) {
	const entries = 4 * walkSize
	limit := store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	began := time.Now()
	for isBetween := false; !isBetween; {
		if time.Since(began) > time.Minute {
			t.Fatal("no walk lets another pass")
		}
		registry := NewRegistry(nil)
		l := New(registry, new(instant), Options{})
		p := &registry.stripes[0]
		grow := func(from int) {
			p.mu.Lock()
			defer p.mu.Unlock()
			for i := range entries {
				id := identity.ID{Limit: registry.limits.Number(&limit), Key: strconv.Itoa(from + i)}
				p.entries.insert(&entry{id: id, stripe: p, Bucket: core.New(0, &core.Moment{Now: math.MaxInt64})}, registry.seed)
			}
		}
		grow(0)
		var grown atomic.Bool
		var growing sync.WaitGroup
		visited := make([]int, 2*entries)
		count := 0
		l.Walk([]store.Request{{Limit: &limit, Events: 10}}, hasLimit, func(_ int, clientKey string, _ *store.State) {
			if count == 0 {
				growing.Go(func() {
					grow(entries)
					grown.Store(true)
				})
			}
			if count%walkSize == 0 {
				// A goroutine that finds the lock taken after so long a wait is next to get it.
				time.Sleep(5 * time.Millisecond)
			}
			isBetween = isBetween || grown.Load() && count < entries
			i, _ := strconv.Atoi(clientKey)
			visited[i]++
			count++
		})
		growing.Wait()
		for i, n := range visited {
			if i < entries && n != 1 || n > 1 {
				t.Fatalf("entry %d is visited %d times", i, n)
			}
		}
		l.Leave()
	}
}

// TestDelays says for which shard charges wait, and until when.
func TestDelays(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		defer l.Leave()
		limit := store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
		r := store.Request{Limit: &limit, ClientKey: "alice", Events: 10, Cost: 1}
		delays := func() bool { return l.Delays(s.Owner(r.ClientKey)) != nil }
		admit(l, r)
		if delays() {
			t.Error("charges wait before there are any")
		}
		s.setDown(true, false)
		l.Settle([]*store.Request{new(r)}, nil)
		pass(5 * time.Second)
		if !delays() || l.Delays("another shard") != nil {
			t.Error("charges do not wait for the shard that is down, or for another one")
		}
		s.setDown(false, false)
		pass(time.Minute)
		if delays() {
			t.Error("charges wait for a shard that is back")
		}
	})
}

// snapshot is what is known of a bucket.
func (l *Ledger) snapshot(r *store.Request) any {
	e := l.look(r)
	if e == nil {
		return nil
	}
	defer e.stripe.mu.Unlock()
	return e.Copy()
}

// TestForeseeKeepsUncertainCosts checks that Foresee keeps costs of unknown outcome.
func TestForeseeKeepsUncertainCosts(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 10)
		s.lossy = 1
		l.ChargeDetached([]*store.Request{new(r)})
		pass(time.Second)
		before := l.snapshot(&r)
		l.Foresee(r, false, s.word)
		if after := l.snapshot(&r); !reflect.DeepEqual(before, after) {
			t.Errorf("%+v became %+v", before, after)
		}
	})
}

// TestForeseeOfTake includes known refusals and reserved tokens.
func TestForeseeOfTake(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 10)
		r.Batch = 4
		take := func() store.State { return store.Answers(t.Context(), l.Take, []store.Request{r})[0] }
		for n := range 12 {
			foreseen := l.Foresee(r, true, s.word)
			if st := take(); foreseen.Err != nil || foreseen.Allowed != st.Allowed {
				t.Errorf("request %d: foreseen is %+v, got %+v", n, foreseen, st)
			}
		}
		writes := s.writes
		if foreseen := l.Foresee(r, true, func(store.Request) store.State { return store.State{Err: store.ErrNotExecuted} }); foreseen.Allowed || foreseen.Err != nil {
			t.Errorf("a known refusal is not foreseen: %+v", foreseen)
		}
		if s.writes != writes {
			t.Error("the store was written to")
		}
		// Until the remaining tokens are given back.
		pass(time.Hour)
	})
}

// TestForeseeOfPenalty is of a client with tokens of a batch: a penalty refuses it, whatever the cost.
func TestForeseeOfPenalty(t *testing.T) {
	for _, cost := range []int64{0, 1} {
		simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
			r := requestOf("alice", 10)
			r.Batch = 4
			take := func() store.State { return store.Answers(t.Context(), l.Take, []store.Request{r})[0] }
			if st := take(); !st.Allowed {
				t.Fatalf("the first take is refused: %+v", st)
			}
			penalty := r
			penalty.Until = s.now() + time.Hour.Microseconds()
			l.Penalize(t.Context(), store.Asks([]store.Request{penalty}))
			r.Cost = cost
			foreseen := l.Foresee(r, true, s.word)
			if st := take(); st.Allowed || foreseen.Allowed || foreseen.Penalty != st.Penalty {
				t.Errorf("cost %d: foreseen is %+v, got %+v", cost, foreseen, st)
			}
			pass(time.Hour)
		})
	}
}

// TestForeseeLocal counts the cost in flight, and reserves nothing.
func TestForeseeLocal(t *testing.T) {
	m := memory.New(memory.NewBuckets(), memory.Options{})
	flights := NewFlights()
	l := NewLocal(flights, m)
	r := requestOf("alice", 2)
	word := func(r store.Request) store.State {
		return store.Answers(context.Background(), m.Peek, []store.Request{r})[0]
	}
	for n, wanted := range []bool{true, true, false} {
		for range 3 {
			if st := l.Foresee(r, false, word); st.Allowed != wanted || st.Used != int64(n) || st.InFlight != !wanted {
				t.Errorf("with %d in flight: %+v", n, st)
			}
		}
		admit(l, r)
	}
	if n := flights.Figures().InFlight; n != 2 {
		t.Errorf("%d requests are in flight", n)
	}
	if st := l.Foresee(r, true, word); !st.Allowed || st.Used != 1 {
		t.Errorf("a take: %+v", st)
	}
	if other := requestOf("bob", 2); flights.held(&other) != 0 || flights.Len() != 1 {
		t.Error("a flight was made")
	}
}

// Reset implements [store.Store].
func (s *simulation) Reset(_ context.Context, r store.Request) error {
	s.travel()
	s.mu.Lock()
	down := s.down || s.away
	s.mu.Unlock()
	if down {
		return errDown
	}
	s.reset(r.Limit.Zone + "/" + r.ClientKey)
	s.travel()
	return nil
}

// spend makes n requests and charges the admitted ones, whose number it returns.
func spend(l *Ledger, r store.Request, n int, pause time.Duration) (admitted int) {
	for range n {
		r.ID = time.Now().String()
		if admit(l, r).Allowed {
			admitted++
			l.Settle([]*store.Request{new(r)}, nil)
		}
		pass(pause)
	}
	return admitted
}

// TestResetIsSeen at once by the process that resets, although a replica is stale,
// and by others within the time of trust, with every algorithm.
func TestResetIsSeen(t *testing.T) {
	for _, trust := range []time.Duration{DefaultTrust, NoTrust} {
		for _, kind := range kinds {
			synctest.Test(t, func(t *testing.T) { resetIsSeen(t, kind, trust) })
		}
	}
}

// resetIsSeen resets a bucket in a process with this trust.
func resetIsSeen(t *testing.T, limit store.Limit, trust time.Duration) {
	s := newSimulation(1)
	s.lag = 300 * time.Millisecond
	own, other := New(NewRegistry(nil), s, Options{Trust: trust}), New(NewRegistry(nil), s, Options{})
	limit.Zone, limit.Window = "zone", time.Hour
	r := store.Request{Limit: &limit, ClientKey: "alice", Events: 5, Cost: 1}
	if n := spend(own, r, 8, 0); n != 5 {
		t.Errorf("%s: %d of 5 admitted", limit.Algorithm, n)
	}
	pass(time.Second)
	if n := spend(other, r, 5, time.Millisecond); n != 0 {
		t.Errorf("%s: %d admitted by the other process", limit.Algorithm, n)
	}
	if a := other.Account(&r); a == nil || !a.Full {
		t.Errorf("%s: the other process knows of %+v", limit.Algorithm, a)
	}
	redistest.Must(t, own.Reset(t.Context(), r))
	if a := own.Account(&r); a == nil || *a != (store.Account{}) {
		t.Errorf("%s: after the reset %+v is known", limit.Algorithm, a)
	}
	if n := spend(own, r, 2, 0); n != 2 {
		t.Errorf("%s: %d of 2 admitted by the process that made the reset", limit.Algorithm, n)
	}
	pass(DefaultTrust + 10*time.Millisecond)
	if n := spend(other, r, 3, 0); n != 3 {
		t.Errorf("%s: %d of 3 admitted by the other process after the reset", limit.Algorithm, n)
	}
	pass(time.Second)
	if used := s.used(r); used != 5 {
		t.Errorf("%s: %d used at the end", limit.Algorithm, used)
	}
	own.Leave()
	other.Leave()
}

// TestResetKeepsRequestsInFlight, and awaits charges in flight.
func TestResetKeepsRequestsInFlight(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 5)
		if admit(l, r); spend(l, r, 3, 0) != 3 {
			t.Fatal("refused")
		}
		redistest.Must(t, l.Reset(t.Context(), r))
		if used := s.used(r); used != 0 {
			t.Errorf("%d sent charges arrived after the reset", used)
		}
		if a := l.Account(&r); *a != (store.Account{InFlight: 1}) {
			t.Errorf("known: %+v", *a)
		}
		if st := admit(l, r); !st.Allowed || st.Used != 1 {
			t.Errorf("beside the request in flight: %+v", st)
		}
		l.Settle([]*store.Request{new(r), new(r)}, nil)
		pass(time.Second)
		if used := s.used(r); used != 2 {
			t.Errorf("%d used", used)
		}
	})
}

// lateAnswers delays the answers to checks while late is set.
type lateAnswers struct {
	*simulation
	late chan struct{}
}

func (s *lateAnswers) Check(ctx context.Context, asks []*store.Ask) {
	late := s.late
	s.simulation.Check(ctx, asks)
	if late != nil {
		<-late
	}
}

// TestAnswerFromBeforeAReset refuses no later request, whether it arrives while a charge is in
// flight or afterwards.
func TestAnswerFromBeforeAReset(t *testing.T) {
	for _, kind := range kinds {
		for _, landed := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				s := &lateAnswers{simulation: newSimulation(1)}
				l := New(NewRegistry(nil), s, Options{})
				limit := kind
				limit.Zone, limit.Window = "zone", time.Hour
				what := fmt.Sprintf("%s, aligned %v, landed %v", limit.Algorithm, limit.Align, landed)
				request := func(id string) store.Request {
					return store.Request{Limit: &limit, ClientKey: "alice", Events: 6, Cost: 1, ID: id}
				}
				first := request("first")
				if !admit(l, first).Allowed {
					t.Errorf("%s: the first request is refused", what)
				}
				for n := range 6 {
					s.others(algorithm.Charge, request("other"+strconv.Itoa(n)))
				}
				pass(DefaultTrust + time.Millisecond)
				done, arrive := s.admitLate(l, request("late"))
				redistest.Must(t, l.Reset(t.Context(), first))
				l.Settle([]*store.Request{new(first)}, nil)
				if landed {
					pass(10 * time.Millisecond)
				}
				arrive()
				if st := <-done; !st.Allowed {
					t.Errorf("%s: refused by an answer from before the reset: %+v", what, st)
				}
				l.Settle([]*store.Request{new(request("late"))}, nil)
				if n := spend(l, request(""), 3, 0); n != 3 {
					t.Errorf("%s: %d of 3 admitted after the reset", what, n)
				}
				pass(10 * time.Millisecond)
				if n := spend(l, request(""), 1, 0); n != 1 {
					t.Errorf("%s: refused once the charges were counted", what)
				}
				pass(time.Second)
				l.Leave()
			})
		}
	}
}

// admitLate begins an admission whose check is answered when arrive is called.
func (s *lateAnswers) admitLate(l *Ledger, reqs ...store.Request) (done chan store.State, arrive func()) {
	late := make(chan struct{})
	s.late = late
	done = make(chan store.State, len(reqs))
	go func() {
		for _, st := range store.Answers(context.Background(), l.Admit, reqs) {
			done <- st
		}
	}()
	synctest.Wait()
	s.late = nil
	return done, func() { close(late) }
}

// TestCheckThatWaitsDuringAReset: an admission that leads the check of a bucket, and is held up
// by that of another, drops the answer of a replica that it chose before a reset.
func TestCheckThatWaitsDuringAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &lateAnswers{simulation: newSimulation(1)}
		l := New(NewRegistry(nil), s, Options{})
		request := requestOf("alice", 6)
		s.others(algorithm.Charge, request)
		first, answerFirst := s.admitLate(l, request)
		both, answerOther := s.admitLate(l, requestOf("bob", 6), request)
		// From here on the next check of alice is that of the admission that waits for bob.
		answerFirst()
		if st := <-first; !st.Allowed {
			t.Errorf("refused within the limit: %+v", st)
		}
		for range 6 {
			s.others(algorithm.Charge, request)
		}
		s.lag = time.Hour
		redistest.Must(t, l.Reset(t.Context(), request))
		answerOther()
		<-both
		if st := <-both; !st.Allowed {
			t.Errorf("refused by an answer from before the reset: %+v", st)
		}
		l.Leave()
	})
}

// TestAnswerAheadFromBeforeAReset: a request that waits is not refused by what a reset has ended,
// and where a replica answered for the primary, the primary is asked next nevertheless.
func TestAnswerAheadFromBeforeAReset(t *testing.T) {
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			s := &lateAnswers{simulation: newSimulation(1)}
			l := New(NewRegistry(nil), s, Options{})
			limit := kind
			limit.Zone, limit.Window = "zone", time.Hour
			request := store.Request{Limit: &limit, ClientKey: "alice", Events: 6, Cost: 1, ID: "first"}
			for n := range 6 {
				other := request
				other.ID = "other" + strconv.Itoa(n)
				s.others(algorithm.Charge, other)
			}
			s.lag = time.Hour
			late, done := make(chan struct{}), make(chan store.State)
			s.late = late
			s.setDown(false, true)
			go func() { done <- l.CheckAhead(t.Context(), request, time.Second) }()
			synctest.Wait()
			pass(time.Millisecond)
			s.setDown(false, false)
			redistest.Must(t, l.Reset(t.Context(), request))
			again := make(chan struct{})
			s.late = again
			close(late)
			synctest.Wait()
			pass(time.Millisecond)
			s.late = nil
			if st := admit(l, request); !st.Allowed || st.Replica {
				t.Errorf("%s, aligned %v: after the reset: %+v", limit.Algorithm, limit.Align, st)
			}
			close(again)
			if st := <-done; !st.Allowed {
				t.Errorf("%s, aligned %v: refused by an answer from before the reset: %+v", limit.Algorithm, limit.Align, st)
			}
			l.Leave()
		})
	}
}

// TestReplicaStandsInAcrossAReset: that a replica answered for the primary before a reset does not
// keep later checks from the primary.
func TestReplicaStandsInAcrossAReset(t *testing.T) {
	simulated(t, func(t *testing.T, ours *simulation, _ *Ledger) {
		s := &lateAnswers{simulation: ours}
		l := New(NewRegistry(nil), s, Options{})
		request := requestOf("alice", 6)
		for range 6 {
			s.others(algorithm.Charge, request)
		}
		s.lag = time.Hour
		// Checks go to the primary.
		redistest.Must(t, l.Reset(t.Context(), request))
		s.setDown(false, true)
		done, arrive := s.admitLate(l, request)
		pass(time.Millisecond)
		s.setDown(false, false)
		redistest.Must(t, l.Reset(t.Context(), request))
		arrive()
		for _, st := range []store.State{<-done, admit(l, request)} {
			if !st.Allowed || st.Replica {
				t.Errorf("after the reset: %+v", st)
			}
		}
		l.Leave()
	})
}

// TestResetsRepeatACheckOnce: a check that meets one reset after the other ends.
func TestResetsRepeatACheckOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &lateAnswers{simulation: newSimulation(1)}
		l := New(NewRegistry(nil), s, Options{})
		request := requestOf("alice", 6)
		done, arrive := s.admitLate(l, request)
		for range 2 {
			redistest.Must(t, l.Reset(t.Context(), request))
			// The repeated check is late as well.
			again := make(chan struct{})
			s.late = again
			arrive()
			synctest.Wait()
			pass(time.Millisecond)
			arrive = func() { close(again) }
		}
		arrive()
		if st := <-done; !st.Allowed || s.checks != 2 {
			t.Errorf("%d checks were made, want 2: %+v", s.checks, st)
		}
		l.Leave()
	})
}

// TestResetDropsPendingCharges, unless it fails.
func TestResetDropsPendingCharges(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 50)
		spend(l, r, 1, time.Second)
		s.setDown(true, false)
		for range 10 {
			l.ChargeDetached([]*store.Request{new(r)})
		}
		pass(100 * time.Millisecond)
		if err := l.Reset(t.Context(), r); err == nil {
			t.Error("the reset succeeded although the store is down")
		}
		if f := l.Figures(); f.Unsent != 10 {
			t.Errorf("%d charges are pending, want 10", f.Unsent)
		}
		s.setDown(false, false)
		redistest.Must(t, l.Reset(t.Context(), r))
		pass(5 * time.Second)
		if used := s.used(r); used != 0 {
			t.Errorf("%d are used", used)
		}
		if f := l.Figures(); f.Unsent != 0 || l.Owes() {
			t.Errorf("pending after the reset: %+v", f)
		}
	})
}

// TestResetGivesUpTokens of reservations.
func TestResetGivesUpTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 100, 10)
		l := b.ledgers[0]
		b.take(l, 1)
		r := b.request(0)
		if a := l.Account(&r); a == nil || a.Reserved != 9 {
			t.Errorf("known: %+v", a)
		}
		redistest.Must(t, l.Reset(t.Context(), r))
		if st := b.take(l, 1); !st.Allowed || b.spent() != 10 {
			t.Errorf("%+v, %d spent in the store, want a batch", st, b.spent())
		}
		want := Figures{Buckets: 1, Counts: core.Counts{Fetches: 2, TokensFetched: 20, TokensExpired: 9}}
		if f := l.Figures(); f != want {
			t.Errorf("figures %+v, want %+v", f, want)
		}
		pass(2 * time.Second)
		want.TokensReturned = 9
		if f := l.Figures(); f != want || b.spent() != 1 {
			t.Errorf("figures %+v, want %+v; %d spent in the store", f, want, b.spent())
		}
		b.leave()
	})
}

// TestFiguresCountSavedCalls: local refusals and admissions, and charges of unknown
// outcome.
func TestFiguresCountSavedCalls(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 100)
		r.Limit = &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
		spend(l, r, 30, 100*time.Millisecond)
		checks := s.checks
		if f := l.Figures(); f.UnaskedAdmissions != int64(30-checks) || f.UnaskedAdmissions == 0 || f.Buckets != 1 || f.InFlight != 0 {
			t.Errorf("after %d checks: %+v", checks, f)
		}
		full := r
		full.Events = 20
		for range 9 {
			admit(l, full)
		}
		if f := l.Figures(); f.LocalRefusals != int64(9-(s.checks-checks)) || f.LocalRefusals == 0 {
			t.Errorf("%d refusals after %d checks", f.LocalRefusals, s.checks-checks)
		}
		s.mu.Lock()
		s.lossy = 1
		s.mu.Unlock()
		l.ChargeDetached([]*store.Request{new(r)})
		pass(time.Second)
		if f := l.Figures(); f.Uncertain != 1 {
			t.Errorf("%d uncertain, want 1", f.Uncertain)
		}
		s.mu.Lock()
		s.lossy = 0
		s.mu.Unlock()
		spend(l, r, 1, time.Second)
		if f := l.Figures(); f.Uncertain != 0 {
			t.Errorf("%d uncertain although the primary has answered", f.Uncertain)
		}
	})
}

// TestResetsAmongRequests: resets in random interleavings leave nothing behind.
func TestResetsAmongRequests(t *testing.T) {
	for seed := range uint64(sweep.Size(75, 3000)) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			s := newSimulation(seed)
			s.lossy = []float64{0, 0.1}[seed%2]
			s.lag = []time.Duration{0, 20 * time.Millisecond}[rng.IntN(2)]
			l := New(NewRegistry(nil), s, Options{})
			limit := kinds[rng.IntN(len(kinds))]
			limit.Zone, limit.Window = "zone", time.Hour
			r := store.Request{Limit: &limit, ClientKey: "alice", Events: 10, Cost: 1}
			if algorithm.Of(limit.Algorithm).Copies() && limit.Algorithm != store.GCRA {
				r.Batch = []int64{0, 3}[rng.IntN(2)]
			}
			var wg sync.WaitGroup
			for n := range 4 {
				seeds := rand.New(rand.NewPCG(seed, uint64(n)))
				wg.Go(func() {
					for range 40 {
						r := r
						r.ID = time.Now().String() + string(rune('a'+n))
						if r.Batch != 0 {
							store.Answers(context.Background(), l.Take, []store.Request{r})
						} else if admit(l, r).Allowed {
							pass(time.Duration(seeds.IntN(5)) * time.Millisecond)
							l.Settle([]*store.Request{new(r)}, nil)
						}
						pass(time.Duration(seeds.IntN(10)) * time.Millisecond)
					}
				})
			}
			for range 8 {
				pass(time.Duration(rng.IntN(60)) * time.Millisecond)
				if err := l.Reset(context.Background(), r); err != nil {
					t.Error(err)
				}
			}
			wg.Wait()
			s.mu.Lock()
			s.lossy = 0
			s.mu.Unlock()
			pass(3 * time.Second)
			if err := l.Reset(context.Background(), r); err != nil {
				t.Error(err)
			}
			r.ID, r.Batch = "last", 0
			if st := store.Answers(context.Background(), l.Take, []store.Request{r})[0]; !st.Allowed || st.Used != 1 {
				t.Errorf("seed %d, %s: after the last reset: %+v", seed, limit.Algorithm, st)
			}
			l.Flush(context.Background())
			if f := l.Figures(); f.InFlight != 0 || f.Unsent != 0 || f.Uncertain != 0 || l.Owes() {
				t.Errorf("seed %d, %s: left: %+v", seed, limit.Algorithm, f)
			}
			if f := l.Figures(); f.TokensFetched < f.TokensReturned+f.TokensExpired {
				t.Errorf("seed %d: more tokens were used than fetched: %+v", seed, f)
			}
			l.Leave()
		})
	}
}

// TestForeseeBesideCharges: for the race detector. What is foreseen is decided on a copy.
func TestForeseeBesideCharges(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		s.setDown(true, false)
		r := requestOf("alice", 1000)
		var both sync.WaitGroup
		both.Go(func() {
			for range 5_000 {
				l.Settle([]*store.Request{new(r)}, []int64{0})
			}
		})
		both.Go(func() {
			for range 5_000 {
				l.Foresee(r, false, s.word)
				l.ForeseeAlone(&r)
			}
		})
		both.Wait()
		s.setDown(false, false)
		l.Flush(t.Context())
	})
}

// TestRecall: the limit of a request is that of the bucket from when it asks, whatever the answer, and
// neither that of one which was admitted before and settles, nor of a look or an operator.
func TestRecall(t *testing.T) {
	for _, kind := range kinds {
		simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
			limit := kind
			limit.Zone, limit.Window = "zone", time.Hour
			request := func(events int64) store.Request {
				return store.Request{Limit: &limit, ClientKey: "alice", Events: events, Burst: events, Cost: 1, ID: strconv.FormatInt(events, 10)}
			}
			recalls := func(what string, want int64) {
				t.Helper()
				r := store.Request{Limit: &limit, ClientKey: "alice"}
				if isKnown := l.Recall(&r); isKnown != (want > 0) || r.Events != want || r.Burst != want {
					t.Errorf("%s, %s: %d events, burst %d, known: %t; want %d", limit.Algorithm, what, r.Events, r.Burst, isKnown, want)
				}
			}
			redistest.Must(t, l.Reset(t.Context(), request(99)))
			recalls("reset by an operator", 0)
			l.Settle([]*store.Request{new(request(40))}, []int64{0})
			recalls("charged without asking", 40)
			pass(time.Second)
			for _, asks := range []func(asked *store.Ask){
				func(asked *store.Ask) { l.Admit(t.Context(), []*store.Ask{asked}) },
				func(asked *store.Ask) { l.Take(t.Context(), []*store.Ask{asked}) },
				func(asked *store.Ask) { l.RefuseKnown([]*store.Ask{asked}) },
				func(asked *store.Ask) { asked.State = l.CheckAhead(t.Context(), asked.Request, 0) },
				func(asked *store.Ask) { asked.State = l.AdmitAlone(&asked.Request) },
			} {
				for _, events := range []int64{20, 1} {
					asked := store.Ask{Request: request(events)}
					asks(&asked)
					recalls(fmt.Sprintf("asked, answer %+v", asked.State), events)
				}
			}
			look := request(77)
			l.Foresee(look, false, s.word)
			l.Foresee(look, true, s.word)
			l.ForeseeKnown(store.Asks([]store.Request{look}))
			l.ForeseeAlone(&look)
			l.IsFull(&look)
			l.Account(&look)
			l.Walk([]store.Request{look}, hasLimit, func(int, string, *store.State) {})
			l.Settle([]*store.Request{new(look)}, []int64{0})
			l.RefundDetached([]*store.Request{new(look)})
			redistest.Must(t, l.Reset(t.Context(), look))
			recalls("looked at, and settled", 1)
			pass(time.Second)
		})
	}
}
