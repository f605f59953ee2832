package algorithm_test

import (
	"fmt"
	"math/big"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestMulDiv compares mulDiv with arithmetic of any precision.
func TestMulDiv(t *testing.T) {
	forAll(t, func(t *trial) {
		integer := oneOf(between(0, 100), between(0, store.MaxInteger))
		a, b, c := integer.draw(t, "a"), integer.draw(t, "b"), max(integer.draw(t, "c"), 1)
		product := new(big.Int).Mul(big.NewInt(a), big.NewInt(b))
		quotient, rest := product.QuoRem(product, big.NewInt(c), new(big.Int))
		if most := big.NewInt(store.MaxInteger); quotient.Cmp(most) > 0 {
			quotient, rest = most, big.NewInt(0)
		}
		if q, r := algorithm.MulDiv(a, b, c); q != quotient.Int64() || r != rest.Int64() {
			t.Fatalf("%d × %d / %d = %d, rest %d, want %v, rest %v", a, b, c, q, r, quotient, rest)
		}
	})
}

// TestNewKnowsTheAlgorithms: each has a kind of bucket that is called like it.
func TestNewKnowsTheAlgorithms(t *testing.T) {
	for _, kind := range kinds {
		_, bucket, _ := strings.Cut(fmt.Sprintf("%T", algorithm.New(&kind)), ".")
		if name := strings.ReplaceAll(kind.Algorithm.String(), "_", ""); !strings.EqualFold(bucket, name) {
			t.Errorf("New(%s) is a %s", kind.Algorithm, bucket)
		}
	}
}

// anyBucket draws a bucket of any content.
func anyBucket(t *trial, kind store.Limit, ops ...algorithm.Operation) *subject {
	s := newSubject(t, kind)
	s.live(ops...)
	return s
}

// TestViewChangesNothing: a view leaves the bucket as it is.
func TestViewChangesNothing(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take, penalize)
		before := algorithm.Clone(s.bucket)
		r := s.request()
		s.bucket.View(&r, s.now, t.maybe("spent"))
		if !reflect.DeepEqual(before, s.bucket) {
			t.Fatalf("%+v became %+v", before, s.bucket)
		}
	})
}

// TestTakeAgreesWithCheck: a take spends exactly what its check says fits.
func TestTakeAgreesWithCheck(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied, s.backwards = true, true
		s.live(check, charge, take, penalize)
		r := s.request()
		checked := check.Run(s.bucket, &r, s.now)
		took := take.Run(s.bucket, &r, s.now)
		want := checked.Used
		if checked.Allowed {
			want += r.Cost
		}
		if took.Allowed != checked.Allowed || took.Used != want {
			t.Fatalf("check says %+v, take %+v", checked, took)
		}
	})
}

// TestChargeReportsWhetherItFit: a charge is allowed if its check was, and counts in
// any case.
func TestChargeReportsWhetherItFit(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = kind.Algorithm != store.SlidingLog // fewer events shorten the log
		s.live(check, charge, take)
		r := s.request()
		checked := check.Run(s.bucket, &r, s.now)
		charged := charge.Run(s.bucket, &r, s.now)
		want := checked.Used + r.Cost
		if keepsMembers(kind) && !checked.Allowed {
			want = charged.Used // the log keeps only a part of what does not fit
		}
		if charged.Allowed != checked.Allowed || charged.Used != want {
			t.Fatalf("check says %+v, charge %+v", checked, charged)
		}
	})
}

// TestAheadIsNotSpent: a check includes Ahead in its decision, and shows the bucket
// without it.
func TestAheadIsNotSpent(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take)
		r := s.request()
		plain := check.Run(s.bucket, &r, s.now)
		more := r
		more.Cost += number(t, "more", 0, 5)
		r.Ahead = more.Cost - r.Cost
		ahead, all := s.after(check, r, s.now), s.after(check, more, s.now)
		// What costs nothing waits for nobody.
		fits := all.Allowed || r.Cost == 0 && all.Penalty == 0
		if ahead.Allowed != fits || ahead.Used != plain.Used || ahead.Remaining != plain.Remaining ||
			ahead.Reset != plain.Reset || ahead.ResetOtherwise != plain.ResetOtherwise {
			t.Fatalf("%d ahead of %d: %+v\nwithout it %+v\nwith a cost of both %+v", r.Ahead, r.Cost, ahead, plain, all)
		}
	})
}

