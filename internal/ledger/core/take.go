package core

import (
	"context"
	"errors"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// AskTake decides about a request to take. Do is Take if the store decides, or Nothing if
// the request is refused without a call, with its state set. Once trust has run out one
// request is let through to ask, and asks is set; meanwhile others are refused if the last
// answer is not old. Where only what is held is in the way, requests are let through more often.
func (b *Bucket) AskTake(r *store.Request, st *store.State, m *Moment) (do Do, asks bool) {
	var refusal store.State
	switch rest, isServed := b.Rest(r, m); {
	case isServed || !b.refuses(&rest, &refusal, m):
		return Take, false
	case b.showHeld(&rest, &refusal) && b.mayAskForHeld(m), b.isDue(m):
		b.asked = m.Now
		return Take, true
	case m.Now-b.trusted > 2*m.Trust:
		return Take, false
	}
	b.hideTokens(r, &refusal, m)
	*st = refusal
	m.Counts.LocalRefusals++
	return Nothing, false
}

// IsFull reports whether the bucket is known to refuse a request to take, however old that
// knowledge is.
func (b *Bucket) IsFull(r *store.Request, m *Moment) bool {
	rest, isServed := b.Rest(r, m)
	return !isServed && b.refuses(&rest, new(store.State), m)
}

// AskNot undoes AskTake of a request that was let through to ask and does not, so that the
// next one may.
func (b *Bucket) AskNot() { b.asked = 0 }

// TakeSent notes that a take is in flight, and sets its Ends, and no Hold if much is left. TakeAnswered gets the mark.
func (b *Bucket) TakeSent(r *store.Request, m *Moment) (mark int64) {
	b.forgoHold(r, m)
	b.taking += r.Cost
	r.Ends = b.opens(r, m)
	return b.extras().landed
}

// TakeAnswered takes in the answer to a take, which was asked for then. Do is AwaitCharge if the charge in
// flight decides, which the store has counted before the take or not: once it is answered, JudgeTake
// decides. Otherwise it is Nothing, and refund is what JudgeTake returns.
func (b *Bucket) TakeAnswered(r *store.Request, st *store.State, asked, mark int64, m *Moment) (do Do, refund store.Request) {
	b.taking -= r.Cost
	if algorithm.Of(r.Limit.Algorithm).Lease {
		b.hearLease(st, m)
		return Nothing, refund
	}
	if st.Err != nil {
		// That a client has left says nothing about the store.
		b.silent = b.silent || !errors.Is(st.Err, context.Canceled)
		return Nothing, refund
	}
	b.hearTake(r, st, asked, m)
	if r.Hold != 0 && !algorithm.LeavesEnough(r, st) {
		b.hearHeld(r, st, asked)
	}
	switch {
	case !st.Allowed:
		return Nothing, refund
	case r.Cost == 0:
		return b.showUnheard(r, st, true), refund
	}
	counted := st.Used
	if b.predatesReset(asked) {
		counted = 0
	}
	b.check.noteLanded(r.Cost, counted)
	if b.isSent() && algorithm.Of(r.Limit.Algorithm).Copies() {
		b.pending.noteTake(r, st, asked)
	}
	own := b.extras().own
	b.countOwn(r, m)
	// Until it is judged, the take is in flight.
	b.taking += r.Cost
	if do, refund = b.JudgeTake(r, st, mark, true, m); !st.Allowed && b.extra != nil {
		b.extra.own = own
	}
	return do, refund
}

// JudgeTake decides about a take that the store has allowed. If there is no room beside what this process
// has admitted and the store did not know of, the take is refused, and refund is its refund, if it gives
// something back or ends what is held. Unless mayWait is set, it decides as if the store had counted the charge in flight after the take.
func (b *Bucket) JudgeTake(r *store.Request, st *store.State, mark int64, mayWait bool, m *Moment) (do Do, refund store.Request) {
	if r.Cost == 0 {
		return b.showUnheard(r, st, mayWait), refund
	}
	// Its cost is counted by now, and was in flight until it is judged.
	b.taking -= r.Cost
	others, j := b.overtakes(r, st, mark, m)
	switch {
	case j == unclear && mayWait:
		b.taking += r.Cost
		return AwaitCharge, refund
	case j == fits:
		return Nothing, refund
	}
	refund = *r
	refund.Receipt = st.Receipt
	if refund.NoteHold(st); b.offset(r.Cost, m) {
		// The take stands for a charge.
		b.noteLanded(r.Cost)
		refund.Cost = 0
	}
	st.Reset, st.ResetOtherwise, st.Receipt = st.ResetOtherwise, st.Reset, store.Receipt{}
	b.refuseOvertaken(r, st, others)
	return Nothing, refund
}

// refuseOvertaken refuses a take that counts in what is known; others counts without it.
func (b *Bucket) refuseOvertaken(r *store.Request, st *store.State, others int64) {
	RefuseForFlight(st, r, b.known, max(others-st.Used, 0))
	st.Used = max(others, 0)
	st.Remaining = max(st.Limit-st.Used, 0)
}

// showUnheard makes the answer to a take that costs nothing count what this process has charged,
// which may have been on its way when the store answered. If the charge in flight counts in another window
// than it was sent in, or nobody knows, Do is AwaitCharge; unless mayWait is set, it counts in this one.
func (b *Bucket) showUnheard(r *store.Request, st *store.State, mayWait bool) Do {
	shown := *st
	v := b.viewOf(r, &shown, st.Now)
	if algorithm.Of(r.Limit.Algorithm).Copies() && v.unclear > 0 && !b.countsInOpenWindow(b.pending, r.Limit, st.Now) {
		if mayWait {
			return AwaitCharge
		}
		v.unclear = 0
	}
	if v.judge(&shown) == fits {
		if b.showAhead(&shown, &v); shown.Used > st.Used {
			st.Used, st.Remaining = shown.Used, shown.Remaining
		}
	}
	return Nothing
}

// hearTake takes in what the answer to a take says of the bucket.
func (b *Bucket) hearTake(r *store.Request, st *store.State, asked int64, m *Moment) {
	counted := b.known.Content[confirmedUsed]
	overlaps := b.overlapsTakes(asked) || b.isSent() || b.refunding() > 0 || mayLack(asked, b.written)
	b.hear(r, st, asked, m)
	if b.batch != nil {
		b.batch.heard = m.Now
	}
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		// The answer to an overlapping take may lack what this one spent.
		b.written = m.Now
		return
	}
	if overlaps {
		// Operations at the same time are not answered in their order.
		b.known.Content[confirmedUsed] = max(counted, st.Used)
		b.showFrom(r, st, asked, m)
	}
	b.ensureExtra().took = m.Now
}

