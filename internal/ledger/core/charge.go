package core

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// ErrExpired is the error of charges that could not be delivered while they
// counted.
var ErrExpired = fmt.Errorf("%w: their window is over", store.ErrNotExecuted)

// chargePhase is where the charges of a bucket are.
type chargePhase uint8

const (
	// sent: one is in flight, and later ones wait for its outcome.
	sent chargePhase = iota
	// delayed: they wait for the next tick.
	delayed
	// queued: they wait for their shard.
	queued
)

// pending are the charges of one bucket that the store has not confirmed: one in
// flight, which an answer may count, and later ones, merged, which no answer counts.
type pending struct {
	phase chargePhase
	// requests are those of the charge in flight, which costs cost; 0 unless one is.
	requests, cost int64
	// at is when the charge in flight was sent, or when those that wait were noted; expires
	// is when it counts no more.
	at, expires int64
	// base is what was known at that instant, and takes answered since, which cost took; age is that of a charge that
	// had waited.
	base algorithm.Known
	took int64
	age  *age
	// heard sums up the answers since the charge was sent; nil without one.
	heard *algorithm.Known
	// isStale is set if the bucket was reset since the charge was sent.
	isStale bool
	// waiting is the next charge, or nil.
	waiting *mergedCharge
	// transit is the driver's.
	transit Transit
}

// Transit is what the driver keeps of a charge in flight.
type Transit struct {
	// Arrived is closed when it is answered; nil if nobody waits.
	Arrived chan struct{}
}

// mergedCharge is a charge for several requests.
type mergedCharge struct {
	req store.Request
	// sent has the request, to be sent.
	sent     [1]*store.Request
	requests int64
	expires  int64
	// opens is when what drains is empty at the other owners, which had it when the charge was noted; or 0.
	opens int64
	age   age
}

// opensUntil returns the opens of a charge that was noted then.
func opensUntil(r *store.Request, noted int64) int64 {
	if r.Ends >= 0 {
		return 0
	}
	return noted - r.Ends
}

// Next is what has to be done with the charges of a bucket.
type Next struct {
	// Do is Nothing, Send, Delay or Retry.
	Do Do
	// Charge is what is to be sent: one request.
	Charge []*store.Request
	// Arrived is the channel of the charge that was answered, to be closed, or nil; Delivery is
	// that of [Moment] from now on, or 0 if it stays.
	Arrived  chan struct{}
	Delivery int64
	// Lost is how many requests' charges are given up, under a limit, of the client with a key at a shard,
	// and Err is why.
	Lost             int64
	Limit            *store.Limit
	ClientKey, Shard string
	Err              error
}

// Transit returns what the driver keeps of the charge in flight, or nil if none is.
func (b *Bucket) Transit() *Transit {
	if !b.isSent() {
		return nil
	}
	return &b.pending.transit
}

func (b *Bucket) isSent() bool { return b.pending != nil && b.pending.phase == sent }

// left is what the charges would count by now, had they arrived at once.
func (p *pending) left(now int64) int64 {
	if p.waiting == nil {
		return p.cost
	}
	return p.cost + p.waiting.left(now)
}

// noteTake notes a take that was answered while the charge is in flight, unless the base counts it, because a later
// take was answered before it.
func (p *pending) noteTake(r *store.Request, st *store.State, asked int64) {
	if asked > p.at || st.Used > p.base.View(r, 0, st.Now).Used-p.took {
		p.base.Charge(r, r.Cost, st.Now)
		p.took += r.Cost
	}
}

// withCharge is the base with a cost charged on top, raised by what is known now.
func (p *pending) withCharge(r *store.Request, cost int64, known algorithm.Known, now int64) algorithm.Known {
	base := p.base
	base.Charge(r, cost, now)
	base.Raise(r.Limit, known, now)
	return base
}

// note remembers an answer that comes while a charge is in flight.
func (p *pending) note(limit *store.Limit, answer algorithm.Known, storeNow int64) {
	if p.heard == nil {
		// The parameter's own address would put every answer on the heap.
		p.heard = &algorithm.Known{Content: answer.Content}
		return
	}
	p.heard.Raise(limit, answer, storeNow)
}

// Settle ends what a request holds in flight, and notes its charge, of which there is one.
func (b *Bucket) Settle(req []*store.Request, hold int64, m *Moment) (n Next) {
	r := req[0]
	b.flight -= hold
	if r.Cost == 0 {
		return n
	}
	b.countOwn(r, m)
	return b.Charge(req, m)
}

