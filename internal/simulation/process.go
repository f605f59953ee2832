package simulation

import (
	"errors"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger/core"
)

// The times of a process, as package ledger has them.
const (
	checkTimeout = 50_000
	firstPause   = 50_000
	longestPause = 1_000_000
	maxRetakes   = 4
	resetTimeout = 500_000
	idleBatch    = 1_000_000
	reapPause    = 250_000
)

// process is one Caddy: the driver of the core.
type process struct {
	*world
	name    string
	net     *network
	trust   int64
	delay   int64
	buckets map[string]*entry
	// local are the local counts, which decide while the store does not.
	local map[string]algorithm.Bucket
	// ticks is set while a tick is to come.
	ticks bool
	held  []*entry
	// reaps is set while tokens are looked for.
	reaps bool
	// evicts is set if idle buckets are evicted now and then: what is forgotten of them is asked
	// again, where replicas have it.
	evicts bool
	// delivery is how long charges commonly take.
	delivery int64
	// queue has the entries whose charges wait for the shard; works is set while they are tried.
	queue []*entry
	works bool
	pause int64
	// processes is how many processes it counts.
	processes int64
	// counts are those of the core.
	counts core.Counts
	// doubted is told of takes of unknown outcome, lost of charges that are given up.
	doubted func(r store.Request)
	// kept is told of refunds that may not have been made.
	kept func(r store.Request)
	lost func(n core.Next)
}

// entry is a bucket of a process.
type entry struct {
	core.Bucket
	key string
	// arrivals are called when the charge in flight is answered.
	arrivals []func()
}

func (p *process) moment() core.Moment {
	return core.Moment{Now: p.now, Trust: p.trust, Delay: p.delay, Delivery: p.delivery, Processes: p.processes}
}

// of returns the bucket of a request. This machine's clock begins at an epoch of its own.
func (p *process) of(r *store.Request, m *core.Moment) *entry {
	key := r.Limit.Zone + "/" + r.ClientKey
	e, ok := p.buckets[key]
	if !ok || e.IsExpired(m) && p.chance(0.3) || p.evicts && e.IsIdle() && !e.CountsAlone(m) && p.chance(0.01) {
		// The registry sweeps expired buckets, and evicts idle ones.
		e = &entry{key: key, Bucket: core.New(epoch, m)}
		p.buckets[key] = e
	}
	return e
}

// told passes on what an event has brought about for other requests.
func (p *process) told(m *core.Moment) {
	for _, t := range m.Turns {
		p.after(0, func() { t.Call.(*request).turn(t) })
	}
	for _, c := range m.Woken {
		close(c.Come)
	}
	p.counts.Add(m.Counts)
}

// next does what the core says about a bucket's charges.
func (p *process) next(e *entry, n core.Next) {
	if n.Lost > 0 {
		p.lost(n)
	}
	switch n.Do {
	case core.Send:
		p.send(e, n.Charge, nil)
	case core.Hold:
		p.held = append(p.held, e)
		if !p.ticks {
			p.ticks = true
			p.after(p.delay, p.tick)
		}
	case core.Retry:
		p.queue = append(p.queue, e)
		if !p.works {
			p.works, p.pause = true, firstPause
			p.after(p.pause, p.work)
		}
	}
}

func (p *process) tick() {
	held := p.held
	p.ticks, p.held = false, nil
	for _, e := range held {
		m := p.moment()
		p.next(e, e.Send(&m))
		p.told(&m)
	}
}

// work tries the charges that wait for the shard.
func (p *process) work() {
	batch := p.queue
	p.queue = nil
	left, executed := 0, false
	finished := func() {
		if left > 0 {
			return
		}
		switch {
		case len(p.queue) == 0:
			p.works = false
		case executed:
			p.pause = firstPause
			p.after(0, p.work)
		default:
			p.pause = min(2*p.pause, longestPause)
			p.after(p.pause, p.work)
		}
	}
	for _, e := range batch {
		m := p.moment()
		n := e.Send(&m)
		if n.Lost > 0 {
			p.lost(n)
		}
		if n.Do == core.Send {
			left++
			p.send(e, n.Charge, func(st *store.State) {
				left--
				executed = executed || !errors.Is(st.Err, store.ErrNotExecuted)
				finished()
			})
		}
		p.told(&m)
	}
	finished()
}

// send sends a charge.
func (p *process) send(e *entry, charge []store.Request, done func(st *store.State)) {
	p.net.write(opCharge, charge[0], func(st store.State) {
		m := p.moment()
		n := e.Delivered(&charge[0], &st, &m)
		p.told(&m)
		if n.Took > 0 {
			p.noteDelivery(n.Took)
		}
		arrivals := e.arrivals
		e.arrivals = nil
		for _, f := range arrivals {
			p.after(0, f)
		}
		p.next(e, n)
		if done != nil {
			done(&st)
		}
	})
}