// TestRetryAfterIsExact: a request fits at its RetryAfter if nothing else is spent, and
// not a microsecond earlier; with Never it never fits. The wait for a slot is unknown.
func TestRetryAfterIsExact(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take, penalize)
		r := s.request()
		switch checked := check.Run(s.bucket, &r, s.now); {
		case checked.Allowed != (checked.RetryAfter == 0):
			t.Fatalf("allowed: %t, retry after %v", checked.Allowed, checked.RetryAfter)
		case (checked.RetryAfter == store.Never) != (r.Cost > r.Capacity()):
			t.Fatalf("retry after %v a cost of %d of %d", checked.RetryAfter, r.Cost, r.Capacity())
		case checked.RetryAfter == store.Never:
			if at := s.now + number(t, "long", 0, 5*s.window()); s.after(take, r, at).Allowed {
				t.Fatalf("a cost that never fits was taken at %d: %+v", at, checked)
			}
		case !checked.Allowed:
			at := s.now + checked.RetryAfter.Microseconds()
			if s.after(take, r, at-1).Allowed {
				t.Fatalf("the cost fits earlier than %+v says", checked)
			}
			if got := s.after(take, r, at); !got.Allowed {
				t.Fatalf("%+v,\nthen %+v", checked, got)
			}
		}
	}, store.Concurrency)
}

// TestResetIsExact: at the reset nothing counts, and right before it something does.
func TestResetIsExact(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take, penalize)
		r := s.request()
		r.Cost = 0
		checked := check.Run(s.bucket, &r, s.now)
		if at := s.after(check, r, checked.Reset); at.Used != 0 || at.Penalty != 0 {
			t.Fatalf("%+v,\nat the reset %+v", checked, at)
		}
		if before := s.after(check, r, checked.Reset-1); checked.Used > 0 && before.Used == 0 && before.Penalty == 0 {
			t.Fatalf("%+v,\nright before the reset %+v", checked, before)
		}
	}, store.Concurrency)
}

// TestResetOtherwise: it is the reset that the bucket has if the cost is spent, or is
// not.
func TestResetOtherwise(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied, s.backwards = true, true
		s.live(check, charge, take)
		r := s.request()
		checked := check.Run(s.bucket, &r, s.now)
		charged := charge.Run(s.bucket, &r, s.now)
		if checked.ResetOtherwise != charged.Reset || charged.ResetOtherwise != checked.Reset {
			t.Fatalf("check says %+v,\ncharge %+v", checked, charged)
		}
	})
}

// TestCostZeroIsFree: a cost of zero changes nothing, and fits whatever is spent, unless
// the bucket is under a penalty.
func TestCostZeroIsFree(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take, penalize)
		r := s.request()
		r.Cost = 0
		s.bucket.Open(&r, s.now)
		before := check.Run(s.bucket, &r, s.now)
		if fits := before.Penalty == 0; before.Allowed != fits {
			t.Fatalf("a cost of zero fits: %t, want %t: %+v", before.Allowed, fits, before)
		}
		took := take.Run(s.bucket, &r, s.now)
		charged := before
		if before.Penalty == 0 {
			charged = charge.Run(s.bucket, &r, s.now)
		}
		after := check.Run(s.bucket, &r, s.now)
		took.Receipt, charged.Receipt = store.Receipt{}, store.Receipt{}
		if took != before || charged != before || after != before {
			t.Fatalf("check %+v,\ntake %+v,\ncharge %+v,\ncheck %+v", before, took, charged, after)
		}
	})
}