// Charge notes a charge, of a cost that counts here already.
func (b *Bucket) Charge(req []*store.Request, m *Moment) (n Next) {
	r := req[0]
	expires := b.expiryOf(r, m)
	switch {
	case r.Ends >= 0:
	case algorithm.Of(r.Limit.Algorithm).Windowed():
		expires = min(expires, m.Now-r.Ends)
	default:
		// It drains behind what others have.
		expires -= r.Ends
	}
	b.keepUntil(r, m)
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		b.ensureExtra().charged = m.Now
	}
	mayDelay := b.mayDelay(r, m)
	switch {
	case b.pending == nil && mayDelay:
		b.pending = &pending{phase: delayed, at: m.Now, base: b.known}
		b.addWaiting(r, 1, expires, m)
		return Next{Do: Delay}
	case b.pending == nil:
		b.pending = &pending{phase: sent, requests: 1, cost: r.Cost, at: m.Now, expires: expires, base: b.known}
		r.Until = b.openUntil(r, m)
		switch {
		case r.Until != 0:
			r.Ends = r.Until
		case b.silent:
			// It may be on its way until the store answers.
			r.Ends = cmp.Or(b.endsAt(r.Limit, expires, m), r.Ends)
		}
		return Next{Do: Send, Charge: req[:1:1]}
	}
	if older := b.pending.waiting; older != nil && isOver(r.Limit, older.expires, m) {
		n = b.dropWaiting(ErrExpired)
	}
	b.addWaiting(r, 1, expires, m)
	// The newer request has the limit that holds now.
	merged := &b.pending.waiting.req
	cost, events, shared := merged.Cost, merged.Events, merged.Shared
	*merged = *r
	merged.Cost, merged.Events, merged.Shared = cost, events, shared
	if b.pending.phase == delayed && (!mayDelay || b.soleWriter == 0) {
		b.sendNext(&n, m)
	}
	return n
}

// isOver reports whether a charge that expires at that instant is given up instead of sent. A draining charge is
// always sent, because together with later ones it may be more than has drained.
func isOver(limit *store.Limit, expires int64, m *Moment) bool {
	return expires <= m.Now && !algorithm.Of(limit.Algorithm).Drains()
}

// expiryOf is the instant from which nothing of the charge of r counts any more, with what
// is pending before it.
func (b *Bucket) expiryOf(r *store.Request, m *Moment) int64 {
	t := algorithm.Of(r.Limit.Algorithm)
	switch {
	case hasParts(r.Limit):
		return m.Now + countsFor(r.Limit)
	case t.Windowed() && b.known.IsOpen(r.Limit, m.Now+b.clock):
		return b.known.WindowEnd() - b.clock
	}
	cost := r.Cost
	if b.pending != nil {
		cost += min(b.pending.left(m.Now), store.MaxInteger-cost)
	}
	return b.known.ChargeExpiry(r, cost, m.Now+b.clock) - b.clock
}

// mayDelay reports whether the charge of a request may wait for the next tick: that makes
// pipelines longer, and the charges of one bucket become one.
func (b *Bucket) mayDelay(r *store.Request, m *Moment) bool {
	switch {
	case m.Delay == 0, b.standing(m) < old, b.uncertain, b.extras().loose > 0:
		return false
	case !algorithm.Of(r.Limit.Algorithm).Windowed(), b.openUntil(r, m)-b.clock-m.Now <= 2*m.Delay:
		return false
	}
	asked := *r
	asked.Reserved = 0
	v := b.viewOf(&asked, nil, m.Now+b.clock)
	st := v.ahead(0)
	return 2*(st.Remaining-v.flight-r.Cost) >= st.Limit
}

// openUntil is the end of the window that is known to be open and stored, or 0. An
// aligned window is stored once something counts in it.
func (b *Bucket) openUntil(r *store.Request, m *Moment) int64 {
	if !algorithm.Of(r.Limit.Algorithm).Windowed() || b.isDisturbed() || !b.known.IsOpen(r.Limit, m.Now+b.clock) {
		return 0
	}
	if r.Limit.Align && b.known.Content[0] == 0 {
		return 0
	}
	if b.known.Content[0] > store.MaxInteger/2 || r.Cost > store.MaxInteger/4 {
		// Only the script stops the count at MaxInteger.
		return 0
	}
	return b.known.WindowEnd()
}

