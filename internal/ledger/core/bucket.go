// Package core decides what this process makes of a bucket in a remote store. It is a
// pure function: of a [Bucket], which is what the process knows, an event and an instant
// it makes the next Bucket, what to do ([Do]), and what to answer (a [store.State]).
//
//	a request asks        Ask, AskTake, AskAhead, AskAlone
//	the store answers     Answered, TakeAnswered, AheadAnswered, Fetched
//	a response settles    Settle, SettleUnknown, Restore
//	a charge is sent      Send; its outcome: Delivered
//	a refund              RefundSent, RefundArrived
//	an operator           Penalize, ResetSent, ResetFailed, ResetDone
//	a take waits          AwaitReturn, WaitNot; is refused: Reclaim
//	nobody                Surplus, GiveUp, Worth, RetryPause
//
// Nothing here waits, locks, reads a clock, or calls a store: package ledger does. A copy
// ([Bucket.Copy]) answers what a request would be told.
//
// The core never compares two machines' clocks: an answer has the store's time, to which
// it adds durations of this process's clock.
package core

import (
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// UsualTrust is how long an answer of the primary is relied upon by default.
const UsualTrust = time.Second

// Moment is when an event happens, and what the core needs to know of the process then.
// Instants and durations are in microseconds, unless they are of package time. After an
// event it has what the event brings about for other requests.
type Moment struct {
	// Now is the age of the process's registry, from 1 on, so that 0 is before everything.
	Now int64
	// Trust is how long an answer of the primary is relied upon.
	Trust int64
	// Delay is how long charges of a client far from its limit wait for others; 0 if
	// none waits.
	Delay int64
	// Delivery is how long charges commonly take until they are answered; 0 before the
	// first answer.
	Delivery int64
	// Processes is how many processes share a limit; 0 if that is unknown. Only batches
	// depend on it.
	Processes int64

	// Counts counts the event.
	Counts Counts
	// Turns are for requests that wait for what another one asks, or for what comes back.
	Turns []Turn
}

// leastTrust is the trust, and no less than the usual one, however short the config makes
// it: so long replicas are not asked after a reset, because they may show the old bucket,
// and the primary is not after a failure.
func (m *Moment) leastTrust() int64 { return max(m.Trust, UsualTrust.Microseconds()) }

// Counts count decisions.
type Counts struct {
	// LocalRefusals are requests refused without a call, UnaskedAdmissions those
	// admitted without a check.
	LocalRefusals, UnaskedAdmissions int64
	// Fetches are the batches requested of the store. TokensFetched are the events that
	// the store gave, TokensReturned those given back to it, and TokensExpired those lost
	// with their window.
	Fetches, TokensFetched, TokensReturned, TokensExpired int64
}

// Add adds other counts.
func (c *Counts) Add(other Counts) {
	c.LocalRefusals += other.LocalRefusals
	c.UnaskedAdmissions += other.UnaskedAdmissions
	c.Fetches += other.Fetches
	c.TokensFetched += other.TokensFetched
	c.TokensReturned += other.TokensReturned
	c.TokensExpired += other.TokensExpired
}

// Do is what the driver has to do after an event.
type Do uint8

// What there is to do.
const (
	// Nothing is due, or the request has its answer.
	Nothing Do = iota
	// CheckReplica is to check at a replica. The answer goes to Answered.
	CheckReplica
	// CheckPrimary is to check at the primary. The answer goes to Answered.
	CheckPrimary
	// Wait is to wait for a [Turn].
	Wait
	// AwaitCharge is to ask again, or to judge the take, when the charge in flight is answered, which
	// decides.
	AwaitCharge
	// Take is to take from the store. The answer goes to TakeAnswered.
	Take
	// Fetch is to take a batch from the store. The answer goes to Fetched.
	Fetch
	// Send is to send a charge. Its outcome goes to Delivered.
	Send
	// Delay is to send the bucket's charges at the next tick.
	Delay
	// Retry is to send a charge that did not run once its shard executes charges again.
	Retry
	// GiveUp is to report charges that are given up.
	GiveUp
)

// Bucket is what this process knows of one bucket. Instants are of the process's clock.
// The zero value is no bucket: see [New].
type Bucket struct {
	// known is the primary's last answer, raised by later answers of replicas.
	known algorithm.Known
	// clock is how far the store's clock is ahead of the process's.
	clock int64
	// trusted is when the primary was asked for its last answer, or 0 without one.
	trusted int64
	// disturbed is when something last happened that known may lack or have too much of,
	// until the primary is asked: a refund, a charge of unknown outcome, a reset.
	disturbed int64
	// written is when a write of this process (charge, refund, take) was last
	// answered: an answer asked for earlier may lack it.
	written int64
	// soleWriter is since when the primary has counted this process's charges
	// and nothing else, or 0.
	soleWriter int64
	// asked is when a request was last let through to check a bucket that is
	// known to be full.
	asked int64
	// until is when the bucket may be forgotten.
	until int64
	// flight is the cost that was admitted and is not settled; taking, that of takes in
	// flight.
	flight, taking int64
	// silent is set while the store does not answer, resets while an operator's reset
	// empties the bucket.
	silent, resets bool
	// usedUp is set once a request has relied on an old answer.
	usedUp bool
	// uncertain is set if a charge has an unknown outcome, until the primary is asked.
	uncertain bool
	// unheld is set if an answer as recent as what is known has said that nothing is held.
	unheld bool
	// check is the coalesced check in flight, or nil.
	check *check
	// pending are the charges that the store has not confirmed, or nil.
	pending *pending
	// batch has events that were taken in advance, or is nil.
	batch *batch
	// extra is nil until one of its values is set.
	extra *extra
}

// extra is the part of a Bucket that few need: there are up to a million.
type extra struct {
	// refunded is when a refund of this process last arrived.
	refunded int64
	// failed is when the primary last failed to answer.
	failed int64
	// penalized is when this process last set a penalty.
	penalized int64
	// charged is when a charge was last in flight, and took, when a take was last
	// answered, if the algorithm's buckets cannot be copied.
	charged, took int64
	// leased is the highest recent count of leases in an answer of the store, which came at took.
	leased int64
	// landed is the cost of all charges that were answered while a take was in flight, and of refused takes that
	// stand for charges.
	landed int64
	// loose is cost of unknown outcome that known lacks, because no window was
	// known to be open.
	loose int64
	// alone is when a request was last decided about without the store, and own, what this
	// process has admitted then and since.
	alone int64
	own   algorithm.Known
	// reset is when this process last reset the bucket.
	reset int64
	// returning is what is on its way back, or nil.
	returning *returning
	// shown is the primary's last answer, if known may have too much that has come back, or nil.
	shown *answer
	held  heldAnswer
}

// New returns a Bucket of which nothing is known. Until the store says what time it is,
// this machine's clock stands for its own, which is so far ahead of the process's.
func New(clock int64, m *Moment) Bucket { return Bucket{until: m.Now, clock: clock} }

// Copy returns a Bucket that shares nothing that an event changes, and for which nobody
// waits.
func (b *Bucket) Copy() Bucket {
	c := *b
	c.check, c.pending, c.batch, c.extra = nil, copied(b.pending), copied(b.batch), copied(b.extra)
	if p := c.pending; p != nil {
		p.heard, p.age, p.waiting = nil, nil, copied(p.waiting)
	}
	if v := c.batch; v != nil {
		v.waiters = nil
	}
	if r := c.extra; r != nil {
		r.returning, r.shown = copied(r.returning), copied(r.shown)
		if v := r.returning; v != nil {
			v.refunds, v.ends, v.waiters = slices.Clone(v.refunds), slices.Clone(v.ends), nil
		}
	}
	return c
}

// copied returns a copy of what p points to, or nil.
func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}

