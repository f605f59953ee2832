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
// answer is not old.
func (b *Bucket) AskTake(r *store.Request, st *store.State, m *Moment) (do Do, asks bool) {
	var refusal store.State
	switch rest, isServed := b.Rest(r, m); {
	case isServed || !b.refuses(&rest, &refusal, m):
		return Take, false
	case b.isDue(m):
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

// TakeSent notes that a take is in flight, which is not that of a lease.
func (b *Bucket) TakeSent(r *store.Request) { b.taking += r.Cost }

// TakeAnswered takes in the answer to a take. If this process has admitted requests that the
// store did not know of, and there is no room beside them, the take is refused, and
// TakeAnswered returns its refund, if it needs one.
func (b *Bucket) TakeAnswered(r *store.Request, st *store.State, asked int64, m *Moment) (refund store.Request) {
	b.taking -= r.Cost
	if st.Err != nil {
		// That a client has left says nothing about the store.
		b.silent = b.silent || !errors.Is(st.Err, context.Canceled)
		return refund
	}
	b.hearTake(r, st, asked, m)
	if !st.Allowed || r.Cost == 0 {
		return refund
	}
	own := b.extras().own
	b.countOwn(r, m)
	others, exceeds := b.overtakes(r, st, m)
	if !exceeds {
		return refund
	}
	if b.extra != nil {
		b.extra.own = own
	}
	if !b.offset(r.Cost, m) {
		refund = *r
		refund.Receipt = st.Receipt
	}
	st.Reset, st.ResetOtherwise, st.Receipt = st.ResetOtherwise, st.Reset, store.Receipt{}
	// The take counts in what is known, and others counts without it.
	RefuseForFlight(st, r, b.known, max(others-st.Used, 0))
	st.Used = max(others, 0)
	st.Remaining = max(st.Limit-st.Used, 0)
	return refund
}

// hearTake takes in what the answer to a take says of the bucket.
func (b *Bucket) hearTake(r *store.Request, st *store.State, asked int64, m *Moment) {
	counted := b.known.Content[confirmedUsed]
	overlaps := b.taking > 0 || b.isSent() || mayLack(asked, max(b.extras().took, b.written))
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
	}
	b.ensureExtra().took = m.Now
}

// landing is how long, in microseconds, a take without a reply or a penalty may be on its way:
// an answer that the primary gives meanwhile may lack it.
const landing = 2_000_000

// AskAlone decides about a request that the store does not answer, by what this process
// knows: the store's last answers, what is in flight, and all that this process has admitted
// since it first decided alone. If the request fits, its cost is in flight until
// Settle or SettleUnknown.
func (b *Bucket) AskAlone(r *store.Request, m *Moment) store.State {
	own := b.ownCount(r, m)
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
		own.Content, waiting = store.Content{}, waiting+b.lastCount(r, m)
	}
	if waiting > 0 {
		spend(&own, r, waiting, m.Now, b.clock)
	}
	return own
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
func (b *Bucket) lastCount(r *store.Request, m *Moment) int64 {
	if b.trusted == 0 || m.Now >= b.trusted+r.Limit.Window.Microseconds() {
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
	} else if v.known.Raise(r.Limit, b.known, v.now); t.Windowed && own.IsOpen(r.Limit, v.now) {
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
	counted, until := b.lastCount(r, m), b.trusted+r.Limit.Window.Microseconds()
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

// overtakes reports whether a take that the store allowed, and that is counted, exceeds the
// limit with what this process has admitted, and the store had not counted then. others is
// what counts beside the take.
func (b *Bucket) overtakes(r *store.Request, st *store.State, m *Moment) (others int64, exceeds bool) {
	if b.isAlone(r, m) {
		// Its cost is counted by now.
		asked := *r
		asked.Ahead -= r.Cost
		alone := b.aloneState(&asked, b.extra.own, m)
		return alone.Used - r.Cost, !alone.Allowed
	}
	unheard := b.flight
	if b.pending != nil {
		// The answer may count the charge in flight.
		unheard += b.pending.left(m.Now) - b.pending.cost
	}
	return st.Used + unheard - r.Cost, st.Used+unheard > max(st.Used, r.Capacity())
}
