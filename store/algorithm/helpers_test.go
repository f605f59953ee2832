package algorithm_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// origin is where scenarios begin: a multiple of every window used in them.
const origin = int64(1_800_000_000_000_000)

const (
	check    = algorithm.Check
	charge   = algorithm.Charge
	take     = algorithm.Take
	refund   = algorithm.Refund
	penalize = algorithm.Penalize
)

// op is short for an operation.
type op = algorithm.Operation

// kinds has one limit for each way of counting.
var kinds = func() (all []store.Limit) {
	for a := range store.Algorithms {
		all = append(all, store.Limit{Zone: a.String(), Algorithm: a})
		if algorithm.Of(a).Windowed() {
			all = append(all, store.Limit{Zone: a.String() + " align", Algorithm: a, Align: true})
		}
	}
	return all
}()

// forKinds runs a property on every way of counting but those left out.
func forKinds(t *testing.T, property func(t *trial, kind store.Limit), leftOut ...store.Algorithm) {
	for _, kind := range kinds {
		out := false
		for _, a := range leftOut {
			out = out || a == kind.Algorithm
		}
		if !out {
			t.Run(kind.Zone, func(t *testing.T) { forAll(t, func(t *trial) { property(t, kind) }) })
		}
	}
}

// keepsMembers reports whether the bucket keeps events one by one.
func keepsMembers(kind store.Limit) bool { return algorithm.Of(kind.Algorithm).NeedsID }

// subject is a bucket with its history.
type subject struct {
	*trial
	limit  store.Limit
	bucket algorithm.Bucket
	now    int64
	// latest is the latest instant that there was.
	latest int64
	// events is what requests ask for; they differ if varied.
	events int64
	varied bool
	// backwards lets time run backwards too.
	backwards bool
	requests  int
}

// newSubject draws a window and a rate of at most one event a microsecond, for a bucket
// without a history.
func newSubject(t *trial, kind store.Limit) *subject {
	s := &subject{trial: t, limit: kind, now: origin + number(t, "now", 0, 1e12)}
	s.limit.Window = micros(oneOf(
		these(1, 7, 999, 1e6, 60e6, 3600e6), between(1, 100e9),
	).draw(t, "window"))
	s.events = min(oneOf(
		these(1, 3, 7, 20), between(1, 50),
	).draw(t, "events"), s.window())
	s.bucket = algorithm.New(&s.limit)
	return s
}

func (s *subject) window() int64 { return s.limit.Window.Microseconds() }

// request draws a request with an ID of its own.
func (s *subject) request() store.Request {
	s.requests++
	r := store.Request{
		Limit: &s.limit, Events: s.events, Cost: number(s.trial, "cost", 0, 4), ID: fmt.Sprintf("request-%06d", s.requests),
		Penalty: micros(10 * s.window()),
	}
	if s.varied {
		r.Events = min(among(s.trial, "events", []int64{s.events, s.events, 1, 7, 30}), s.window())
	}
	switch number(s.trial, "odd", 0, 11) {
	case 0:
		r.Cost = number(s.trial, "high cost", 0, 2*r.Events)
	case 1:
		r.Reserved = number(s.trial, "reserved", 0, r.Events)
	case 2:
		r.Burst = number(s.trial, "burst", 1, 2*r.Events)
	}
	r.Until = s.now + number(s.trial, "penalty", 1, s.window()+5)
	return r
}

// pass lets time pass, or not.
func (s *subject) pass() {
	w := s.window()
	spans := []numbers{
		these(0), these(0), these(1), between(0, w/4+1),
		between(0, w/4+1), between(0, w), these(w), between(0, 3*w),
	}
	if s.backwards {
		spans = append(spans, between(-2*w, 0), between(-w/4, 0))
	}
	s.latest = max(s.latest, s.now)
	s.now = max(s.now+oneOf(spans...).draw(s.trial, "passed"), s.latest-algorithm.Grace.Microseconds())
}

// do runs one of the operations and returns it with its result. Penalties are rare,
// since nothing else happens under one.
func (s *subject) do(ops ...algorithm.Operation) (algorithm.Operation, store.Request, store.State) {
	op := among(s.trial, "operation", ops)
	if op == penalize && number(s.trial, "mercy", 0, 3) > 0 {
		op = check
	}
	r := s.request()
	return op, r, op.Run(s.bucket, &r, s.now)
}

// live runs operations so that the bucket may have any content.
func (s *subject) live(ops ...algorithm.Operation) {
	var taken []store.Request
	for range number(s.trial, "operations", 0, 30) {
		if len(taken) > 0 && number(s.trial, "refund", 0, 5) == 0 {
			i := number(s.trial, "taken", 0, int64(len(taken))-1)
			refund.Run(s.bucket, &taken[i], s.now)
			taken = append(taken[:i], taken[i+1:]...)
		}
		if op, r, state := s.do(ops...); op == take && state.Allowed {
			r.Receipt = state.Receipt
			taken = append(taken, r)
		}
		s.pass()
	}
}

// after returns what op would return at an instant, and leaves the bucket unchanged.
func (s *subject) after(op algorithm.Operation, r store.Request, now int64) store.State {
	return op.Run(algorithm.Clone(s.bucket), &r, now)
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// step is one operation of a scenario, and its result.
type step struct {
	at   time.Duration // since origin
	op   algorithm.Operation
	cost int64

	allowed         bool
	used, remaining int64
	reset           time.Duration // since origin
	retry           time.Duration
}

// play runs the steps on a new bucket. A refund takes back the last successful take
// of its cost.
func play(t *testing.T, r store.Request, steps []step) {
	t.Helper()
	b := algorithm.New(r.Limit)
	taken := map[int64]store.Request{}
	for i, s := range steps {
		now := origin + s.at.Microseconds()
		r.Cost, r.ID = s.cost, fmt.Sprintf("request-%03d", i)
		asked := r
		if s.op == refund {
			asked = taken[s.cost]
		}
		got := s.op.Run(b, &asked, now)
		if s.op == take && got.Allowed {
			r.Receipt = got.Receipt
			taken[s.cost] = r
			r.Receipt = store.Receipt{}
		}
		want := store.State{
			Allowed: s.allowed, Limit: r.Capacity(), Used: s.used, Remaining: s.remaining, RetryAfter: s.retry, Now: now,
		}
		if r.Limit.Algorithm != store.Concurrency {
			want.Reset = origin + s.reset.Microseconds()
		}
		want.ResetOtherwise, want.Receipt, want.Content = got.ResetOtherwise, got.Receipt, got.Content // these have tests of their own
		if s.op == refund {                                                                            // whether it would fit again
			want.Allowed, want.RetryAfter = got.Allowed, got.RetryAfter
		}
		if got != want {
			t.Errorf("step %d, %s of %d at %v:\n got %+v\nwant %+v", i, s.op, s.cost, s.at, got, want)
		}
	}
}

// admissions are takes in order.
type admissions []struct{ at, cost int64 }

func (a *admissions) add(at, cost int64) { *a = append(*a, struct{ at, cost int64 }{at, cost}) }

// most is the most that was taken in any half-open interval of that length. Time must
// not have run backwards.
func (a admissions) most(length int64) int64 {
	most, sum, first := int64(0), int64(0), 0
	for _, last := range a {
		sum += last.cost
		for a[first].at <= last.at-length {
			sum -= a[first].cost
			first++
		}
		most = max(most, sum)
	}
	return most
}

// since is the cost taken after an instant.
func (a admissions) since(at int64) (sum int64) {
	for _, m := range a {
		if m.at > at {
			sum += m.cost
		}
	}
	return sum
}