// hearLease takes in the answer to the take of a lease: it keeps the highest count for the time of trust. Nothing else
// is known of leases, because they expire by themselves.
func (b *Bucket) hearLease(st *store.State, m *Moment) {
	if st.Err != nil {
		return
	}
	if rare := b.ensureExtra(); st.Used >= rare.leased || m.Now-rare.took > m.Trust {
		rare.leased, rare.took = st.Used, m.Now
	}
	b.until = max(b.until, m.Now+m.Trust)
}

// landing is how long, in microseconds, a take without a reply or a penalty may be on its way:
// an answer that the primary gives meanwhile may lack it.
const landing = 2_000_000

// clockSlack is by how much, in microseconds, two answers may differ about one clock.
const clockSlack = 1_000_000

// AskAlone decides about a request that the store does not answer, by what this process
// knows: the store's last answers, what is in flight, and all that this process has admitted
// since it first decided alone. If the request fits, its cost is in flight until
// Settle or SettleUnknown.
func (b *Bucket) AskAlone(r *store.Request, m *Moment) store.State {
	own, now := b.ownCount(r, m), m.Now+b.clock
	if algorithm.Of(r.Limit.Algorithm).Windowed() && !own.IsOpen(r.Limit, now) && !b.known.IsOpen(r.Limit, now) {
		// Like a check, the first request opens the window.
		own.Charge(r, 0, now)
	}
	rare := b.ensureExtra()
	rare.own, rare.alone = own, m.Now
	b.keepUntil(r, m)
	st := b.aloneState(r, own, m)
	if st.Allowed {
		b.flight += r.Cost
	}
	return st
}

// SettleUnknown ends what a request holds whose take may have spent its cost: nothing is
// charged, and it counts here until what the primary says has it.
func (b *Bucket) SettleUnknown(r *store.Request, hold int64, m *Moment) {
	b.flight -= hold
	b.countOwn(r, m)
}

// isAlone reports whether this process has decided alone so recently that the store may not
// have counted all that it has admitted.
func (b *Bucket) isAlone(r *store.Request, m *Moment) bool {
	alone := b.extras().alone
	return alone != 0 && m.Now-alone <= r.Limit.Window.Microseconds() && b.trusted <= alone+landing
}

// ownCount returns what this process has admitted since it first decided alone, on top of what
// was known then.
func (b *Bucket) ownCount(r *store.Request, m *Moment) algorithm.Known {
	if b.isAlone(r, m) {
		return b.extra.own
	}
	own, waiting := b.known, b.extras().loose
	if p := b.pending; p != nil {
		if waiting += p.left(m.Now); p.isStale {
			// The bucket was reset since the charge in flight was sent.
			waiting -= p.cost
		}
	}
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		// When events leave a log only the store knows.
		own.Content, waiting = store.Content{}, waiting+b.lastCount(r, m.Now)
	}
	if waiting > 0 {
		spend(&own, r, waiting, m.Now, b.clock)
	}
	return own
}

