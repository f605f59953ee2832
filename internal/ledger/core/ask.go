package core

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// maxTrustShare is the part of a window, as its divisor, for which an answer about a
// returning client is relied upon at most.
const maxTrustShare = 10

// Waiter is a request that waits for what another one asks of the store. Call and Place
// are the driver's.
type Waiter struct {
	Request *store.Request
	State   *store.State
	Call    any
	Place   int
}

// Turn is what a waiter has to do next.
type Turn struct {
	Waiter
	// Do is Nothing if the state is set; CheckReplica or CheckPrimary, to make the
	// next check, which began when the turn was made; Again, to ask anew.
	Do    Do
	Check Check
}

// Again is the Do of a turn by which a request starts again.
const Again = Wait

// Check is a check that a request makes for itself and others.
type Check struct {
	// At is when it was decided whether a replica may answer; the answer is trusted from
	// then on.
	At int64
	// Primary is set if only the primary can answer, Joined if others wait for the
	// answer, Repeated if there was an answer that does not count.
	Primary, Joined, Repeated bool
	// Ends is the [store.Request.Ends] of what asks.
	Ends int64
	// was is when a request was let through before.
	was int64
}

// check is the check in flight of one bucket. A request that arrives
// while one is in flight joins the next one: the reply in flight may predate it.
type check struct {
	// joined wait for the answer, beside the request that asks; next wait for the next check.
	joined, next []Waiter
	// landed is the cost of charges and takes confirmed since the check was sent.
	// The answer may count it or not.
	landed int64
	// counted is the highest count that one of them was answered with: it has takes whose answers are on their
	// way, which the answer to the check may lack too.
	counted int64
}

// noteLanded notes a charge or an allowed take that was answered with a count while the check is in flight.
func (c *check) noteLanded(cost, counted int64) {
	if c != nil {
		c.landed += cost
		c.counted = max(c.counted, counted)
	}
}

// unclear is how much the answer to the check may lack.
func (c *check) unclear(answer *store.State) int64 {
	if answer == nil {
		return c.landed
	}
	return max(c.landed, c.counted-answer.Used)
}

var checks = sync.Pool{New: func() any { return new(check) }}

// Refuse sets the state of a request that is refused without a call, and reports whether
// it is. A request with a batch is not refused if that may serve it.
func (b *Bucket) Refuse(r *store.Request, st *store.State, m *Moment) bool {
	rest, isServed := b.Rest(r, m)
	return !isServed && b.refuseFresh(&rest, st, m)
}

func (b *Bucket) refuseFresh(r *store.Request, st *store.State, m *Moment) bool {
	var refusal store.State
	if b.standing(m) != fresh || !b.refuses(r, &refusal, m) {
		return false
	}
	if b.showHeld(r, &refusal) && (b.ending() > 0 || b.mayAskForHeld(m)) {
		return false
	}
	*st = refusal
	m.Counts.LocalRefusals++
	return true
}

// Ask decides about a request to check. If it is admitted, its cost is in flight until
// Settle. Do is Nothing if the state is set, CheckReplica or CheckPrimary if the request
// makes the check that c describes, or Wait if it waits for the next one.
func (b *Bucket) Ask(w Waiter, c *Check, m *Moment) Do {
	switch r := w.Request; {
	case b.refuseFresh(r, w.State, m), b.admitUnasked(r, w.State, m):
		return Nothing
	case b.check == nil:
		b.check = checks.Get().(*check)
		return b.begin(r, c, m)
	}
	b.check.next = append(b.check.next, w)
	return Wait
}

// begin begins a check.
func (b *Bucket) begin(r *store.Request, c *Check, m *Moment) Do {
	r.Until = b.openUntil(r, m)
	c.At, c.Ends = m.Now, b.opens(r, m)
	if c.Primary = b.wantsPrimary(r, m); c.Primary {
		return CheckPrimary
	}
	return CheckReplica
}

// wantsPrimary reports whether only the primary can answer.
func (b *Bucket) wantsPrimary(r *store.Request, m *Moment) bool {
	switch {
	case !b.canReach(m):
		return false
	case b.isDisturbed(), b.wasReset(m):
		return true
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		// What a replica lacks cannot be added to its answer.
		written := max(b.extras().charged, b.extras().took)
		return b.pending != nil || written > 0 && m.Now-written <= r.Limit.Window.Microseconds() ||
			b.repeatsRefusal(r, new(store.State), m.Now+b.clock)
	case b.trusts(m):
		return false
	default:
		// A replica's answer is not enough to go on refusing.
		return b.judge(r, new(store.State), m.Now+b.clock, m) == full
	}
}

