package core

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// flightRetry is the RetryAfter of a request that fits but for the client's own
// requests in flight: how they end is unknown.
const flightRetry = time.Second

// hear takes in the store's answer to r, asked for at the instant asked. It
// reports whether the answer is behind what is known.
func (b *Bucket) hear(r *store.Request, st *store.State, asked int64, m *Moment) (stale bool) {
	b.clock = st.Now - m.Now
	b.silent = false
	if b.predatesReset(asked) {
		// The windows before and after a reset may have the same name, so Raise cannot
		// tell them apart.
		return true
	}
	answer := algorithm.Known{Content: st.Content}
	before := b.known
	// The answer may or may not count a write of ours.
	overlaps := b.isSent() || b.refunds > 0 || mayLack(asked, b.written)
	switch {
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		b.noteRefusal(r, st)
		if !st.Replica && !overlaps {
			b.known.Content[confirmedUsed] = st.Used
			b.confirm(b.known, asked)
		}
	case !st.Replica && !overlaps:
		b.confirm(answer, asked)
	default:
		stale = b.known.Raise(r.Limit, answer, st.Now) && st.Replica
		if b.isSent() {
			b.pending.note(r.Limit, answer, st.Now)
		}
	}
	if mayLack(asked, b.extras().refunded) {
		// It must not refuse for long.
		b.disturbed = m.Now
	}
	if b.known != before && !b.isSent() {
		b.soleWriter = 0
	}
	b.keepUntil(r, m)
	return stale
}

// confirm replaces what is known by the primary's answer.
func (b *Bucket) confirm(answer algorithm.Known, asked int64) {
	b.known, b.trusted, b.usedUp, b.uncertain = answer, asked, false, false
	if b.extra != nil {
		b.extra.loose = 0
	}
	if b.pending != nil {
		b.pending.base = answer
	}
}

// noteReach notes the answer to a check that only the primary was to answer, asked for at
// the instant asked: if a replica did, the primary failed. After a reset the primary is
// asked, whatever an answer from before says.
func (b *Bucket) noteReach(st *store.State, asked int64, m *Moment) {
	switch {
	case b.predatesReset(asked):
	case st.Replica:
		b.ensureExtra().failed = m.Now
	case b.extra != nil:
		b.extra.failed = 0
	}
}

// judgement is the decision about a request.
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
func (b *Bucket) judge(r *store.Request, st *store.State, storeNow int64, m *Moment) judgement {
	v := b.viewOf(r, st, storeNow)
	if with := v.ahead(v.flight); with.Allowed {
		*st = with
		b.showAhead(st, &v)
		return fits
	}
	if v.unclear > 0 {
		if with := v.ahead(v.flight - v.unclear); with.Allowed {
			return unclear
		}
	}
	if *st = v.ahead(0); st.Allowed {
		refuseForFlight(st, r, v.known, v.flight)
		b.showAhead(st, &v)
	} else {
		b.awaitLanding(r, st, m)
	}
	return full
}

