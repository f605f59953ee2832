package algorithm_test

import (
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// anyBucket draws a bucket of any content.
func anyBucket(t *rapid.T, kind store.Limit, ops ...algorithm.Operation) *subject {
	s := newSubject(t, kind)
	s.live(ops...)
	return s
}

// TestViewChangesNothing requires that to look at a bucket leaves it as it is.
func TestViewChangesNothing(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take, penalize)
		before := algorithm.Clone(s.bucket)
		r := s.request()
		s.bucket.View(&r, s.now, rapid.Bool().Draw(t, "spent"))
		if !reflect.DeepEqual(before, s.bucket) {
			t.Fatalf("%+v became %+v", before, s.bucket)
		}
	})
}

// TestTakeDoesWhatCheckSays requires that what a check says fits is taken, and
// nothing else, and that it is then spent.
func TestTakeDoesWhatCheckSays(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
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

// TestChargeSaysWhetherItFitted requires that a charge is allowed if its check
// was, and that it counts all the same.
func TestChargeSaysWhetherItFitted(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = kind.Algorithm != store.SlidingLog // it forgets what fewer events do not need
		s.live(check, charge, take)
		r := s.request()
		checked := check.Run(s.bucket, &r, s.now)
		charged := charge.Run(s.bucket, &r, s.now)
		want := checked.Used + r.Cost
		if keepsMembers(kind) && !checked.Allowed {
			want = charged.Used // of what does not fit, not all is kept
		}
		if charged.Allowed != checked.Allowed || charged.Used != want {
			t.Fatalf("check says %+v, charge %+v", checked, charged)
		}
	})
}

// TestAheadIsNotThere requires that a check asks for what is ahead as well,
// and shows the bucket without it.
func TestAheadIsNotThere(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take)
		r := s.request()
		plain := check.Run(s.bucket, &r, s.now)
		more := r
		more.Cost += number(t, "more", 0, 5)
		r.Ahead = more.Cost - r.Cost
		ahead, all := s.after(check, r, s.now), s.after(check, more, s.now)
		if ahead.Allowed != all.Allowed || ahead.Used != plain.Used || ahead.Remaining != plain.Remaining ||
			ahead.Reset != plain.Reset || ahead.ResetOtherwise != plain.ResetOtherwise {
			t.Fatalf("%d ahead of %d: %+v\nwithout it %+v\nwith a cost of both %+v", r.Ahead, r.Cost, ahead, plain, all)
		}
	})
}

// TestRetryAfterIsExact requires that a request fits when it was told, if
// nothing else is spent, and no microsecond before; and never, if it was told
// that. Who changes the rate of a bucket of gcra is told how long it takes at
// the new rate, which holds from the next time that something is spent; who
// waits for a slot, nothing at all.
func TestRetryAfterIsExact(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = kind.Algorithm != store.GCRA
		s.live(check, charge, take, penalize)
		r := s.request()
		switch checked := check.Run(s.bucket, &r, s.now); {
		case checked.Allowed != (checked.RetryAfter == 0):
			t.Fatalf("allowed: %t, retry after %v", checked.Allowed, checked.RetryAfter)
		case (checked.RetryAfter == store.Never) != (r.Cost > r.Capacity()):
			t.Fatalf("retry after %v a cost of %d of %d", checked.RetryAfter, r.Cost, r.Capacity())
		case checked.RetryAfter == store.Never:
			if at := s.now + number(t, "long", 0, 5*s.window()); s.after(take, r, at).Allowed {
				t.Fatalf("what never fits was taken at %d: %+v", at, checked)
			}
		case !checked.Allowed:
			at := s.now + checked.RetryAfter.Microseconds()
			if s.after(take, r, at-1).Allowed {
				t.Fatalf("fits earlier than %+v says", checked)
			}
			if got := s.after(take, r, at); !got.Allowed {
				t.Fatalf("%+v,\nthen %+v", checked, got)
			}
		}
	}, store.Concurrency)
}

// TestResetIsExact requires that at the reset nothing counts, and that right
// before it something does.
func TestResetIsExact(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = kind.Algorithm != store.GCRA
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

// TestResetOtherwise requires that it is the reset of the same bucket if the
// cost were spent, or had not been.
func TestResetOtherwise(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied, s.backwards = true, true
		s.live(check, charge, take)
		r := s.request()
		checked := check.Run(s.bucket, &r, s.now)
		charged := charge.Run(s.bucket, &r, s.now)
		forgotten := kind.Algorithm == store.SlidingLog && r.Cost > r.Events // what was there before
		if checked.ResetOtherwise != charged.Reset || charged.ResetOtherwise != checked.Reset && !forgotten {
			t.Fatalf("check says %+v,\ncharge %+v", checked, charged)
		}
	})
}

// TestCostZeroIsFree requires that it changes nothing, and fits as long as no
// more than the capacity is spent.
func TestCostZeroIsFree(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take)
		r := s.request()
		r.Cost = 0
		before := check.Run(s.bucket, &r, s.now)
		if fits := before.Used <= r.Capacity(); before.Allowed != fits {
			t.Fatalf("nothing fits: %t, want %t: %+v", before.Allowed, fits, before)
		}
		took, charged := take.Run(s.bucket, &r, s.now), charge.Run(s.bucket, &r, s.now)
		after := check.Run(s.bucket, &r, s.now)
		took.Receipt, charged.Receipt = store.Receipt{}, store.Receipt{}
		if took != before || charged != before || after != before {
			t.Fatalf("check %+v,\ntake %+v,\ncharge %+v,\ncheck %+v", before, took, charged, after)
		}
	})
}

// TestStatesMakeSense requires what is true of every state.
func TestStatesMakeSense(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
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

// TestExpiredBucketIsEmpty requires that nothing is lost with a bucket that is
// forgotten when it expires.
func TestExpiredBucketIsEmpty(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
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

// TestWeightIsAllThatCounts requires that a bucket never weighs less than what
// it has used.
func TestWeightIsAllThatCounts(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := anyBucket(t, kind, check, charge)
		r := s.request()
		if used, weight := check.Run(s.bucket, &r, s.now).Used, s.bucket.Weight(&s.limit); weight < used {
			t.Fatalf("weighs %d with %d used", weight, used)
		}
	})
}

// TestChargesAdd requires that costs count the same one by one and at once.
// Counters stop at the largest integer.
func TestChargesAdd(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		one := newSubject(t, kind)
		amount, events := rapid.Int64Range(0, store.MaxInteger), int64(store.MaxInteger)
		switch {
		case keepsMembers(kind):
			amount, events = rapid.Int64Range(0, 20), 100
		case kind.Algorithm == store.GCRA: // it stops where time does
			amount, events = rapid.Int64Range(0, 1e6), 1e6
		}
		all := algorithm.New(&one.limit)
		sum := int64(0)
		r := store.Request{Limit: &one.limit, Events: events}
		for i, cost := range rapid.SliceOfN(amount, 0, 5).Draw(t, "costs") {
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
