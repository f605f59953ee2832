package ledger

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// landing is how long, in microseconds, a take without a reply may be on its way: an answer
// that the primary gives meanwhile may lack it.
const landing = 2_000_000

// AdmitAlone decides about a request that the store does not answer, by what this process
// knows: the store's last answers, what is in flight, and all that this process has admitted
// since it first decided alone. If the request fits, its cost is in flight until
// [Ledger.Settle] or [Ledger.SettleUnknown].
func (l *Ledger) AdmitAlone(r *store.Request) store.State {
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	own := e.ownCount(r, now)
	past := e.rarely()
	past.own, past.alone = own, now
	e.keepUntil(r, now)
	st := e.alone(r, own, now)
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
	now := l.books.now()
	return e.alone(r, e.ownCount(r, now), now)
}

// SettleUnknown ends what requests hold whose takes may have spent their cost: nothing is
// charged, and it counts here until what the primary says has it.
func (l *Ledger) SettleUnknown(reqs []store.Request, held []int64) {
	now := l.books.now()
	for i := range reqs {
		e := l.enter(&reqs[i], now)
		e.hold(-held[i])
		e.countOwn(&reqs[i], now)
		e.page.mu.Unlock()
	}
}

// isAlone reports whether this process has decided alone so recently that the store may not
// have counted all that it has admitted.
func (e *entry) isAlone(r *store.Request, now int64) bool {
	alone := e.past().alone
	return alone != 0 && now-alone <= r.Limit.Window.Microseconds() && e.trusted <= alone+landing
}

// ownCount returns what this process has admitted since it first decided alone, on top of what
// was known then.
func (e *entry) ownCount(r *store.Request, now int64) algorithm.Known {
	if e.isAlone(r, now) {
		return e.past().own
	}
	own, waiting := e.known, e.past().loose
	if p := e.pending; p != nil {
		if waiting += p.cost(now); p.isStale {
			// The bucket was reset since the charge in flight was sent.
			waiting -= p.sentCost
		}
	}
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		own.Content = store.Content{ownUsed: e.lastCount(r, now), ownUntil: now + r.Limit.Window.Microseconds()}
		own.Content[ownUsed] += waiting
		return own
	}
	if waiting > 0 {
		own.Charge(r, waiting, now+e.clock)
	}
	return own
}

// The own count of a bucket that cannot be copied. When events leave a log only the store
// knows, so they count for a window after the process first decided alone.
const (
	ownUsed = iota
	ownUntil
)

// countOwn adds what this process has admitted to its own count.
func (e *entry) countOwn(r *store.Request, now int64) {
	if r.Cost == 0 || !e.isAlone(r, now) {
		return
	}
	own := &e.rare.own
	switch c := &own.Content; {
	case algorithm.Of(r.Limit.Algorithm).Copies():
		own.Charge(r, r.Cost, now+e.clock)
	case now < c[ownUntil]:
		c[ownUsed] += r.Cost
	default:
		c[ownUsed], c[ownUntil] = r.Cost, now+r.Limit.Window.Microseconds()
	}
	e.keepUntil(r, now)
}

// lastCount is what the store last said of a bucket that cannot be copied, for a window.
func (e *entry) lastCount(r *store.Request, now int64) int64 {
	if e.trusted == 0 || now >= e.trusted+r.Limit.Window.Microseconds() {
		return 0
	}
	return e.known.Content[confirmedUsed]
}

// alone returns what the bucket says to a request while the store does not answer.
func (e *entry) alone(r *store.Request, own algorithm.Known, now int64) store.State {
	t := algorithm.Of(r.Limit.Algorithm)
	if !t.Copies() {
		return e.aloneInLog(r, own, now)
	}
	storeNow := now + e.clock
	merged := own
	merged.Raise(r.Limit, e.known, storeNow)
	if t.Windowed && own.IsOpen(r.Limit, storeNow) {
		// A window that the store has opened later does not forget what was admitted in this one.
		merged.Content[0] = max(merged.Content[0], own.Content[0])
	}
	flight := e.flight + e.taking
	st := merged.View(r, flight, storeNow)
	if !st.Allowed {
		if st = merged.View(r, 0, storeNow); st.Allowed {
			refuseForFlight(&st, r, merged, flight)
		}
	}
	showFlight(&st, flight)
	return st
}

// aloneInLog is alone where buckets cannot be copied.
func (e *entry) aloneInLog(r *store.Request, own algorithm.Known, now int64) store.State {
	counted, until := e.lastCount(r, now), e.trusted+r.Limit.Window.Microseconds()
	if now < own.Content[ownUntil] && own.Content[ownUsed] >= counted {
		counted, until = own.Content[ownUsed], own.Content[ownUntil]
	}
	reset := now + e.clock + r.Limit.Window.Microseconds()
	st := store.State{Limit: max(r.Capacity(), 0), Used: counted, Now: now + e.clock, Reset: reset, ResetOtherwise: reset}
	showFlight(&st, e.flight+e.taking)
	switch {
	case r.Cost == 0, st.Used+r.Need() <= r.Capacity():
		st.Allowed = true
	case r.Cost > r.Capacity():
		st.RetryAfter = store.Never
	case counted+r.Need() <= r.Capacity():
		refuseForFlight(&st, r, own, e.flight+e.taking)
	default:
		st.RetryAfter = time.Duration(until-now) * time.Microsecond
	}
	return st
}

// overtakes reports whether a take that the store allowed, and that is counted, exceeds the
// limit with what this process has admitted, and the store had not counted then. others is
// what counts beside the take.
func (e *entry) overtakes(r *store.Request, st *store.State, now int64) (others int64, exceeds bool) {
	if e.isAlone(r, now) {
		// Its cost is counted by now.
		asked := *r
		asked.Ahead -= r.Cost
		alone := e.alone(&asked, e.past().own, now)
		return alone.Used - r.Cost, !alone.Allowed
	}
	unheard := e.flight
	if e.pending != nil {
		// The answer may count the charge in flight.
		unheard += e.pending.cost(now) - e.pending.sentCost
	}
	return st.Used + unheard - r.Cost, st.Used+unheard > max(st.Used, r.Capacity())
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