// extras returns the extra values; changing what it returns changes nothing.
func (b *Bucket) extras() extra {
	if b.extra == nil {
		return extra{}
	}
	return *b.extra
}

// ensureExtra returns the extra values to set one of them.
func (b *Bucket) ensureExtra() *extra {
	if b.extra == nil {
		b.extra = new(extra)
	}
	return b.extra
}

// standing says how much can be made of what is known. Each is worse than the next one.
type standing uint8

const (
	// silent: the store does not answer.
	silent standing = iota
	// resetting: the bucket is being emptied.
	resetting
	// doubtful: known may lack something, or have too much.
	doubtful
	// old: the primary has not been asked for longer than it is trusted.
	old
	fresh
)

func (b *Bucket) standing(m *Moment) standing {
	switch {
	case b.silent:
		return silent
	case b.resets:
		return resetting
	case b.isDisturbed():
		return doubtful
	case !b.trusts(m):
		return old
	}
	return fresh
}

// isDisturbed reports whether the primary has not been asked since something happened that
// known may lack, or have too much of.
func (b *Bucket) isDisturbed() bool { return b.refunding() > 0 || mayLack(b.trusted, b.disturbed) }

// trusts reports whether the primary's answer is recent enough to rely on.
func (b *Bucket) trusts(m *Moment) bool {
	return b.trusted != 0 && m.Now-b.trusted <= m.Trust
}

