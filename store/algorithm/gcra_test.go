package algorithm_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestGCRA(t *testing.T) {
	const s, m = time.Second, time.Minute
	// An event drains in 10 s.
	play(t, store.Request{Limit: &store.Limit{Algorithm: store.GCRA, Window: m}, Events: 6, Burst: 3}, []step{
		{at: 5 * s, op: check, cost: 3, allowed: true, used: 0, remaining: 3, reset: 5 * s},
		{at: 5 * s, op: take, cost: 2, allowed: true, used: 2, remaining: 1, reset: 25 * s},
		{at: 6 * s, op: take, cost: 2, allowed: false, used: 2, remaining: 1, reset: 25 * s, retry: 9 * s},
		{at: 15*s - time.Microsecond, op: take, cost: 2, allowed: false, used: 2, remaining: 1, reset: 25 * s, retry: time.Microsecond},
		{at: 15 * s, op: check, cost: 0, allowed: true, used: 1, remaining: 2, reset: 25 * s},
		{at: 15 * s, op: take, cost: 1, allowed: true, used: 2, remaining: 1, reset: 35 * s},
		// Of the 2 of the first take, 1 has drained.
		{at: 16 * s, op: refund, cost: 2, used: 1, remaining: 2, reset: 26 * s},
		{at: 16 * s, op: take, cost: 4, allowed: false, used: 1, remaining: 2, reset: 26 * s, retry: store.Never},
		{at: 17 * s, op: charge, cost: 4, allowed: false, used: 5, remaining: 0, reset: 66 * s, retry: 19 * s},
		// The clock runs backwards.
		{at: 7 * s, op: check, cost: 0, allowed: true, used: 6, remaining: 0, reset: 66 * s},
		{at: 36 * s, op: check, cost: 0, allowed: true, used: 3, remaining: 0, reset: 66 * s},
		{at: 66 * s, op: check, cost: 3, allowed: true, used: 0, remaining: 3, reset: 66 * s},
	})
}

// rates do not divide their windows, or not into whole microseconds.
var rates = []struct {
	events int64
	window time.Duration
}{
	{1_000_000, time.Second}, {3, time.Second}, {7, time.Minute}, {999_983, time.Hour},
}

// forRates runs a test at each rate, with a number of arrivals.
func forRates(t *testing.T, test func(t *testing.T, r store.Request, arrivals int)) {
	for _, rate := range rates {
		for burst, arrivals := range map[int64]int{1: 100_000, 10: 1_000_000} {
			t.Run(fmt.Sprintf("%d in %v, burst %d", rate.events, rate.window, burst), func(t *testing.T) {
				limit := &store.Limit{Algorithm: store.GCRA, Window: rate.window}
				test(t, store.Request{Limit: limit, Events: rate.events, Burst: burst, Cost: 1}, arrivals)
			})
		}
	}
}

// TestGCRAGivesASaturatingClientItsRate: a client that takes whenever it may never has
// more than burst + d×rate after d, and never a whole event less. With a burst of 1
// each wait is rounded up to a microsecond.
func TestGCRAGivesASaturatingClientItsRate(t *testing.T) {
	forRates(t, func(t *testing.T, r store.Request, arrivals int) {
		window := r.Limit.Window.Microseconds()
		b := algorithm.New(r.Limit)
		got, now := int64(0), origin
		for range arrivals {
			s := take.Run(b, &r, now)
			if s.Allowed {
				got++
				continue
			}
			// In units of an event divided by the window's microseconds, all this is
			// exact.
			passed := now - origin
			admitted, due := got*window, r.Burst*window+passed*r.Events
			if r.Burst == 1 {
				due = (1 + passed/((window+r.Events-1)/r.Events)) * window
			}
			if admitted > due || admitted+window <= due {
				t.Fatalf("%d admitted after %d µs", got, passed)
			}
			now += s.RetryAfter.Microseconds()
		}
	})
}

// TestGCRAConforms compares a million random arrivals, some simultaneous, with an exact
// leaky bucket.
func TestGCRAConforms(t *testing.T) {
	const seed = 20261121
	forRates(t, func(t *testing.T, r store.Request, arrivals int) {
		random := rand.New(rand.NewPCG(seed, uint64(r.Events)))
		window := r.Limit.Window.Microseconds()
		b := algorithm.New(r.Limit)
		level, now, admitted := int64(0), origin, 0
		for i := range arrivals {
			passed := int64(random.ExpFloat64() * 1.5 * float64(window) / float64(r.Events))
			now += passed
			level = max(level-passed*r.Events, 0)
			r.Cost = 1 + random.Int64N(min(r.Burst, 3))
			fits := level+r.Cost*window <= r.Burst*window
			if got := b.Take(&r, now); got != fits {
				t.Fatalf("arrival %d (seed %d): a cost of %d is taken at a level of %d/%d: %t", i, seed, r.Cost, level, window, got)
			}
			if fits {
				level += r.Cost * window
				admitted++
			}
		}
		if admitted < arrivals/10 || admitted > arrivals-arrivals/100 {
			t.Errorf("%d of %d admitted: the test shows little", admitted, arrivals)
		}
	})
}

