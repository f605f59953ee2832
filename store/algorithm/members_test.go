package algorithm_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestSlidingLog(t *testing.T) {
	const s, m = time.Second, time.Minute
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.SlidingLog, Window: m}, Events: 5}, []step{
		{at: 10 * s, op: check, cost: 1, allowed: true, used: 0, remaining: 5, reset: 10 * s},
		{at: 10 * s, op: take, cost: 2, allowed: true, used: 2, remaining: 3, reset: 70 * s},
		{at: 30 * s, op: take, cost: 3, allowed: true, used: 5, remaining: 0, reset: 90 * s},
		// One or two events have to leave, then one more.
		{at: 40 * s, op: take, cost: 1, allowed: false, used: 5, remaining: 0, reset: 90 * s, retry: 30 * s},
		{at: 40 * s, op: take, cost: 2, allowed: false, used: 5, remaining: 0, reset: 90 * s, retry: 30 * s},
		{at: 40 * s, op: take, cost: 3, allowed: false, used: 5, remaining: 0, reset: 90 * s, retry: 50 * s},
		{at: 40 * s, op: take, cost: 6, allowed: false, used: 5, remaining: 0, reset: 90 * s, retry: store.Never},
		// An event counts for exactly one window.
		{at: 70*s - time.Microsecond, op: check, cost: 0, allowed: true, used: 5, remaining: 0, reset: 90 * s},
		{at: 70 * s, op: check, cost: 0, allowed: true, used: 3, remaining: 2, reset: 90 * s},
		{at: 70 * s, op: take, cost: 1, allowed: true, used: 4, remaining: 1, reset: 130 * s},
		{at: 71 * s, op: refund, cost: 3, used: 1, remaining: 4, reset: 130 * s},
		{at: 72 * s, op: refund, cost: 2, used: 1, remaining: 4, reset: 130 * s},
		{at: 73 * s, op: refund, cost: 1, used: 0, remaining: 5, reset: 73 * s},
		// The clock runs backwards: what is ahead of it counts.
		{at: 74 * s, op: take, cost: 4, allowed: true, used: 4, remaining: 1, reset: 134 * s},
		{at: 70 * s, op: take, cost: 2, allowed: false, used: 4, remaining: 1, reset: 134 * s, retry: 64 * s},
	})
}

// TestSlidingLogIsExact: every interval of one window has at most the events, and no
// request that fits is refused.
func TestSlidingLogIsExact(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingLog})
		var log admissions
		for range 80 {
			r := s.request()
			r.Reserved = 0
			with := append(log[:len(log):len(log)], struct{ at, cost int64 }{s.now, r.Cost})
			fits := with.since(s.now-s.window()) <= r.Capacity()
			if take.Run(s.bucket, &r, s.now).Allowed != fits {
				t.Fatalf("a cost of %d fits at %d: %t, but not for the log: %v", r.Cost, s.now, fits, log)
			}
			if fits {
				log = with
			}
			s.pass()
		}
		if got := log.most(s.window()); got > s.events {
			t.Fatalf("%d taken of %d in an interval of one window: %v", got, s.events, log)
		}
	})
}

// TestSlidingLogOverTime: takes less than a window old, or ahead, never exceed the
// events, however time runs. Where time runs forwards again, no interval of one window
// exceeds them.
func TestSlidingLogOverTime(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingLog})
		s.backwards = true
		var all, stretch admissions
		latest := int64(0)
		for range 80 {
			_, r, state := s.do(take)
			if state.Allowed && r.Cost > 0 {
				if n := len(stretch); n > 0 && stretch[n-1].at > s.now {
					stretch = nil
				}
				all.add(s.now, r.Cost)
				stretch.add(s.now, r.Cost)
				latest = max(latest, s.now)
				if got := all.since(latest - s.window()); got > s.events {
					t.Fatalf("%d of %d taken after %d: %v", got, s.events, latest-s.window(), all)
				}
				if got := stretch.most(s.window()); got > s.events {
					t.Fatalf("%d of %d taken in an interval of one window: %v", got, s.events, stretch)
				}
			}
			s.pass()
		}
	})
}

// TestSlidingLogIsBounded: a bucket charged beyond every limit has bounded memory, and
// counts no less for it.
func TestSlidingLogIsBounded(t *testing.T) {
	limit := store.Limit{Algorithm: store.SlidingLog, Window: time.Hour}
	for _, cost := range []int64{50, 700, store.MaxMembers, store.MaxInteger} {
		b := algorithm.New(&limit)
		for i := range 2 * store.MaxMembers / min(cost, 700) {
			r := store.Request{Limit: &limit, Events: 1 + i%7, Cost: cost, ID: strconv.FormatInt(i, 10)}
			charge.Run(b, &r, origin+i)
		}
		if n := algorithm.Members(b); n <= store.MaxMembers || n > 2*store.MaxMembers {
			t.Errorf("cost %d: the log holds %d events", cost, n)
		}
		r := store.Request{Limit: &limit, Events: store.MaxMembers, Cost: 1, ID: "last"}
		if st := check.Run(b, &r, origin+1e6); st.Allowed || st.Used != store.MaxMembers+1 {
			t.Errorf("cost %d: %+v", cost, st)
		}
	}
}

