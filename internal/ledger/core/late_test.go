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

// TestLateChargesCountAsLongAsIfTheyHadComeAtOnce, however late they are and how many there were; of a log and of
// windows of the clock by fifths of that time.
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
			slack := int64(0)
			if hasParts(&s.limit) {
				slack = wheelPart(&s.limit) + 1
			}
			for later := int64(0); later < 2*window; later += window / 37 {
				least := s.used(s.ideal, later)
				most := least
				if slack > 0 {
					most = 0
					for _, one := range s.settled {
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

// TestLatestReadingOfTheClockNamesTheEnd: where the primary's clock was read lately, a late charge says when it ends,
// and otherwise how long it counts yet.
func TestLatestReadingOfTheClockNamesTheEnd(t *testing.T) {
	for _, c := range []struct {
		name  string
		heard int64
		isEnd bool
	}{{"never", 0, false}, {"lately", clockLasts - 1, true}, {"long ago", clockLasts + 1, false}} {
		s := newLateStore(store.Limit{})
		m := s.m
		m.Now = 100_000_000
		if c.heard > 0 {
			r := s.request(1)
			s.bucket.hear(&r, &store.State{Now: m.Now - c.heard + s.ahead, Content: store.Content{0, 0}}, m.Now-c.heard, &Moment{Now: m.Now - c.heard})
		}
		end := m.Now + 5_000_000
		got := s.bucket.endsAt(&s.limit, end, m)
		if want := end + s.ahead; c.isEnd && got != want {
			t.Errorf("%s: %d, want the instant %d", c.name, got, want)
		}
		if want := m.Now - end; !c.isEnd && got != want {
			t.Errorf("%s: %d, want the time %d", c.name, got, want)
		}
	}
}
