package ledger

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// flightRetry is how long a client is told to wait that would fit but for its
// own requests in flight: how they end is not known.
const flightRetry = time.Second

// entry is what is known of one bucket. Its page's lock guards it. Instants are
// of the books' clock, in microseconds.
type entry struct {
	id    identity.ID
	page  *page
	place int // in its page's ring
	// known is what the primary said last, raised by what was heard since.
	known algorithm.Known
	// clock is how much the store's clock is ahead of the books'.
	clock int64
	// trusted is when the primary was asked for its last word, or 0 if that
	// must not be relied upon; confirmed is when something was last heard, or
	// done, that a word asked for before might lack.
	trusted, confirmed int64
	// refunded is when a refund of this process last arrived.
	refunded int64
	// alone is since when the primary has counted what this process charged, and
	// nothing else; 0 if that is not so.
	soleWriter int64
	// failed is when the primary could last not answer, though its word was
	// wanted.
	failed int64
	// asked is when somebody was last let through to ask about a bucket that
	// is known to be full.
	asked int64
	// until is when what is known is about the past.
	until int64
	// charged is when a charge of this process was last on its way, of a bucket
	// that cannot be copied.
	charged int64
	// flight is the cost that was admitted and is not settled.
	flight int64
	// loose is the cost that may have been spent, and that known lacks because
	// no window was known to be open.
	loose int64
	// refunds are on their way.
	refunds int32
	// silent is set while the store does not answer; doubted, until the primary
	// is heard after something was given back or may have been spent, and again when
	// an older word comes later than that.
	silent, doubted bool
	// unsure is set if it may have been spent.
	unsure bool
	// question is what the store is being asked, or nil.
	check *coalescedCheck
	// debts are the charges that the store has not confirmed, or nil.
	pending *pendingCharges
	// reservation is what was taken in advance, or nil.
	reservation *reservation
}

// isIdle tells whether the entry may be forgotten, and only what is known with
// it.
func (e *entry) isIdle() bool {
	return e.isUnused() && e.pending == nil
}

func (e *entry) isUnused() bool {
	return e.flight == 0 && e.refunds == 0 && e.check == nil && (e.reservation == nil || e.reservation.isEmpty())
}

// mayBeGivenUp tells whether charges wait that are not on their way.
func (e *entry) mayBeGivenUp() bool {
	return e.isUnused() && e.pending.isUnsent()
}

// keepUntil notes for how long the entry says something.
func (e *entry) keepUntil(r *store.Request, now int64) {
	if algorithm.Copies(r.Limit.Algorithm) {
		e.until = max(e.until, e.known.Expiry(r.Limit)-e.clock)
	} else {
		e.until = now + r.Limit.Window.Microseconds()
	}
}

// trusts tells whether the primary's word can be relied upon.
func (e *entry) trusts(now, trust int64) bool { return e.trusted != 0 && now-e.trusted <= trust }

// canReach tells whether the primary is worth asking for its word: it is not
// asked in vain more often than it is trusted.
func (e *entry) canReach(now, trust int64) bool { return e.failed == 0 || now-e.failed > trust }

// hear takes in what the store said to r, asked for at the instant asked. It
// tells whether a replica says less than is known.
func (e *entry) hear(r *store.Request, st *store.State, asked, now int64) (less bool) {
	e.clock = st.Now - now
	e.silent = false
	word := algorithm.Known{Content: st.Content}
	before := e.known
	// A charge or refund of ours may be in a word that was asked for before it
	// was confirmed, or not.
	overlaps := e.isSent() || e.refunds > 0 || asked < e.confirmed
	switch {
	case !algorithm.Copies(r.Limit.Algorithm):
		e.noteRefusal(r, st)
		if !st.Replica && !overlaps {
			e.known.Content[confirmedUsed] = st.Used
			e.confirm(e.known, asked)
		}
	case !st.Replica && !overlaps:
		e.confirm(word, asked)
	default:
		less = e.known.Raise(r.Limit, word, st.Now) && st.Replica
		if e.isSent() {
			e.pending.note(r.Limit, word, st.Now)
		}
	}
	// It may count what has been given back since, so it must not refuse for long.
	e.doubted = e.doubted || asked < e.refunded
	if e.known != before && !e.isSent() {
		e.soleWriter = 0
	}
	e.keepUntil(r, now)
	return less
}

// confirm makes the primary's word what is known.
func (e *entry) confirm(word algorithm.Known, asked int64) {
	e.known, e.trusted, e.doubted, e.loose = word, asked, false, 0
	e.noteUnsure(false)
	if e.pending != nil {
		e.pending.base = word
	}
}

// judgement is what an entry says to a request.
type judgement uint8

const (
	// fits: to the best of this process's knowledge.
	fits judgement = iota
	// full: without what is in flight, or with it.
	full
	// unclear: a charge that is on its way decides, and the store may have
	// counted it already.
	unclear
)

// judge sets the state of a request, for which st is the store's last answer
// where buckets cannot be copied.
func (e *entry) judge(r *store.Request, st *store.State, storeNow int64) judgement {
	v := e.viewOf(r, st, storeNow)
	if with := v.ahead(v.flight); with.Allowed {
		*st = with
		e.showAhead(st, &v)
		return fits
	}
	if v.unclear > 0 {
		if with := v.ahead(v.flight - v.unclear); with.Allowed {
			return unclear
		}
	}
	if *st = v.ahead(0); st.Allowed {
		refuseForFlight(st)
		e.showAhead(st, &v)
	}
	return full
}

