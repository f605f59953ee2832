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
	// Busy identifies the busy time, in which the bucket was never empty.
	// Refunded is what was given back in it, in microseconds.
	Busy, Refunded int64
	penalty
}

var gcra = Traits{
	Penalties: true, Unbatched: "because it would defeat its smoothness", MostEvents: store.MaxEvents, MostWords: mostWords,
	empty: func() Bucket { return new(GCRA) },
	view: func(c store.Content, r store.Request, now int64, spent bool) store.State {
		return gcraOf(c).View(&r, now, spent)
	},
	copies: &copies{
		penalty: 5, busy: 3,
		charge: func(c store.Content, r store.Request, now int64) store.Content {
			b := gcraOf(c)
			b.Charge(&r, now)
			return store.Content{b.TAT, b.Rest, b.Events, b.Busy, b.Refunded, b.Penalty}
		},
		expiry: func(c store.Content, limit *store.Limit) int64 { return gcraOf(c).Expiry(limit) },
		raise:  raiseGCRA,
	},
}

func gcraOf(c store.Content) *GCRA {
	return &GCRA{TAT: c[0], Rest: c[1], Events: c[2], Busy: c[3], Refunded: c[4], penalty: penalty{c[5]}}
}

func raiseGCRA(c, other store.Content, _ *store.Limit, now int64) (merged store.Content, less bool) {
	ahead := other[0] > c[0] || other[0] == c[0] && other[1] > c[1]
	behind := other[0] < c[0] || other[0] == c[0] && other[1] < c[1]
	if ahead {
		copy(c[:5], other[:5])
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

// renew begins another busy time if the bucket is empty at now, or if the rate has
// changed: the remaining events then drain at the new rate.
func (b *GCRA) renew(r *store.Request, now int64) {
	switch {
	case b.TAT < now || b.TAT == now && b.Rest == 0:
		b.TAT = now
	case b.Events != r.Events:
		debt := float64(b.TAT - now)
		if b.Rest > 0 {
			debt++
		}
		// Go and Lua round a single product alike.
		debt = math.Ceil(debt * (float64(b.Events) / float64(r.Events)))
		b.TAT = now + int64(min(debt, float64(store.MaxInteger-now)))
	default:
		return
	}
	b.Rest, b.Events, b.Refunded = 0, r.Events, 0
	b.Busy = max(b.Busy+1, now)
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
	if r.Cost > 0 {
		b.renew(r, now)
		b.spend(r, r.Cost)
	}
}

// Take implements [Bucket].
func (b *GCRA) Take(r *store.Request, now int64) bool {
	if b.isPenalized(now) {
		return false
	}
	need := r.Need()
	after := *b
	after.renew(r, now)
	after.spend(r, need)
	if !after.holds(r, now, need) {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. Events drain in the order in which they were spent;
// a refund removes those of the request that have not drained, and later events
// move up.
func (b *GCRA) Refund(r *store.Request, now int64) {
	if b.Busy != r.Receipt.Period || b.Events != r.Events || b.TAT <= now {
		return
	}
	left := r.Receipt.Position - b.Refunded - now
	if left <= 0 {
		return
	}
	whole, rest := DrainTime(r, r.Cost)
	// Positions are rounded to the microsecond, except that of the last event.
	if left < whole || left == whole && b.TAT-now > left {
		whole, rest = left, 0
	}
	b.TAT -= whole
	if b.Rest -= rest; b.Rest < 0 {
		b.Rest += b.Events
		b.TAT--
	}
	b.Refunded += whole
	if rest > 0 {
		b.Refunded++
	}
	if b.Refunded > maxRefunded {
		// A new busy time: receipts of this one are void.
		b.Busy++
		b.Refunded = 0
	}
}

// maxRefunded keeps what was refunded in a busy time, and positions in it,
// exact.
const maxRefunded = 1 << 52

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
		s.Receipt = store.Receipt{Period: at.Busy, Position: add(at.TAT, at.Refunded)}
	} else {
		need = r.Need()
		other.spend(r, r.Cost)
	}
	s.Reset, s.ResetOtherwise = at.end(), max(other.end(), now)
	after := at
	after.spend(r, need)
	if s.Allowed = after.holds(r, now, need); !s.Allowed {
		whole, rest := DrainTime(r, max(r.Capacity(), 0))
		fits := after.TAT - whole
		if after.Rest > rest {
			fits++
		}
		wait(&s, r, fits, spent)
	}
	if !spent {
		b.apply(&s)
	}
	return s
}

// content is what counts at now: arrival time, rest, events, busy, refunded,
// penalty.
func (b *GCRA) content(now int64) (c store.Content) {
	if b.end() > now {
		c[0], c[1], c[2], c[3], c[4] = b.TAT, b.Rest, b.Events, b.Busy, b.Refunded
	}
	c[5] = b.live(now)
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

// Weight implements [Bucket]. It counts the events of the busy time.
func (b *GCRA) Weight(limit *store.Limit) int64 {
	return b.used(min(b.Busy, b.TAT), limit.Window.Microseconds())
}
