package core

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// lateStore is a store that executes no charges for a while, beside one that always does.
type lateStore struct {
	limit  store.Limit
	bucket Bucket
	m      *Moment
	// ahead is how far the clock of both is ahead of the process's.
	ahead       int64
	late, ideal algorithm.Bucket
	// settled is what each charge cost, and when it settled.
	settled []struct{ cost, at int64 }
}

func newLateStore(limit store.Limit) *lateStore {
	limit.Zone, limit.Window = "zone", time.Minute
	s := &lateStore{limit: limit, m: &Moment{Now: 1, Trust: UsualTrust.Microseconds()}, ahead: 1_700_000_000_123_456}
	s.late, s.ideal = algorithm.New(&s.limit), algorithm.New(&s.limit)
	s.bucket = New(s.ahead, s.m)
	return s
}

func (s *lateStore) request(cost int64) store.Request {
	return store.Request{Limit: &s.limit, ClientKey: "alice", Events: 1000, Cost: cost, ID: fmt.Sprintf("%08d", len(s.settled))}
}

// charge settles a request that the store does not charge.
func (s *lateStore) charge(cost int64) {
	r := s.request(cost)
	s.settled = append(s.settled, struct{ cost, at int64 }{cost, s.m.Now})
	algorithm.Charge.Run(s.ideal, &r, s.m.Now+s.ahead)
	n := s.bucket.Charge([]*store.Request{&r}, s.m)
	if n.Do == Send {
		s.bucket.Delivered(n.Charge[0], &store.State{Err: store.ErrNotExecuted}, s.m)
	}
}

// deliver makes the store charge what waits, and returns in how many calls.
func (s *lateStore) deliver() (calls int) {
	for n := s.bucket.Send(s.m); n.Do == Send; calls++ {
		st := algorithm.Charge.Run(s.late, n.Charge[0], s.m.Now+s.ahead)
		n = s.bucket.Delivered(n.Charge[0], &st, s.m)
	}
	return calls
}

// used is what counts in a bucket so long after the present.
func (s *lateStore) used(b algorithm.Bucket, later int64) int64 {
	r := s.request(1)
	return b.View(&r, s.m.Now+s.ahead+later, false).Used
}

// TestLateChargesCountAsLongAsIfTheyHadComeAtOnce, however late they are and how many there were; of a log all
// but the last by fifths of that time.
func TestLateChargesCountAsLongAsIfTheyHadComeAtOnce(t *testing.T) {
	for _, limit := range []store.Limit{{}, {Align: true}, {Algorithm: store.SlidingWindow}, {Algorithm: store.SlidingLog}} {
		for seed := range uint64(200) {
			random := rand.New(rand.NewPCG(seed, 1))
			s := newLateStore(limit)
			window := s.limit.Window.Microseconds()
			for range 1 + random.IntN(8) {
				s.charge(1 + random.Int64N(5))
				s.m.Now += random.Int64N(window / 4)
			}
			outage := s.m.Now
			s.m.Now += random.Int64N(window / 2)
			if calls := s.deliver(); calls > 7 {
				t.Errorf("%+v, seed %d: %d calls for %d charges", limit, seed, calls, len(s.settled))
			}
			for later := int64(0); later < 2*window; later += window / 37 {
				least := s.used(s.ideal, later)
				most := least
				if s.limit.Algorithm == store.SlidingLog {
					slack := window/partsOf(&s.limit) + 2
					most = 0
					for n, one := range s.settled {
						if n == len(s.settled)-1 {
							// The instant of the last one is known.
							slack = 2
						}
						if one.at > s.m.Now+later-countsFor(&s.limit)-slack {
							most += one.cost
						}
					}
				}
				if got := s.used(s.late, later); got < least || got > most {
					t.Fatalf("%+v, seed %d: the store counts %d, %v after it was back and %v after the last charge, want %d to %d",
						limit, seed, got, micros(later), micros(s.m.Now-outage+later), least, most)
				}
			}
		}
	}
}

// TestNothingOpensALaterWindow: while charges wait, a check and a take open the window in which they count.
func TestNothingOpensALaterWindow(t *testing.T) {
	s := newLateStore(store.Limit{})
	s.charge(3)
	end := s.m.Now + s.limit.Window.Microseconds() + s.ahead
	s.m.Now += s.limit.Window.Microseconds() / 3
	r, check := s.request(1), new(Check)
	if do := s.bucket.Ask(Waiter{Request: &r, State: new(store.State)}, check, s.m); do != CheckReplica && do != CheckPrimary {
		t.Fatalf("a check has to do %d", do)
	}
	take := s.request(1)
	s.bucket.TakeSent(&take, s.m)
	for name, ends := range map[string]int64{"check": check.Ends, "take": take.Ends} {
		b := algorithm.New(&s.limit)
		asked := s.request(1)
		asked.Ends = ends
		if st := algorithm.Check.Run(b, &asked, s.m.Now+s.ahead); st.Reset != end {
			t.Errorf("a %s opens a window that ends %v later than the charges count", name, micros(st.Reset-end))
		}
	}
}

