package algorithm_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestEarlierIsNeverMore requires that a bucket never has more left, and never
// admits more, at an instant before another. So a clock that runs backwards
// gives nothing.
func TestEarlierIsNeverMore(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied, s.backwards = true, true
		s.live(check, charge, take, penalize)
		r := s.request()
		at := s.now
		s.pass()
		early, late := min(at, s.now), max(at, s.now)
		before, after := s.bucket.View(&r, early, false), s.bucket.View(&r, late, false)
		if before.Remaining > after.Remaining || before.Allowed && !after.Allowed {
			t.Fatalf("earlier %+v,\nlater %+v", before, after)
		}
	})
}

// TestTimeThatStandsStill requires that at one instant no more than the
// capacity is taken, and that nothing comes back.
func TestTimeThatStandsStill(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		sum := int64(0)
		for range 40 {
			_, r, state := s.do(check, take)
			if state.Receipt != (store.Receipt{}) || keepsMembers(kind) && state.Used > sum {
				sum += r.Cost // it was a take, and it was allowed
			}
			most := s.events
			if kind.Algorithm == store.GCRA {
				most *= 2 // the highest burst
			}
			if state.Used != sum || sum > most {
				t.Fatalf("%d taken at once of %d: %+v", sum, most, state)
			}
		}
	})
}

// TestAnyNumbers goes through histories with numbers of any size, refunds of
// what was never taken, and instants in any order: nothing may overflow or
// panic, and a charge never leaves less spent.
func TestAnyNumbers(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		amount := rapid.OneOf(
			rapid.Int64Range(0, 10), rapid.Int64Range(0, store.MaxInteger), rapid.Int64Range(store.MaxInteger-3, store.MaxInteger),
		)
		most := int64(store.MaxInteger)
		switch kind.Algorithm {
		case store.SlidingWindow:
			most = store.MaxWeighted
		case store.SlidingLog, store.Concurrency:
			most = 200 // there may be more, but they take long
		}
		const century = 100 * 365 * 24 * 3600 * int64(1e6)
		s := newSubject(t, kind)
		s.limit.Window = micros(rapid.OneOf(rapid.Int64Range(1, 100), rapid.Int64Range(1, century)).Draw(t, "window"))
		for range 30 {
			s.now = rapid.OneOf(rapid.Int64Range(0, 3e15), rapid.Just(s.now)).Draw(t, "now")
			r := s.request()
			r.Events = 1 + amount.Draw(t, "events")%most
			r.Burst, r.Cost, r.Until = amount.Draw(t, "burst"), amount.Draw(t, "cost"), amount.Draw(t, "until")
			r.Reserved = amount.Draw(t, "reserved") % (r.Events + 1)
			r.Receipt = store.Receipt{
				Period:   rapid.OneOf(amount, rapid.Just(s.now), rapid.Just(s.now-s.now%s.window())).Draw(t, "period"),
				Position: amount.Draw(t, "position"),
			}
			do := rapid.SampledFrom([]op{check, charge, take, refund, penalize}).Draw(t, "operation")
			if do == check {
				r.Ahead = amount.Draw(t, "ahead")
			}
			before := s.bucket.View(&r, s.now, false)
			got := do.Run(s.bucket, &r, s.now)
			if got.Used < 0 || got.Used > store.MaxInteger || got.Remaining < 0 || got.Remaining > got.Limit ||
				got.Reset < 0 || got.RetryAfter < 0 || s.bucket.Weight(&s.limit) < 0 || s.bucket.Expiry(&s.limit) < 0 {
				t.Fatalf("%s of %+v: %+v", do, r, got)
			}
			if do == charge && got.Used < min(before.Used, r.Events) {
				t.Fatalf("charge of %+v: %+v,\nbefore it %+v", r, got, before)
			}
			if do == take && got.Used > max(before.Used, r.Capacity()) {
				t.Fatalf("take of %+v: %+v,\nbefore it %+v", r, got, before)
			}
		}
	})
}