// admitUnasked admits a request of a sole writer without a call if at least half of the
// limit would be left: a second writer shows in a reply before the limit is near.
func (b *Bucket) admitUnasked(r *store.Request, st *store.State, m *Moment) bool {
	storeNow := m.Now + b.clock
	switch {
	case b.soleWriter == 0, b.standing(m) < old:
		return false
	case !algorithm.Of(r.Limit.Algorithm).Copies(), !b.known.IsOpen(r.Limit, storeNow):
		return false
	}
	var known store.State
	if b.judge(r, &known, storeNow, m) != fits || 2*(known.Remaining-r.Cost) < known.Limit || !b.reliesOn(r, m) {
		return false
	}
	*st = known
	b.flight += r.Cost
	m.Counts.UnaskedAdmissions++
	return true
}

// reliesOn reports whether the primary's last answer is recent enough to admit a request
// of a sole writer. Beyond the time of trust one request relies on it, and uses it up,
// unless the config shortens that time.
func (b *Bucket) reliesOn(r *store.Request, m *Moment) bool {
	if b.trusts(m) && m.Now-b.soleWriter >= m.Trust {
		return true
	}
	quiet := min(b.trusted-b.soleWriter, r.Limit.Window.Microseconds()/maxTrustShare)
	if m.Trust < UsualTrust.Microseconds() || b.trusted == 0 || b.usedUp || quiet < m.Trust || m.Now-b.trusted >= quiet || b.flight > 0 || b.pending != nil {
		return false
	}
	b.usedUp = true
	return true
}

// Answered takes in the answer to a check, which is of the request's own or of others
// that wait for it, and sets the states of all of them. Do is Nothing; AwaitCharge if
// a charge in flight decides about the request that asked; or CheckPrimary if the check has
// to be repeated, as c describes. Others get their turns.
func (b *Bucket) Answered(w Waiter, answer store.State, c *Check, m *Moment) Do {
	if answer.Err != nil {
		*w.State = answer
		b.fail(&answer, m)
		return Nothing
	}
	if c.Primary {
		b.noteReach(&answer, c.At, m)
	}
	isStale := b.hear(w.Request, &answer, c.At, m) && !b.trusts(m)
	if b.predatesReset(c.At) {
		// The check is repeated once, so that resets that follow each other hold up no
		// request.
		isStale = !c.Repeated
	}
	if isStale && b.canReach(m) {
		b.check.landed, b.check.counted = 0, 0
		*c = Check{At: m.Now, Primary: true, Joined: true, Repeated: true, Ends: b.opens(w.Request, m)}
		return CheckPrimary
	}
	if !algorithm.Of(w.Request.Limit.Algorithm).Copies() {
		b.known.Content[confirmedUsed] = max(b.known.Content[confirmedUsed], b.check.counted)
	}
	do := Nothing
	if b.admit(w.Request, w.State, &answer, m) == unclear {
		do = AwaitCharge
	}
	for _, other := range b.check.joined {
		if !algorithm.Of(w.Request.Limit.Algorithm).Copies() && !sameNeed(w.Request, other.Request) || b.admit(other.Request, other.State, &answer, m) == unclear {
			m.turn(other, Again)
			continue
		}
		m.turn(other, Nothing)
	}
	b.checkNext(m)
	return do
}

func (m *Moment) turn(w Waiter, do Do) { m.Turns = append(m.Turns, Turn{Waiter: w, Do: do}) }

// fail passes an error of the store on to all waiters, so that they do not meet
// it one after the other.
func (b *Bucket) fail(answer *store.State, m *Moment) {
	if errors.Is(answer.Err, context.Canceled) {
		// The client has left, which says nothing about the store.
		for _, w := range b.check.joined {
			m.turn(w, Again)
		}
		b.checkNext(m)
		return
	}
	b.silent = true
	for _, w := range append(b.check.joined, b.check.next...) {
		*w.State = *answer
		m.turn(w, Nothing)
	}
	b.check = nil
}

// sameNeed reports whether an answer to r also answers other, where buckets
// cannot be copied.
func sameNeed(r, other *store.Request) bool {
	return r.Cost == other.Cost && r.Events == other.Events && r.Reserved == other.Reserved
}

