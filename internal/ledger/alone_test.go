package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// alone is a process that decides by itself where the store does not answer.
type alone struct {
	*Ledger
	takes bool
	// odd counts refusals that claim to have room, now or soon.
	odd *atomic.Int64
}

// serve makes a request, which takes some time, and reports whether it was admitted, and
// whether alone.
func (p alone) serve(r store.Request, ms int) (admitted, decided bool) {
	var st store.State
	if p.takes {
		st = store.Answers(context.Background(), p.Take, []store.Request{r})[0]
	} else {
		st = admit(p, r)
	}
	unknown := p.takes && errors.Is(st.Err, store.ErrUncertain)
	if decided = st.Err != nil; decided {
		st = p.AdmitAlone(&r)
	}
	if !st.Allowed {
		wait := st.RetryAfter
		if st.InFlight {
			wait = time.Duration(st.ResetOtherwise-st.Now) * time.Microsecond
		}
		if st.Remaining >= r.Cost || wait < r.Limit.Window/100 {
			p.odd.Add(1)
		}
		return false, decided
	}
	pass(time.Duration(ms) * time.Millisecond)
	switch {
	case unknown:
		p.SettleUnknown([]*store.Request{new(r)}, []int64{r.Cost}, nil)
	case decided || !p.takes:
		p.Settle([]*store.Request{new(r)}, nil)
	}
	return true, decided
}

// forEachWay runs a test for every algorithm that keeps counts, charged after and before.
func forEachWay(t *testing.T, test func(t *testing.T, limit store.Limit, takes bool)) {
	t.Helper()
	for _, limit := range kinds {
		for _, takes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, align %t, takes %t", limit.Algorithm, limit.Align, takes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { test(t, limit, takes) })
			})
		}
	}
}

// TestProcessAdmitsNoMoreThanTheLimit while the store comes and goes, answers too late and loses
// replies, with many requests at once: what was admitted by the store and alone counts together.
func TestProcessAdmitsNoMoreThanTheLimit(t *testing.T) {
	const events, workers, requests = 60, 16, 30
	forEachWay(t, func(t *testing.T, limit store.Limit, takes bool) {
		for seed := range uint64(6) {
			s := newSimulation(seed)
			// What got lost on its way is counted nowhere once the primary has said so.
			vanishes := int64(0)
			s.touched = func(landed int64, vanished bool) {
				if vanished {
					vanishes += landed
				}
			}
			// A clock that is hours ahead would let events of gcra drain.
			s.skew %= time.Second
			s.lossy = []float64{0, 0.1}[seed%2]
			limit.Zone, limit.Window = fmt.Sprint("zone-", seed), 100*time.Hour
			p := alone{New(NewRegistry(nil), s, Options{}), takes, new(atomic.Int64)}
			p.Run()
			stop := make(chan struct{})
			var storms, all sync.WaitGroup
			storms.Go(func() {
				rng := rand.New(rand.NewPCG(seed, 2))
				for down := true; ; down = !down {
					s.setDown(down, false)
					select {
					case <-time.After(time.Duration(1+rng.IntN(60)) * time.Millisecond):
					case <-stop:
						return
					}
				}
			})
			var admitted, decided atomic.Int64
			for worker := range workers {
				rng := rand.New(rand.NewPCG(seed, uint64(worker)+3))
				all.Go(func() {
					for n := range requests {
						r := store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1, ID: fmt.Sprint(worker, "-", n)}
						ok, isAlone := p.serve(r, rng.IntN(20))
						if ok {
							admitted.Add(1)
						}
						if ok && isAlone {
							decided.Add(1)
						}
						pass(time.Duration(rng.IntN(15)) * time.Millisecond)
					}
				})
			}
			all.Wait()
			close(stop)
			storms.Wait()
			s.setDown(false, false)
			p.Flush(t.Context())
			p.Leave()
			// Refunds that an outage refuses leave more.
			asked := store.Request{Limit: &limit, ClientKey: "alice", Events: events}
			if used, n := s.used(asked), admitted.Load(); s.lossy == 0 && used < n {
				t.Errorf("seed %d: %d are used, but %d requests were admitted", seed, used, n)
			}
			if n := p.odd.Load(); n > 0 {
				t.Errorf("seed %d: %d refusals name room for the request, or soon", seed, n)
			}
			if n := admitted.Load(); n > events+vanishes || n < events/2 {
				t.Errorf("seed %d: %d requests were admitted, %d of them alone, and %d got lost: want at most %d more, and most of them", seed, n, decided.Load(), vanishes, events)
			}
		}
	})
}

