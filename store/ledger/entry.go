package ledger

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// flightRetry is the RetryAfter of a request that fits but for the client's own
// requests in flight: how they end is unknown.
const flightRetry = time.Second

// entry is this process's knowledge of one bucket, guarded by the lock of its
// page. Instants are of the books' clock, in microseconds.
type entry struct {
	id   identity.ID
	page *page
	// known is the primary's last answer, raised by later answers of replicas.
	known algorithm.Known
	// clock is how far the store's clock is ahead of the books'.
	clock int64
	// trusted is when the primary was asked for its last answer, or 0 if that is
	// not to be trusted.
	trusted int64
	// written is when a write of this process (charge, refund, take) was last
	// answered: an answer asked for earlier may lack it.
	written int64
	// soleWriter is since when the primary has counted this process's charges
	// and nothing else, or 0.
	soleWriter int64
	// asked is when a request was last let through to check a bucket that is
	// known to be full.
	asked int64
	// until is when the entry expires.
	until int64
	// flight is the cost that was admitted and is not settled; taking, that of takes in
	// flight.
	flight, taking int64
	// refunds is the number of refunds in flight.
	refunds int32
	// silent is set while the store does not answer; doubted, after a refund or
	// a charge of unknown outcome until the primary answers.
	silent, doubted bool
	// unsure is set if a charge has an unknown outcome.
	unsure bool
	// resets is set while an operator's reset empties the bucket.
	resets bool
	// check is the coalesced check in flight, or nil.
	check *coalescedCheck
	// pending are the charges that the store has not confirmed, or nil.
	pending *pendingCharges
	// reservation holds tokens taken in advance, or is nil.
	reservation *reservation
	// rare is nil until one of its values is set.
	rare *rare
}

// rare is the part of an entry that few buckets need: there are up to a million entries.
type rare struct {
	// refunded is when a refund of this process last arrived.
	refunded int64
	// failed is when the primary last failed to answer.
	failed int64
	// charged is when a charge was last in flight, and took, when a take was last
	// answered, if the algorithm's buckets cannot be copied.
	charged, took int64
	// loose is cost of unknown outcome that known lacks, because no window was
	// known to be open.
	loose int64
	// alone is when a request was last decided about without the store, and own, what this
	// process has admitted then and since.
	alone int64
	own   algorithm.Known
	// reset is when this process last reset the bucket.
	reset int64
	// returning is what is on its way back, or nil; back is what has come back, and no take
	// was repeated for it yet.
	returning *returning
	back      int64
}

// past returns the rare values.
func (e *entry) past() rare {
	if e.rare == nil {
		return rare{}
	}
	return *e.rare
}

// rarely returns the rare values to set one of them.
func (e *entry) rarely() *rare {
	if e.rare == nil {
		e.rare = new(rare)
	}
	return e.rare
}

// forgetLoose notes that nothing is loose any more.
func (e *entry) forgetLoose() {
	if e.rare != nil {
		e.rare.loose = 0
	}
}

// isIdle reports whether forgetting the entry loses knowledge and nothing else.
func (e *entry) isIdle() bool { return e.isUnused() && e.pending == nil }

func (e *entry) isUnused() bool {
	return e.flight == 0 && e.taking == 0 && e.refunds == 0 && e.past().returning == nil && e.check == nil && (e.reservation == nil || e.reservation.isEmpty())
}

// keepUntil sets when the entry expires.
func (e *entry) keepUntil(r *store.Request, now int64) {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		e.until = now + r.Limit.Window.Microseconds()
		return
	}
	e.until = max(e.until, e.known.Expiry(r.Limit)-e.clock)
	if past := e.past(); past.alone != 0 {
		e.until = max(e.until, past.own.Expiry(r.Limit)-e.clock)
	}
}

// trusts reports whether the primary's answer is recent enough to rely on.
func (e *entry) trusts(now, trust int64) bool { return e.trusted != 0 && now-e.trusted <= trust }

// canReach reports whether the primary is worth a call: after a failure it is
// called once for each time of trust.
func (e *entry) canReach(now, trust int64) bool {
	failed := e.past().failed
	return failed == 0 || now-failed > trust
}

// wasReset reports whether this process has reset the bucket so recently that a replica may
// not show it.
func (e *entry) wasReset(now, trust int64) bool {
	reset := e.past().reset
	return reset != 0 && now-reset <= trust
}

// predatesReset reports whether an answer asked for at that instant is from before this
// process's last reset of the bucket, and so says nothing about it.
func (e *entry) predatesReset(asked int64) bool { return mayLack(asked, e.past().reset) }