func (p *process) noteDelivery(took int64) {
	if p.delivery > 0 {
		took = p.delivery + (took-p.delivery)/8
	}
	p.delivery = took
}

// settle ends what a request holds, and charges its cost.
func (p *process) settle(r store.Request, hold int64) {
	m := p.moment()
	e := p.of(&r, &m)
	n := e.Settle([]store.Request{r}, hold, &m)
	p.told(&m)
	p.next(e, n)
}

// restore gives back what a request has taken: to its batch, or to the store.
func (p *process) restore(r store.Request) {
	m := p.moment()
	isRestored := p.of(&r, &m).Restore(&r, &m)
	p.told(&m)
	if !isRestored {
		p.refund(r)
	}
}

// refund gives back to the store what the request costs, if anything.
func (p *process) refund(r store.Request) {
	if r.Cost == 0 {
		return
	}
	m := p.moment()
	e := p.of(&r, &m)
	e.RefundSent(r.Cost, &m)
	p.told(&m)
	p.net.write(opRefund, r, func(st store.State) {
		if st.Err != nil {
			p.kept(r)
		}
		m := p.moment()
		e.RefundArrived(r.Cost, &m)
		p.told(&m)
	})
}

// reap gives back tokens that lie unused, as long as there are any.
func (p *process) reap() {
	p.reaps = false
	for _, key := range sorted(p.buckets) {
		e := p.buckets[key]
		if e.Gauges().Tokens > 0 {
			m := p.moment()
			refund := e.Surplus(idleBatch, &m)
			p.told(&m)
			p.refund(refund)
		}
		if e.Gauges().Tokens > 0 {
			p.reapLater()
		}
	}
}

func (p *process) reapLater() {
	if !p.reaps {
		p.reaps = true
		p.after(reapPause, p.reap)
	}
}

// reset empties a bucket, as an operator does.
func (p *process) reset(r store.Request, done func()) {
	m := p.moment()
	e := p.of(&r, &m)
	n := e.ResetSent(&m)
	p.told(&m)
	p.next(e, n)
	empty := func() {
		p.net.empty(r, func(err error) {
			m := p.moment()
			if err != nil {
				e.ResetFailed(&m)
			} else {
				e.ResetDone(&m)
			}
			p.told(&m)
			done()
		})
	}
	p.awaitCharge(e, p.now+resetTimeout, func(bool) { empty() })
}

// awaitCharge calls f when the charge in flight of a bucket is answered, or the time is over.
func (p *process) awaitCharge(e *entry, until int64, f func(inTime bool)) {
	if e.Transit() == nil {
		f(true)
		return
	}
	called := false
	once := func(inTime bool) {
		if !called {
			called = true
			f(inTime)
		}
	}
	e.arrivals = append(e.arrivals, func() { once(true) })
	p.after(until-p.now, func() { once(false) })
}

// request is one request to a process.
type request struct {
	*process
	entry *entry
	req   []store.Request
	state store.State
	check core.Check
	// began is when it came; until is when it stops waiting for a charge, once it had to.
	began, until int64
	// asked is when its take was asked.
	asked    int64
	retakes  int
	answered func(st store.State)
}

func (p *process) request(r store.Request, answered func(st store.State)) {
	m := p.moment()
	q := &request{process: p, entry: p.of(&r, &m), req: []store.Request{r}, began: p.now, answered: answered}
	q.ask()
}

func (q *request) waiter() core.Waiter {
	return core.Waiter{Request: &q.req[0], State: &q.state, Call: q}
}

// ask asks whether the request fits.
func (q *request) ask() {
	m := q.moment()
	q.entry, q.check = q.of(&q.req[0], &m), core.Check{}
	do := q.entry.Ask(q.waiter(), &q.check, &m)
	q.told(&m)
	q.do(do)
}

func (q *request) do(do core.Do) {
	switch do {
	case core.Nothing:
		q.answered(q.state)
	case core.CheckReplica, core.CheckPrimary:
		q.sendCheck()
	case core.AwaitCharge:
		q.awaitUnclear()
	}
}

func (q *request) turn(t core.Turn) {
	switch t.Do {
	case core.Again:
		if q.isTake() {
			q.take()
			return
		}
		q.ask()
	default:
		q.check = t.Check
		q.do(t.Do)
	}
}

func (q *request) isTake() bool { return q.asked != 0 }

func (q *request) sendCheck() {
	r := q.req[0]
	r.Primary = q.check.Primary
	q.net.check(r, func(st store.State) {
		m := q.moment()
		do := q.entry.Answered(q.waiter(), st, &q.check, &m)
		q.told(&m)
		q.do(do)
	})
}

// awaitUnclear waits for the charge in flight that decides.
func (q *request) awaitUnclear() {
	if q.until == 0 {
		q.until = q.now + checkTimeout
	}
	q.awaitCharge(q.entry, q.until, func(inTime bool) {
		if inTime && q.now < q.until {
			q.ask()
			return
		}
		m := q.moment()
		q.entry.RefuseUnclear(&q.req[0], &q.state, &m)
		q.told(&m)
		q.answered(q.state)
	})
}

