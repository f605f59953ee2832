package storetest

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// kinds returns a request like [fixture.request] for every way of counting.
func (f *fixture) kinds() map[string]store.Request {
	all := map[string]store.Request{}
	for _, limit := range Limits {
		name := limit.Algorithm.String()
		if limit.Align {
			name += ", aligned"
		}
		r := f.request()
		limit.Zone = r.Limit.Zone
		r.Limit, r.ID = &limit, "first000"
		all[name] = r
	}
	return all
}

func (f *fixture) take(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Take, []store.Request{r})[0]
}

func (f *fixture) refund(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Refund, []store.Request{r})[0]
}

func testTakeSpendsWhatFits(f *fixture) {
	for name, r := range f.kinds() {
		for used := int64(1); used <= 5; used++ {
			r.ID = fmt.Sprintf("take%04d", used)
			if s := f.take(r); !s.Allowed || s.Used != used || s.Remaining != 5-used || s.RetryAfter != 0 {
				f.Errorf("%s: take %d of 5: %+v", name, used, s)
			}
		}
		for range 3 {
			r.ID += "x"
			if s := f.take(r); s.Allowed || s.Used != 5 || s.Remaining != 0 || s.RetryAfter <= 0 {
				f.Errorf("%s: take past the limit: %+v", name, s)
			}
		}
		f.wantUsed(name+": check after the takes", f.check(r), 5)
	}
}

// testTakeIsAllOrNothing asks for more than is left, and then for the rest.
func testTakeIsAllOrNothing(f *fixture) {
	for name, r := range f.kinds() {
		r.Cost = 3
		f.wantUsed(name+": first take", f.take(r), 3)
		r.ID = "second00"
		if s := f.take(r); s.Allowed || s.Used != 3 {
			f.Errorf("%s: take of 3 with 2 left: %+v", name, s)
		}
		r.Cost = 2
		if s := f.take(r); !s.Allowed || s.Used != 5 {
			f.Errorf("%s: take of 2 with 2 left: %+v", name, s)
		}
		r.Cost, r.ID = 6, "third000"
		if s := f.take(r); s.Allowed || s.RetryAfter != store.Never {
			f.Errorf("%s: take of 6 out of 5: %+v", name, s)
		}
	}
}

func testRefundGivesBack(f *fixture) {
	for name, r := range f.kinds() {
		r.Cost = 4
		r.Receipt = f.take(r).Receipt
		half := r
		half.Cost = 2
		if s := f.refund(half); s.Used != 2 || s.Remaining != 3 {
			f.Errorf("%s: refund of 2 of 4: %+v", name, s)
		}
		if algorithm.Of(r.Limit.Algorithm).NeedsID {
			// The ID selects what is refunded, so r refunds the rest.
			f.wantUsed(name+": refund of the rest", f.refund(r), 0)
			continue
		}
		f.wantUsed(name+": refund of the rest", f.refund(half), 0)
		f.wantUsed(name+": refund of nothing", f.refund(half), 0)
	}
}

// testRefundOfAnotherTime refunds a take that has expired while another one counts.
func testRefundOfAnotherTime(f *fixture) {
	for name, r := range f.kinds() {
		r.Cost = 4
		r.Receipt = f.take(r).Receipt
		f.clock.Advance(3 * time.Minute)
		later := r
		later.Cost, later.ID, later.Receipt = 3, "later000", store.Receipt{}
		f.wantUsed(name+": take later", f.take(later), 3)
		f.wantUsed(name+": refund of an expired take", f.refund(r), 3)
	}
}

// testRefundOfAnEarlierBucket refunds a take whose bucket was reset since, when another one counts.
func testRefundOfAnEarlierBucket(f *fixture) {
	for name, r := range f.kinds() {
		r.Cost = 4
		r.Receipt = f.take(r).Receipt
		f.reset(r)
		f.clock.Advance(time.Millisecond)
		later := r
		later.Cost, later.ID, later.Receipt = 3, "later000", store.Receipt{}
		later.Receipt = f.take(later).Receipt
		f.wantUsed(name+": refund of a take before the reset", f.refund(r), 3)
		later.Cost = 1
		f.wantUsed(name+": refund of one after it", f.refund(later), 2)
	}
}

func testConcurrentTakes(f *fixture) {
	const events = 100
	for name, r := range f.kinds() {
		r.Events = events
		var allowed atomic.Int64
		atOnce(func(g int) {
			for i := range 10 {
				mine := r
				mine.ID = fmt.Sprintf("%04d%04d", g, i)
				if s := f.take(mine); s.Allowed {
					allowed.Add(1)
				} else if s.Remaining != 0 || s.Used != events {
					f.Errorf("%s: refused with %+v", name, s)
				}
			}
		})
		if n := allowed.Load(); n != events {
			f.Errorf("%s: %d takes were allowed, want %d", name, n, events)
		}
		f.wantUsed(name+": check after all", f.check(r), events)
	}
}

func testReserved(f *fixture) {
	for name, r := range f.kinds() {
		r.Reserved = 3
		for used := int64(1); used <= 2; used++ {
			r.ID = fmt.Sprintf("take%04d", used)
			if s := f.take(r); !s.Allowed || s.Limit != 2 || s.Remaining != 2-used {
				f.Errorf("%s: take %d of 2: %+v", name, used, s)
			}
		}
		r.ID = "other000"
		if s := f.take(r); s.Allowed || s.Remaining != 0 {
			f.Errorf("%s: take from the reserve: %+v", name, s)
		}
		r.Reserved = 0
		if s := f.take(r); !s.Allowed || s.Used != 3 || s.Remaining != 2 {
			f.Errorf("%s: take from all: %+v", name, s)
		}
	}
}