// mayLack reports whether an answer asked for at that instant may lack what was answered at
// another. At equal instants it may: clocks stand still for up to 15 ms where Windows runs.
func mayLack(asked, answered int64) bool { return answered != 0 && asked <= answered }

// isDue reports whether trust has run out, and no request was let through to ask since.
func (e *entry) isDue(now, trust int64) bool {
	return !e.trusts(now, trust) && (e.asked == 0 || now-e.asked > trust)
}

func (e *entry) hold(cost int64) {
	e.flight += cost
	e.page.counts.InFlight += cost
}

func (e *entry) noteUnsure(unsure bool) {
	switch {
	case unsure && !e.unsure:
		e.page.counts.Uncertain++
	case !unsure && e.unsure:
		e.page.counts.Uncertain--
	}
	e.unsure = unsure
}

// hear takes in the store's answer to r, asked for at the instant asked. It
// reports whether the answer is behind what is known.
func (e *entry) hear(r *store.Request, st *store.State, asked, now int64) (stale bool) {
	e.clock = st.Now - now
	e.silent = false
	if e.predatesReset(asked) {
		// The windows before and after a reset may have the same name, so Raise cannot
		// tell them apart.
		return true
	}
	answer := algorithm.Known{Content: st.Content}
	before := e.known
	// The answer may or may not count a write of ours.
	overlaps := e.isSent() || e.refunds > 0 || mayLack(asked, e.written)
	switch {
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		e.noteRefusal(r, st)
		if !st.Replica && !overlaps {
			e.known.Content[confirmedUsed] = st.Used
			e.confirm(e.known, asked)
		}
	case !st.Replica && !overlaps:
		e.confirm(answer, asked)
	default:
		stale = e.known.Raise(r.Limit, answer, st.Now) && st.Replica
		if e.isSent() {
			e.pending.note(r.Limit, answer, st.Now)
		}
	}
	// The answer may lack the refund, so it must not refuse for long.
	e.doubted = e.doubted || mayLack(asked, e.past().refunded)
	if e.known != before && !e.isSent() {
		e.soleWriter = 0
	}
	e.keepUntil(r, now)
	return stale
}

// noteReach notes the answer to a check that only the primary was to answer, asked for at
// the instant asked: if a replica did, the primary failed. After a reset the primary is
// asked, whatever an answer from before says.
func (e *entry) noteReach(st *store.State, asked, now int64) {
	switch {
	case e.predatesReset(asked):
	case st.Replica:
		e.rarely().failed = now
	case e.rare != nil:
		e.rare.failed = 0
	}
}

// confirm replaces what is known by the primary's answer. It is doubted if it may lack
// a refund, so that it refuses no request for long.
func (e *entry) confirm(answer algorithm.Known, asked int64) {
	e.known, e.trusted = answer, asked
	e.forgetLoose()
	e.doubted = e.refunds > 0 || mayLack(asked, e.past().refunded)
	e.noteUnsure(false)
	if e.pending != nil {
		e.pending.base = answer
	}
}

// judgement is an entry's decision about a request.
type judgement uint8

const (
	// fits: the request is within the limit, as far as this process knows.
	fits judgement = iota
	// full: the request does not fit, with what is in flight or without it.
	full
	// unclear: a charge in flight decides, and the store may have counted it
	// already.
	unclear
)

// judge sets the state of a request, unless it is unclear. Where buckets cannot
// be copied, st is the store's last answer.
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
		refuseForFlight(st, r, v.known, v.flight)
		e.showAhead(st, &v)
	} else {
		e.awaitLanding(r, st)
	}
	return full
}

// awaitLanding makes a refused request wait for the end of the window in which pending charges
// will commonly count, if that is the next one.
func (e *entry) awaitLanding(r *store.Request, st *store.State) {
	p := e.pending
	if p == nil || p.held || st.Penalty != 0 || st.RetryAfter == store.Never {
		return
	}
	took := e.page.delivery.Load()
	if took == 0 {
		// None has been answered yet.
		took = flightRetry.Microseconds()
	}
	lands := p.sentAt + e.clock + took
	if p.sent && p.waiting != nil {
		lands += took
	}
	window := r.Limit.Window.Microseconds()
	switch t := algorithm.Of(r.Limit.Algorithm); {
	case t.Clocked && lands/window > st.Now/window:
		st.RetryAfter += r.Limit.Window
	case t.Windowed && st.Reset > st.Now && lands >= st.Reset:
		st.RetryAfter = time.Duration(lands-st.Now+window) * time.Microsecond
	}
}

// view is a bucket as one request sees it.
type view struct {
	req    *store.Request
	known  algorithm.Known
	answer *store.State
	now    int64
	// flight has to fit before the request, beside what is known; unclear is the
	// part of it that known may count already.
	flight, unclear int64
}