// TestStatesMakeSense checks the invariants of every state.
func TestStatesMakeSense(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied, s.backwards = true, true
		for range 30 {
			op, r, got := s.do(check, charge, take, penalize)
			left := max(r.Capacity()-got.Used, 0)
			if got.Penalty > 0 {
				left = 0
			}
			if got.Limit != max(r.Capacity(), 0) || got.Remaining != left || got.Now != s.now || got.Used < 0 ||
				got.Allowed && got.RetryAfter != 0 || got.RetryAfter < 0 ||
				(kind.Algorithm == store.Concurrency) != (got.Reset == 0) ||
				got.Reset > 0 && got.Reset < s.now || got.Err != nil {
				t.Fatalf("%s of %+v: %+v", op, r, got)
			}
			s.pass()
		}
	})
}

// TestExpiredBucketIsEmpty: a bucket that expires loses nothing that counts.
func TestExpiredBucketIsEmpty(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take, penalize)
		r := s.request()
		at := max(s.bucket.Expiry(&s.limit), s.now)
		if got, want := check.Run(s.bucket, &r, at), check.Run(algorithm.New(&s.limit), &r, at); got != want {
			t.Fatalf("when it expires %+v,\nempty %+v", got, want)
		}
	})
}

// TestShareIsOfTheUsedCost: a bucket is full from its capacity on, when it is penalized, and
// with any lease.
func TestShareIsOfTheUsedCost(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, penalize)
		r := s.request()
		capacity := r.Capacity() + r.Reserved
		st := check.Run(s.bucket, &r, s.now)
		want := float64(st.Used) / float64(capacity)
		if st.Penalty != 0 {
			want = max(want, 1)
		}
		if algorithm.Of(kind.Algorithm).Lease {
			want = float64(st.Used)
		}
		if got := s.bucket.Share(&s.limit, capacity, s.now); got != want {
			t.Fatalf("share %v with %d of %d used, want %v", got, st.Used, capacity, want)
		}
	})
}

// TestChargesAdd: costs count the same one by one and at once. Counters stop at the
// largest integer.
func TestChargesAdd(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		one := newSubject(t, kind)
		amount, events := between(0, store.MaxInteger), int64(store.MaxInteger)
		switch {
		case keepsMembers(kind):
			amount, events = between(0, 20), 100
		case kind.Algorithm == store.GCRA: // it stops where time does
			amount, events = between(0, 1e6), 1e6
		}
		all := algorithm.New(&one.limit)
		sum := int64(0)
		r := store.Request{Limit: &one.limit, Events: events}
		for i := range number(t, "charges", 0, 5) {
			cost := amount.draw(t, "cost")
			r.Cost, r.ID = cost, string(rune('a'+i))
			one.bucket.Charge(&r, one.now)
			sum += min(cost, store.MaxInteger-sum)
		}
		r.Cost, r.ID = sum, "all"
		all.Charge(&r, one.now)
		r.Cost = 0
		got, want := check.Run(one.bucket, &r, one.now), check.Run(all, &r, one.now)
		if got != want || got.Used != sum {
			t.Fatalf("%d one by one %+v,\nat once %+v", sum, got, want)
		}
	})
}