// TestOutageLongerThanTheWindow: what was admitted alone stops to count as the algorithm says.
// Of a log only the store knows how, so its last count stands for a window.
func TestOutageLongerThanTheWindow(t *testing.T) {
	const events = 10
	forEachWay(t, func(t *testing.T, limit store.Limit, takes bool) {
		s := newSimulation(1)
		limit.Zone, limit.Window = "zone", time.Minute
		p := alone{New(NewRegistry(nil), s, Options{}), takes, new(atomic.Int64)}
		p.Run()
		id := 0
		serve := func() bool {
			id++
			ok, _ := p.serve(store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1, ID: fmt.Sprint(id)}, 0)
			return ok
		}
		for range events / 2 {
			serve()
		}
		pass(100 * time.Millisecond)
		s.setDown(true, false)
		most := 0
		for range 10 {
			admitted := 0
			for range 3 * events {
				if serve() {
					admitted++
				}
			}
			most = max(most, admitted)
			pass(limit.Window + time.Second)
		}
		if most > events || most == 0 {
			t.Errorf("%d requests were admitted in a window of an outage, want from 1 to %d", most, events)
		}
		if traits := algorithm.Of(limit.Algorithm); !traits.Copies() || traits.Clocked() {
			most = events // parts of the window before count
		}
		if most < events {
			t.Errorf("%d requests were admitted in the best window of an outage, want %d", most, events)
		}
		s.setDown(false, false)
		pass(2 * time.Second)
		p.Leave()
	})
}

// TestForeseenAlone is what the next request gets, and changes nothing.
func TestForeseenAlone(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 3)
		if st := l.ForeseeAlone(&r); !st.Allowed || l.Figures().Buckets != 0 {
			t.Errorf("about an unknown client: %+v", st)
		}
		comes(t, l, r)
		pass(time.Second)
		s.setDown(true, false)
		for used := range int64(4) {
			for range 2 {
				if st := l.ForeseeAlone(&r); st.Allowed != (used < 2) || st.Used != min(1+used, 3) {
					t.Errorf("after %d requests alone: %+v", used, st)
				}
			}
			l.AdmitAlone(&r)
		}
		if n := l.Figures().InFlight; n != 2 {
			t.Errorf("%d are in flight, want 2", n)
		}
		s.setDown(false, false)
	})
}

// TestTakesThatEndLate: the cost of a request that passed counts once here, and is charged if its take spent nothing.
func TestTakesThatEndLate(t *testing.T) {
	for _, k := range []struct {
		end       error
		used, odd int64
	}{{nil, 0, 0}, {store.ErrNotExecuted, 1, 0}, {store.ErrUncertain, 0, 1}} {
		synctest.Test(t, func(t *testing.T) {
			s, odd := newSimulation(1), int64(0)
			l := New(NewRegistry(nil), s, Options{OnUndelivered: func(_ string, _ *store.Limit, op algorithm.Operation, n int64, err error) {
				if op != algorithm.Take || !errors.Is(err, k.end) {
					t.Errorf("%v: %s is undelivered: %v", k.end, op, err)
				}
				odd += n
			}})
			l.Run()
			defer l.Leave()
			var take store.Late
			r := requestOf("alice", 10)
			s.setDown(true, false)
			if st := l.AdmitAlone(&r); !st.Allowed {
				t.Fatalf("%+v", st)
			}
			l.SettleUnknown([]*store.Request{new(r)}, []int64{1}, []*store.Late{&take})
			for range 2 {
				if st := l.ForeseeAlone(&r); st.Used != 1 {
					t.Errorf("%v: %d are used here, want 1", k.end, st.Used)
				}
				take.End(k.end)
			}
			s.setDown(false, false)
			pass(time.Minute)
			if used := s.used(r); used != k.used || odd != k.odd {
				t.Errorf("%v: %d are used and %d undelivered, want %d and %d", k.end, used, odd, k.used, k.odd)
			}
		})
	}
}

