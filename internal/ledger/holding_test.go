package ledger

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// holding is a simulation in which every take with a number is held, and refusals are for one event that is.
type holding struct {
	*simulation
	ended []uint32
	// late, unless it is nil, is how takes end, whose replies are lost.
	late *store.Late
	took []uint32
	// hurried is how often what lingers was hurried.
	hurried int
}

func (s *holding) Hurry(string) { s.hurried++ }

func (s *holding) Take(ctx context.Context, asks []*store.Ask) {
	s.simulation.Take(ctx, asks)
	for _, a := range asks {
		if s.took = append(s.took, a.Hold); s.late != nil {
			a.State = store.State{Err: s.late.Wrap(store.ErrUncertain)}
		}
		if a.Err != nil || a.Hold == 0 {
			continue
		}
		a.IsHeld = a.Allowed && a.MayHold()
		algorithm.ShowHeld(&a.State, &a.Request, 1)
	}
}

func (s *holding) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.mu.Lock()
	for _, r := range reqs {
		if r.MayHold() {
			s.ended = append(s.ended, r.Hold)
		}
	}
	s.mu.Unlock()
	s.simulation.RefundReported(reqs, report)
}

// TestUsedUpBatchIsHeldNoMore, or until its only request settles.
func TestUsedUpBatchIsHeldNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &holding{simulation: newSimulation(1)}
		l := New(NewRegistry(nil), s, Options{})
		for _, c := range []struct {
			cost  int64
			after time.Duration
			ended int
		}{{2, 2 * reapPause, 0}, {1, 2 * reapPause, 0}, {1, 2 * reapPause, 1}} {
			r := requestOf("alice", 10)
			r.Cost, r.Batch, r.Hold = c.cost, 2, store.NewHold()
			if st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]; st.Err != nil || !st.Allowed || st.IsHeld != (c.cost == 2) {
				t.Fatalf("a take of %d: %+v", c.cost, st)
			}
			pass(c.after)
			synctest.Wait()
			if n := len(s.ended); n != c.ended {
				t.Errorf("%v after a take of %d, %d batches are held no more, want %d", c.after, c.cost, n, c.ended)
			}
		}
		if l.IsNeeded() {
			t.Error("something is left to give back")
		}
		l.Leave()
	})
}

// TestLostFetchIsHeldNoMore once it has ended, unless it certainly held nothing.
func TestLostFetchIsHeldNoMore(t *testing.T) {
	for _, end := range []error{nil, store.ErrNotExecuted, store.ErrUncertain} {
		synctest.Test(t, func(t *testing.T) {
			s := &holding{simulation: newSimulation(1), late: new(store.Late)}
			l := New(NewRegistry(nil), s, Options{OnUndelivered: func(_ string, _ *store.Limit, op algorithm.Operation, _ int64, err error) {
				t.Errorf("a %s that nobody made is lost: %v", op, err)
			}})
			r := requestOf("alice", 10)
			r.Batch, r.Hold = 2, store.HearsHeld
			if st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]; !errors.Is(st.Err, store.ErrUncertain) {
				t.Errorf("a take whose reply is lost: %+v", st)
			}
			pass(time.Second)
			if len(s.ended) > 0 {
				t.Errorf("%d holds have ended before the fetch has", len(s.ended))
			}
			s.late.End(end)
			pass(time.Second)
			want := s.took
			if errors.Is(end, store.ErrNotExecuted) {
				want = nil
			}
			if sizes := s.callSizes(); len(sizes) > 0 {
				t.Errorf("%v: nothing is charged in %d calls", end, len(sizes))
			}
			if !slices.Equal(s.ended, want) || len(s.took) != 1 || s.took[0] <= store.HearsHeld {
				t.Errorf("%v: taken under %v, and the holds %v have ended", end, s.took, s.ended)
			}
			l.Leave()
		})
	}
}

// TestLostEndIsReported: what a request held is held until its time is over then.
func TestLostEndIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, lost := newSimulation(1), int64(0)
		l := New(NewRegistry(nil), s, Options{OnUndelivered: func(_ string, _ *store.Limit, op algorithm.Operation, n int64, err error) {
			if op == algorithm.Refund && errors.Is(err, ErrHeld) {
				lost += n
			}
		}})
		end := requestOf("alice", 10)
		end.Cost, end.Hold = 0, store.NewHold()
		s.setDown(true, false)
		l.RefundDetached([]*store.Request{&end})
		pass(time.Second)
		synctest.Wait()
		if lost != 1 {
			t.Errorf("%d are reported", lost)
		}
		l.Leave()
	})
}

// TestTakeWaitsOnceForEnds: although it is let through to ask meanwhile, and not at all where another bucket refuses it.
func TestTakeWaitsOnceForEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &holding{simulation: newSimulation(1)}
		l := New(NewRegistry(nil), s, Options{})
		late := New(l.registry, &lateRefunds{s.simulation}, Options{})
		take := func() (st store.State, took time.Duration) {
			r, began := requestOf("alice", 1), time.Now()
			r.Hold = store.NewHold()
			return store.Answers(t.Context(), l.Take, []store.Request{r})[0], time.Since(began)
		}
		take()
		if st, took := take(); !st.InFlight || took > 2*time.Millisecond {
			t.Errorf("while one is held: %+v after %v", st, took)
		}
		end := requestOf("alice", 1)
		end.Cost, end.Hold = 0, store.NewHold()
		full := requestOf("bob", 1)
		for range 2 {
			store.Answers(t.Context(), l.Take, []store.Request{full})
		}
		late.RefundDetached([]*store.Request{&end})
		both, began := []store.Request{requestOf("alice", 1), full}, time.Now()
		both[0].Hold = store.NewHold()
		if st, took := store.Answers(t.Context(), l.Take, both)[1], time.Since(began); st.Allowed || took > 2*time.Millisecond {
			t.Errorf("while another bucket is full: %+v after %v", st, took)
		}
		if st, took := take(); !st.InFlight || took < DefaultTimeout || took > DefaultTimeout+5*time.Millisecond {
			t.Errorf("while its end is on its way: %+v after %v", st, took)
		}
		if s.hurried == 0 {
			t.Error("what lingers does not leave at once")
		}
		pass(1100 * time.Millisecond)
		late.RefundDetached([]*store.Request{&end})
		before := len(s.took)
		both[0].Hold = store.NewHold()
		if store.Answers(t.Context(), l.Take, both); len(s.took) == before {
			t.Error("nobody asks about the other bucket, because of a request that has only waited")
		}
		pass(2 * time.Second)
		late.Leave()
		l.Leave()
	})
}

// TestRefusedTakeHearsWhatIsHeld, although much was known to be left when it was sent.
func TestRefusedTakeHearsWhatIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &holding{simulation: newSimulation(1)}
		l := New(NewRegistry(nil), s, Options{})
		r := requestOf("alice", 100)
		r.Hold = store.NewHold()
		take := func() store.State { return store.Answers(t.Context(), l.Take, []store.Request{r})[0] }
		if st := take(); st.Err != nil || !st.IsHeld {
			t.Errorf("the first take: %+v", st)
		}
		if st := take(); st.Err != nil || !st.Allowed || st.IsHeld {
			t.Errorf("a take that is known to leave much: %+v", st)
		}
		others := r
		others.Cost, others.ID, others.Hold = 98, "others", 0
		store.Answers(t.Context(), s.Take, []store.Request{others})
		if st := take(); st.Err != nil || st.Allowed || !st.InFlight || st.Held != 1 {
			t.Errorf("a take that others leave no room: %+v", st)
		}
		l.Leave()
	})
}