// canReach reports whether the primary is worth a call: after a failure it is
// called once for each time of trust.
func (b *Bucket) canReach(m *Moment) bool {
	failed := b.extras().failed
	return failed == 0 || m.Now-failed > m.leastTrust()
}

// wasReset reports whether this process has reset the bucket so recently that a replica may
// not show it.
func (b *Bucket) wasReset(m *Moment) bool {
	reset := b.extras().reset
	return reset != 0 && m.Now-reset <= m.leastTrust()
}

// predatesReset reports whether an answer asked for at that instant is from before this
// process's last reset of the bucket, and so says nothing about it.
func (b *Bucket) predatesReset(asked int64) bool { return mayLack(asked, b.extras().reset) }

// mayLack reports whether an answer asked for at that instant may lack what was answered at
// another. At equal instants it may: clocks stand still for up to 15 ms where Windows runs.
func mayLack(asked, answered int64) bool { return answered != 0 && asked <= answered }

// isDue reports whether trust has run out, and no request was let through to ask since.
func (b *Bucket) isDue(m *Moment) bool {
	return !b.trusts(m) && (b.asked == 0 || m.Now-b.asked > m.Trust)
}

// Worth is what is lost if a bucket is forgotten. A full registry forgets those of least worth.
type Worth uint8

const (
	// Expired is nothing, because what is known counts no more.
	Expired Worth = iota
	// Idle is knowledge that the store has too.
	Idle
	// Alone is what the store does not know, or has not heard yet.
	Alone
	// Owing is charges that wait for their shard.
	Owing
	// InUse is the worth of a bucket that cannot be forgotten.
	InUse
)

// Worth returns that of the bucket.
func (b *Bucket) Worth(m *Moment) Worth {
	switch {
	case !b.isUnused(), b.pending != nil && b.pending.phase != queued:
		return InUse
	case b.pending != nil:
		return Owing
	case b.until <= m.Now:
		return Expired
	case b.extras().alone != 0, b.mayHideThePenalty(m.Now):
		return Alone
	}
	return Idle
}

// mayHideThePenalty reports whether an answer asked for at that instant may lack the penalty that
// this process has set last, because it was on its way.
func (b *Bucket) mayHideThePenalty(asked int64) bool {
	penalized := b.extras().penalized
	return penalized != 0 && asked <= penalized+landing
}

func (b *Bucket) isUnused() bool {
	return b.flight == 0 && b.taking == 0 && b.extras().returning == nil && b.check == nil && (b.batch == nil || b.batch.isEmpty())
}

// keepUntil sets when the bucket may be forgotten.
func (b *Bucket) keepUntil(r *store.Request, m *Moment) {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		b.until = m.Now + r.Limit.Window.Microseconds()
		return
	}
	b.until = max(b.until, b.known.Expiry(r.Limit)-b.clock)
	if rare := b.extras(); rare.alone != 0 {
		b.until = max(b.until, rare.own.Expiry(r.Limit)-b.clock)
	}
}

// Gauges are what a Bucket adds to the figures of all.
type Gauges struct {
	// InFlight is the cost that was admitted and is not settled.
	InFlight int64
	// Unsent is the number of requests whose charges wait, except for the next tick.
	Unsent int64
	// Uncertain is 1 if a charge has an unknown outcome.
	Uncertain int64
	// Owing is what has to be delivered: 1 if charges are pending, and each refund, or end of what is held, in flight.
	Owing int64
	// Tokens is what is left of events that were taken in advance.
	Tokens int64
	// Reserves is set if there are tokens, or the store holds those that there were.
	Reserves bool
}

