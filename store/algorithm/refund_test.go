package algorithm_test

import (
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestRefundRestores: a take and its refund at the same instant leave the bucket as it
// was.
func TestRefundRestores(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		s.live(check, charge, take)
		r := s.request()
		look := r
		look.Cost = 0
		before := check.Run(s.bucket, &look, s.now)
		took := take.Run(s.bucket, &r, s.now)
		if !took.Allowed {
			return // nothing was taken
		}
		r.Receipt = took.Receipt
		refund.Run(s.bucket, &r, s.now)
		got := check.Run(s.bucket, &look, s.now)
		got.Content, before.Content = store.Content{}, store.Content{} // a refund is noted there
		if got != before && (kind.Algorithm != store.GCRA || !s.near(&got, &before, r.Cost)) {
			t.Fatalf("before %+v,\ntaken  %+v,\nafter  %+v", before, took, got)
		}
	})
}

// near reports whether got, after a refund, differs from want by no more than rounding
// where rates differ: takes add up to a microsecond, and what that is of an event, and a
// refund forgets up to 2^-40 of what there was.
func (s *subject) near(got, want *store.State, cost int64) bool {
	late, more := got.Reset-want.Reset, got.Used-want.Used
	if late < 0 {
		least := float64(s.window()) * float64(cost+1) / (1 << 40)
		return got.Used == 0 && want.Used <= 1 && got.Reset == got.Now && -late <= 1+int64(least)
	}
	return late <= 1 && more >= 0 && more <= 1
}

// act is one operation of a history, and what came of it.
type act struct {
	op       algorithm.Operation
	r        store.Request
	now      int64
	taken    bool
	refunded int64 // by a later operation
}

// history draws takes, charges, penalties, and refunds of all or a part of a take, some
// of them late.
func (s *subject) history() []act {
	var acts []act
	ops := []algorithm.Operation{check, charge, take, take, take, penalize}
	if s.limit.Algorithm == store.SlidingLog {
		// Charges beyond the limit push takes out of the log.
		ops = []algorithm.Operation{check, take, take, take}
	}
	for range number(s.trial, "length", 1, 40) {
		var open []int
		for i, a := range acts {
			if a.taken && a.r.Cost > 0 && a.refunded == 0 {
				open = append(open, i)
			}
		}
		if len(open) > 0 && number(s.trial, "refund", 0, 2) == 0 {
			a := &acts[among(s.trial, "of", open)]
			back := a.r
			if number(s.trial, "part", 0, 3) == 0 {
				back.Cost = number(s.trial, "cost back", 1, a.r.Cost)
			}
			a.refunded = back.Cost
			refund.Run(s.bucket, &back, s.now)
			acts = append(acts, act{op: refund, r: back, now: s.now})
		} else {
			op, r, state := s.do(ops...)
			r.Receipt = state.Receipt
			acts = append(acts, act{op: op, r: r, now: s.now, taken: op == take && state.Allowed})
		}
		s.pass()
	}
	return acts
}

// TestRefundsCreateNothing: a bucket never has more left than one with the same history
// without the refunded takes.
func TestRefundsCreateNothing(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.varied = true
		if kind.Algorithm == store.GCRA {
			// In a short window the parts of a microsecond matter.
			s.limit.Window = micros(oneOf(these(s.window()), between(1, 40)).draw(t, "short"))
			s.events = number(t, "rate", 1, min(1e6, s.window()))
		}
		acts := s.history()
		with, without := algorithm.New(&s.limit), algorithm.New(&s.limit)
		for i, a := range acts {
			a.op.Run(with, &a.r, a.now)
			switch {
			case a.op == refund:
			case a.op == take && !a.taken:
				check.Run(without, &a.r, a.now)
			case a.op == take:
				// A take that one bucket refuses may fit into the other.
				algorithm.Touch(without, &a.r, a.now)
				rest := a.r
				rest.Cost -= a.refunded
				charge.Run(without, &rest, a.now)
			default:
				a.op.Run(without, &a.r, a.now)
			}
			look := store.Request{Limit: &s.limit, Events: a.r.Events}
			for later := int64(0); later < s.window(); later += s.window()/50 + 1 {
				got, want := with.View(&look, a.now+later, false), without.View(&look, a.now+later, false)
				if got.Used < want.Used {
					t.Fatalf("%d µs after act %d of %+v:\nwith the refunds %+v,\nwithout the takes %+v", later, i, acts, got, want)
				}
			}
		}
	})
}

// TestRefundOfDrainedCost: a refund does not give back what time has given back.
func TestRefundOfDrainedCost(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.live(check, charge, take)
		r := s.request()
		took := take.Run(s.bucket, &r, s.now)
		if !took.Allowed || r.Cost == 0 {
			return // nothing was taken
		}
		r.Receipt = took.Receipt
		s.now += 2*s.window() + number(t, "late", 0, s.window())
		if e := s.bucket.Expiry(&s.limit); s.now < e {
			s.now = e
		}
		again := s.request()
		charge.Run(s.bucket, &again, s.now)
		want := check.Run(s.bucket, &again, s.now)
		refund.Run(s.bucket, &r, s.now)
		if got := check.Run(s.bucket, &again, s.now); got != want {
			t.Fatalf("before %+v,\nafter %+v", want, got)
		}
	})
}