// takeRequest is a request that takes.
func (p *process) takeRequest(r store.Request, answered func(st store.State)) {
	m := p.moment()
	q := &request{process: p, entry: p.of(&r, &m), req: []store.Request{r}, began: p.now, asked: p.now, answered: answered}
	do, _ := q.entry.AskTake(&q.req[0], &q.state, &m)
	p.told(&m)
	if do == core.Nothing {
		answered(q.state)
		return
	}
	if r.Batch != 0 {
		p.reapLater()
		q.claim()
		return
	}
	q.take()
}

// claim serves the request from the batch of its bucket.
func (q *request) claim() {
	m := q.moment()
	do, size := q.entry.Claim(q.waiter(), &m)
	q.told(&m)
	switch do {
	case core.Nothing:
		q.answered(q.state)
	case core.Fetch:
		q.fetch(size)
	case core.Take:
		q.take()
	}
}

func (q *request) fetch(size int64) {
	r := q.req[0]
	r.Cost = size
	q.exchange(r, func(st store.State) {
		m := q.moment()
		do, leftover := q.entry.Fetched(q.waiter(), &r, &st, &m)
		q.told(&m)
		q.refund(leftover)
		if do == core.Take {
			q.take()
			return
		}
		q.answered(q.state)
	})
}

// exchange takes a cost from the store.
func (q *request) exchange(r store.Request, then func(st store.State)) {
	q.entry.TakeSent(&r)
	asked := q.now
	q.net.write(opTake, r, func(st store.State) {
		m := q.moment()
		if errors.Is(st.Err, store.ErrUncertain) {
			q.doubted(r)
		}
		refund := q.entry.TakeAnswered(&r, &st, asked, &m)
		q.told(&m)
		q.refund(refund)
		then(st)
	})
}

// take takes the cost, what the batch has of it and the rest.
func (q *request) take() {
	r := q.req[0]
	m := q.moment()
	loan := core.Loan{}
	if r.Batch != 0 {
		loan = q.entry.Borrow(&r, &m)
	}
	q.told(&m)
	q.exchange(r, func(st store.State) {
		if r.Batch != 0 {
			m := q.moment()
			refund := q.entry.Repay(&r, loan, &st, &m)
			q.told(&m)
			q.refund(refund)
		}
		was := q.state
		if q.retakes > 0 && errors.Is(st.Err, store.ErrNotExecuted) {
			// The refusal stands.
			st = was
		}
		q.state = st
		q.taken()
	})
}

// taken looks for what comes back to the bucket of a refused take.
func (q *request) taken() {
	if q.state.Err != nil || q.state.Allowed || q.retakes == maxRetakes {
		q.answered(q.state)
		return
	}
	c := q.entry.ClaimReturn(&q.req[0], &q.state, q.asked)
	if c == nil {
		q.reclaim()
		return
	}
	q.retakes++
	if c.Come == nil {
		q.asked = q.now
		q.take()
		return
	}
	q.awaitReturn(c, q.began+2*checkTimeout)
}

// awaitReturn looks every millisecond whether what the claim needs has come.
func (q *request) awaitReturn(c *core.Claim, until int64) {
	select {
	case <-c.Come:
		q.asked = q.now
		q.take()
	default:
		if q.now >= until {
			m := q.moment()
			q.entry.Withdraw(c, &m)
			q.told(&m)
			q.answered(q.state)
			return
		}
		q.after(1000, func() { q.awaitReturn(c, until) })
	}
}

func (q *request) reclaim() {
	if q.req[0].Batch == 0 {
		q.answered(q.state)
		return
	}
	m := q.moment()
	do := q.entry.Reclaim(q.waiter(), &m)
	q.told(&m)
	switch do {
	case core.Nothing:
		q.answered(q.state)
	case core.Take:
		q.retakes = maxRetakes
		q.take()
	}
}

// alone decides without the store: the request has to fit into the local counts, and beside
// what is known of the bucket.
func (p *process) alone(r store.Request) store.State {
	st := opTake.Run(bucketIn(p.local, &r), &r, epoch+p.now)
	if !st.Allowed {
		return st
	}
	m := p.moment()
	known := p.of(&r, &m).AskAlone(&r, &m)
	p.told(&m)
	if !known.Allowed {
		r.Receipt = st.Receipt
		p.refundLocal(r)
	}
	return known
}

func (p *process) refundLocal(r store.Request) {
	opRefund.Run(bucketIn(p.local, &r), &r, epoch+p.now)
}

func (p *process) settleUnknown(r store.Request, hold int64) {
	m := p.moment()
	p.of(&r, &m).SettleUnknown(&r, hold, &m)
	p.told(&m)
}