// hearClock notes what the store's clock says. Before the first answer it was a guess, and the
// next primary may have another one: what this process has admitted alone keeps its time.
func (b *Bucket) hearClock(r *store.Request, storeNow int64, m *Moment) {
	clock := storeNow - m.Now
	by := clock - b.clock
	b.clock = clock
	// An answer is on its way for a moment, which differs.
	if moved := by > clockSlack || by < -clockSlack; moved && algorithm.Of(r.Limit.Algorithm).Copies() && b.isAlone(r, m) {
		b.extra.own.Move(r.Limit, by, storeNow)
	}
}

// countOwn adds what this process has admitted to its own count.
func (b *Bucket) countOwn(r *store.Request, m *Moment) {
	if r.Cost == 0 || !b.isAlone(r, m) {
		return
	}
	spend(&b.extra.own, r, r.Cost, m.Now, b.clock)
	b.keepUntil(r, m)
}

// lastCount is what the store last said of a bucket that cannot be copied, for a window.
func (b *Bucket) lastCount(r *store.Request, now int64) int64 {
	if b.trusted == 0 || now >= b.trusted+r.Limit.Window.Microseconds() {
		return 0
	}
	return b.known.Content[confirmedUsed]
}

// aloneState returns what the bucket says to a request while the store does not answer.
func (b *Bucket) aloneState(r *store.Request, own algorithm.Known, m *Moment) store.State {
	var st store.State
	v := view{req: r, known: own, answer: &st, now: m.Now + b.clock, flight: b.flight + b.taking}
	if t := algorithm.Of(r.Limit.Algorithm); !t.Copies() {
		st = b.aloneInLog(r, own, m)
	} else if v.known.Raise(r.Limit, b.known, v.now); t.Windowed() && own.IsOpen(r.Limit, v.now) {
		// A window that the store has opened later does not forget what was admitted in this one.
		v.known.Content[0] = max(v.known.Content[0], own.Content[0])
	}
	v.judge(&st)
	ShowFlight(&st, v.flight)
	return st
}

// aloneInLog is what the bucket says, without what is in flight, where buckets cannot be
// copied.
func (b *Bucket) aloneInLog(r *store.Request, own algorithm.Known, m *Moment) store.State {
	counted, until := b.lastCount(r, m.Now), b.trusted+r.Limit.Window.Microseconds()
	if spent := inWheel(own.Content, r.Limit, m.Now); spent >= counted {
		counted, until = spent, wheelFrees(own.Content, r.Limit, r.Capacity()-r.Need(), m.Now)
	}
	now := m.Now + b.clock
	reset := now + r.Limit.Window.Microseconds()
	st := store.State{Limit: max(r.Capacity(), 0), Used: counted, Now: now, Reset: reset, ResetOtherwise: reset}
	switch {
	case r.Cost == 0, counted+r.Need() <= r.Capacity():
		st.Allowed = true
	case r.Cost > r.Capacity():
		st.RetryAfter = store.Never
	default:
		st.RetryAfter = micros(until - m.Now)
	}
	return st
}

// unheard is what this process has admitted and the store has not confirmed.
func (b *Bucket) unheard(m *Moment) int64 {
	if b.pending == nil {
		return b.flight
	}
	return b.flight + b.pending.left(m.Now)
}

// overtakes judges a take that the store allowed, and that is counted, beside what this process has
// admitted, and the store had not counted then. It is unclear while the charge in flight decides. others
// is what counts beside the take.
func (b *Bucket) overtakes(r *store.Request, st *store.State, mark int64, m *Moment) (others int64, j judgement) {
	if b.isAlone(r, m) {
		// Its cost is counted by now.
		without := *r
		without.Ahead -= r.Cost
		alone := b.aloneState(&without, b.extra.own, m)
		if !alone.Allowed {
			j = full
		}
		return alone.Used - r.Cost, j
	}
	counted, sent := st.Used, int64(0)
	if landed := b.extras().landed - mark; landed > 0 {
		// The store may have counted these charges after the take, if it has counted that much.
		counted = min(counted+landed, max(counted, b.usedOf(r, m)))
	}
	unheard := b.unheard(m)
	if b.isSent() {
		sent = b.pending.cost
	}
	most := max(st.Used, r.Capacity())
	switch {
	case counted+unheard-sent > most:
		return counted + unheard - sent - r.Cost, full
	case counted+unheard > most:
		return counted + unheard - r.Cost, unclear
	}
	return counted + unheard - sent - r.Cost, fits
}

// usedOf is what is known to be spent.
func (b *Bucket) usedOf(r *store.Request, m *Moment) int64 {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		return b.lastCount(r, m.Now)
	}
	return b.known.View(r, 0, m.Now+b.clock).Used
}
