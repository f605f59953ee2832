package algorithm_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const minute = int64(60_000_000)

func TestZeroValueIsClosed(t *testing.T) {
	if (algorithm.FixedWindow{}).IsOpen(0) {
		t.Error("a window that was never opened is open at the epoch")
	}
}

func TestIsOpen(t *testing.T) {
	b := algorithm.FixedWindow{Reset: 1000}
	for now, want := range map[int64]bool{0: true, 998: true, 999: true, 1000: false, 1001: false, 1 << 52: false} {
		if got := b.IsOpen(now); got != want {
			t.Errorf("open at %d: %t, want %t", now, got, want)
		}
	}
}

func TestCheck(t *testing.T) {
	const now, reset = 1000, 1500
	for _, c := range []struct {
		used, events, cost int64
		allowed            bool
		remaining          int64
	}{
		{used: 0, events: 1, cost: 0, allowed: true, remaining: 1},
		{used: 0, events: 1, cost: 1, allowed: true, remaining: 1},
		{used: 0, events: 1, cost: 2, allowed: false, remaining: 1},
		{used: 1, events: 1, cost: 0, allowed: true, remaining: 0},
		{used: 1, events: 1, cost: 1, allowed: false, remaining: 0},
		{used: 2, events: 1, cost: 0, allowed: false, remaining: 0},
		{used: 3, events: 10, cost: 7, allowed: true, remaining: 7},
		{used: 3, events: 10, cost: 8, allowed: false, remaining: 7},
		{used: store.MaxInteger, events: store.MaxInteger, cost: 0, allowed: true, remaining: 0},
		{used: store.MaxInteger, events: store.MaxInteger, cost: 1, allowed: false, remaining: 0},
		{used: store.MaxInteger, events: 1, cost: store.MaxInteger, allowed: false, remaining: 0},
	} {
		want := store.State{
			Allowed: c.allowed, Limit: c.events, Used: c.used, Remaining: c.remaining, Reset: reset, Now: now,
		}
		if !c.allowed {
			want.RetryAfter = 500 * time.Microsecond
		}
		if got := (algorithm.FixedWindow{Used: c.used, Reset: reset}).Check(now, c.events, c.cost); got != want {
			t.Errorf("check of %+v:\n got %+v\nwant %+v", c, got, want)
		}
	}
}

// step is what may happen to a bucket.
type step struct {
	passed, cost, events int64
	charge               bool
}

// steps draws what happens to one bucket, with a window and the instant at
// which it begins. All sums stay where a store's arithmetic is exact.
func steps(t *rapid.T) (now, window int64, steps []step) {
	now = rapid.Int64Range(0, 4_000_000_000_000_000).Draw(t, "now") // until 2096
	window = rapid.OneOf(
		rapid.Just(int64(1)), rapid.Just(int64(999)), rapid.Just(minute), rapid.Int64Range(1, 24*60*minute),
	).Draw(t, "window")
	amount := rapid.OneOf(
		rapid.Int64Range(0, 10), rapid.Int64Range(0, store.MaxInteger), rapid.Just(int64(store.MaxInteger)),
	)
	steps = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) step {
		return step{
			passed: rapid.OneOf(
				rapid.Just(int64(0)), rapid.Int64Range(0, window), rapid.Just(window-1), rapid.Just(window),
				rapid.Int64Range(0, 10*window),
			).Draw(t, "passed"),
			cost:   amount.Draw(t, "cost"),
			events: max(amount.Draw(t, "events"), 1),
			charge: rapid.Bool().Draw(t, "charge"),
		}
	}), 1, 50).Draw(t, "steps")
	return now, window, steps
}

func TestWindowProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, window, steps := steps(t)
		var b algorithm.FixedWindow
		for i, s := range steps {
			now += s.passed
			before := b
			if s.charge {
				b = b.Charge(now, window, s.cost)
			} else {
				b = b.Open(now, window)
			}
			switch {
			case !b.IsOpen(now):
				t.Fatalf("step %d: %+v is closed at %d", i, b, now)
			case before.IsOpen(now) && b.Reset != before.Reset:
				t.Fatalf("step %d: reset of an open window went from %d to %d", i, before.Reset, b.Reset)
			case !before.IsOpen(now) && b.Reset != now+window:
				t.Fatalf("step %d: window of %d opened at %d has reset %d", i, window, now, b.Reset)
			}
			spent := int64(0)
			if before.IsOpen(now) {
				spent = before.Used
			}
			if b.Used < spent || b.Used > store.MaxInteger {
				t.Fatalf("step %d: count went from %d to %d", i, spent, b.Used)
			}
			if s.charge {
				spent = saturated(spent, s.cost)
			}
			if b.Used != spent {
				t.Fatalf("step %d: count is %d, want %d", i, b.Used, spent)
			}
		}
	})
}

func TestStateProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, window, steps := steps(t)
		var b algorithm.FixedWindow
		for i, s := range steps {
			now += s.passed
			b = b.Open(now, window)
			checked := b.Check(now, s.events, s.cost)
			verify(t, b, checked, now, s.events)
			if !s.charge {
				continue
			}
			exact := b.Used <= store.MaxInteger-s.cost
			b = b.Charge(now, window, s.cost)
			charged := b.Charged(now, s.events)
			verify(t, b, charged, now, s.events)
			// Where the count is exact, a charge fits if its check did.
			if exact && charged.Allowed != checked.Allowed {
				t.Fatalf("step %d: check says %+v, charge %+v", i, checked, charged)
			}
		}
	})
}

// verify requires what is true of every state of the open window b.
func verify(t *rapid.T, b algorithm.FixedWindow, s store.State, now, events int64) {
	switch {
	case s.Limit != events || s.Used != b.Used || s.Reset != b.Reset || s.Now != now || s.Err != nil:
		t.Fatalf("state of %+v with %d events at %d: %+v", b, events, now, s)
	case s.Remaining < 0 || s.Remaining > events || s.Remaining > 0 && s.Used+s.Remaining != events:
		t.Fatalf("remaining is wrong: %+v", s)
	case s.Allowed && s.RetryAfter != 0:
		t.Fatalf("allowed, but to be retried: %+v", s)
	case !s.Allowed && s.RetryAfter != time.Duration(s.Reset-s.Now)*time.Microsecond:
		t.Fatalf("refused, and to be retried at another instant than the reset: %+v", s)
	case !s.Allowed && s.RetryAfter <= 0:
		t.Fatalf("refused, and to be retried at once: %+v", s)
	}
}

func TestChargeOfNothingOnlyOpens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := algorithm.FixedWindow{
			Used:  rapid.Int64Range(0, store.MaxInteger).Draw(t, "used"),
			Reset: rapid.Int64Range(0, 100).Draw(t, "reset"),
		}
		now := rapid.Int64Range(0, 100).Draw(t, "now")
		if got, want := b.Charge(now, minute, 0), b.Open(now, minute); got != want {
			t.Fatalf("charge of nothing makes %+v of %+v, want %+v", got, b, want)
		}
	})
}

// TestChargesAdd requires that costs count the same one by one and at once.
func TestChargesAdd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var one, all algorithm.FixedWindow
		sum := int64(0)
		for _, cost := range rapid.SliceOf(rapid.Int64Range(0, store.MaxInteger)).Draw(t, "costs") {
			one = one.Charge(0, minute, cost)
			sum = saturated(sum, cost)
		}
		one = one.Open(0, minute)
		if all = all.Charge(0, minute, sum); one != all {
			t.Fatalf("one by one: %+v, at once: %+v", one, all)
		}
	})
}

// saturated adds in a way that cannot overflow.
func saturated(a, b int64) int64 {
	if a > store.MaxInteger-b {
		return store.MaxInteger
	}
	return a + b
}