func (b *Bucket) addWaiting(r *store.Request, requests, expires int64, m *Moment) {
	if w := b.pending.waiting; w != nil {
		w.age.add(r, m.Now)
		w.merge(r, requests, expires)
		return
	}
	b.pending.waiting = &mergedCharge{req: *r, requests: requests, expires: expires, opens: opensUntil(r, m.Now), age: b.newAge(r, b.known, m.Now)}
}

func (w *mergedCharge) merge(r *store.Request, requests, expires int64) {
	own := &w.req
	own.Events = algorithm.MergedEvents(own, r)
	own.Cost += min(r.Cost, store.MaxInteger-own.Cost)
	own.Shared = own.Shared && r.Shared
	w.requests += requests
	switch aging := algorithm.Of(r.Limit.Algorithm).Aging; aging {
	case algorithm.AtWindowEnd:
		w.expires = min(w.expires, expires)
	case algorithm.ByClock, algorithm.Draining, algorithm.OneByOne:
		w.expires = max(w.expires, expires)
	default:
		panic(aging.Unknown())
	}
}

// Delivered takes in the outcome of the charge in flight, and says what to do with the
// next one.
func (b *Bucket) Delivered(r *store.Request, st *store.State, m *Moment) (n Next) {
	p := b.pending
	requests, cost, heard := p.requests, p.cost, p.heard
	arrived, delivery := p.transit.Arrived, int64(0)
	p.requests, p.cost, p.heard, p.transit = 0, 0, nil, Transit{}
	defer func() { p.took, n.Arrived, n.Delivery = 0, arrived, delivery }()
	if b.extras().charged > 0 {
		b.extra.charged = m.Now
	}
	if !p.isStale && (st.Err == nil || errors.Is(st.Err, store.ErrUncertain)) {
		b.noteLanded(cost)
	}
	b.written = m.Now
	switch {
	case p.isStale:
		// The reply may predate the reset, and only the primary knows whether
		// the charge counts after it.
		p.isStale, b.disturbed = false, m.Now
	case st.Err == nil:
		delivery = m.averageDelivery(m.Now - p.at)
		b.confirmCharge(r, st, cost, heard, m)
	case errors.Is(st.Err, store.ErrUncertain):
		b.suspect(r, cost, m)
		n = lost(r, requests, st.Err)
	case errors.Is(st.Err, store.ErrFinal):
		b.silent = true
		n = lost(r, requests, st.Err)
	default:
		b.silent = true
		// The charge did not run: it waits for its shard.
		p.phase, n.Do = queued, Retry
		if algorithm.Of(r.Limit.Algorithm).Aging != algorithm.AtWindowEnd || !isOver(r.Limit, p.expires, m) {
			b.waitAgain(r, requests, m)
			return n
		}
		// Its window is over, and that of what waits is not.
		if n = lost(r, requests, ErrExpired); p.waiting != nil {
			n.Do = Retry
		} else {
			b.pending = nil
		}
		return n
	}
	if next := p.waiting; next != nil && b.soleWriter != 0 && b.mayDelay(&next.req, m) {
		p.phase, p.at, p.base = delayed, m.Now, b.known
		n.Do = Delay
		return n
	}
	b.sendNext(&n, m)
	return n
}

// noteLanded notes a charge for the takes in flight: the store may have counted it after them.
func (b *Bucket) noteLanded(cost int64) {
	if b.taking > 0 {
		b.ensureExtra().landed += cost
	}
}

// averageDelivery is a moving average of how long charges take, once another one took so long.
func (m *Moment) averageDelivery(took int64) int64 {
	if m.Delivery == 0 {
		return max(took, 1)
	}
	return m.Delivery + (max(took, 1)-m.Delivery)/8
}

func lost(r *store.Request, requests int64, err error) Next {
	return Next{Lost: requests, Limit: r.Limit, ClientKey: r.ClientKey, Shard: r.Shard(), Err: err}
}

