package algorithm_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestFixedWindow(t *testing.T) {
	const s, m = time.Second, time.Minute
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.FixedWindow, Window: m}, Events: 10}, []step{
		// The first request opens the window, whatever it is.
		{at: 20 * s, op: check, cost: 4, allowed: true, used: 0, remaining: 10, reset: 80 * s},
		{at: 30 * s, op: take, cost: 4, allowed: true, used: 4, remaining: 6, reset: 80 * s},
		{at: 31 * s, op: take, cost: 7, allowed: false, used: 4, remaining: 6, reset: 80 * s, retry: 49 * s},
		{at: 32 * s, op: take, cost: 6, allowed: true, used: 10, remaining: 0, reset: 80 * s},
		{at: 33 * s, op: check, cost: 0, allowed: true, used: 10, remaining: 0, reset: 80 * s},
		{at: 34 * s, op: check, cost: 1, allowed: false, used: 10, remaining: 0, reset: 80 * s, retry: 46 * s},
		{at: 35 * s, op: charge, cost: 2, allowed: false, used: 12, remaining: 0, reset: 80 * s, retry: 45 * s},
		{at: 36 * s, op: refund, cost: 6, used: 6, remaining: 4, reset: 80 * s},
		{at: 37 * s, op: check, cost: 11, allowed: false, used: 6, remaining: 4, reset: 80 * s, retry: store.Never},
		// The instant of the reset is no longer part of the window.
		{at: 80*s - 1*time.Microsecond, op: check, cost: 5, allowed: false, used: 6, remaining: 4, reset: 80 * s, retry: time.Microsecond},
		{at: 80 * s, op: charge, cost: 5, allowed: true, used: 5, remaining: 5, reset: 140 * s},
		// The takes of an earlier window are gone.
		{at: 81 * s, op: refund, cost: 4, used: 5, remaining: 5, reset: 140 * s},
		// The clock runs backwards: the window remains.
		{at: 76 * s, op: take, cost: 6, allowed: false, used: 5, remaining: 5, reset: 140 * s, retry: 64 * s},
	})
}

func TestFixedWindowAligned(t *testing.T) {
	const s, m = time.Second, time.Minute
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.FixedWindow, Window: m, Align: true}, Events: 3}, []step{
		{at: 59 * s, op: take, cost: 3, allowed: true, used: 3, remaining: 0, reset: 60 * s},
		{at: 59 * s, op: take, cost: 1, allowed: false, used: 3, remaining: 0, reset: 60 * s, retry: s},
		{at: 60 * s, op: take, cost: 3, allowed: true, used: 3, remaining: 0, reset: 120 * s},
		{at: 200 * s, op: check, cost: 1, allowed: true, used: 0, remaining: 3, reset: 240 * s},
	})
}

func TestZeroValueIsClosed(t *testing.T) {
	if new(algorithm.FixedWindow).IsOpen(0) {
		t.Error("a window that was never opened is open at the epoch")
	}
}

func TestIsOpen(t *testing.T) {
	b := &algorithm.FixedWindow{Reset: 1000}
	for now, want := range map[int64]bool{0: true, 998: true, 999: true, 1000: false, 1001: false, 1 << 52: false} {
		if got := b.IsOpen(now); got != want {
			t.Errorf("open at %d: %t, want %t", now, got, want)
		}
	}
}

// TestFixedWindowIsOpenedOnce: a window's reset is chosen when it opens, and stays.
func TestFixedWindowIsOpenedOnce(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, among(t, "kind", kinds[:2]))
		s.backwards = true
		b := s.bucket.(*algorithm.FixedWindow)
		for range 30 {
			before := *b
			op, _, _ := s.do(check, charge, take)
			want := s.now + s.window()
			if s.limit.Align {
				want = (s.now/s.window() + 1) * s.window()
			}
			// A window that follows the clock has its reset without being stored.
			if before.IsOpen(s.now) || s.limit.Align && op == check {
				want = before.Reset
			}
			if b.Reset != want {
				t.Fatalf("at %d the window of %d is %+v after %+v, want reset %d", s.now, s.window(), *b, before, want)
			}
			s.pass()
		}
	})
}

// TestFixedWindowNeverTakesMoreThanItsCapacity counts by window, over time
// that stands still, jumps and runs backwards.
func TestFixedWindowNeverTakesMoreThanItsCapacity(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, among(t, "kind", kinds[:2]))
		s.backwards = true
		taken := map[int64]int64{}
		latest := int64(0)
		for range 50 {
			_, r, state := s.do(take)
			if state.Reset < latest {
				t.Fatalf("went back from the window until %d to that until %d", latest, state.Reset)
			}
			latest = state.Reset
			if state.Allowed {
				taken[state.Reset] += r.Cost
				if r.Cost > 0 && taken[state.Reset] > r.Capacity() {
					t.Fatalf("%d taken of %d until %d", taken[state.Reset], r.Capacity(), state.Reset)
				}
			}
			s.pass()
		}
	})
}

// TestFixedWindowBound shows how much can be taken in an interval of one
// window: twice the events if windows are aligned or were opened by a request
// that spent nothing, and one less if the first taker opened its own.
func TestFixedWindowBound(t *testing.T) {
	const events, window = 10, int64(60_000_000)
	for _, c := range []struct {
		name  string
		align bool
		open  algorithm.Operation // what happens half a window before the burst
		cost  int64
		want  int64
	}{
		{name: "aligned", align: true, open: take, cost: 0, want: 2 * events},
		{name: "opened by a check", open: check, cost: 1, want: 2 * events},
		{name: "opened by a take", open: take, cost: 1, want: 2*events - 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			limit := store.Limit{Algorithm: store.FixedWindow, Window: micros(window), Align: c.align}
			b := algorithm.New(&limit)
			c.open.Run(b, &store.Request{Limit: &limit, Events: events, Cost: c.cost}, origin)
			got := int64(0)
			for _, at := range []int64{origin + window - 1, origin + window, origin + 2*window - 2} {
				for take.Run(b, &store.Request{Limit: &limit, Events: events, Cost: 1}, at).Allowed {
					got++
				}
			}
			if got != c.want {
				t.Errorf("%d taken in an interval of one window, want %d", got, c.want)
			}
		})
	}
}

// TestFixedWindowStaysWithinItsBound holds random traffic to the same bound.
func TestFixedWindowStaysWithinItsBound(t *testing.T) {
	for _, align := range []bool{false, true} {
		forAll(t, func(t *trial) {
			s := newSubject(t, store.Limit{Algorithm: store.FixedWindow, Align: align})
			bound := 2 * s.events
			if !align {
				bound--
			}
			var log admissions
			for range 60 {
				r := store.Request{Limit: &s.limit, Events: s.events, Cost: number(t, "cost", 1, s.events)}
				if take.Run(s.bucket, &r, s.now).Allowed {
					log.add(s.now, r.Cost)
				}
				s.pass()
			}
			if got := log.most(s.window()); got > bound {
				t.Fatalf("%d taken in an interval of one window, want at most %d: %v", got, bound, log)
			}
		})
	}
}