// TestSlidingLogRemembersForEveryLimit: what one request may use says nothing about what
// another one finds.
func TestSlidingLogRemembersForEveryLimit(t *testing.T) {
	limit := store.Limit{Algorithm: store.SlidingLog, Window: time.Hour}
	b := algorithm.New(&limit)
	for i := range int64(100) {
		for op, events := range map[algorithm.Operation]int64{charge: 1, take: 1000} {
			r := store.Request{Limit: &limit, Events: events, Cost: 1, ID: fmt.Sprint(op, i)}
			op.Run(b, &r, origin+i)
		}
	}
	r := store.Request{Limit: &limit, Events: 200, Cost: 1, ID: "last"}
	if st := take.Run(b, &r, origin+1000); st.Allowed || st.Used != 200 {
		t.Errorf("after 200 requests of different limits: %+v", st)
	}
}

func TestConcurrency(t *testing.T) {
	const s, m = time.Second, time.Minute
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.Concurrency, Window: m}, Events: 5}, []step{
		{at: 0, op: check, cost: 1, allowed: true, used: 0, remaining: 5},
		{at: 0, op: take, cost: 2, allowed: true, used: 2, remaining: 3},
		{at: 10 * s, op: take, cost: 3, allowed: true, used: 5, remaining: 0},
		// When a slot becomes free is unknown.
		{at: 11 * s, op: take, cost: 1, allowed: false, used: 5, remaining: 0, retry: s},
		{at: 11 * s, op: take, cost: 6, allowed: false, used: 5, remaining: 0, retry: store.Never},
		{at: 12 * s, op: refund, cost: 2, used: 3, remaining: 2},
		{at: 13 * s, op: refund, cost: 2, used: 3, remaining: 2},
		// A lease ends after a window.
		{at: 70*s - time.Microsecond, op: check, cost: 0, allowed: true, used: 3, remaining: 2},
		{at: 70 * s, op: check, cost: 0, allowed: true, used: 0, remaining: 5},
		// A charge counts in any case.
		{at: 71 * s, op: charge, cost: 9, allowed: false, used: 9, remaining: 0, retry: s},
		{at: 72 * s, op: charge, cost: 1, allowed: false, used: 10, remaining: 0, retry: s},
	})
}

// TestLeasesAreRenewed: a charge of the same request, and of no other, makes its leases
// last for another window.
func TestLeasesAreRenewed(t *testing.T) {
	limit := store.Limit{Algorithm: store.Concurrency, Window: time.Minute}
	b := algorithm.New(&limit)
	renewed := store.Request{Limit: &limit, Events: 5, Cost: 2, ID: "renewed"}
	other := store.Request{Limit: &limit, Events: 5, Cost: 1, ID: "other"}
	take.Run(b, &renewed, origin)
	take.Run(b, &other, origin)
	for i, want := range []int64{3, 3, 2, 2} {
		now := origin + int64(i)*40e6
		if got := charge.Run(b, &renewed, now).Used; got != want {
			t.Errorf("%d leases after %d renewals, want %d", got, i+1, want)
		}
	}
	if got := refund.Run(b, &renewed, origin+121e6).Used; got != 0 {
		t.Errorf("%d leases after the last ended, want 0", got)
	}
	// An ended lease is taken again.
	if got := charge.Run(b, &other, origin+300e6).Used; got != 1 {
		t.Errorf("%d leases after a renewal that came late, want 1", got)
	}
}

// TestNeverMoreLeasesThanEvents counts the leases that were neither refunded nor have
// ended. Its clock stands still where the real one runs backwards.
func TestNeverMoreLeasesThanEvents(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.Concurrency})
		s.backwards = true
		type lease struct {
			store.Request
			until int64
		}
		var running []lease
		latest := s.now
		for range 80 {
			latest = max(latest, s.now)
			if len(running) > 0 && t.maybe("again") {
				i := number(t, "which", 0, int64(len(running))-1)
				if t.maybe("end") {
					refund.Run(s.bucket, &running[i].Request, s.now)
					running = append(running[:i], running[i+1:]...)
				} else if running[i].until > latest {
					charge.Run(s.bucket, &running[i].Request, s.now)
					running[i].until = s.now + s.window()
				}
			}
			_, r, state := s.do(take)
			if state.Allowed {
				running = append(running, lease{r, s.now + s.window()})
			}
			live := int64(0)
			for _, l := range running {
				if l.until > latest {
					live += l.Cost
				}
			}
			if live > s.events {
				t.Fatalf("%d leases of %d at %d: %+v", live, s.events, latest, running)
			}
			s.pass()
		}
	})
}

// TestEndedLeasesAreRemoved by the next operation, and not earlier.
func TestEndedLeasesAreRemoved(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.Concurrency})
		for range 30 {
			op, r, state := s.do(charge, take, refund)
			if n := algorithm.Members(s.bucket); n != state.Used {
				t.Fatalf("%d leases are kept after %s of %+v: %+v", n, op, r, state)
			}
			s.pass()
		}
	})
}
