package algorithm_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestConcurrency(t *testing.T) {
	const s, m = time.Second, time.Minute
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.Concurrency, Window: m}, Events: 5}, []step{
		{at: 0, op: check, cost: 1, allowed: true, used: 0, remaining: 5},
		{at: 0, op: take, cost: 2, allowed: true, used: 2, remaining: 3},
		{at: 10 * s, op: take, cost: 3, allowed: true, used: 5, remaining: 0},
		// Nobody knows when a slot becomes free.
		{at: 11 * s, op: take, cost: 1, allowed: false, used: 5, remaining: 0, retry: s},
		{at: 11 * s, op: take, cost: 6, allowed: false, used: 5, remaining: 0, retry: store.Never},
		{at: 12 * s, op: refund, cost: 2, used: 3, remaining: 2},
		{at: 13 * s, op: refund, cost: 2, used: 3, remaining: 2},
		// A lease ends after a window.
		{at: 70*s - time.Microsecond, op: check, cost: 0, allowed: true, used: 3, remaining: 2},
		{at: 70 * s, op: check, cost: 0, allowed: true, used: 0, remaining: 5},
		// A charge counts in any case, but not by more than shows that it is too much.
		{at: 71 * s, op: charge, cost: 9, allowed: false, used: 6, remaining: 0, retry: s},
		{at: 72 * s, op: charge, cost: 1, allowed: false, used: 7, remaining: 0, retry: s},
	})
}

// TestLeasesAreRenewed requires that a charge of the same request makes its
// leases last for another window, and of no other.
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
	// One that has ended is taken again.
	if got := charge.Run(b, &other, origin+300e6).Used; got != 1 {
		t.Errorf("%d leases after a renewal that came late, want 1", got)
	}
}

// TestNeverMoreLeasesThanEvents counts the leases that were taken and neither
// refunded nor at their end, by a clock that does not run backwards where the
// real one does.
func TestNeverMoreLeasesThanEvents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
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
			if len(running) > 0 && rapid.Bool().Draw(t, "again") {
				i := number(t, "which", 0, int64(len(running))-1)
				if rapid.Bool().Draw(t, "end") {
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

// TestLeasesThatEndedAreNotKept requires that they go with whatever is done
// next, and no sooner.
func TestLeasesThatEndedAreNotKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newSubject(t, store.Limit{Algorithm: store.Concurrency})
		for range 30 {
			op, r, state := s.do(charge, take, refund)
			if n := s.bucket.Weight(&s.limit); n != state.Used {
				t.Fatalf("%d leases are kept after %s of %+v: %+v", n, op, r, state)
			}
			s.pass()
		}
	})
}
