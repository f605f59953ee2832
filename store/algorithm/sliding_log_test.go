package algorithm_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestSlidingLog(t *testing.T) {
	const s, m = time.Second, time.Minute
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.SlidingLog, Window: m}, Events: 5}, []step{
		{at: 10 * s, op: check, cost: 1, allowed: true, used: 0, remaining: 5, reset: 10 * s},
		{at: 10 * s, op: take, cost: 2, allowed: true, used: 2, remaining: 3, reset: 70 * s},
		{at: 30 * s, op: take, cost: 3, allowed: true, used: 5, remaining: 0, reset: 90 * s},
		// One or two have to go, then one more.
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
		{at: 50 * s, op: take, cost: 2, allowed: false, used: 4, remaining: 1, reset: 134 * s, retry: 84 * s},
	})
}

// TestSlidingLogIsExact requires that in every interval of one window no more
// than the events are taken, and that nothing is refused that would have
// fitted.
func TestSlidingLogIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
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

// TestSlidingLogOverTime requires that what is less than a window old, or
// ahead, is never more than the events, however time runs; and that where it
// runs forwards again no interval of one window has more than the events.
func TestSlidingLogOverTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
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

// TestSlidingLogKeepsNoMoreThanItNeeds bounds the memory of a bucket that is
// charged beyond its limit, and lets what is over go with the next charge.
func TestSlidingLogKeepsNoMoreThanItNeeds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newSubject(t, store.Limit{Algorithm: store.SlidingLog})
		for range 30 {
			_, r, state := s.do(charge)
			if n := s.bucket.Weight(&s.limit); n > s.events+1 || r.Cost > 0 && n != state.Used {
				t.Fatalf("the log holds %d of %d events: %+v", n, s.events, state)
			}
			s.pass()
		}
	})
}