// viewOf adds the pending charges to what is known.
func (e *entry) viewOf(r *store.Request, answer *store.State, now int64) view {
	v := view{req: r, known: e.known, answer: answer, now: now, flight: e.flight + e.past().loose}
	if !algorithm.Of(r.Limit.Algorithm).Copies() && e.check != nil {
		v.flight, v.unclear = v.flight+e.check.landed, e.check.landed
	}
	p := e.pending
	if p == nil {
		return v
	}
	pending := p.cost(now - e.clock)
	waiting := pending - p.sentCost
	switch {
	case e.countsInOpenWindow(p, r.Limit, now):
		// Later answers may count the charge in flight, and lack the waiting one.
		v.known.Charge(r, waiting, now)
		v.known = p.withCharge(r, pending, v.known, now)
	case v.known.IsOpen(r.Limit, now):
		v.known.Charge(r, waiting, now)
		v.flight, v.unclear = v.flight+p.sentCost, p.sentCost
	default:
		v.flight, v.unclear = v.flight+pending, v.unclear+p.sentCost
	}
	return v
}

// countsInOpenWindow reports whether the charge in flight counts in the open window.
func (e *entry) countsInOpenWindow(p *pendingCharges, limit *store.Limit, now int64) bool {
	t := algorithm.Of(limit.Algorithm)
	switch {
	case t.Windowed:
		return p.base.IsOpen(limit, now) && p.base.WindowEnd() == e.known.WindowEnd()
	case t.Clocked:
		window := limit.Window.Microseconds()
		return now-now%window <= p.sentAt+e.clock
	default:
		return t.Copies()
	}
}

// ahead is the state of the request once cost is spent before it.
func (v *view) ahead(cost int64) store.State {
	if algorithm.Of(v.req.Limit.Algorithm).Copies() {
		return v.known.View(v.req, cost, v.now)
	}
	st := *v.answer
	if st.Allowed = st.Allowed && (v.req.Cost == 0 || st.Used+v.req.Need()+cost <= v.req.Capacity()); !st.Allowed && st.RetryAfter == 0 {
		st.RetryAfter = flightRetry
	}
	return st
}

// showAhead makes a state count the cost ahead of the request, and the unclear
// part of it once.
func (e *entry) showAhead(st *store.State, v *view) {
	if !algorithm.Of(v.req.Limit.Algorithm).Copies() {
		used := e.known.Content[confirmedUsed]
		if e.pending != nil {
			used += e.pending.sentCost
		}
		st.Used = max(st.Used, used)
	}
	showFlight(st, v.flight-v.unclear)
}

// refuseForFlight refuses a request that fits but for what is in flight in a bucket of which
// this is known.
func refuseForFlight(st *store.State, r *store.Request, known algorithm.Known, flight int64) {
	wait := r.Limit.Window
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		known.Charge(r, flight, st.Now)
		if with := known.View(r, 0, st.Now); with.RetryAfter != store.Never {
			wait = with.RetryAfter
		}
	}
	st.ResetOtherwise = st.Now + wait.Microseconds()
	st.Allowed, st.InFlight, st.RetryAfter = false, true, max(st.RetryAfter, flightRetry)
}

func showFlight(st *store.State, flight int64) {
	st.Used += flight
	st.Remaining = max(st.Limit-st.Used, 0)
}

// The content of a bucket that cannot be copied is its last refusal, which holds
// for every request that needs as much or more.
const (
	refusalUntil = iota
	refusalCost
	refusalCapacity
	refusalUsed
	refusalReset
	// confirmedUsed is the primary's last count.
	confirmedUsed
)

// noteRefusal remembers a refusal. When a lease ends is unknown, so refusals for want of
// one do not last.
func (e *entry) noteRefusal(r *store.Request, st *store.State) {
	c := store.Content{confirmedUsed: e.known.Content[confirmedUsed]}
	if !algorithm.Of(r.Limit.Algorithm).Lease && !st.Allowed && st.RetryAfter != store.Never {
		c[refusalUntil], c[refusalCost] = st.Now+st.RetryAfter.Microseconds(), r.Need()
		c[refusalCapacity], c[refusalUsed], c[refusalReset] = r.Capacity(), st.Used, st.Reset
	}
	e.known.Content = c
}

// repeatsRefusal sets the state of a request to which the last refusal applies.
func (e *entry) repeatsRefusal(r *store.Request, st *store.State, storeNow int64) bool {
	c := &e.known.Content
	left := c[refusalUntil] - storeNow
	if left <= 0 || r.Cost == 0 || r.Need() < c[refusalCost] || r.Capacity() > c[refusalCapacity] {
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