// Gauges returns those of the bucket.
func (b *Bucket) Gauges() Gauges {
	g := Gauges{InFlight: b.flight, Owing: b.refunding() + b.ending()}
	if b.uncertain {
		g.Uncertain = 1
	}
	if p := b.pending; p != nil {
		g.Owing++
		if p.waiting != nil && p.phase != delayed {
			g.Unsent = p.waiting.requests
		}
	}
	if b.batch != nil {
		g.Tokens, g.Reserves = b.batch.tokens, b.batch.tokens > 0 || b.batch.hold != 0
	}
	return g
}

// ForgetUncertainty drops the uncertainty about charges that count no more.
func (b *Bucket) ForgetUncertainty(m *Moment) {
	if b.until <= m.Now {
		b.uncertain = false
	}
}

// flightRetry is the RetryAfter of a request that fits but for the client's own
// requests in flight: how they end is unknown.
const flightRetry = time.Second

// hear takes in the store's answer to r, asked for at the instant asked. It
// reports whether the answer is behind what is known.
func (b *Bucket) hear(r *store.Request, st *store.State, asked int64, m *Moment) (stale bool) {
	b.hearClock(r, st.Now, m)
	b.silent = false
	if b.predatesReset(asked) {
		// The windows before and after a reset may have the same name, so Raise cannot
		// tell them apart.
		return true
	}
	answer := algorithm.Known{Content: st.Content}
	before := b.known
	if !st.Replica {
		b.show(r, st, asked, m)
	}
	// The answer may or may not count a write of ours.
	overlaps := b.isSent() || b.refunding() > 0 || mayLack(asked, b.written)
	switch {
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		b.noteRefusal(r, st)
		if !st.Replica && !overlaps {
			b.known.Content[confirmedUsed] = st.Used
			b.confirm(b.known, asked)
			b.showConfirmed(r, asked, m)
		}
	case !st.Replica && !overlaps:
		if b.mayHideThePenalty(asked) {
			// The penalty may be on its way yet.
			answer.KeepPenalty(r.Limit, b.known)
		}
		b.confirm(answer, asked)
		b.showConfirmed(r, asked, m)
	default:
		stale = b.known.Raise(r.Limit, answer, st.Now) && st.Replica
		if st.Replica && b.known != before {
			b.showKnown()
		}
		if b.isSent() {
			b.pending.note(r.Limit, answer, st.Now)
		}
	}
	if refunded := b.extras().refunded; mayLack(asked, refunded) {
		// It must not refuse for long.
		b.disturbed = max(b.disturbed, b.trusted, refunded)
	}
	if b.known != before && !b.isSent() {
		b.soleWriter = 0
	}
	b.keepUntil(r, m)
	return stale
}

// showKnown makes views show what is known.
func (b *Bucket) showKnown() {
	if b.extra != nil {
		b.extra.shown = nil
	}
}

// showConfirmed makes views show what is known, which is what the primary has just said, unless other
// answers may raise it yet: those from before the last refund or, where buckets cannot be copied, those to
// takes at the same time.
func (b *Bucket) showConfirmed(r *store.Request, asked int64, m *Moment) {
	if m.Now > b.extras().refunded+landing && (algorithm.Of(r.Limit.Algorithm).Copies() || !b.overlapsTakes(asked)) {
		b.showKnown()
	}
}

// overlapsTakes reports whether a take may have been answered since that instant, or is in flight.
func (b *Bucket) overlapsTakes(asked int64) bool {
	return b.taking > 0 || mayLack(asked, b.extras().took)
}

// confirm replaces what is known by the primary's answer.
func (b *Bucket) confirm(answer algorithm.Known, asked int64) {
	b.known, b.trusted, b.usedUp, b.uncertain, b.unheld = answer, asked, false, false, false
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
	j := v.judge(st)
	if j == unclear {
		return j
	}
	if !st.Allowed && !st.InFlight {
		b.awaitLanding(r, st, m)
	}
	b.showAhead(st, &v)
	return j
}