// TestWaitingChargeKeepsItsEnd: the bucket that it opens ends with that of the client's other owner, and nothing else
// opens a later one meanwhile. With its shard it is gone only if the others have all of it.
func TestWaitingChargeKeepsItsEnd(t *testing.T) {
	for _, limit := range []store.Limit{{}, {Algorithm: store.GCRA}} {
		s := newLateStore(limit)
		window := s.limit.Window.Microseconds()
		end := s.m.Now + window/12
		for n := range 3 {
			r := s.request(1)
			r.Ends, r.Shared = s.m.Now-end, n > 0
			if n := s.bucket.Charge([]*store.Request{&r}, s.m); n.Do == Send {
				s.bucket.Delivered(n.Charge[0], &store.State{Err: store.ErrNotExecuted}, s.m)
			}
			s.m.Now += window / 60
		}
		if s.bucket.pending.waiting.req.Shared {
			t.Errorf("%v: what one owner alone has would be gone with it", limit.Algorithm)
		}
		take := s.request(1)
		if s.bucket.TakeSent(&take, s.m); limit.Algorithm == store.FixedWindow && take.Ends != s.m.Now-end {
			t.Errorf("a take opens a window for %v, want %v", micros(-take.Ends), micros(end-s.m.Now))
		}
		s.deliver()
		if limit.Algorithm == store.GCRA {
			end += 3 * window / 1000
		}
		r := s.request(0)
		if st := s.late.View(&r, s.m.Now+s.ahead, false); st.Reset != end+s.ahead || st.Used < 3 {
			t.Errorf("%v: a bucket with %d ends %v too late", limit.Algorithm, st.Used, micros(st.Reset-end-s.ahead))
		}
	}
}

// TestExpiredChargesAreLostAlone: a charge whose window is over is neither sent nor merged with one of a later
// window.
func TestExpiredChargesAreLostAlone(t *testing.T) {
	for name, c := range map[string]struct {
		// waits is when a second charge settles, ends when the first one's outcome is known, and late how
		// many requests are lost later.
		waits, ends time.Duration
		outcome     error
		lost        int64
		do          Do
		sends       bool
		late        int64
	}{
		"the first, in time":       {0, 59 * time.Second, store.ErrNotExecuted, 0, Retry, true, 0},
		"the first, too late":      {0, 61 * time.Second, store.ErrNotExecuted, 1, Nothing, false, 0},
		"the first of two windows": {61 * time.Second, 62 * time.Second, store.ErrNotExecuted, 1, Retry, true, 0},
		"the second, behind":       {time.Second, 62 * time.Second, store.ErrUncertain, 1, Retry, false, 1},
		"the second, in time":      {time.Second, 3 * time.Second, store.ErrUncertain, 1, Send, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newLateStore(store.Limit{})
			began, m := s.m.Now, s.m
			first := s.request(1)
			n := s.bucket.Charge([]*store.Request{&first}, m)
			if c.waits > 0 {
				m.Now = began + c.waits.Microseconds()
				second := s.request(1)
				s.bucket.Charge([]*store.Request{&second}, m)
			}
			m.Now = began + c.ends.Microseconds()
			n = s.bucket.Delivered(n.Charge[0], &store.State{Err: c.outcome}, m)
			if n.Lost != c.lost || n.Do != c.do {
				t.Errorf("%d lost, to do %d, want %d and %d", n.Lost, n.Do, c.lost, c.do)
			}
			if n = s.bucket.Send(m); (n.Do == Send) != c.sends || n.Lost != c.late || c.sends && n.Charge[0].Cost != 1 {
				t.Errorf("what waits: %+v, want it sent: %t, and %d lost", n, c.sends, c.late)
			}
		})
	}
}

// TestDrainedChargesAreSent: the store is told of a charge that waits behind another one, although it has drained
// by then.
func TestDrainedChargesAreSent(t *testing.T) {
	s := newLateStore(store.Limit{Algorithm: store.GCRA})
	first, second, third := s.request(1), s.request(1), s.request(1)
	n := s.bucket.Charge([]*store.Request{&first}, s.m)
	s.bucket.Charge([]*store.Request{&second}, s.m)
	s.m.Now += s.limit.Window.Microseconds()
	if lost := s.bucket.Charge([]*store.Request{&third}, s.m).Lost; lost != 0 {
		t.Errorf("%d are lost when another one comes", lost)
	}
	st := algorithm.Charge.Run(s.late, n.Charge[0], s.m.Now+s.ahead)
	if n = s.bucket.Delivered(n.Charge[0], &st, s.m); n.Do != Send || n.Lost != 0 || n.Charge[0].Cost < 1 {
		t.Errorf("behind a charge that took a window: %+v", n)
	}
}

// TestChargesBehindOneInFlightKeepTheLowestRate: once that one has failed, the last of them may count by the client's
// lowest limit.
func TestChargesBehindOneInFlightKeepTheLowestRate(t *testing.T) {
	s := newLateStore(store.Limit{Algorithm: store.GCRA})
	charge := func(events, cost int64) Next {
		r := s.request(cost)
		r.Events, r.Burst = events, 5
		return s.bucket.Charge([]*store.Request{&r}, s.m)
	}
	n := charge(1000, 1)
	charge(1000, 1000)
	s.m.Now += 2 * s.limit.Window.Microseconds()
	charge(10, 5)
	s.bucket.Delivered(n.Charge[0], &store.State{Err: store.ErrNotExecuted}, s.m)
	s.deliver()
	if used := s.used(s.late, 3*time.Second.Microseconds()); used < 4 {
		t.Errorf("%d of 5 count after some seconds, 10 of which drain in a minute", used)
	}
}

// TestTakeStandsForNoChargeThatIsOver: a refused take is refunded if the charges that wait count no more.
func TestTakeStandsForNoChargeThatIsOver(t *testing.T) {
	s := newLateStore(store.Limit{})
	s.charge(1)
	s.m.Now += s.limit.Window.Microseconds()
	if s.bucket.offset(1, s.m) {
		t.Error("a take that counts would stand for a charge that does not")
	}
}
