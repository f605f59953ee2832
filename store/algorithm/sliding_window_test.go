package algorithm_test

import (
	"math/big"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestSlidingWindow(t *testing.T) {
	const s = 10 * time.Millisecond
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.SlidingWindow, Window: 60 * s}, Events: 12}, []step{
		{at: 10 * s, op: check, cost: 1, allowed: true, used: 0, remaining: 12, reset: 10 * s},
		{at: 15 * s, op: take, cost: 9, allowed: true, used: 9, remaining: 3, reset: 120 * s},
		// 4 of the 9 have to leave: 4/9 of the next window.
		{at: 50 * s, op: take, cost: 7, allowed: false, used: 9, remaining: 3, reset: 120 * s, retry: 366667 * time.Microsecond},
		{at: 60 * s, op: check, cost: 0, allowed: true, used: 9, remaining: 3, reset: 120 * s},
		// 9 × 30/60, rounded up.
		{at: 90 * s, op: check, cost: 7, allowed: true, used: 5, remaining: 7, reset: 120 * s},
		{at: 90 * s, op: take, cost: 3, allowed: true, used: 8, remaining: 4, reset: 180 * s},
		{at: 119 * s, op: check, cost: 0, allowed: true, used: 4, remaining: 8, reset: 180 * s},
		{at: 120 * s, op: check, cost: 0, allowed: true, used: 3, remaining: 9, reset: 180 * s},
		// The clock runs backwards: all of the window before counts.
		{at: 30 * s, op: check, cost: 0, allowed: true, used: 12, remaining: 0, reset: 180 * s},
		{at: 91 * s, op: refund, cost: 9, used: 3, remaining: 9, reset: 180 * s},
		{at: 121 * s, op: refund, cost: 3, used: 0, remaining: 12, reset: 121 * s},
		{at: 122 * s, op: charge, cost: 20, allowed: false, used: 20, remaining: 0, reset: 240 * s, retry: 82 * s},
		{at: 200 * s, op: take, cost: 13, allowed: false, used: 14, remaining: 0, reset: 240 * s, retry: store.Never},
		{at: 240 * s, op: check, cost: 12, allowed: true, used: 0, remaining: 12, reset: 240 * s},
	})
}

// TestSlidingWindowEstimate: the previous window counts by its share of the overlap,
// rounded up, in at most 2^20 parts of a window.
func TestSlidingWindowEstimate(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingWindow})
		w := s.window()
		spent := oneOf(between(0, 100), between(0, store.MaxWeighted)).draw(t, "spent")
		s.bucket.Charge(&store.Request{Limit: &s.limit, Events: 1, Cost: spent}, s.now-s.now%w)
		left := number(t, "left", 1, w)
		got := s.after(check, store.Request{Limit: &s.limit, Events: 1}, s.now-s.now%w+2*w-left).Used

		unit := algorithm.WeightUnit(w)
		if unit > 1 && w/unit < 1<<19 {
			t.Fatalf("a window of %d is cut into parts of %d", w, unit)
		}
		ceil := func(left int64) int64 {
			n := new(big.Int).Mul(big.NewInt(spent), big.NewInt(left))
			n.Add(n, big.NewInt(w-1))
			return n.Div(n, big.NewInt(w)).Int64()
		}
		if least, most := ceil(left-unit), ceil(left+unit); got < least || got > most || unit == 1 && got != ceil(left) {
			t.Fatalf("%d spent, %d of %d left: %d count, want %d to %d", spent, left, w, got, least, most)
		}
	})
}

// TestSlidingWindowTakesWithinItsEstimate computes the estimate from the takes.
func TestSlidingWindowTakesWithinItsEstimate(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingWindow})
		w := s.window()
		taken := map[int64]int64{} // by window
		for range 60 {
			_, r, state := s.do(take)
			if start := s.now - s.now%w; state.Allowed {
				taken[start] += r.Cost
				// The estimate without any rounding; nothing may be beyond it.
				used := new(big.Rat).Mul(big.NewRat(taken[start-w], 1), big.NewRat(start+w-s.now, w))
				used.Add(used, big.NewRat(taken[start], 1))
				if r.Cost > 0 && used.Cmp(big.NewRat(r.Capacity(), 1)) > 0 {
					t.Fatalf("at %d %v count of %d", s.now, used, r.Capacity())
				}
			}
			s.pass()
		}
	})
}

// slidingBound is the most that can be taken in an interval of n windows: what
// fits into one, and for each further window one less, since at least one event
// of the window before always counts. A single event of a window fills all of
// the next one.
func slidingBound(events, n int64) int64 {
	if events == 1 {
		return 1 + n/2
	}
	return events + n*(events-1)
}

// TestSlidingWindowBound reaches slidingBound.
func TestSlidingWindowBound(t *testing.T) {
	const events, window = 10, int64(60_000_000)
	limit := store.Limit{Algorithm: store.SlidingWindow, Window: micros(window)}
	for n := range int64(6) {
		b := algorithm.New(&limit)
		var log admissions
		// The worst are bursts right before the ends of windows, each a little
		// earlier than the one before.
		for i := range n + 1 {
			at := origin + (i+1)*window - 1 - i
			for take.Run(b, &store.Request{Limit: &limit, Events: events, Cost: 1}, at).Allowed {
				log.add(at, 1)
			}
		}
		if got, want := log.most(max(n*window, 1)), slidingBound(events, n); got != want {
			t.Errorf("%d taken in an interval of %d windows, want %d", got, n, want)
		}
	}
}

// TestSlidingWindowStaysWithinItsBound holds random traffic to the same bound.
func TestSlidingWindowStaysWithinItsBound(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingWindow})
		var log admissions
		for range 80 {
			r := store.Request{Limit: &s.limit, Events: s.events, Cost: number(t, "cost", 1, s.events)}
			if take.Run(s.bucket, &r, s.now).Allowed {
				log.add(s.now, r.Cost)
			}
			s.pass()
		}
		for n := range int64(4) {
			if got, bound := log.most(max(n*s.window(), 1)), slidingBound(s.events, n); got > bound {
				t.Fatalf("%d taken in an interval of %d windows, want at most %d: %v", got, n, bound, log)
			}
		}
	})
}

// TestSlidingWindowOverTime holds each window to its capacity while time stands still,
// jumps and runs backwards. A take before the current window counts in the current one.
func TestSlidingWindowOverTime(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingWindow})
		s.backwards = true
		taken := map[int64]int64{}
		latest := int64(0)
		for range 60 {
			_, r, state := s.do(take)
			if state.Allowed && r.Cost > 0 {
				w := s.window()
				latest = max(latest, s.now)
				start := latest - latest%w
				taken[start] += r.Cost
				if taken[start]+min(taken[start-w], 1) > r.Capacity() {
					t.Fatalf("%d taken after %d of %d", taken[start], taken[start-w], r.Capacity())
				}
			}
			s.pass()
		}
	})
}