// TestWindowAloneHasOneReset from its first request on.
func TestWindowAloneHasOneReset(t *testing.T) {
	for _, limit := range kinds {
		if !algorithm.Of(limit.Algorithm).Windowed() {
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			l := New(NewRegistry(nil), newSimulation(1), Options{})
			limit.Zone, limit.Window = "zone", time.Hour
			r := store.Request{Limit: &limit, ClientKey: "alice", Events: 9, Cost: 1}
			resets := map[int64]bool{}
			for range 3 {
				st := l.AdmitAlone(&r)
				resets[st.Reset] = true
				pass(time.Second)
				l.SettleUnknown([]*store.Request{new(r)}, []int64{1}, nil)
			}
			if len(resets) != 1 || resets[0] {
				t.Errorf("align %t: the resets are %v", limit.Align, resets)
			}
			l.Leave()
		})
	}
}

// TestPenaltyAlone holds at all owners until it ends, and no shard hears of it.
func TestPenaltyAlone(t *testing.T) {
	for _, limit := range kinds {
		for _, owners := range []string{"b", "bc"} {
			if !algorithm.Of(limit.Algorithm).Penalties {
				continue
			}
			synctest.Test(t, func(t *testing.T) {
				s := &sharded{newServers(1), owners}
				o := NewOwners(New(NewRegistry(nil), s, Options{}))
				limit.Zone, limit.Window = "zone", time.Hour
				what := fmt.Sprintf("%s, align %t, owners %s", limit.Algorithm, limit.Align, owners)
				r := store.Request{Limit: &limit, ClientKey: "alice", Events: 9, Cost: 1}
				first := o.AdmitAlone(&r)
				penalty := r
				penalty.Until = first.Now + time.Minute.Microseconds()
				o.PenalizeAlone(&penalty)
				if st := o.AdmitAlone(&r); !first.Allowed || st.Allowed || st.InFlight || st.Penalty != penalty.Until || st.RetryAfter > time.Minute {
					t.Errorf("%s: with a penalty: %+v", what, st)
				}
				pass(time.Minute + time.Second)
				if st := o.AdmitAlone(&r); !st.Allowed || st.Used != 1 {
					t.Errorf("%s: after a penalty: %+v", what, st)
				}
				if len(s.buckets) > 0 {
					t.Errorf("%s: a shard has %v", what, s.buckets)
				}
				o.Leave()
			})
		}
	}
}

// TestResetEmptiesWhatIsCountedAlone, although a charge sent before it has no answer yet.
func TestResetEmptiesWhatIsCountedAlone(t *testing.T) {
	for _, limit := range kinds {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(1)
			l := New(NewRegistry(nil), slowCharges{s}, Options{})
			limit.Zone, limit.Window = "zone", 100*time.Hour
			r := store.Request{Limit: &limit, ClientKey: "alice", Events: 4, Cost: 1, ID: "1"}
			for range 2 {
				for n := range 5 {
					st := l.AdmitAlone(&r)
					if st.Allowed != (n < 4) {
						t.Errorf("%s, align %t: request %d: %+v", limit.Algorithm, limit.Align, n, st)
					}
					if st.Allowed {
						l.Settle([]*store.Request{new(r)}, nil)
					}
				}
				redistest.Must(t, l.Reset(t.Context(), r))
			}
			pass(2 * time.Hour)
			l.Leave()
		})
	}
}