// confirmCharge takes in the reply to the charge in flight.
func (b *Bucket) confirmCharge(r *store.Request, st *store.State, cost int64, heard *algorithm.Known, m *Moment) {
	p := b.pending
	b.hearClock(r, st.Now, m)
	b.silent = false
	b.show(r, st, p.at, m)
	reply := algorithm.Known{Content: st.Content}
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		reply.KeepPenalty(r.Limit, b.known)
		b.noteSoleWriter(r, reply, st.Now, m)
	} else if reply.Content[confirmedUsed] = st.Used; mayLack(p.at, b.extras().took) {
		// A take may have come later, and been answered first.
		reply.Content[confirmedUsed] = max(st.Used, b.known.Content[confirmedUsed])
	}
	b.confirm(reply, p.at)
	b.check.noteLanded(cost, st.Used)
	if heard != nil {
		if b.known.Raise(r.Limit, *heard, st.Now); b.known != reply {
			b.soleWriter = 0
		}
	}
	b.keepUntil(r, m)
}

// noteSoleWriter notes whether the reply adds the charge to what was known, and no more.
func (b *Bucket) noteSoleWriter(r *store.Request, reply algorithm.Known, storeNow int64, m *Moment) {
	expected := b.pending.base
	expected.ChargeLate(r, r.Cost, storeNow)
	switch {
	case reply != expected:
		b.soleWriter = 0
	case b.soleWriter == 0:
		b.soleWriter = m.Now
	}
}

// suspect counts a charge of unknown outcome until the primary answers. What is
// known may count it already.
func (b *Bucket) suspect(r *store.Request, cost int64, m *Moment) {
	// An answer asked for since knows of it.
	b.disturbed = max(b.disturbed, b.pending.at)
	b.uncertain, b.soleWriter = true, 0
	b.showKnown()
	storeNow := m.Now + b.clock
	if !b.countsInOpenWindow(b.pending, r.Limit, storeNow) {
		b.ensureExtra().loose += cost
		return
	}
	hidden := b.hiddenCharge(r, cost, storeNow)
	b.known = b.pending.withCharge(r, cost, b.known, storeNow)
	b.known.Charge(r, hidden, storeNow)
}

// waitAgain makes the charge that was in flight and did not run wait.
func (b *Bucket) waitAgain(r *store.Request, requests int64, m *Moment) {
	p := b.pending
	if algorithm.Of(r.Limit.Algorithm).Drains() {
		b.waitFirst(r, requests, m)
		return
	}
	if p.waiting == nil {
		p.waiting = &mergedCharge{req: *r, expires: p.expires, age: age{clock: b.clock, least: r.Events}}
		p.waiting.req.Cost = 0
	}
	p.waiting.age.addLate(r, p.expires)
	p.waiting.merge(r, requests, p.expires)
}

// waitFirst is waitAgain of what drains: before what came later.
func (b *Bucket) waitFirst(r *store.Request, requests int64, m *Moment) {
	p := b.pending
	if p.age == nil {
		begun := b.newAge(r, p.base, p.at)
		p.age = &begun
	}
	age := *p.age
	w := p.waiting
	if w == nil {
		p.waiting = &mergedCharge{req: *r, requests: requests, expires: p.expires, opens: opensUntil(r, p.at), age: age}
		return
	}
	w.opens = opensUntil(r, p.at)
	later := w.req
	later.Cost = w.left(m.Now)
	age.least = min(age.least, w.age.least)
	w.age = age
	w.age.add(&later, m.Now)
	w.merge(r, requests, p.expires)
}

// sendNext notes the waiting charge as sent.
func (b *Bucket) sendNext(n *Next, m *Moment) {
	p := b.pending
	w := p.waiting
	if w == nil {
		b.pending = nil
		return
	}
	switch {
	case !isOver(w.req.Limit, w.expires, m):
	case n.Lost > 0:
		// Others are lost for another reason.
		p.phase, n.Do = queued, Retry
		return
	default:
		*n = lost(&w.req, w.requests, ErrExpired)
		b.pending = nil
		return
	}
	rest := w.split(m.Now)
	r := &w.req
	p.phase, p.waiting, p.age = sent, rest, &w.age
	p.requests, p.cost, p.at, p.expires, p.base = w.requests, r.Cost, m.Now, w.expires, b.known
	if r.Until = b.openUntil(r, m); r.Until != 0 {
		r.Ends = r.Until
	} else {
		r.Ends = cmp.Or(b.endsAt(r.Limit, p.expires, m), min(m.Now-w.opens, 0))
	}
	w.sent[0] = r
	n.Do, n.Charge = Send, w.sent[:]
}