// TestGCRAIsExactAtAnyRate does the same at any rate, also above one event a
// microsecond. Time may run backwards: then nothing drains.
func TestGCRAIsExactAtAnyRate(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.GCRA})
		s.backwards = true
		r := store.Request{Limit: &s.limit, Events: number(t, "rate", 1, 1e6), Burst: number(t, "most", 1, 100)}
		w := s.window()
		level, at := int64(0), int64(0)
		for range 80 {
			r.Cost = number(t, "cost", 0, 5)
			if level == 0 { // nothing was ever spent
				at = s.now
			}
			now := max(level-max(s.now-at, 0)*r.Events, 0)
			took := s.bucket.Take(&r, s.now)
			if fits := now+r.Cost*w <= r.Burst*w; took && !fits || s.now >= at && took != fits {
				t.Fatalf("a cost of %d is taken at a level of %d/%d: %t", r.Cost, now, w, took)
			}
			if took && r.Cost > 0 {
				level, at = now+r.Cost*w, max(at, s.now)
			}
			s.pass()
		}
	})
}

// TestGCRABound shows how much can be taken in an interval of one window: the
// burst and, before the window is over, all events but one.
func TestGCRABound(t *testing.T) {
	for _, burst := range []int64{1, 4, 10} {
		limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
		r := store.Request{Limit: &limit, Events: 7, Burst: burst, Cost: 1}
		b := algorithm.New(&limit)
		var log admissions
		for now := origin; now < origin+3*60e6; {
			s := take.Run(b, &r, now)
			if s.Allowed {
				log.add(now, 1)
			}
			now += s.RetryAfter.Microseconds()
		}
		if got, want := log.most(60e6), burst+r.Events-1; got != want {
			t.Errorf("burst %d: %d taken in an interval of one window, want %d", burst, got, want)
		}
	}
}

// TestGCRAStaysWithinItsBound holds random traffic to the same bound.
func TestGCRAStaysWithinItsBound(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.GCRA})
		burst := number(t, "most", 1, 30)
		var log admissions
		for range 80 {
			r := store.Request{Limit: &s.limit, Events: s.events, Burst: burst, Cost: number(t, "cost", 1, burst)}
			if take.Run(s.bucket, &r, s.now).Allowed {
				log.add(s.now, r.Cost)
			}
			s.pass()
		}
		if got, bound := log.most(s.window()), burst+s.events-1; got > bound {
			t.Fatalf("%d taken in an interval of one window, want at most %d: %v", got, bound, log)
		}
	})
}

// TestBurstIsIndependentOfTheRate: the burst bounds what is taken at once, not how fast
// it comes back. Its default is the events.
func TestBurstIsIndependentOfTheRate(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	for burst, want := range map[int64]int64{0: 6, 1: 1, 20: 20} {
		r := store.Request{Limit: &limit, Events: 6, Burst: burst, Cost: 1}
		b := algorithm.New(&limit)
		got := int64(0)
		for take.Run(b, &r, origin).Allowed {
			got++
		}
		if got != want {
			t.Errorf("burst %d: %d taken at once, want %d", burst, got, want)
		}
		if s := check.Run(b, &r, origin); s.RetryAfter != 10*time.Second {
			t.Errorf("burst %d: the next fits after %v, want 10s", burst, s.RetryAfter)
		}
	}
}

// TestGCRAAdmitsWhatTheLogAdmits: with a burst of all events, the takes that a log
// admits never fill the bucket, since no span has more of them than can drain.
func TestGCRAAdmitsWhatTheLogAdmits(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.GCRA})
		log := algorithm.New(&store.Limit{Algorithm: store.SlidingLog})
		for range 60 {
			r := s.request()
			r.Burst, r.Reserved = 0, 0
			if log.Take(&r, s.now) && !take.Run(s.bucket, &r, s.now).Allowed {
				t.Fatalf("the log admits a cost of %d at %d, gcra does not", r.Cost, s.now)
			}
			s.pass()
		}
	})
}

// small is a history of a bucket whose events drain in little more than a microsecond,
// so that fractions of one show. Three costs are spent at 0. The second, and a third of
// 1, are refunded later, and a last cost is spent.
type small struct {
	events, window            int64
	first, second, third      int64
	refund, again, last, when int64
}

// TestGCRARefundsCreateNothingInSmall goes through all small histories.
func TestGCRARefundsCreateNothingInSmall(t *testing.T) {
	for _, rate := range [][2]int64{{1, 1}, {2, 3}, {3, 4}, {5, 7}, {4, 7}, {3, 8}} {
		for i := range int64(4 * 3 * 3 * 5 * 3 * 4 * 5) {
			next := func(n int64) int64 {
				digit := i % n
				i /= n
				return digit
			}
			h := small{events: rate[0], window: rate[1]}
			h.first, h.second, h.third = next(4), 1+next(3), next(3)
			h.refund, h.again, h.last, h.when = next(5), next(3), 2+next(4), next(5)
			if !h.holds(t) {
				return
			}
		}
	}
}

