package algorithm_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestTraitsSayWhatBucketsDo holds each row of the traits to the algorithm's buckets.
func TestTraitsSayWhatBucketsDo(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.Zone, func(t *testing.T) {
			kind.Window = micros(60e6)
			traits := algorithm.Of(kind.Algorithm)
			ask := func(b algorithm.Bucket, do op, change func(r *store.Request)) store.State {
				r := store.Request{Limit: &kind, Events: 5, Cost: 1, ID: "id"}
				change(&r)
				return do.Run(b, &r, origin)
			}
			same := func(*store.Request) {}
			b := algorithm.New(&kind)
			st := ask(b, charge, same)
			for name, is := range map[string]struct{ said, seen bool }{
				"windowed":  {traits.Windowed(), kind.Align || st.Reset != 0 && ask(algorithm.New(&kind), algorithm.Peek, same).Reset == 0},
				"clocked":   {traits.Clocked(), take.Run(algorithm.New(&kind), &store.Request{Limit: &kind, Events: 5, Cost: 1}, origin+1).Receipt.Period == origin},
				"a lease":   {traits.Lease, st.Reset == 0},
				"needs IDs": {traits.NeedsID, ask(algorithm.Clone(b), charge, same).Used == 1},
				"penalties": {traits.Penalties, ask(algorithm.Clone(b), penalize, func(r *store.Request) { r.Until = origin + 1e6 }).Penalty != 0},
				"a burst":   {kind.Algorithm.HasBurst(), ask(b, check, func(r *store.Request) { r.Burst = 9 }).Limit == 9},
				"drains":    {traits.Drains(), kind.Algorithm.HasBurst()},
				"1 by 1":    {traits.Aging == algorithm.OneByOne, !traits.Copies()},
				"copies":    {traits.Copies(), ask(b, check, same).Content != (store.Content{})},
			} {
				if is.said != is.seen {
					t.Errorf("%s: the traits say %v, and the bucket %v", name, is.said, is.seen)
				}
			}
			if traits.Aging == 0 {
				t.Error("the traits do not say how events stop counting")
			}
			if traits.MostEvents <= 0 || traits.MostWords == "" {
				t.Errorf("it counts up to %d, %q", traits.MostEvents, traits.MostWords)
			}
			if traits.Unbatched == "" && !traits.Windowed() && !traits.Clocked() {
				t.Error("batches need a period that ends")
			}
		})
	}
}

// TestCopiesDecideAsBuckets holds copies, and merged ones, to the buckets they are of.
func TestCopiesDecideAsBuckets(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		if !algorithm.Of(kind.Algorithm).Copies() {
			return
		}
		s := newSubject(t, kind)
		s.live(check, charge, take, penalize)
		copied := func() algorithm.Known {
			r := s.request()
			return algorithm.Known{Content: algorithm.Peek.Run(s.bucket, &r, s.now).Content}
		}
		older := copied()
		k, spent := older, s.request()
		k.Charge(&spent, spent.Cost, s.now)
		charge.Run(s.bucket, &spent, s.now)
		if number(t, "penalized", 0, 1) == 1 {
			k.Penalize(&spent, s.now)
			penalize.Run(s.bucket, &spent, s.now)
		}
		merged := older
		if merged.Raise(&s.limit, k, s.now) {
			t.Fatalf("%+v has less than %+v", k, older)
		}
		r := s.request()
		want := algorithm.Peek.Run(s.bucket, &r, s.now)
		want.Content = store.Content{}
		for _, k := range []algorithm.Known{copied(), k, merged} {
			if kind.Algorithm == store.GCRA && k.Content[3] > s.now {
				// The number of a busy time is its first instant, or one more than the last number, if
				// that is greater. A copy takes such a number for an estimate that is behind the
				// bucket's clock.
				continue
			}
			got := k.View(&r, 0, s.now)
			got.Content = store.Content{}
			if got != want {
				t.Fatalf("copy %+v\n%+v,\nthe bucket\n%+v", k, got, want)
			}
			if k.Expiry(&s.limit) < s.now && want.Used > 0 {
				t.Fatalf("copy %+v expires although it counts", k)
			}
		}
	})
}

// TestNamesOfAlgorithms also holds the names to those of configs and keys.
func TestNamesOfAlgorithms(t *testing.T) {
	for a := range store.Algorithms {
		if got, ok := store.ParseAlgorithm(a.String()); got != a || !ok {
			t.Errorf("%s is parsed as %s, %v", a, got, ok)
		}
	}
	for _, name := range []string{"", "fixed", "FIXED_WINDOW"} {
		if got, ok := store.ParseAlgorithm(name); ok {
			t.Errorf("%q is parsed as %s", name, got)
		}
	}
	for want, which := range map[string]func(a store.Algorithm) bool{
		"":                                     func(store.Algorithm) bool { return false },
		"gcra":                                 func(a store.Algorithm) bool { return a == store.GCRA },
		"sliding_log or concurrency":           func(a store.Algorithm) bool { return a == store.SlidingLog || a == store.Concurrency },
		"fixed_window, sliding_window or gcra": func(a store.Algorithm) bool { return a < store.SlidingLog || a == store.GCRA },
	} {
		if got := algorithm.Names(which); got != want {
			t.Errorf("names are %q, want %q", got, want)
		}
	}
}

// TestCopiesStayOnTheStack requires that no method of a copy allocates: each request uses
// several.
func TestCopiesStayOnTheStack(t *testing.T) {
	for _, kind := range kinds {
		if !algorithm.Of(kind.Algorithm).Copies() {
			continue
		}
		t.Run(kind.Zone, func(t *testing.T) {
			kind.Window = time.Minute
			r := &store.Request{Limit: &kind, Events: 5, Cost: 1}
			allocs := testing.AllocsPerRun(100, func() {
				var known, other algorithm.Known
				known.Charge(r, 1, origin)
				known.View(r, 1, origin)
				other.Raise(&kind, known, origin)
				other.KeepPenalty(&kind, known)
				other.Penalize(r, origin)
				if other.IsOpen(&kind, origin) && other.Expiry(&kind) > other.ChargeExpiry(r, 1, origin) {
					t.Error("a charge shortens what counts")
				}
			})
			if allocs > 0 {
				t.Errorf("%v allocations", allocs)
			}
		})
	}
}