// TestRefundWithoutReceipt, or with another request's ID, gives nothing back.
func TestRefundWithoutReceipt(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		s := newSubject(t, kind)
		s.live(check, charge)
		r := s.request()
		want := check.Run(s.bucket, &r, s.now)
		refund.Run(s.bucket, &r, s.now)
		if got := check.Run(s.bucket, &r, s.now); got != want {
			t.Fatalf("before %+v,\nafter %+v", want, got)
		}
	})
}

// TestGCRARefundsOnlyUndrainedEvents: events of overlapping requests drain in the order
// in which they were spent.
func TestGCRARefundsOnlyUndrainedEvents(t *testing.T) {
	const s = int64(1e6) // an event drains in 10 s
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	b := algorithm.New(&limit)
	step := func(op algorithm.Operation, r *store.Request, at, want int64) {
		t.Helper()
		got := op.Run(b, r, origin+at)
		if op == take {
			r.Receipt = got.Receipt
		}
		if got.Used != want {
			t.Errorf("%s at %d s: %d used, want %d", op, at/s, got.Used, want)
		}
	}
	request := func(cost int64) *store.Request { return &store.Request{Limit: &limit, Events: 6, Burst: 8, Cost: cost} }
	first, second, third, fourth := request(2), request(2), request(1), request(3)
	step(take, first, 0, 2)
	step(take, second, 0, 4)
	step(take, third, 0, 5)
	step(take, fourth, 0, 8)
	// One of the first has drained: one comes back, and the others move up.
	step(refund, first, 10*s, 6)
	// One of the second has drained.
	step(refund, second, 20*s, 4)
	// All of the third drained 10 s ago.
	step(refund, third, 40*s, 2)
	step(refund, fourth, 40*s, 0)

	// In the reverse order all comes back, and in another one less may: its events may
	// have drained.
	first, second, third = request(1), request(1), request(1)
	for _, order := range [][]*store.Request{{third, second, first}, {first, second, third}, {second, third, first}} {
		at := 100 * s
		for i, r := range []*store.Request{first, second, third} {
			step(take, r, at, int64(i)+1)
		}
		for i, r := range order {
			step(refund, r, at, 2-int64(i))
		}
		b = algorithm.New(&limit)
	}
}

// TestGCRARefundsWithinABusyTime: a receipt is worthless once the bucket was empty, and
// remains good at another rate.
func TestGCRARefundsWithinABusyTime(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	request := func(events, cost int64) store.Request {
		return store.Request{Limit: &limit, Events: events, Burst: 20, Cost: cost}
	}
	b := algorithm.New(&limit)
	takes := func(r *store.Request, at int64) {
		r.Receipt = take.Run(b, r, origin+at).Receipt
	}
	refunds := func(r store.Request, at, want int64) {
		t.Helper()
		if got := refund.Run(b, &r, origin+at).Used; got != want {
			t.Errorf("%d used after a refund, want %d", got, want)
		}
	}

	first, second := request(6, 1), request(6, 1)
	takes(&first, 0)
	takes(&second, 0)
	refunds(first, 0, 1)
	// The second drains until 10 s; its position is at 20 s.
	third := request(6, 3)
	takes(&third, 11e6)
	refunds(second, 11e6, 3)

	fourth := request(60, 1)
	takes(&fourth, 11e6)
	refunds(third, 11e6, 1)
	refunds(fourth, 11e6, 0)
}

// TestGCRARefundsInAnyOrder: what overlapping requests of any limits get back, in any
// order, leaves next to nothing while no time passes, and never creates anything.
func TestGCRARefundsInAnyOrder(t *testing.T) {
	forAll(t, func(t *trial) {
		limit := store.Limit{Algorithm: store.GCRA, Window: time.Hour}
		b := algorithm.New(&limit)
		kept := store.Request{Limit: &limit, Events: 100, Cost: number(t, "kept", 0, 10)}
		charge.Run(b, &kept, origin)
		var taken []store.Request
		for range number(t, "takes", 1, 40) {
			r := store.Request{Limit: &limit, Burst: 1000, Cost: number(t, "cost", 1, 5)}
			r.Events = among(t, "events", []int64{90, 99, 100, 100})
			st := take.Run(b, &r, origin)
			r.Receipt = st.Receipt
			taken = append(taken, r)
		}
		for len(taken) > 0 {
			i := number(t, "refunded", 0, int64(len(taken))-1)
			refund.Run(b, &taken[i], origin)
			taken = slices.Delete(taken, int(i), int(i)+1)
		}
		want := kept.Cost
		kept.Cost = 0
		if got := check.Run(b, &kept, origin).Used; got < want || got > want+1 {
			t.Fatalf("%d used after all refunds, want %d", got, want)
		}
	})
}

// TestGCRARefundOfAllLeavesNothing: rounding leaves no part of an event that was refunded.
func TestGCRARefundOfAllLeavesNothing(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: 7 * time.Microsecond}
	b := algorithm.New(&limit)
	r := store.Request{Limit: &limit, Events: 2, Cost: 1}
	r.Receipt = take.Run(b, &r, origin).Receipt
	refund.Run(b, &r, origin+1)
	r.Cost = 0
	if got := check.Run(b, &r, origin+1); got.Used != 0 || got.Reset != origin+1 {
		t.Errorf("%d used until %d", got.Used, got.Reset-origin)
	}
}
