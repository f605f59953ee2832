package ledger

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// AdmitAlone decides about a request that the store does not answer, by what this process
// knows: the store's last answers, what is in flight, and charges that the store has not
// confirmed. If the request fits, its cost is in flight until [Ledger.Settle] or
// [Ledger.SettleUnknown].
func (l *Ledger) AdmitAlone(r *store.Request) store.State {
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	e.rarely().alone = now
	e.keepUntil(r, now)
	st := e.alone(r, now)
	if st.Allowed {
		e.hold(r.Cost)
	}
	return st
}

// ForeseeAlone returns what AdmitAlone would answer, and changes nothing.
func (l *Ledger) ForeseeAlone(r *store.Request) store.State {
	e := l.find(r)
	if e == nil {
		return store.State{Allowed: true, Limit: max(r.Capacity(), 0)}
	}
	defer e.page.mu.Unlock()
	return e.alone(r, l.books.now())
}

// SettleUnknown ends what requests hold whose takes may have spent their cost: it counts until
// the primary answers.
func (l *Ledger) SettleUnknown(reqs []store.Request, held []int64) {
	now := l.books.now()
	for i := range reqs {
		r := &reqs[i]
		e := l.enter(r, now)
		e.hold(-held[i])
		if r.Cost > 0 {
			e.suspectTake(r, now)
		}
		e.page.mu.Unlock()
	}
}

// suspectTake counts a take of unknown outcome until the primary answers.
func (e *entry) suspectTake(r *store.Request, now int64) {
	e.doubted, e.soleWriter = true, 0
	e.noteUnsure(true)
	e.chargeAlone(r, now)
	if !e.known.IsOpen(r.Limit, now+e.clock) {
		e.addLoose(r, r.Cost, now)
		return
	}
	e.known.Charge(r, r.Cost, now+e.clock)
	e.keepUntil(r, now)
}

// chargeAlone adds a take to what counts while the store does not answer: what it says
// of the bucket lacks the charges that wait.
func (e *entry) chargeAlone(r *store.Request, now int64) {
	if e.pending != nil {
		e.pending.chargeAlone(r, r.Cost, now+e.clock)
	}
}

// alone returns what the bucket says to a request while the store does not answer.
func (e *entry) alone(r *store.Request, now int64) store.State {
	t := algorithm.Of(r.Limit.Algorithm)
	if !t.Copies() {
		return e.aloneInLog(r, now)
	}
	v := e.viewOf(r, nil, now+e.clock)
	if p := e.pending; p != nil && !t.Windowed {
		// An outage may last for many windows, in which the charges drain that wait.
		v.known, v.flight = p.alone, e.flight
		v.known.Raise(r.Limit, e.known, v.now)
	} else if now >= e.past().looseUntil {
		v.flight -= e.past().loose
	}
	v.flight += e.taking
	st := v.ahead(v.flight)
	if !st.Allowed {
		if st = v.ahead(0); st.Allowed {
			refuseForFlight(&st)
		}
	}
	showFlight(&st, v.flight)
	return st
}

// aloneInLog is alone where buckets cannot be copied. When the events of a log leave it is
// not known, so the last count holds for a window.
func (e *entry) aloneInLog(r *store.Request, now int64) store.State {
	window := r.Limit.Window.Microseconds()
	counted, flight := int64(0), e.flight+e.taking
	if e.trusted != 0 && now < e.trusted+window {
		counted = e.known.Content[confirmedUsed]
	}
	if now < e.past().looseUntil {
		flight += e.past().loose
	}
	if p := e.pending; p != nil {
		flight += p.cost()
	}
	st := store.State{
		Limit: max(r.Capacity(), 0), Used: counted + flight, Now: now + e.clock,
		Reset: now + e.clock + window, ResetOtherwise: now + e.clock + window,
	}
	st.Remaining = max(st.Limit-st.Used, 0)
	switch {
	case st.Used+r.Need() <= r.Capacity():
		st.Allowed = true
	case r.Cost > r.Capacity():
		st.RetryAfter = store.Never
	case counted+r.Need() <= r.Capacity():
		refuseForFlight(&st)
	default:
		st.RetryAfter = time.Duration(e.trusted+window-now) * time.Microsecond
	}
	return st
}

// overtakes reports whether a take that the store allowed exceeds the limit with what this
// process has admitted, and the store had not counted then.
func (e *entry) overtakes(r *store.Request, st *store.State, now int64) bool {
	used, unheard := st.Used, e.flight
	if e.pending != nil {
		unheard += e.pending.cost() - e.pending.sentCost
	}
	if alone := e.past().alone; alone != 0 && now-alone <= r.Limit.Window.Microseconds() {
		// The answer may count the charge in flight, or lack one that was answered first.
		used = max(used, e.used(r, now))
		if e.pending != nil {
			unheard += e.pending.sentCost
		}
	}
	return used+unheard > max(st.Used, r.Capacity())
}

// used is what the store is known to have counted.
func (e *entry) used(r *store.Request, now int64) int64 {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		return e.known.Content[confirmedUsed]
	}
	asked := *r
	asked.Cost = 0
	return e.known.View(&asked, 0, now+e.clock).Used
}