// testHeld: a take that leaves little is held until a refund under its number, of any cost. Requests that are refused
// for want of what is held are told so.
func testHeld(f *fixture) {
	for name, r := range f.kinds() {
		if algorithm.Of(r.Limit.Algorithm).Lease {
			continue
		}
		r.Events, r.Cost, r.Hold = 80, 60, store.HearsHeld
		r.ID = "plenty00"
		if s := f.take(r); !s.Allowed || s.IsHeld || s.Held != 0 {
			f.Errorf("%s: take that holds nothing: %+v", name, s)
		}
		first := r
		first.Cost, first.ID, first.Hold = 15, "first000", 7
		taken := f.take(first)
		if !taken.Allowed || !taken.IsHeld || taken.Held != 15 {
			f.Errorf("%s: take that leaves less than a quarter: %+v", name, taken)
		}
		first.Receipt = taken.Receipt
		second := first
		second.Cost, second.ID, second.Hold = 4, "second00", 8
		second.Receipt = f.take(second).Receipt
		for _, ask := range []func(r store.Request) store.State{f.check, f.take, f.peek} {
			r.ID, r.Cost = "other000", 20
			if s := ask(r); s.Allowed || !s.InFlight || s.Held != 19 || s.RetryAfter <= 0 || s.RetryAfter > time.Second || s.ResetOtherwise <= s.Now {
				f.Errorf("%s: refused for want of what is held: %+v", name, s)
			}
			if r.Cost = 21; ask(r).InFlight {
				f.Errorf("%s: refused for want of more than what is held: %+v", name, ask(r))
			}
			unheard := r
			unheard.Cost, unheard.Hold = 20, 0
			if s := ask(unheard); s.Allowed || s.InFlight || s.Held != 0 {
				f.Errorf("%s: refused without hearing what is held: %+v", name, s)
			}
		}
		if s := f.refund(second); s.Held != 15 || s.Used != 75 {
			f.Errorf("%s: refund of the second: %+v", name, s)
		}
		first.Cost = 0
		for range 2 {
			if s := f.refund(first); s.Held != 0 || s.Used != 75 {
				f.Errorf("%s: the first is held no more: %+v", name, s)
			}
		}
		r.Cost = 20
		if s := f.take(r); s.Allowed || s.InFlight || s.Held != 0 {
			f.Errorf("%s: refused while nothing is held: %+v", name, s)
		}
	}
}

// testHeldEnds: what is held counts once under a number, goes with what was spent, and with the bucket.
func testHeldEnds(f *fixture) {
	for name, r := range f.kinds() {
		if algorithm.Of(r.Limit.Algorithm).Lease {
			continue
		}
		r.Cost, r.Hold = 1, 7
		for i := range 2 {
			r.ID = fmt.Sprintf("take%04d", i)
			if s := f.take(r); !s.IsHeld || s.Held != 1 {
				f.Errorf("%s: take %d under one number: %+v", name, i, s)
			}
		}
		f.reset(r)
		other := r
		other.ID, other.Hold = "other000", 8
		if s := f.take(other); s.Held != 1 {
			f.Errorf("%s: take after a reset: %+v", name, s)
		}
		f.clock.Advance(r.Limit.Window)
		other.ID, other.Hold = "later000", 9
		if s := f.take(other); s.Held != 1 {
			f.Errorf("%s: take a window later: %+v", name, s)
		}
		// A hold outlasts a bucket that refunds have emptied.
		emptied, last := r, r
		emptied.Events, emptied.Cost, emptied.ID, emptied.Hold = 80, 75, "emptied0", 20
		f.reset(emptied)
		emptied.Receipt = f.take(emptied).Receipt
		emptied.Hold = store.HearsHeld
		if s := f.refund(emptied); s.Used != 0 || s.Held != 75 {
			f.Errorf("%s: refund of all: %+v", name, s)
		}
		f.clock.Advance(time.Millisecond)
		last.Events, last.Cost, last.ID, last.Hold = 80, 75, "last0000", 21
		if s := f.take(last); s.Held != 150 {
			f.Errorf("%s: take of a bucket that refunds have emptied: %+v", name, s)
		}
		f.reset(last)
		// Of a long window, for ten minutes, in case that nobody ends it.
		long := *r.Limit
		long.Window, r.Limit = 10_000*time.Hour, &long
		for i, span := range []time.Duration{0, 10*time.Minute - time.Millisecond, time.Millisecond} {
			f.clock.Advance(span)
			r.ID, r.Hold = fmt.Sprintf("long%04d", i), uint32(10+i)
			if s := f.take(r); !s.IsHeld || int(s.Held) != min(i+1, 2) {
				f.Errorf("%s: take %d in a long window: %+v", name, i, s)
			}
		}
	}
}

func (f *fixture) peek(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Peek, []store.Request{r})[0]
}

func testPenalty(f *fixture) {
	for name, r := range f.kinds() {
		if !algorithm.Of(r.Limit.Algorithm).Penalties {
			continue
		}
		f.charge(r)
		until := f.now() + micros(5*time.Minute)
		for _, end := range []int64{until, until + micros(time.Minute)} {
			r.Until = end
			f.answer(f.store.Penalize, []store.Request{r})
			f.clock.Advance(time.Second)
		}
		for _, ask := range []func(store.Request) store.State{f.check, f.take} {
			s := ask(r)
			if s.Allowed || s.Penalty != until || s.Remaining != 0 || s.Reset < until || micros(s.RetryAfter) != until-f.now() {
				f.Errorf("%s: under a penalty: %+v", name, s)
			}
			f.clock.Advance(2 * time.Minute)
		}
		f.clock.Advance(2 * time.Minute)
		if s := f.take(r); !s.Allowed || s.Used != 1 || s.Penalty != 0 {
			f.Errorf("%s: after the penalty: %+v", name, s)
		}
	}
}