// awaitLanding makes a refused request wait for the end of the window in which pending charges
// will commonly count, if that is the next one.
func (b *Bucket) awaitLanding(r *store.Request, st *store.State, m *Moment) {
	p := b.pending
	if p == nil || p.phase == delayed || st.Penalty != 0 || st.RetryAfter == store.Never {
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
	st.RetryAfter = waitForLanding(r.Limit, st, lands)
}

// waitForLanding is the time to wait of a refused request if pending charges count from the instant lands on.
func waitForLanding(limit *store.Limit, st *store.State, lands int64) time.Duration {
	window := limit.Window.Microseconds()
	switch aging := algorithm.Of(limit.Algorithm).Aging; aging {
	case algorithm.AtWindowEnd:
		if st.Reset > st.Now && lands >= st.Reset {
			return time.Duration(lands-st.Now+window) * time.Microsecond
		}
		return st.RetryAfter
	case algorithm.ByClock:
		if lands/window > st.Now/window {
			return st.RetryAfter + limit.Window
		}
		return st.RetryAfter
	case algorithm.Draining, algorithm.OneByOne:
		return st.RetryAfter
	default:
		panic(aging.Unknown())
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
		v.unclear = b.check.unclear(answer)
		v.flight += v.unclear
	}
	p := b.pending
	if p == nil {
		return v
	}
	all := p.left(now - b.clock)
	waiting := all - p.cost
	switch {
	case b.countsInOpenWindow(p, r.Limit, now):
		hidden := b.hiddenCharge(r, p.cost, now)
		v.flight, v.unclear = v.flight+hidden, v.unclear+hidden
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

// hiddenCharge is how much of the charge in flight, which costs cost, known may lack, although it counts more than
// when the charge was sent: takes whose answers are on their way may be the reason.
func (b *Bucket) hiddenCharge(r *store.Request, cost, now int64) int64 {
	if cost == 0 || b.taking == 0 {
		return 0
	}
	base, known := b.pending.base.View(r, 0, now).Used, b.known.View(r, 0, now).Used
	seen := max(base+cost, known)
	return max(base+min(known-base, b.taking)+cost-seen, 0)
}

// countsInOpenWindow reports whether the charge in flight counts in the open window.
func (b *Bucket) countsInOpenWindow(p *pending, limit *store.Limit, now int64) bool {
	switch aging := algorithm.Of(limit.Algorithm).Aging; aging {
	case algorithm.AtWindowEnd:
		return p.base.IsOpen(limit, now) && p.base.WindowEnd() == b.known.WindowEnd()
	case algorithm.ByClock:
		window := limit.Window.Microseconds()
		return now-now%window <= p.expires-countsFor(limit)+b.clock
	case algorithm.Draining:
		return true
	case algorithm.OneByOne:
		return false
	default:
		panic(aging.Unknown())
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

// judge sets the state of the request, unless it is unclear.
func (v *view) judge(st *store.State) judgement {
	if with := v.ahead(v.flight); with.Allowed {
		*st = with
		return fits
	}
	if v.unclear > 0 {
		if with := v.ahead(v.flight - v.unclear); with.Allowed {
			return unclear
		}
	}
	if *st = v.ahead(0); st.Allowed {
		RefuseForFlight(st, v.req, v.known, v.flight)
	}
	return full
}

// showAhead makes a state count the cost ahead of the request, and the unclear
// part of it once.
func (b *Bucket) showAhead(st *store.State, v *view) {
	if !algorithm.Of(v.req.Limit.Algorithm).Copies() {
		used := b.lastCount(v.req, v.now-b.clock)
		if b.pending != nil {
			used += b.pending.cost
		}
		st.Used = max(st.Used, used)
	}
	ShowFlight(st, v.flight-v.unclear)
}

// RefuseForFlight refuses a request that fits but for what is in flight in a bucket that is known.
func RefuseForFlight(st *store.State, r *store.Request, known algorithm.Known, flight int64) {
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

// ShowFlight makes a state count what is in flight. Under a penalty nothing remains, whatever is used.
func ShowFlight(st *store.State, flight int64) {
	st.Used += flight
	if st.Penalty == 0 {
		st.Remaining = max(st.Limit-st.Used, 0)
	}
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
		if st.InFlight {
			c[refusalUntil] = st.ResetOtherwise
		}
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
	c := b.asShown(r.Limit)
	answer := store.State{Limit: max(r.Capacity(), 0), Used: c.known.Content[confirmedUsed]}
	v := c.viewOf(r, &answer, m.Now+b.clock)
	st := v.ahead(0)
	c.showAhead(&st, &v)
	return st
}

// Account returns what is known beyond what the store says. The request is one of the
// bucket; its cost does not matter.
func (b *Bucket) Account(r *store.Request, m *Moment) store.Account {
	asked := *r
	asked.Cost = 0
	shown := b.asShown(r.Limit)
	a := store.Account{InFlight: b.flight, Used: shown.used(&asked, m), IsAlone: b.isAlone(r, m)}
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