// holds reports whether refunds never exceed what was taken.
func (h small) holds(t *testing.T) bool {
	limit := store.Limit{Algorithm: store.GCRA, Window: micros(h.window)}
	with, without := algorithm.New(&limit), algorithm.New(&limit)
	spend := func(b algorithm.Bucket, cost, at int64) store.Request {
		r := store.Request{Limit: &limit, Events: h.events, Cost: cost}
		r.Receipt = charge.Run(b, &r, origin+at).Receipt
		return r
	}
	spend(with, h.first, 0)
	spend(without, h.first, 0)
	second := spend(with, h.second, 0)
	third := spend(with, h.third, 0)
	if h.third != 1 {
		spend(without, h.third, 0)
	}
	for at := range int64(30) {
		if at == h.refund+h.when {
			spend(with, h.last, at)
			spend(without, h.last, at)
		}
		if at == h.refund {
			refund.Run(with, &second, origin+at)
		}
		if at == h.refund+h.again && h.third == 1 {
			refund.Run(with, &third, origin+at)
		}
		if at < h.refund+h.again {
			continue // the refunds are yet to come
		}
		r := store.Request{Limit: &limit, Events: h.events}
		if got, want := check.Run(with, &r, origin+at).Used, check.Run(without, &r, origin+at).Used; got < want {
			t.Errorf("%+v: %d used at %d with the refunds, %d without the takes", h, got, at, want)
			return false
		}
	}
	return true
}

// TestMergedEventsTakeTheTimeOfEach: a charge for two costs of any limits drains no earlier
// than both, and at no lower rate than the lower of theirs.
func TestMergedEventsTakeTheTimeOfEach(t *testing.T) {
	forAll(t, func(t *trial) {
		limit := store.Limit{Algorithm: store.GCRA, Window: time.Hour}
		request := func() *store.Request {
			return &store.Request{Limit: &limit, Events: number(t, "events", 1, 2000), Cost: number(t, "cost", 0, 50)}
		}
		one, other := request(), request()
		both := *other
		both.Events, both.Cost = algorithm.MergedEvents(one, other), one.Cost+other.Cost
		apart, merged := algorithm.New(&limit), algorithm.New(&limit)
		charge.Run(apart, one, origin)
		charge.Run(apart, other, origin)
		charge.Run(merged, &both, origin)
		// Apart, the times are rounded up.
		if merged.Expiry(&limit) < apart.Expiry(&limit)-2 && both.Cost > 0 || both.Events < min(one.Events, other.Events) {
			t.Fatalf("%+v and %+v are merged to %+v", one, other, both)
		}
	})
}

// TestDrainedCopyLacksNothing: nobody asks again because another copy lacks what counts no more.
func TestDrainedCopyLacksNothing(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	for later, want := range map[int64]bool{0: true, 2_000_000: false} {
		var k algorithm.Known
		k.Charge(&store.Request{Limit: &limit, Events: 60}, 1, origin)
		if less := k.Raise(&limit, algorithm.Known{}, origin+later); less != want {
			t.Errorf("after %d us the other copy has less: %t", later, less)
		}
	}
}

// TestRaisedCopyHasTheEventsOfBoth: of two copies of a bucket the one that drains later may
// have fewer events.
func TestRaisedCopyHasTheEventsOfBoth(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Hour}
	slow := store.Request{Limit: &limit, Events: 10, Cost: 1}
	quick := store.Request{Limit: &limit, Events: 1000, Cost: 20}
	var one, other algorithm.Known
	one.Charge(&slow, slow.Cost, origin)
	other.Charge(&quick, quick.Cost, origin)
	for _, pair := range [][2]algorithm.Known{{one, other}, {other, one}} {
		raised := pair[0]
		raised.Raise(&limit, pair[1], origin)
		if st := raised.View(&slow, 0, origin); st.Used != 20 || st.Reset != origin+360e6 {
			t.Errorf("%+v", st)
		}
	}
}

// TestRefundAtAnotherRateLeavesASoundBucket: a rest that is no part of a microsecond would empty it in Redis.
func TestRefundAtAnotherRateLeavesASoundBucket(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	b := algorithm.New(&limit)
	spent := take.Run(b, &store.Request{Limit: &limit, Events: 1 << 40, Cost: 1<<40 - 1}, origin)
	left := refund.Run(b, &store.Request{Limit: &limit, Events: 1 << 50, Cost: 1<<40 - 17, Receipt: spent.Receipt}, origin)
	if rest, parts := left.Content[1], left.Content[2]; spent.Content[1] == 0 || rest >= parts || left.Reset <= origin {
		t.Errorf("after %v it holds %v", spent.Content, left.Content)
	}
}