// endsAt returns an instant of the process's clock as [store.Request.Ends] has it: as the time that is left,
// because a wrong clock would make charges count for nothing. What drains has no end.
func (b *Bucket) endsAt(limit *store.Limit, at int64, m *Moment) int64 {
	switch {
	case algorithm.Of(limit.Algorithm).Drains():
		return 0
	case at <= m.Now:
		// An instant that is long over.
		return 1
	}
	return m.Now - at
}

// Left returns how long the bucket is open, as far as is known: see [algorithm.Known.Left].
func (b *Bucket) Left(r *store.Request, m *Moment) int64 { return b.known.Left(r.Limit, m.Now+b.clock) }

// opens returns the end, as [store.Request.Ends] has it, of the window in which pending charges count, or that which the
// request has for it: what asks first opens no other one.
func (b *Bucket) opens(r *store.Request, m *Moment) int64 {
	return cmp.Or(b.chargedUntil(r, m), r.Ends)
}

// chargedUntil returns the end of the window in which pending charges count, or 0 if none do.
func (b *Bucket) chargedUntil(r *store.Request, m *Moment) int64 {
	p := b.pending
	if p == nil || !algorithm.Of(r.Limit.Algorithm).Windowed() || b.known.IsOpen(r.Limit, m.Now+b.clock) {
		return 0
	}
	end := int64(0)
	if p.phase == sent && !p.isStale {
		end = p.expires
	}
	if w := p.waiting; w != nil && (end <= m.Now || w.expires < end) {
		end = w.expires
	}
	if end <= m.Now {
		return 0
	}
	return b.endsAt(r.Limit, end, m)
}

// Send sends delayed charges, or waits for its shard. What counts no more is given up. Do is
// Nothing if neither is the case any more.
func (b *Bucket) Send(m *Moment) (n Next) {
	switch p := b.pending; {
	case p == nil || p.phase == sent:
	case p.waiting.expires <= m.Now:
		return b.GiveUp(ErrExpired)
	default:
		b.sendNext(&n, m)
	}
	return n
}

const (
	// retryPause is the first pause. Pauses double up to maxRetryPause.
	retryPause    = 50 * time.Millisecond
	maxRetryPause = time.Second
)

// RetryPause returns the pause before the charges that wait for a shard are sent again: none if it
// has executed some, and otherwise twice the last pause, from 50 ms to a second. last is 0 before
// the first try.
func RetryPause(last time.Duration, executes bool) time.Duration {
	if executes {
		return 0
	}
	return min(max(2*last, retryPause), maxRetryPause)
}

// IsDelayed reports whether charges wait for the next tick.
func (b *Bucket) IsDelayed() bool { return b.pending != nil && b.pending.phase == delayed }

// GiveUp gives up the charges that wait.
func (b *Bucket) GiveUp(err error) (n Next) {
	if b.pending == nil {
		return n
	}
	n = b.dropWaiting(err)
	if b.pending.phase != sent {
		b.pending = nil
	}
	return n
}

func (b *Bucket) dropWaiting(err error) (n Next) {
	if w := b.pending.waiting; w != nil {
		n = lost(&w.req, w.requests, err)
		n.Do = GiveUp
		b.pending.waiting = nil
	}
	return n
}

// offset makes the waiting charges spend less by what a refused take has spent, and reports
// whether they were as much. So nothing depends on a refund, which may fail.
func (b *Bucket) offset(cost int64, m *Moment) bool {
	p := b.pending
	if p == nil || p.waiting == nil || p.waiting.expires <= m.Now {
		return false
	}
	p.waiting.shrink(m.Now)
	r := &p.waiting.req
	if r.Cost < cost {
		return false
	}
	if hasParts(r.Limit) {
		p.waiting.age.remove(cost)
	}
	if r.Cost -= cost; r.Cost == 0 {
		if p.waiting = nil; p.phase != sent {
			b.pending = nil
		}
	}
	return true
}

// age is how much of charges that wait would count by now, had they arrived at once: a long
// outage must not end with all that was spent in it at one instant. Charges of a window
// that ends expire together, and have no age.
type age struct {
	// clock is how far the store's clock is ahead of the process's, as heard when age began.
	clock int64
	// known is a copy of the bucket, of what drains, or a wheel, of what stops counting at several instants.
	known algorithm.Known
	// least are the fewest events of the requests: what is left may be theirs.
	least int64
}