// TestNoCostPassesAlone, and once the store is back, however much is spent.
func TestNoCostPassesAlone(t *testing.T) {
	forEachWay(t, func(t *testing.T, limit store.Limit, takes bool) {
		s := newSimulation(1)
		limit.Zone, limit.Window = "zone", time.Hour
		p := alone{New(NewRegistry(nil), s, Options{}), takes, new(atomic.Int64)}
		p.Run()
		s.setDown(true, false)
		request := func(events, cost int64) store.Request {
			return store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: cost, ID: fmt.Sprint(time.Now())}
		}
		for n := range 5 {
			if ok, _ := p.serve(request(3, 1), 1); ok != (n < 3) {
				t.Errorf("request %d: admitted is %t", n, ok)
			}
		}
		for _, down := range []bool{true, false} {
			s.setDown(down, false)
			if ok, isAlone := p.serve(request(1, 0), 1); !ok || isAlone != down {
				t.Errorf("a request that costs nothing: admitted is %t, alone %t, in an outage %t", ok, isAlone, down)
			}
		}
		p.Flush(t.Context())
		p.Leave()
	})
}

// noRefunds is a store that can be charged, and gives nothing back.
type noRefunds struct{ *simulation }

func (noRefunds) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	for i := range reqs {
		report(i, store.State{Err: errDown})
	}
}

// TestRefusedTakesOffsetWaitingCharges: what a take has spent in vain when the store comes back,
// the charges that wait need not spend, and so no refund is needed.
func TestRefusedTakesOffsetWaitingCharges(t *testing.T) {
	for _, limit := range kinds {
		synctest.Test(t, func(t *testing.T) {
			const events = 4
			s := newSimulation(1)
			l := New(NewRegistry(nil), noRefunds{s}, Options{})
			limit.Zone, limit.Window = "zone", 100*time.Hour
			what := fmt.Sprintf("%s, align %t", limit.Algorithm, limit.Align)
			request := func(id int) store.Request {
				return store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1, ID: fmt.Sprint(id)}
			}
			s.setDown(true, false)
			for id := range events {
				l.ChargeDetached([]*store.Request{new(request(id))})
			}
			pass(30 * time.Millisecond)
			s.setDown(false, false)
			for id := range 2 {
				if st := takeAll(l, []store.Request{request(events + id)})[0]; st.Err != nil || st.Allowed || st.Remaining != 0 {
					t.Errorf("%s: a take beside charges that wait gets %+v", what, st)
				}
			}
			l.Flush(t.Context())
			if used := s.used(request(0)); used != events {
				t.Errorf("%s: %d are used, want %d", what, used, events)
			}
			if f := l.Figures(); f.Unsent != 0 || l.Owes() {
				t.Errorf("%s: pending in the end: %+v", what, f)
			}
			l.Leave()
		})
	}
}

// TestCountedAloneIsKept although the store has never answered about the client and others come,
// for as long as it counts.
func TestCountedAloneIsKept(t *testing.T) {
	forEachWay(t, func(t *testing.T, limit store.Limit, _ bool) {
		l := New(NewRegistry(nil), newSimulation(1), Options{MaxBuckets: 4000})
		limit.Zone, limit.Window = "zone", time.Hour
		request := func(client string) store.Request {
			return store.Request{Limit: &limit, ClientKey: client, Events: 1, Cost: 1, ID: client}
		}
		flood := func() {
			for i := range 20_000 {
				r := request(fmt.Sprint(i))
				m := l.moment()
				e := l.enter(&r, &m)
				// So that it is known for a while.
				e.RefundSent(&r, &m)
				e.RefundArrived(&r, new(store.State), m.Now, &m)
				e.release(&m)
			}
		}
		r := request("alice")
		if st := l.AdmitAlone(&r); !st.Allowed {
			t.Fatalf("the first request: %+v", st)
		}
		l.SettleUnknown([]*store.Request{new(r)}, []int64{1}, nil)
		flood()
		if st := l.AdmitAlone(&r); st.Allowed {
			t.Errorf("the second request: %+v", st)
		}
		pass(2*limit.Window + time.Second)
		flood()
		if e := l.look(&r); e != nil {
			e.stripe.mu.Unlock()
			t.Error("what counts no more is kept")
		}
		l.Leave()
	})
}

// slowCharges is a store whose charges take an hour.
type slowCharges struct{ *simulation }

func (s slowCharges) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	time.AfterFunc(time.Hour, func() { s.simulation.ChargeReported(reqs, report) })
}
