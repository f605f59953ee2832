package algorithm_test

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// penalized draws a bucket under a penalty, and an instant before its end.
func penalized(t *trial, kind store.Limit) (s *subject, until int64) {
	s = anyBucket(t, kind, check, charge, take)
	r := s.request()
	penalize.Run(s.bucket, &r, s.now)
	s.now += number(t, "since", 0, r.Until-s.now-1)
	return s, r.Until
}

var withPenalty, withoutPenalty = func() (with, without []store.Algorithm) {
	for a := range store.Algorithms {
		if algorithm.Of(a).Penalties {
			with = append(with, a)
		} else {
			without = append(without, a)
		}
	}
	return with, without
}()

// TestPenalty: under a penalty nothing fits, and the penalty shows and ends.
func TestPenalty(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s, until := penalized(t, kind)
		r := s.request()
		for _, op := range []algorithm.Operation{check, take} {
			got := s.after(op, r, s.now)
			if got.Allowed || got.Remaining != 0 || got.Penalty != until || got.Reset < until ||
				got.RetryAfter < micros(until-s.now) {
				t.Fatalf("%s under a penalty until %d: %+v", op, until, got)
			}
		}
		if got := s.after(check, r, until); got.Penalty != 0 || got.Used == 0 && r.Cost <= r.Capacity() && !got.Allowed {
			t.Fatalf("when the penalty ends: %+v", got)
		}
	}, withoutPenalty...)
}

// TestPenaltyIsNotExtended: a penalized bucket gets no other penalty until the first
// one ends.
func TestPenaltyIsNotExtended(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s, until := penalized(t, kind)
		r := s.request()
		if got := s.after(penalize, r, s.now).Penalty; got != until {
			t.Fatalf("until %d and not %d after another", got, until)
		}
		s.now = until
		r = s.request()
		if got := penalize.Run(s.bucket, &r, s.now).Penalty; got != r.Until {
			t.Fatalf("until %d and not %d after the first has ended", got, r.Until)
		}
	}, withoutPenalty...)
}

// TestPenaltyKeepsTheCount: charges and refunds count under a penalty as they do
// without.
func TestPenaltyKeepsTheCount(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take)
		free := *s
		free.bucket = algorithm.Clone(s.bucket)
		r := s.request()
		r.Until = s.now + 10*s.window()
		penalize.Run(s.bucket, &r, s.now)
		for range 10 {
			r := s.request()
			got, want := charge.Run(s.bucket, &r, s.now), charge.Run(free.bucket, &r, s.now)
			// The penalty is there, and made the bucket.
			got.Content, want.Content = store.Content{}, store.Content{}
			receipts := [2]store.Receipt{got.Receipt, want.Receipt}
			got.Receipt.Position, want.Receipt.Position = 0, 0
			if got != want {
				t.Fatalf("charge under a penalty %+v,\nwithout %+v", got, want)
			}
			if t.maybe("refund") {
				other := r
				r.Receipt, other.Receipt = receipts[0], receipts[1]
				if got, want := refund.Run(s.bucket, &r, s.now), refund.Run(free.bucket, &other, s.now); got.Used != want.Used {
					t.Fatalf("refund under a penalty %+v,\nwithout %+v", got, want)
				}
			}
			s.pass()
		}
	}, withoutPenalty...)
}

// TestNoPenalty: buckets without penalties do not change.
func TestNoPenalty(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take)
		r := s.request()
		before := check.Run(s.bucket, &r, s.now)
		if got := penalize.Run(s.bucket, &r, s.now); got != before {
			t.Fatalf("before %+v,\nafter %+v", before, got)
		}
	}, withPenalty...)
}

// TestPenaltyOpensNoWindow: without an open window the reset is the penalty's end.
func TestPenaltyOpensNoWindow(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		r := s.request()
		r.Until = s.now + 2*s.window()
		penalize.Run(s.bucket, &r, s.now)
		for range 2 {
			if got := check.Run(s.bucket, &r, s.now); got.Reset != r.Until {
				t.Fatalf("penalty until %d: %+v", r.Until, got)
			}
			s.now += number(t, "later", 0, s.window()-1)
		}
	}, withoutPenalty...)
}