// newAge begins an age with a request that was to be charged at now, on top of what is known. What
// drains in order has to wait for what was before it.
func (b *Bucket) newAge(r *store.Request, known algorithm.Known, now int64) age {
	a := age{clock: b.clock, least: r.Events}
	if algorithm.Of(r.Limit.Algorithm).Drains() {
		a.known = known
	}
	a.add(r, now)
	return a
}

// add notes that a request was to be charged at now.
func (a *age) add(r *store.Request, now int64) {
	a.least = min(a.least, r.Events)
	switch {
	case hasParts(r.Limit):
		addToWheel(&a.known.Content, r.Limit, r.Cost, now+a.clock)
	case algorithm.Of(r.Limit.Algorithm).Drains():
		a.known.Charge(r, r.Cost, now+a.clock)
	}
}

// spend adds a cost to what is known of a bucket, or to the wheel that stands for it. clock is how
// far the store's clock is ahead.
func spend(known *algorithm.Known, r *store.Request, cost, now, clock int64) {
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		known.Charge(r, cost, now+clock)
	} else {
		addToWheel(&known.Content, r.Limit, cost, now)
	}
}

// A wheel is a content that has what was spent in each part of the time for which something counts: the first
// number is that of the present part, the next ones are the costs of this part and those before it, of that time
// and the part in which it began. All its instants are those of one clock: for charges that wait the store's, so that
// no part is in two aligned windows.

// partsOf is how many parts a window has.
func partsOf(limit *store.Limit) int64 {
	return int64(len(store.Content{})-2) * limit.Window.Microseconds() / countsFor(limit)
}

// partAt is the part that has an instant.
func partAt(limit *store.Limit, at int64) int64 {
	window, parts := limit.Window.Microseconds(), partsOf(limit)
	return at/window*parts + at%window*parts/window
}

// partEnd is the instant at which a part is over.
func partEnd(limit *store.Limit, part int64) int64 {
	window, parts := limit.Window.Microseconds(), partsOf(limit)
	return (part+1)/parts*window + ((part+1)%parts*window+parts-1)/parts
}

// countsFor is for how long something counts at most of what is spent in a bucket of parts. Where the windows of a
// clock begin this process may not know.
func countsFor(limit *store.Limit) int64 {
	if algorithm.Of(limit.Algorithm).Clocked() {
		return 2 * limit.Window.Microseconds()
	}
	return limit.Window.Microseconds()
}

// turn makes the part of now the first one.
func turn(c *store.Content, limit *store.Limit, now int64) {
	part := partAt(limit, now)
	costs := c[1:]
	for n := min(max(part-c[0], 0), int64(len(costs))); n > 0; n-- {
		copy(costs[1:], costs)
		costs[0] = 0
	}
	c[0] = max(c[0], part)
}

func addToWheel(c *store.Content, limit *store.Limit, cost, at int64) {
	turn(c, limit, at)
	costs := c[1:]
	if age := c[0] - partAt(limit, at); age < int64(len(costs)) {
		costs[age] += min(cost, store.MaxInteger-costs[age])
	}
}

// oldestInWheel is the cost of the oldest part that counts, when that stops, and the wheel without it. newest is the
// instant of the last that was spent.
func oldestInWheel(c store.Content, limit *store.Limit, newest, now int64) (cost, ends int64, rest store.Content) {
	turn(&c, limit, now)
	costs := c[1:]
	for age := len(costs) - 1; age >= 0; age-- {
		if cost = costs[age]; cost > 0 {
			costs[age] = 0
			last := partEnd(limit, c[0]-int64(age))
			if algorithm.Of(limit.Algorithm).Clocked() {
				// Without a margin a delay would move the charge into the next window.
				last -= limit.Window.Microseconds() / 16
			}
			ends = min(last, newest) + countsFor(limit)
			break
		}
	}
	return cost, ends, c
}

// inWheel is how much of a wheel still counts.
func inWheel(c store.Content, limit *store.Limit, now int64) (sum int64) {
	turn(&c, limit, now)
	for _, cost := range c[1:] {
		sum += cost
	}
	return sum
}

// wheelFrees is the instant at which no more than most of a wheel counts.
func wheelFrees(c store.Content, limit *store.Limit, most, now int64) int64 {
	left := inWheel(c, limit, now)
	turn(&c, limit, now)
	at := now
	for age := len(c) - 2; age >= 0 && left > most; age-- {
		left -= c[1+age]
		at = partEnd(limit, c[0]-int64(age)+partsOf(limit))
	}
	return at
}