// TestEarlierIsNeverMore: at an earlier instant a bucket never has more left and never
// admits more, so a clock that runs backwards gives nothing away.
func TestEarlierIsNeverMore(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
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

// TestTimeThatStandsStill: at one instant no more than the capacity is taken, and
// nothing comes back.
func TestTimeThatStandsStill(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
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
	forKinds(t, func(t *trial, kind store.Limit) {
		amount := oneOf(
			between(0, 10), between(0, store.MaxInteger), between(store.MaxInteger-3, store.MaxInteger),
		)
		most := int64(store.MaxInteger)
		switch kind.Algorithm {
		case store.SlidingWindow:
			most = store.MaxWeighted
		case store.SlidingLog, store.Concurrency:
			most = 200 // more are possible, but slow
		}
		const century = 100 * 365 * 24 * 3600 * int64(1e6)
		s := newSubject(t, kind)
		s.limit.Window = micros(oneOf(between(1, 100), between(1, century)).draw(t, "window"))
		for range 30 {
			s.now = oneOf(between(0, 3e15), these(s.now)).draw(t, "now")
			r := s.request()
			r.Events = 1 + amount.draw(t, "events")%most
			r.Burst, r.Cost, r.Until = amount.draw(t, "burst"), amount.draw(t, "cost"), amount.draw(t, "until")
			r.Reserved = amount.draw(t, "reserved") % (r.Events + 1)
			r.Receipt = store.Receipt{
				Period:   oneOf(amount, these(s.now), these(s.now-s.now%s.window())).draw(t, "period"),
				Position: amount.draw(t, "position"),
			}
			do := among(t, "operation", []op{check, charge, take, refund, penalize})
			if do == check {
				r.Ahead = amount.draw(t, "ahead")
			}
			before := algorithm.Peek.Run(s.bucket, &r, s.now)
			got := do.Run(s.bucket, &r, s.now)
			if got.Used < 0 || got.Used > store.MaxInteger || got.Remaining < 0 || got.Remaining > got.Limit ||
				got.Reset < 0 || got.RetryAfter < 0 || s.bucket.Share(&s.limit, r.Events, s.now) < 0 || s.bucket.Expiry(&s.limit) < 0 {
				t.Fatalf("%s of %+v: %+v", do, r, got)
			}
			// A mean rate of gcra is exact to fewer digits.
			inexact := int64(0)
			if kind.Algorithm == store.GCRA {
				inexact = before.Used >> 38
			}
			if do == charge && got.Used < min(before.Used, r.Events)-inexact {
				t.Fatalf("charge of %+v: %+v,\nbefore it %+v", r, got, before)
			}
			if do == take && got.Used > max(before.Used, r.Capacity())+inexact {
				t.Fatalf("take of %+v: %+v,\nbefore it %+v", r, got, before)
			}
		}
	})
}

// TestForeseenWaitIsNoLongerThanTheWait has requests wait in line, each taking as soon
// as it fits: the wait foreseen at their arrival is no longer than the real one, nor
// much shorter.
func TestForeseenWaitIsNoLongerThanTheWait(t *testing.T) {
	const start, waiting = 1_800_000_030_000_000, 25
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA} {
		for _, events := range []int64{1, 3, 10} {
			for _, used := range []int64{0, 1, events, 3 * events} {
				limit := &store.Limit{Zone: "zone", Algorithm: a, Window: time.Minute}
				b := algorithm.New(limit)
				if used > 0 {
					b.Charge(&store.Request{Limit: limit, Events: events, Cost: used, ID: "before"}, start-int64(1e6))
				}
				var foreseen [waiting]int64
				for i := range foreseen {
					r := &store.Request{Limit: limit, Events: events, Cost: 1, Ahead: int64(i)}
					foreseen[i] = b.View(r, start, false).RetryAfter.Microseconds()
				}
				now := int64(start)
				for i := range foreseen {
					r := &store.Request{Limit: limit, Events: events, Cost: 1, ID: string(rune('a' + i))}
					for !b.Take(r, now) {
						now += b.View(r, now, false).RetryAfter.Microseconds()
					}
					waited := now - start
					if foreseen[i] > waited {
						t.Errorf("%s, %d events, %d used: request %d foresaw %d µs and waited %d", a, events, used, i, foreseen[i], waited)
					}
					// Two windows less is near enough to turn requests away early; the sliding
					// window is slower than any bound.
					if floor := waited - 2*limit.Window.Microseconds(); foreseen[i] < floor && a != store.SlidingWindow {
						t.Errorf("%s, %d events, %d used: request %d foresaw only %d µs and waited %d", a, events, used, i, foreseen[i], waited)
					}
				}
			}
		}
	}
}

// TestBusyTimeOfGCRAEndsBeforeItsSumsAreTooLarge: a bucket that is never empty begins
// another busy time, in which earlier receipts are void.
func TestBusyTimeOfGCRAEndsBeforeItsSumsAreTooLarge(t *testing.T) {
	limit := &store.Limit{Zone: "zone", Algorithm: store.GCRA, Window: time.Hour}
	b := new(algorithm.GCRA)
	r := &store.Request{Limit: limit, Events: store.MaxEvents, Burst: store.MaxInteger, Cost: store.MaxEvents - 1}
	now, busy := origin, map[int64]bool{}
	for range 10 {
		b.Charge(r, now)
		busy[b.Busy] = true
		if b.Spent < r.Cost || b.Spent > store.MaxInteger || b.Busy > store.MaxInteger {
			t.Fatalf("after %d charges: %+v", len(busy), *b)
		}
		now += limit.Window.Microseconds() - 2
	}
	if len(busy) < 3 {
		t.Errorf("%d busy times", len(busy))
	}
}