func (b *Bucket) admit(r *store.Request, st, answer *store.State, m *Moment) judgement {
	judged := *answer
	j := b.judge(r, &judged, answer.Now, m)
	if j == unclear {
		return j
	}
	if *st = judged; j == fits {
		b.flight += r.Cost
	}
	return j
}

// checkNext makes the first waiter that is not refused without a call begin the
// next check.
func (b *Bucket) checkNext(m *Moment) {
	next := b.check.next[:0]
	for _, w := range b.check.next {
		if b.refuseFresh(w.Request, w.State, m) {
			m.turn(w, Nothing)
		} else {
			next = append(next, w)
		}
	}
	if len(next) == 0 {
		*b.check = check{}
		checks.Put(b.check)
		b.check = nil
		return
	}
	b.check = &check{joined: next[1:]}
	t := Turn{Waiter: next[0], Check: Check{Joined: len(next) > 1}}
	t.Do = b.begin(t.Request, &t.Check, m)
	m.Turns = append(m.Turns, t)
}

// RefuseUnclear refuses a request about which a charge in flight decides, and sets its
// state.
func (b *Bucket) RefuseUnclear(r *store.Request, st *store.State, m *Moment) {
	now := m.Now + b.clock
	*st = store.State{Limit: max(r.Capacity(), 0), Now: now}
	v := b.viewOf(r, nil, now)
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		*st = v.ahead(0)
		b.showAhead(st, &v)
	}
	RefuseForFlight(st, r, v.known, v.flight)
}

// AskAhead decides about a request that waits behind others, and holds nothing. Do is
// Nothing if the state is set: the last refusal of a bucket that cannot be copied answers a
// request of equal need, or one whose wait exceeds maxWait. Otherwise it is CheckPrimary,
// once for each time of trust.
func (b *Bucket) AskAhead(r *store.Request, st *store.State, maxWait time.Duration, c *Check, m *Moment) Do {
	if !b.knowsAhead(r, st, maxWait, m) {
		c.At, c.Ends, c.was, b.asked = m.Now, b.opens(r, m), b.asked, m.Now
		return CheckPrimary
	}
	if !st.Allowed && st.RetryAfter > maxWait {
		m.Counts.LocalRefusals++
	}
	return Nothing
}

func (b *Bucket) knowsAhead(r *store.Request, st *store.State, maxWait time.Duration, m *Moment) bool {
	switch s := b.standing(m); {
	case b.isDue(m), s == silent, b.isDisturbed():
		return false
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		c := &b.known.Content
		isSame := r.Need() == c[refusalCost] && r.Capacity() == c[refusalCapacity]
		if !b.repeatsRefusal(r, st, m.Now+b.clock) {
			return false
		}
		b.showHeld(r, st)
		return isSame || st.RetryAfter > maxWait
	}
	// An unclear request gets a zero state.
	if b.judge(r, st, m.Now+b.clock, m) == full {
		b.showHeld(r, st)
	}
	return true
}

// AheadAnswered takes in the answer to a request that waits behind others. Do is
// CheckPrimary if the answer is from before a reset, or else Nothing.
func (b *Bucket) AheadAnswered(r *store.Request, st *store.State, c *Check, m *Moment) Do {
	switch {
	case st.Err == nil:
		isOld := b.predatesReset(c.At)
		b.hear(r, st, c.At, m)
		b.noteReach(st, c.At, m)
		b.hearHeld(r, st, c.At)
		if b.judge(r, st, st.Now, m) == full {
			b.showHeld(r, st)
		}
		if isOld {
			return CheckPrimary
		}
	case errors.Is(st.Err, context.Canceled):
		// The client has left, which says nothing about the store.
		b.asked = c.was
	default:
		b.silent = true
	}
	return Nothing
}

// MayLack reports whether an answer to r, asked for then, may lack what was answered since, in a bucket that cannot be
// copied.
func (b *Bucket) MayLack(r *store.Request, asked int64) bool {
	return !algorithm.Of(r.Limit.Algorithm).Copies() && b.written > asked
}

// Penalize notes the penalty that a request earns, in a bucket that can be copied.
func (b *Bucket) Penalize(r *store.Request, m *Moment) {
	b.PenalizeAlone(r, m)
	b.ensureExtra().penalized = m.Now
}

// PenalizeAlone is Penalize of a penalty that the store does not get.
func (b *Bucket) PenalizeAlone(r *store.Request, m *Moment) {
	b.known.Penalize(r, m.Now+b.clock)
	b.keepUntil(r, m)
}
