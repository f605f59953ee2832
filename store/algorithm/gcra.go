package algorithm

import (
	"math"
	"math/bits"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// GCRA is the content of a bucket of [store.GCRA]. Each event adds the time in which it
// drains at the rate of its own request, and all that has not drained shrinks alike. So
// events never drain faster than at the highest rate among them, whatever else is spent.
type GCRA struct {
	noWindow
	// TAT is the theoretical arrival time, when all events have drained: whole
	// microseconds, and Rest in parts of 1/Events.
	TAT, Rest int64
	// The bucket drains at Events in Span microseconds: at the rate of the events in it,
	// which is exact, or if these differ at their mean, without a Rest.
	Events, Span int64
	// Busy is the beginning of the busy time, in which the bucket was never empty. Spent are
	// the events spent in it, but for those that were last and were given back.
	Busy, Spent int64
	penalty
}

var gcra = Traits{
	Aging: Draining, Penalties: true, Unbatched: "because it would defeat its smoothness", MostEvents: store.MaxEvents, MostWords: mostWords,
	empty: func() Bucket { return new(GCRA) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return gcraOf(c).View(&r, now, spent)
	},
	copies: &copies{
		penalty: 6, busy: 3, instants: []int{0, 3, 6},
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
		expiry: func(c store.Content, limit *store.Limit) int64 { return gcraOf(c).Expiry(limit) },
		raise:  raiseGCRA,
	},
}

func gcraOf(c store.Content) *GCRA {
	return &GCRA{TAT: c[0], Rest: c[1], Events: c[2], Busy: c[3], Spent: c[4], Span: c[5], penalty: penalty{c[6]}}
}

func (b *GCRA) copy() store.Content {
	return store.Content{b.TAT, b.Rest, b.Events, b.Busy, b.Spent, b.Span, b.Penalty}
}

func raiseGCRA(c, other store.Content, _ *store.Limit, now int64) (merged store.Content, less bool) {
	ahead := other[0] > c[0] || other[0] == c[0] && other[1] > c[1]
	behind := other[0] < c[0] || other[0] == c[0] && other[1] < c[1]
	less = behind && c[0] > now
	if ahead {
		c, other = other, c
	}
	return gcraOf(c).atLeast(gcraOf(other), now), less
}

// atLeast is a copy of the bucket with no fewer events at now than another one, which drains
// no later.
func (b *GCRA) atLeast(other *GCRA, now int64) store.Content {
	if other.end() > now {
		if n := other.count(now); n > b.count(now)*(1+exactness) {
			b.TAT, b.Rest = b.end(), 0
			b.mean(n, now)
			b.Spent = max(b.Spent, other.Spent)
		}
	}
	return b.copy()
}

// DrainTime is how long n events take to drain: whole microseconds, and the rest
// in parts of 1/r.Events.
func DrainTime(r *store.Request, n int64) (whole, rest int64) {
	return mulDiv(n, r.Limit.Window.Microseconds(), r.Events)
}

// MergedEvents are the events of a request for the costs of two, the newer one last. Where
// they drain, they take no less time than each at its own rate.
func MergedEvents(a, b *store.Request) int64 {
	if !Of(b.Limit.Algorithm).Drains() || a.Events == b.Events {
		return b.Events
	}
	first, second := float64(a.Cost), float64(b.Cost)
	rate := (first + second) / (first/float64(a.Events) + second/float64(b.Events))
	if math.IsNaN(rate) {
		return b.Events // no costs
	}
	return max(int64(rate), min(a.Events, b.Events))
}

// Tolerance is how far TAT may be ahead of the present after a request has spent
// its need, or less than 0 if the need exceeds the capacity.
func Tolerance(r *store.Request, need int64) (whole, rest int64) {
	if capacity := r.Capacity(); capacity >= need {
		return DrainTime(r, capacity)
	}
	return -1, 0
}

// renew begins another busy time if the bucket is empty at now.
func (b *GCRA) renew(r *store.Request, now int64) {
	if b.end() <= now {
		b.TAT, b.Rest, b.Spent = now, 0, 0
		b.Events, b.Span = r.Events, r.Limit.Window.Microseconds()
		b.Busy = max(b.Busy, now)
	}
}

// open gives a bucket that is empty the arrival time that r, which needs that much, has for it: no later than that of
// a full one.
func (b *GCRA) open(r *store.Request, now, need int64) {
	most, _ := Tolerance(r, need)
	tat := min(endOf(r, now, most), store.MaxInteger)
	if b.end() > now || r.Ends == 0 || tat <= now {
		return
	}
	b.renew(r, now)
	b.TAT, b.Spent = tat, store.MaxInteger
	b.Spent = int64(min(math.Ceil(b.count(now)), store.MaxInteger))
}

// isOf reports whether all events in the bucket have the rate of r.
func (b *GCRA) isOf(r *store.Request) bool {
	return b.Events == r.Events && b.Span == r.Limit.Window.Microseconds()
}

// roundedUp is [DrainTime] in whole microseconds.
func roundedUp(r *store.Request, n int64) int64 {
	whole, rest := DrainTime(r, n)
	if rest > 0 {
		whole++
	}
	return whole
}

// count is how many events have not drained at now: no more than were spent, also by a
// clock that is behind. Go and Lua round single operations alike, which conversions keep
// from being fused.
func (b *GCRA) count(now int64) float64 {
	whole := float64(float64(b.TAT-now) * (float64(b.Events) / float64(b.Span)))
	return min(whole+float64(b.Rest)/float64(b.Span), float64(b.Spent))
}

// mean sets the rate at which n events drain by TAT.
func (b *GCRA) mean(n float64, now int64) {
	each := min(float64(b.TAT-now)/min(n, store.MaxInteger), store.MaxInteger)
	events := math.Floor(store.MaxInteger / max(each, 1))
	b.Events, b.Span = int64(events), int64(min(max(math.Floor(float64(each*events)), 1), store.MaxInteger))
}

func (b *GCRA) spend(r *store.Request, n, now int64) {
	if n == 0 {
		return
	}
	if !b.isOf(r) {
		sum := b.count(now) + float64(n)
		b.TAT, b.Rest = add(min(b.end(), store.MaxInteger), roundedUp(r, n)), 0
		b.mean(sum, now)
		return
	}
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

// holds reports whether need fits into the bucket.
func (b *GCRA) holds(r *store.Request, now, need int64) bool {
	if !b.isOf(r) {
		return b.usedBy(r, now) <= r.Capacity()-need
	}
	with := *b
	with.spend(r, need, now)
	whole, rest := Tolerance(r, need)
	ahead := with.TAT - now
	return ahead < whole || ahead == whole && with.Rest <= rest
}

// Charge implements [Bucket].
func (b *GCRA) Charge(r *store.Request, now int64) {
	if r.Cost == 0 {
		return
	}
	b.open(r, now, 0)
	b.renew(r, now)
	b.spend(r, r.Cost, now)
	if b.Spent += r.Cost; b.Spent > store.MaxInteger {
		// A new busy time: receipts of this one are void.
		b.Busy, b.Spent = max(b.Busy, now)+1, store.MaxInteger
	}
}

// Take implements [Bucket].
func (b *GCRA) Take(r *store.Request, now int64) bool {
	if b.isPenalized(now) {
		return false
	}
	b.open(r, now, r.Cost)
	with := *b
	with.renew(r, now)
	if r.Cost > 0 && !with.holds(r, now, r.Need()) {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. It removes what of the request has not drained, and never
// more. Receipts say when it was spent, and how much had been spent in the busy time. A bucket
// does not become empty before all receipts of its busy time are older or refunded.
func (b *GCRA) Refund(r *store.Request, now int64) {
	if r.Cost == 0 || r.Receipt.Period < b.Busy || b.TAT <= now {
		return
	}
	later, since := max(b.Spent-r.Receipt.Position, 0), max(now-r.Receipt.Period, 0)
	back := r.Cost
	if b.isOf(r) {
		if !b.removeLast(r, later, since, now) {
			return
		}
	} else if back = b.removeShare(r, later, since, now); back < 0 {
		return
	}
	if later == 0 {
		if b.Spent = max(b.Spent-back, 0); b.Spent == 0 {
			// What rounding has left is of no event.
			b.TAT, b.Rest = now, 0
		}
	}
}

// removeLast refunds where all events have one rate: they drain in the order in which they
// were spent, and later ones move up. Those have not drained that are left beside the
// events spent later; of these some may have been removed, but no more has drained than
// the time since allows. It reports whether anything was left to refund.
func (b *GCRA) removeLast(r *store.Request, later, since, now int64) bool {
	whole, rest := DrainTime(r, r.Cost)
	left := float64(b.TAT - now)
	behind := math.Ceil(float64(later) * (float64(b.Span) / float64(b.Events)))
	undrained := min(max(left-behind, float64(whole-since)), left)
	if undrained <= 0 {
		return false
	}
	if undrained < float64(whole) || undrained == float64(whole) && later > 0 {
		whole, rest = int64(undrained), 0
	}
	b.TAT -= whole
	if b.Rest -= rest; b.Rest < 0 {
		b.Rest += b.Events
		b.TAT--
	}
	return true
}

// removeShare refunds where rates differ: all events shrink alike. At least that share of
// the request is left which is left of all that was there with it, at most its capacity,
// beside the events spent later, and which is left if it was alone. It returns how much of
// the cost came back, rounded down, or -1 if nothing was left to refund.
func (b *GCRA) removeShare(r *store.Request, later, since, now int64) (back int64) {
	n := b.count(now)
	whole, rest := DrainTime(r, r.Cost)
	all := float64(whole) + float64(rest)/float64(r.Events)
	share := max((n-float64(later))/float64(max(r.Capacity(), 1)), 1-float64(since)/all)
	if share <= 0 {
		return -1
	}
	share = min(share, 1)
	// The rest is in parts of the old rate: it is rounded up.
	b.TAT, b.Rest = min(b.end(), store.MaxInteger), 0
	left := float64(b.TAT - now)
	cost := float64(float64(r.Cost) * share)
	if n-cost > float64(n*exactness) {
		b.TAT -= int64(min(math.Floor(float64(float64(whole)*share)), left-1))
		b.mean(n-cost, now)
	} else {
		b.TAT = now
	}
	return int64(math.Floor(cost))
}

// View implements [Bucket].
func (b *GCRA) View(r *store.Request, now int64, spent bool) store.State {
	at := *b
	at.renew(r, now)
	s := newState(r, now, at.usedBy(r, now), spent)
	s.Content = b.content(now)
	need, other := int64(0), at
	if spent {
		other.unspend(r)
		s.Receipt = store.Receipt{Period: max(at.Busy, now), Position: at.Spent}
	} else {
		need = r.Need()
		other.spend(r, r.Cost, now)
	}
	s.Reset, s.ResetOtherwise = at.end(), max(other.end(), now)
	if s.Allowed = r.Cost == 0 || at.holds(r, now, need); !s.Allowed {
		wait(&s, r, at.fits(r, now, need), spent)
	}
	if !spent {
		b.apply(&s)
	}
	return s
}

// unspend takes back the time that the cost has just added.
func (b *GCRA) unspend(r *store.Request) {
	if !b.isOf(r) {
		b.TAT -= roundedUp(r, r.Cost)
		return
	}
	whole, rest := DrainTime(r, r.Cost)
	if b.TAT -= whole; b.Rest < rest {
		b.TAT--
		b.Rest += b.Events
	}
	b.Rest -= rest
}

// fits is the instant at which need fits, or could if it is more than the capacity.
func (b *GCRA) fits(r *store.Request, now, need int64) int64 {
	if b.isOf(r) {
		with := *b
		with.spend(r, need, now)
		whole, rest := DrainTime(r, max(r.Capacity(), 0))
		if with.Rest > rest {
			whole--
		}
		return with.TAT - whole
	}
	room := r.Capacity() - need
	if room < 0 {
		// When there is room for what exceeds the capacity, the bucket would have been empty so long.
		return add(b.TAT, roundedUp(r, -room))
	}
	at := max(b.TAT-int64(min(float64(room)*(float64(b.Span)/float64(b.Events)), float64(b.TAT-now))), now)
	for b.usedBy(r, at) > room {
		at++
	}
	for at > now && b.usedBy(r, at-1) <= room {
		at--
	}
	return at
}

// content is what counts at now: arrival time, rest, events, busy, spent, span, penalty.
func (b *GCRA) content(now int64) (c store.Content) {
	if b.end() > now {
		c[0], c[1], c[2], c[3], c[4], c[5] = b.TAT, b.Rest, b.Events, b.Busy, b.Spent, b.Span
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

// exactness is what a mean rate may be wrong by: without it, events that have just been
// spent could be rounded up to one more.
const exactness = 1.0 / (1 << 40)

// usedBy is how many events have not drained at now as r sees it, rounded up.
func (b *GCRA) usedBy(r *store.Request, now int64) int64 {
	if b.isOf(r) {
		return b.used(now)
	}
	return int64(min(math.Ceil(float64(b.count(now)*(1-exactness))), store.MaxInteger))
}

// used is how many events have not drained at now, rounded up.
func (b *GCRA) used(now int64) int64 {
	hi, lo := bits.Mul64(uint64(b.TAT-now), uint64(b.Events))
	lo, carry := bits.Add64(lo, uint64(b.Rest+b.Span-1), 0)
	if hi += carry; hi >= uint64(b.Span) {
		return store.MaxInteger
	}
	n, _ := bits.Div64(hi, lo, uint64(b.Span))
	return int64(min(n, store.MaxInteger))
}

// Expiry implements [Bucket].
func (b *GCRA) Expiry(*store.Limit) int64 { return max(b.end(), b.Penalty) }

// Share implements [Bucket].
func (b *GCRA) Share(_ *store.Limit, capacity, now int64) float64 {
	used := int64(0)
	if b.end() > now && b.TAT >= now {
		used = b.used(now)
	}
	return b.raise(shareOf(used, capacity), now)
}