// TestEventsChange: other events leave what is used, and when nothing is, as they are.
func TestEventsChange(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take)
		r := s.request()
		r.Cost, r.Reserved = 0, 0
		before := check.Run(s.bucket, &r, s.now)
		r.Events = number(t, "other events", 1, min(100, s.window()))
		got := check.Run(s.bucket, &r, s.now)
		if got.Used != before.Used || got.Reset != before.Reset || got.Remaining != max(r.Capacity()-got.Used, 0) {
			t.Fatalf("before %+v,\nwith %d %+v", before, r.Events, got)
		}
	})
}

// TestGCRAEventsChange: spent events stay spent at another rate, and each takes the time
// that its own request has for it.
func TestGCRAEventsChange(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	for _, c := range []struct {
		before, after int64
		reset         time.Duration
	}{
		{before: 10, after: 20, reset: 42 * time.Second},
		{before: 10, after: 5, reset: 60 * time.Second},
		{before: 10, after: 10, reset: 48 * time.Second},
		{before: 10, after: 7, reset: 53142858 * time.Microsecond},
	} {
		b := algorithm.New(&limit)
		charge.Run(b, &store.Request{Limit: &limit, Events: c.before, Burst: 20, Cost: 6}, origin)
		got := charge.Run(b, &store.Request{Limit: &limit, Events: c.after, Burst: 20, Cost: 2}, origin)
		if want := origin + c.reset.Microseconds(); got.Reset != want || got.Used != 8 {
			t.Errorf("6 at %d a minute and 2 at %d: %d used until %d, want 8 until %d", c.before, c.after, got.Used, got.Reset, want)
		}
	}
}

// TestGCRADrainsAtTheRateOfWhatWasSpent, and not of what asks: a raised limit neither
// brings back spent events at once, nor makes the client wait longer for the next.
func TestGCRADrainsAtTheRateOfWhatWasSpent(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	b := algorithm.New(&limit)
	old := store.Request{Limit: &limit, Events: 10, Burst: 6, Cost: 6}
	faster := store.Request{Limit: &limit, Events: 20, Burst: 6, Cost: 1}
	charge.Run(b, &old, origin)
	if got := check.Run(b, &faster, origin).RetryAfter; got != 6*time.Second {
		t.Errorf("wait %v, want 6s", got)
	}
	if take.Run(b, &faster, origin+6e6-1).Allowed {
		t.Error("an event has drained at the new rate")
	}
	if got := take.Run(b, &faster, origin+6e6); !got.Allowed || got.Reset != origin+36e6+3e6 {
		t.Errorf("an event has drained at the old rate, and another one is spent: %+v", got)
	}
	// Five events of 6 s each and one of 3 s drain together.
	if got := check.Run(b, &faster, origin+6e6).RetryAfter; got != 5500*time.Millisecond {
		t.Errorf("wait %v, want 5.5s", got)
	}
}

// TestReserved: a request cannot use what is reserved from it; others can.
func TestReserved(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		reserved := number(t, "reserved", 0, s.events-1)
		taken := func(reserved int64, id string) (n int64) {
			r := store.Request{Limit: &s.limit, Events: s.events, Reserved: reserved, Cost: 1, ID: id}
			for {
				r.ID += "+"
				got := take.Run(s.bucket, &r, s.now)
				if got.Limit != s.events-reserved {
					t.Fatalf("limit of %d events, %d reserved: %+v", s.events, reserved, got)
				}
				if !got.Allowed {
					return n
				}
				n++
			}
		}
		if got := taken(reserved, "many"); got != s.events-reserved {
			t.Fatalf("%d of %d taken with %d reserved", got, s.events, reserved)
		}
		if got := taken(0, "few"); got != reserved {
			t.Fatalf("requests that may use the reserve took %d of %d", got, reserved)
		}
	})
}
