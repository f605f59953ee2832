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
	place int // in its page's ring
	// known is what the primary said last, raised by what replicas said since,
	// and by charges of this process that are yet to be confirmed.
	known algorithm.Known
	// clock is how much the store's clock is ahead of the books'.
	clock int64
	// trusted is when the primary was asked for its last word, or 0 if that
	// must not be relied upon; confirmed is when something was last heard, or
	// done, that a word asked for before might lack.
	trusted, confirmed int64
	// asked is when somebody was last let through to ask about a bucket that
	// is known to be full.
	asked int64
	// until is when what is known is about the past.
	until int64
	// flight is the cost that was admitted and is not settled.
	flight int64
	// loose is the cost that was settled and that known lacks, because no
	// window was known to be open.
	loose int64
	// silent is set while the store does not answer; doubted, until the primary
	// is heard after something was given back or may have been spent.
	silent, doubted bool
	// question is what the store is being asked, or nil.
	question *question
	// debts are the charges that the store has not confirmed, or nil.
	debts *debts
	// reservation is what was taken in advance, or nil.
	reservation *reservation
}

// isIdle tells whether the entry may be forgotten, and only what is known with
// it.
func (e *entry) isIdle() bool {
	return e.isUnused() && e.debts == nil
}

func (e *entry) isUnused() bool {
	return e.flight == 0 && e.question == nil && (e.reservation == nil || e.reservation.isEmpty())
}

// mayBeGivenUp tells whether charges wait that are not on their way.
func (e *entry) mayBeGivenUp() bool {
	return e.isUnused() && e.debts != nil && !e.debts.sent && e.debts.waiting != nil
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

// hear takes in what the store said to r, asked for at the instant asked. It
// tells whether a replica says less than is known.
func (e *entry) hear(r *store.Request, st *store.State, asked, now int64) (less bool) {
	e.clock = st.Now - now
	e.silent = false
	copies := algorithm.Copies(r.Limit.Algorithm)
	word := algorithm.Known{Content: st.Content}
	overlaps := e.isSent() || asked < e.confirmed
	switch {
	case st.Replica:
		less = copies && e.known.Raise(r.Limit, word, st.Now)
	case overlaps:
		// A charge of ours may be in it or not.
		if copies {
			e.known.Raise(r.Limit, word, st.Now)
		}
	default:
		e.confirm(r, word, st, asked)
	}
	if e.isSent() && copies {
		e.debts.note(r.Limit, word, st.Now)
	}
	if !copies {
		e.noteRefusal(r, st)
	}
	e.keepUntil(r, now)
	return less
}

// confirm makes the primary's word what is known, and adds what it lacks.
func (e *entry) confirm(r *store.Request, word algorithm.Known, st *store.State, asked int64) {
	if algorithm.Copies(r.Limit.Algorithm) {
		e.known = word
	}
	e.trusted, e.doubted, e.loose = asked, false, 0
	if e.debts != nil {
		e.debts.looseSent = 0
		if w := e.debts.waiting; w != nil {
			e.spend(&w.req, st.Now)
		}
	}
}

// spend adds a charge to what is known.
func (e *entry) spend(r *store.Request, storeNow int64) {
	if e.known.IsOpen(r.Limit, storeNow) {
		e.known.Charge(r, storeNow)
		return
	}
	e.loose += r.Cost
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
	unclearCost := int64(0)
	if e.debts != nil {
		unclearCost = e.debts.looseSent
	}
	ahead := e.flight + e.loose
	with := e.view(r, st, storeNow, ahead)
	if with.Allowed {
		*st = with
		showFlight(st, ahead)
		return fits
	}
	if unclearCost > 0 && e.view(r, st, storeNow, ahead-unclearCost).Allowed {
		return unclear
	}
	without := e.view(r, st, storeNow, 0)
	if *st = without; without.Allowed {
		st.Allowed, st.InFlight, st.RetryAfter = false, true, flightRetry
		showFlight(st, ahead)
	}
	return full
}

// view is what the bucket looks like to a request before which so much is
// spent.
func (e *entry) view(r *store.Request, answer *store.State, storeNow, ahead int64) store.State {
	asked := *r
	asked.Ahead += ahead
	if algorithm.Copies(r.Limit.Algorithm) {
		return e.known.View(&asked, storeNow)
	}
	st := *answer
	if st.Allowed = st.Allowed && st.Used+asked.Need() <= r.Capacity(); !st.Allowed && st.RetryAfter == 0 {
		st.RetryAfter = flightRetry
	}
	return st
}

// showFlight makes a state count what is in flight.
func showFlight(st *store.State, flight int64) {
	st.Used += flight
	st.Remaining = max(st.Limit-st.Used, 0)
}
