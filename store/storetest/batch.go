package storetest

import (
	"fmt"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// testAnswersInOrder asks about many buckets at once, of several limits and of
// clients that a sharded store spreads.
func testAnswersInOrder(f *fixture) {
	limits := []*store.Limit{
		f.limit("minute", time.Minute), f.limit("hour", time.Hour), f.limit("day", 24*time.Hour),
	}
	var reqs []store.Request
	for c := range 20 {
		for l, limit := range limits {
			reqs = append(reqs, store.Request{
				Limit: limit, ClientKey: fmt.Sprint("client ", c), Events: int64(30 + l), Cost: int64(len(reqs)),
			})
		}
	}
	want := func(i int, used, cost int64) store.State {
		r := reqs[i]
		s := store.State{
			Allowed: used+cost <= r.Events, Limit: r.Events, Used: used, Remaining: max(r.Events-used, 0),
			Reset: f.now() + micros(r.Limit.Window), Now: f.now(),
		}
		switch {
		case cost > r.Events:
			s.RetryAfter = store.Never
		case !s.Allowed:
			s.RetryAfter = r.Limit.Window
		}
		return s
	}
	for i, s := range f.answer(f.store.Check(f.Context(), reqs), len(reqs)) {
		f.want(fmt.Sprint("check ", i), s, want(i, 0, reqs[i].Cost))
	}
	for i, s := range f.answer(f.store.Charge(f.Context(), reqs), len(reqs)) {
		f.want(fmt.Sprint("charge ", i), s, want(i, reqs[i].Cost, 0))
	}
	for i, s := range f.answer(f.store.Check(f.Context(), reqs), len(reqs)) {
		f.want(fmt.Sprint("second check ", i), s, want(i, reqs[i].Cost, reqs[i].Cost))
	}
}

func testSameBucketTwice(f *fixture) {
	r := f.request()
	other := r
	other.ClientKey = "another client"
	for i, s := range f.answer(f.store.Check(f.Context(), []store.Request{r, other, r}), 3) {
		f.want(fmt.Sprint("check ", i), s, store.State{
			Allowed: true, Limit: 5, Remaining: 5, Reset: f.now() + micros(time.Minute), Now: f.now(),
		})
	}
	more := r
	more.Cost, more.Events = 3, 7
	states := f.answer(f.store.Charge(f.Context(), []store.Request{r, other, more, r, r}), 5)
	for i, used := range []int64{1, 1, 4, 5, 6} {
		f.wantUsed(fmt.Sprint("charge ", i), states[i], used)
		if fits := used <= 5; states[i].Allowed != fits {
			f.Errorf("charge %d: allowed %t, want %t", i, states[i].Allowed, fits)
		}
	}
	f.wantUsed("check", f.check(r), 6)
	f.wantUsed("check of the other client", f.check(other), 1)
}

func testRequestsAreReadOnly(f *fixture) {
	reqs := []store.Request{f.request(), f.request(), f.request()}
	reqs[1].ClientKey = "another client"
	reqs[2].Cost = 9
	before := slices.Clone(reqs)
	limit := *reqs[0].Limit
	f.answer(f.store.Check(f.Context(), reqs), len(reqs))
	f.answer(f.store.Charge(f.Context(), reqs), len(reqs))
	if !slices.Equal(reqs, before) || *reqs[0].Limit != limit {
		f.Errorf("requests were %+v and are %+v", before, reqs)
	}
}