// view is a bucket as a request has to see it.
type view struct {
	req    *store.Request
	known  algorithm.Known
	answer *store.State
	now    int64
	// flight is what has to fit before the request, beside what is known;
	// unclear is how much of it may be known already.
	flight, unclear int64
}

// viewOf adds to what is known the charges that the store has not confirmed.
func (e *entry) viewOf(r *store.Request, answer *store.State, now int64) view {
	v := view{req: r, known: e.known, answer: answer, now: now, flight: e.flight + e.loose}
	if !algorithm.Copies(r.Limit.Algorithm) && e.check != nil {
		v.flight, v.unclear = v.flight+e.check.landed, e.check.landed
	}
	d := e.pending
	if d == nil {
		return v
	}
	waiting := d.owed() - d.sentCost
	switch {
	case e.isBase(d, r.Limit, now):
		// Whatever was heard since may have in it what was sent then, and lacks
		// what waits.
		charge(&v.known, r, waiting, now)
		v.known = d.onBase(r, d.owed(), v.known, now)
	case v.known.IsOpen(r.Limit, now):
		charge(&v.known, r, waiting, now)
		v.flight, v.unclear = v.flight+d.sentCost, d.sentCost
	default:
		v.flight, v.unclear = v.flight+d.owed(), v.unclear+d.sentCost
	}
	return v
}

// isBase tells whether what was sent on top of base was spent in the window that
// is open now.
func (e *entry) isBase(d *pendingCharges, limit *store.Limit, now int64) bool {
	switch limit.Algorithm {
	case store.FixedWindow:
		return d.base.IsOpen(limit, now) && d.base.WindowEnd() == e.known.WindowEnd()
	case store.SlidingWindow:
		window := limit.Window.Microseconds()
		return now-now%window <= d.sentAt+e.clock
	default:
		return algorithm.Copies(limit.Algorithm)
	}
}

// charge adds so much to what is known, as a request like r would.
func charge(k *algorithm.Known, r *store.Request, cost, now int64) {
	charged := *r
	charged.Cost = cost
	k.Charge(&charged, now)
}

// ahead is what the bucket looks like if so much is spent before the request.
func (v *view) ahead(cost int64) store.State {
	asked := *v.req
	asked.Ahead += cost
	if algorithm.Copies(asked.Limit.Algorithm) {
		return v.known.View(&asked, v.now)
	}
	st := *v.answer
	if st.Allowed = st.Allowed && st.Used+asked.Need() <= asked.Capacity(); !st.Allowed && st.RetryAfter == 0 {
		st.RetryAfter = flightRetry
	}
	return st
}

// showAhead makes a state count what is ahead of the request, and what is
// unclear once.
func (e *entry) showAhead(st *store.State, v *view) {
	if !algorithm.Copies(v.req.Limit.Algorithm) {
		used := e.known.Content[confirmedUsed]
		if e.pending != nil {
			used += e.pending.sentCost
		}
		st.Used = max(st.Used, used)
	}
	showFlight(st, v.flight-v.unclear)
}

// refuseForFlight makes a state refuse its request because of what is in flight.
func refuseForFlight(st *store.State) {
	st.Allowed, st.InFlight, st.RetryAfter = false, true, max(st.RetryAfter, flightRetry)
}

// showFlight makes a state count what is in flight.
func showFlight(st *store.State, flight int64) {
	st.Used += flight
	st.Remaining = max(st.Limit-st.Used, 0)
}

// Of a bucket that cannot be copied, the place of its content is taken by the
// last refusal, which holds for every request of as much or more.
const (
	refusalUntil = iota
	refusalCost
	refusalCapacity
	refusalUsed
	refusalReset
	// confirmedUsed is what was spent when the primary was last heard.
	confirmedUsed
)

// noteRefusal remembers what the store said about a bucket of
// [store.SlidingLog]. When a slot of [store.Concurrency] becomes free is not
// known, so nothing can be remembered of it.
func (e *entry) noteRefusal(r *store.Request, st *store.State) {
	e.known.Content = store.Content{confirmedUsed: e.known.Content[confirmedUsed]}
	if r.Limit.Algorithm == store.SlidingLog && !st.Allowed && st.RetryAfter != store.Never {
		e.known.Content = store.Content{
			refusalUntil: st.Now + st.RetryAfter.Microseconds(), refusalCost: r.Need(),
			refusalCapacity: r.Capacity(), refusalUsed: st.Used, refusalReset: st.Reset,
			confirmedUsed: e.known.Content[confirmedUsed],
		}
	}
}

// refusesAsBefore sets the state of a request to which the last refusal
// applies.
func (e *entry) refusesAsBefore(r *store.Request, st *store.State, storeNow int64) bool {
	c := &e.known.Content
	left := c[refusalUntil] - storeNow
	if left <= 0 || r.Need() < c[refusalCost] || r.Capacity() > c[refusalCapacity] {
		return false
	}
	*st = store.State{
		Limit: max(r.Capacity(), 0), Used: c[refusalUsed], Remaining: max(r.Capacity()-c[refusalUsed], 0),
		Reset: c[refusalReset], ResetOtherwise: max(c[refusalReset], storeNow+r.Limit.Window.Microseconds()),
		RetryAfter: time.Duration(left) * time.Microsecond, Now: storeNow,
	}
	if r.Cost > r.Capacity() {
		st.RetryAfter = store.Never
	}
	return true
}
