package algorithm

import (
	"math"
	"math/bits"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// GCRA is the content of a bucket of [store.GCRA]. Each event drains in Window /
// Events; the rest of that division is kept, so that every rate is exact.
type GCRA struct {
	noWindow
	// TAT is the theoretical arrival time, when all events have drained: whole
	// microseconds, and Rest in parts of 1/Events. Events is their rate.
	TAT, Rest, Events int64
	// Busy identifies the busy time, in which the bucket was never empty. Spent are the
	// events spent in it, but for those that were last and were given back.
	Busy, Spent int64
	// Fastest is the highest rate in the busy time.
	Fastest int64
	penalty
}

var gcra = Traits{
	Penalties: true, Unbatched: "because it would defeat its smoothness", MostEvents: store.MaxEvents, MostWords: mostWords,
	empty: func() Bucket { return new(GCRA) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return gcraOf(c).View(&r, now, spent)
	},
	copies: &copies{
		penalty: 6, busy: 3,
		charge: func(c store.Content, r store.Request, cost, now int64) store.Content {
			r.Cost = cost
			b := gcraOf(c)
			b.Charge(&r, now)
			return b.copy()
		},
		believe: func(c store.Content, r store.Request, now int64) store.Content {
			b := gcraOf(c)
			b.Believe(&r, now)
			return b.copy()
		},
		expiry: func(c *store.Content, limit *store.Limit) int64 { return gcraOf(*c).Expiry(limit) },
		raise:  raiseGCRA,
	},
}

func gcraOf(c store.Content) *GCRA {
	return &GCRA{TAT: c[0], Rest: c[1], Events: c[2], Busy: c[3], Spent: c[4], Fastest: c[5], penalty: penalty{c[6]}}
}

func (b *GCRA) copy() store.Content {
	return store.Content{b.TAT, b.Rest, b.Events, b.Busy, b.Spent, b.Fastest, b.Penalty}
}

func raiseGCRA(c, other store.Content, _ *store.Limit, now int64) (merged store.Content, less bool) {
	ahead := other[0] > c[0] || other[0] == c[0] && other[1] > c[1]
	behind := other[0] < c[0] || other[0] == c[0] && other[1] < c[1]
	if ahead {
		copy(c[:6], other[:6])
	}
	return c, behind && c[0] > now
}

// DrainTime is how long n events take to drain: whole microseconds, and the rest
// in parts of 1/r.Events.
func DrainTime(r *store.Request, n int64) (whole, rest int64) {
	return mulDiv(n, r.Limit.Window.Microseconds(), r.Events)
}

// Tolerance is how far TAT may be ahead of the present after a request has spent
// its need, or less than 0 if the need exceeds the capacity.
func Tolerance(r *store.Request, need int64) (whole, rest int64) {
	if capacity := r.Capacity(); capacity >= need {
		return DrainTime(r, capacity)
	}
	return -1, 0
}

// renew begins another busy time if the bucket is empty at now. If the rate has changed,
// the remaining events drain at the new rate.
func (b *GCRA) renew(r *store.Request, now int64) {
	switch {
	case b.end() <= now:
		b.TAT, b.Rest, b.Spent, b.Fastest = now, 0, 0, 0
		b.Busy = max(b.Busy+1, now)
	case b.Events != r.Events:
		b.TAT, b.Rest = after(now, math.Ceil(float64(b.end()-now)*(float64(b.Events)/float64(r.Events)))), 0
	}
	b.Events, b.Fastest = r.Events, max(b.Fastest, r.Events)
}

// after is the instant a number of microseconds after now. Go and Lua round a single
// operation alike.
func after(now int64, micros float64) int64 {
	return now + int64(min(micros, float64(store.MaxInteger-now)))
}

func (b *GCRA) spend(r *store.Request, n int64) {
	whole, rest := DrainTime(r, n)
	b.TAT = add(b.TAT, whole)
	if b.Rest += rest; b.Rest >= b.Events {
		b.Rest -= b.Events
		b.TAT = add(b.TAT, 1)
	}
	if b.TAT == store.MaxInteger {
		b.Rest = 0
	}
}

// holds reports whether the bucket, with need spent in it, does not overflow.
func (b *GCRA) holds(r *store.Request, now, need int64) bool {
	whole, rest := Tolerance(r, need)
	ahead := b.TAT - now
	return ahead < whole || ahead == whole && b.Rest <= rest
}

// Charge implements [Bucket].
func (b *GCRA) Charge(r *store.Request, now int64) {
	if r.Cost == 0 {
		return
	}
	b.renew(r, now)
	b.spend(r, r.Cost)
	if b.Spent += r.Cost; b.Spent > store.MaxInteger {
		// A new busy time: receipts of this one are void.
		b.Busy, b.Spent = b.Busy+1, r.Cost
	}
}

// Take implements [Bucket].
func (b *GCRA) Take(r *store.Request, now int64) bool {
	if b.isPenalized(now) {
		return false
	}
	need := r.Need()
	with := *b
	with.renew(r, now)
	with.spend(r, need)
	if r.Cost > 0 && !with.holds(r, now, need) {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. Events drain in the order in which they were spent; a
// refund removes those of the request that have not drained, and later events move up.
// Those have not drained that are left beside the events spent later; of these some may
// have been removed, but no more has drained than the time since allows at any rate. So a
// refund may remove less, and never more.
func (b *GCRA) Refund(r *store.Request, now int64) {
	later, left := max(b.Spent-r.Receipt.Position, 0), b.TAT-now
	if r.Cost == 0 || b.Busy != r.Receipt.Period || left <= 0 {
		return
	}
	whole, rest := DrainTime(r, r.Cost)
	if rates := float64(r.Events) / float64(b.Events); rates != 1 {
		whole, rest = int64(min(math.Floor(float64(whole)*rates), store.MaxInteger)), 0
	}
	behind := math.Ceil(float64(later) * (float64(r.Limit.Window.Microseconds()) / float64(b.Events)))
	drained := math.Ceil(float64(max(now-r.Receipt.At, 0)) * (float64(b.Fastest) / float64(b.Events)))
	undrained := min(max(float64(left)-behind, float64(whole)-drained), float64(left))
	if undrained <= 0 {
		return
	}
	if undrained < float64(whole) || undrained == float64(whole) && later > 0 {
		whole, rest = int64(undrained), 0
	}
	b.TAT -= whole
	if b.Rest -= rest; b.Rest < 0 {
		b.Rest += b.Events
		b.TAT--
	}
	if later == 0 {
		b.Spent = max(b.Spent-r.Cost, 0)
	}
}

// View implements [Bucket].
func (b *GCRA) View(r *store.Request, now int64, spent bool) store.State {
	at := *b
	at.renew(r, now)
	s := newState(r, now, at.used(now, r.Limit.Window.Microseconds()), spent)
	s.Content = b.content(now)
	need := int64(0)
	other := at
	if spent {
		whole, rest := DrainTime(r, r.Cost)
		if other.TAT -= whole; other.Rest < rest {
			other.TAT--
			other.Rest += other.Events
		}
		other.Rest -= rest
		s.Receipt = store.Receipt{Period: at.Busy, Position: at.Spent, At: now}
	} else {
		need = r.Need()
		other.spend(r, r.Cost)
	}
	s.Reset, s.ResetOtherwise = at.end(), max(other.end(), now)
	with := at
	with.spend(r, need)
	if s.Allowed = r.Cost == 0 || with.holds(r, now, need); !s.Allowed {
		whole, rest := DrainTime(r, max(r.Capacity(), 0))
		fits := with.TAT - whole
		if with.Rest > rest {
			fits++
		}
		wait(&s, r, fits, spent)
	}
	if !spent {
		b.apply(&s)
	}
	return s
}

// content is what counts at now: arrival time, rest, events, busy, spent,
// fastest, penalty.
func (b *GCRA) content(now int64) (c store.Content) {
	if b.end() > now {
		c[0], c[1], c[2], c[3], c[4], c[5] = b.TAT, b.Rest, b.Events, b.Busy, b.Spent, b.Fastest
	}
	c[6] = b.live(now)
	return c
}

func (b *GCRA) end() int64 {
	if b.Rest > 0 {
		return b.TAT + 1
	}
	return b.TAT
}

// used is how many events have not drained at now, rounded up.
func (b *GCRA) used(now, window int64) int64 {
	hi, lo := bits.Mul64(uint64(b.TAT-now), uint64(b.Events))
	lo, carry := bits.Add64(lo, uint64(b.Rest+window-1), 0)
	if hi += carry; hi >= uint64(window) {
		return store.MaxInteger
	}
	n, _ := bits.Div64(hi, lo, uint64(window))
	return int64(min(n, store.MaxInteger))
}

// Expiry implements [Bucket].
func (b *GCRA) Expiry(*store.Limit) int64 { return max(b.end(), b.Penalty) }

// Share implements [Bucket].
func (b *GCRA) Share(limit *store.Limit, capacity, now int64) float64 {
	used := int64(0)
	if b.end() > now && b.TAT >= now {
		used = b.used(now, limit.Window.Microseconds())
	}
	return b.raise(shareOf(used, capacity), now)
}