// hasParts reports whether charges of a limit stop counting at several instants.
func hasParts(limit *store.Limit) bool {
	switch aging := algorithm.Of(limit.Algorithm).Aging; aging {
	case algorithm.AtWindowEnd, algorithm.Draining:
		return false
	case algorithm.ByClock, algorithm.OneByOne:
		return true
	default:
		panic(aging.Unknown())
	}
}

// split leaves the part in w that stops counting first, and returns the others, or nil. What drains is one
// charge.
func (w *mergedCharge) split(now int64) (rest *mergedCharge) {
	r := &w.req
	if !hasParts(r.Limit) {
		w.shrink(now)
		return nil
	}
	newest := w.expires - countsFor(r.Limit) + w.age.clock
	cost, ends, others := oldestInWheel(w.age.known.Content, r.Limit, newest, now+w.age.clock)
	if cost == 0 {
		r.Cost = 1
		return nil
	}
	if left, parts := sumOfWheel(others); left > 0 {
		rest = new(mergedCharge)
		*rest = *w
		rest.age.known.Content, rest.req.Cost = others, left
		share := int64(float64(w.requests) * (float64(cost) / float64(cost+left)))
		w.requests = max(min(share, w.requests-parts), 1)
		rest.requests -= w.requests
		if r.ID != "" {
			// Where events are kept one by one each part is one.
			r.ID += string(rune('a' + partAt(r.Limit, ends)%26))
		}
	}
	r.Cost, w.expires = cost, ends-w.age.clock
	return rest
}

// sumOfWheel is the cost of all parts, and the number of those that have any.
func sumOfWheel(c store.Content) (sum, parts int64) {
	for _, cost := range c[1:] {
		if sum += cost; cost > 0 {
			parts++
		}
	}
	return sum, parts
}

// shrink makes the merged charges cost what still counts of them.
func (w *mergedCharge) shrink(now int64) {
	if left := w.left(now); left < w.req.Cost {
		w.req.Cost, w.req.Events = left, w.age.least
	}
}

// left is how much of the merged charges still counts, and 1 at least, because charges of which
// nothing counts expire. What drains is charged as it was, up to a full bucket.
func (w *mergedCharge) left(now int64) int64 {
	r, left := &w.req, int64(0)
	switch aging := algorithm.Of(r.Limit.Algorithm).Aging; aging {
	case algorithm.AtWindowEnd:
		left = r.Cost
	case algorithm.ByClock:
		left = weighted(w.age.known.Content, r.Limit, now+w.age.clock)
	case algorithm.Draining:
		left = max(w.age.used(*r, now), r.Capacity())
	case algorithm.OneByOne:
		left = inWheel(w.age.known.Content, r.Limit, now+w.age.clock)
	default:
		panic(aging.Unknown())
	}
	return min(r.Cost, max(left, 1))
}

// addLate notes a charge that stops counting then.
func (a *age) addLate(r *store.Request, ends int64) {
	a.least = min(a.least, r.Events)
	if hasParts(r.Limit) {
		// A part does not have the instant at which it ends.
		addToWheel(&a.known.Content, r.Limit, r.Cost, ends-countsFor(r.Limit)-1+a.clock)
	}
}

// remove takes a cost out of the newest parts.
func (a *age) remove(cost int64) {
	for i := range a.known.Content[1:] {
		part := &a.known.Content[1+i]
		less := min(cost, *part)
		cost -= less
		*part -= less
	}
}

// weighted is how much of a wheel counts at most in windows of a clock, wherever those begin: all of the last
// window, and less of what is older.
func weighted(c store.Content, limit *store.Limit, now int64) (sum int64) {
	turn(&c, limit, now)
	window := limit.Window.Microseconds()
	for age, cost := range c[1:] {
		// The newest of the part.
		since := max(now-partEnd(limit, c[0]-int64(age)), 0)
		counts := float64(cost) * min(max(float64(2*window-since)/float64(window), 0), 1)
		if sum += int64(counts); counts > float64(int64(counts)) {
			// A part of an event counts as a whole one.
			sum++
		}
	}
	return sum
}

// used is how much of a copy counts.
func (a *age) used(r store.Request, now int64) int64 {
	r.Cost = 0
	return a.known.View(&r, 0, now+a.clock).Used
}