// awaitLanding makes a refused request wait for the end of the window in which pending charges
// will commonly count, if that is the next one.
func (b *Bucket) awaitLanding(r *store.Request, st *store.State, m *Moment) {
	p := b.pending
	if p == nil || p.phase == held || st.Penalty != 0 || st.RetryAfter == store.Never {
		return
	}
	took := m.Delivery
	if took == 0 {
		// None has been answered yet.
		took = flightRetry.Microseconds()
	}
	lands := p.at + b.clock + took
	if p.phase == sent && p.waiting != nil {
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
func (b *Bucket) viewOf(r *store.Request, answer *store.State, now int64) view {
	v := view{req: r, known: b.known, answer: answer, now: now, flight: b.flight + b.extras().loose}
	if !algorithm.Of(r.Limit.Algorithm).Copies() && b.check != nil {
		v.flight, v.unclear = v.flight+b.check.landed, b.check.landed
	}
	p := b.pending
	if p == nil {
		return v
	}
	all := p.left(now - b.clock)
	waiting := all - p.cost
	switch {
	case b.countsInOpenWindow(p, r.Limit, now):
		// Later answers may count the charge in flight, and lack the waiting one.
		v.known.Charge(r, waiting, now)
		v.known = p.withCharge(r, all, v.known, now)
	case v.known.IsOpen(r.Limit, now):
		v.known.Charge(r, waiting, now)
		v.flight, v.unclear = v.flight+p.cost, p.cost
	default:
		v.flight, v.unclear = v.flight+all, v.unclear+p.cost
	}
	return v
}

// countsInOpenWindow reports whether the charge in flight counts in the open window.
func (b *Bucket) countsInOpenWindow(p *pending, limit *store.Limit, now int64) bool {
	t := algorithm.Of(limit.Algorithm)
	switch {
	case t.Windowed:
		return p.base.IsOpen(limit, now) && p.base.WindowEnd() == b.known.WindowEnd()
	case t.Clocked:
		window := limit.Window.Microseconds()
		return now-now%window <= p.at+b.clock
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
func (b *Bucket) showAhead(st *store.State, v *view) {
	if !algorithm.Of(v.req.Limit.Algorithm).Copies() {
		used := b.known.Content[confirmedUsed]
		if b.pending != nil {
			used += b.pending.cost
		}
		st.Used = max(st.Used, used)
	}
	ShowFlight(st, v.flight-v.unclear)
}

// RefuseForFlight refuses a request that fits but for what is in flight in a bucket of
// which st shows the content.
func RefuseForFlight(st *store.State, r *store.Request, flight int64) {
	refuseForFlight(st, r, algorithm.Known{Content: st.Content}, flight)
}

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

// ShowFlight makes a state count what is in flight.
func ShowFlight(st *store.State, flight int64) {
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
func (b *Bucket) noteRefusal(r *store.Request, st *store.State) {
	c := store.Content{confirmedUsed: b.known.Content[confirmedUsed]}
	if !algorithm.Of(r.Limit.Algorithm).Lease && !st.Allowed && st.RetryAfter != store.Never {
		c[refusalUntil], c[refusalCost] = st.Now+st.RetryAfter.Microseconds(), r.Need()
		c[refusalCapacity], c[refusalUsed], c[refusalReset] = r.Capacity(), st.Used, st.Reset
	}
	b.known.Content = c
}

// repeatsRefusal sets the state of a request to which the last refusal applies.
func (b *Bucket) repeatsRefusal(r *store.Request, st *store.State, storeNow int64) bool {
	c := &b.known.Content
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

// refuses sets the state of a request that known refuses. It leaves the state of
// a request that fits: the store decides about that.
func (b *Bucket) refuses(r *store.Request, st *store.State, m *Moment) bool {
	if b.standing(m) < old {
		return false
	}
	storeNow := m.Now + b.clock
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		return b.repeatsRefusal(r, st, storeNow)
	}
	var refusal store.State
	if b.judge(r, &refusal, storeNow, m) != full {
		return false
	}
	*st = refusal
	return true
}

// Estimate returns what a request of no cost would see of the bucket, by what is known.
func (b *Bucket) Estimate(r *store.Request, m *Moment) store.State {
	answer := store.State{Limit: max(r.Capacity(), 0), Used: b.known.Content[confirmedUsed]}
	v := b.viewOf(r, &answer, m.Now+b.clock)
	st := v.ahead(0)
	b.showAhead(&st, &v)
	return st
}

// Account returns what is known beyond what the store says. The request is one of the
// bucket; its cost does not matter.
func (b *Bucket) Account(r *store.Request, m *Moment) store.Account {
	asked := *r
	asked.Cost = 0
	a := store.Account{InFlight: b.flight, Used: b.used(&asked, m)}
	if b.pending != nil {
		a.Unsent = b.pending.left(m.Now) - b.pending.cost
	}
	if v := b.batch; v != nil && m.Now+b.clock < v.ends {
		a.Reserved = v.tokens
	}
	// Full means that even a request of the least cost is refused.
	asked.Cost = 1
	a.Full = b.trusts(m) && b.refuses(&asked, new(store.State), m)
	return a
}

// used is what the store is known to have counted.
func (b *Bucket) used(r *store.Request, m *Moment) int64 {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		return b.known.Content[confirmedUsed]
	}
	return b.known.View(r, 0, m.Now+b.clock).Used
}
