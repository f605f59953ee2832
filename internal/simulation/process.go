package simulation

import (
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// The times of a process, as package ledger has them.
const (
	checkTimeout = 50_000
	resetTimeout = 500_000
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
	// ticks is set while a tick is to come.
	ticks bool
	held  []*entry
	// reaps is set while tokens are looked for.
	reaps bool
	// evicts is set if buckets of strangers need room now and then.
	evicts bool
	// evicted is told of a bucket before it is forgotten for another.
	evicted func(e *entry, m *core.Moment)
	// repeated is told of a take that was not executed, of what its request was answered before, and of
	// what it is answered now.
	repeated func(r *store.Request, was, st *store.State)
	// covered is told of a request that stays refused, although its batch had enough for it.
	covered func(r *store.Request, st *store.State)
	// leaves is the part of requests whose client leaves while they wait.
	leaves float64
	// looks is told how long ago a request that waits asked the primary before.
	looks func(r *store.Request, ago int64)
	// delivery is how long charges commonly take.
	delivery int64
	// queue has the entries whose charges wait for the shard; works is set while they are tried.
	queue []*entry
	works bool
	// processes is how many processes it counts.
	processes int64
	// counts are those of the core.
	counts core.Counts
	// doubted is told of takes of unknown outcome, lost of charges that are given up.
	doubted func(r store.Request)
	// kept is told of refunds that may not have been made.
	kept func(r store.Request)
	lost func(e *entry, n core.Next)
}

// entry is a bucket of a process.
type entry struct {
	core.Bucket
	key string
	// looked is when a request that waits was last let through to ask the primary, or 0.
	looked int64
	// alone is set once a request was decided about alone, until the bucket is reset.
	alone bool
	// penalized is when the process last set a penalty, or 0.
	penalized int64
	// period is when the window of the last batch ends, as the store said.
	period int64
	// arrivals are called when the charge in flight is answered.
	arrivals []func()
}

func (p *process) moment() core.Moment {
	return core.Moment{Now: p.now, Trust: p.trust, Delay: p.delay, Delivery: p.delivery, Processes: p.processes}
}

// of returns the bucket of a request. This machine's clock begins at an epoch of its own.
func (p *process) of(r *store.Request, m *core.Moment) *entry {
	if p.evicts && p.chance(0.01) {
		p.evict(m)
	}
	key := keyOf(r)
	e, ok := p.buckets[key]
	if !ok || e.Worth(m) == core.Expired && p.chance(0.3) {
		// The registry sweeps expired buckets.
		e = &entry{key: key, Bucket: core.New(epoch, m)}
		p.buckets[key] = e
	}
	return e
}

var errNoRoom = fmt.Errorf("%w: simulated lack of room", store.ErrNotExecuted)

// evict removes the bucket of least worth of some, and gives up its charges, as the registry does if
// it is full.
func (p *process) evict(m *core.Moment) {
	keys := sorted(p.buckets)
	p.rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	var least *entry
	worth := core.InUse
	for _, key := range keys {
		if e := p.buckets[key]; worth > core.Idle && e.Worth(m) < worth {
			least, worth = e, e.Worth(m)
		}
	}
	if least == nil {
		return
	}
	p.evicted(least, m)
	delete(p.buckets, least.key)
	if n := least.GiveUp(errNoRoom); n.Lost > 0 {
		p.lost(least, n)
	}
}

// told passes on what an event has brought about for other requests.
func (p *process) told(m *core.Moment) {
	for _, t := range m.Turns {
		p.after(0, func() { t.Call.(*call).turns[t.Place](t) })
	}
	p.counts.Add(m.Counts)
}

// next does what the core says about a bucket's charges.
func (p *process) next(e *entry, n core.Next) {
	if n.Lost > 0 {
		p.lost(e, n)
	}
	switch n.Do {
	case core.Send:
		p.send(e, n.Charge, nil)
	case core.Delay:
		p.held = append(p.held, e)
		if !p.ticks {
			p.ticks = true
			p.after(p.delay, p.tick)
		}
	case core.Retry:
		p.queue = append(p.queue, e)
		if !p.works {
			p.works = true
			p.workLater(core.RetryPause(0, false))
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

func (p *process) workLater(pause time.Duration) {
	p.after(pause.Microseconds(), func() { p.work(pause) })
}

// work tries the charges that wait for the shard.
func (p *process) work(pause time.Duration) {
	batch := p.queue
	p.queue = nil
	left, executed := 0, false
	finished := func() {
		switch {
		case left > 0:
		case len(p.queue) == 0:
			p.works = false
		default:
			p.workLater(core.RetryPause(pause, executed))
		}
	}
	for _, e := range batch {
		m := p.moment()
		n := e.Send(&m)
		if n.Lost > 0 {
			p.lost(e, n)
		}
		if n.Do == core.Send {
			left++
			p.send(e, n.Charge, func(ran bool) {
				left--
				executed = executed || ran
				finished()
			})
		}
		p.told(&m)
	}
	finished()
}

// send sends a charge.
func (p *process) send(e *entry, charge []*store.Request, done func(executed bool)) {
	p.net.write(opCharge, *charge[0], func(st store.State) {
		m := p.moment()
		n := e.Delivered(charge[0], &st, &m)
		p.told(&m)
		if n.Delivery > 0 {
			p.delivery = n.Delivery
		}
		arrivals := e.arrivals
		e.arrivals = nil
		for _, f := range arrivals {
			p.after(0, f)
		}
		p.next(e, n)
		if done != nil {
			done(n.Do != core.Retry)
		}
	})
}

// settle ends what a request holds, and charges its cost.
func (p *process) settle(r store.Request, hold int64) {
	m := p.moment()
	e := p.of(&r, &m)
	n := e.Settle([]*store.Request{&r}, hold, &m)
	p.told(&m)
	p.next(e, n)
}

// restore gives back what a request has taken: to its batch, or to the store.
func (p *process) restore(r store.Request) {
	m := p.moment()
	isRestored := p.of(&r, &m).Restore(&r, &m)
	p.told(&m)
	if isRestored {
		r.Cost = 0
	}
	p.refund(r)
}

// refund gives back to the store what the request costs, and ends what it holds, if anything.
func (p *process) refund(r store.Request) {
	if r.Cost == 0 && !r.MayHold() {
		return
	}
	m := p.moment()
	e := p.of(&r, &m)
	e.RefundSent(&r, &m)
	sent := m.Now
	p.told(&m)
	p.net.write(opRefund, r, func(st store.State) {
		if st.Err != nil {
			p.kept(r)
		}
		m := p.moment()
		e.RefundArrived(&r, &st, sent, &m)
		p.told(&m)
	})
}

// reap gives back tokens that lie unused, as long as there are any.
func (p *process) reap() {
	p.reaps = false
	for _, key := range sorted(p.buckets) {
		e, ok := p.buckets[key]
		if !ok {
			continue
		}
		if e.Gauges().Reserves {
			m := p.moment()
			refund := e.Surplus(core.IdleBatch, &m)
			p.told(&m)
			p.refund(refund)
		}
		if e.Gauges().Reserves {
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
				e.alone = false
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

// penalize keeps the client of a request refused.
func (p *process) penalize(r store.Request) {
	m := p.moment()
	e := p.of(&r, &m)
	e.Penalize(&r, &m)
	e.penalized = m.Now
	p.told(&m)
	p.net.write(opPenalize, r, func(store.State) {})
}

// ahead asks about a request that waits behind others. An answer from before a reset is asked for
// once more.
func (p *process) ahead(r store.Request, maxWait time.Duration, answered func(st store.State)) {
	p.lookAhead(r, maxWait, func(st store.State, again bool) {
		if again {
			p.lookAhead(r, maxWait, func(st store.State, _ bool) { answered(st) })
			return
		}
		answered(st)
	})
}

func (p *process) lookAhead(r store.Request, maxWait time.Duration, answered func(st store.State, again bool)) {
	var st store.State
	var check core.Check
	m := p.moment()
	e := p.of(&r, &m)
	do := e.AskAhead(&r, &st, maxWait, &check, &m)
	p.told(&m)
	if do == core.Nothing {
		answered(st, false)
		return
	}
	if e.looked != 0 {
		p.looks(&r, p.now-e.looked)
	}
	e.looked = p.now
	asked := r
	asked.Primary = true
	p.net.check(asked, func(st store.State) {
		m := p.moment()
		do := p.of(&r, &m).AheadAnswered(&r, &st, &check, &m)
		p.told(&m)
		answered(st, do == core.CheckPrimary)
	})
}

// alone decides without the store.
func (p *process) alone(r store.Request) store.State {
	m := p.moment()
	e := p.of(&r, &m)
	e.alone = true
	st := e.AskAlone(&r, &m)
	p.told(&m)
	return st
}

func (p *process) settleUnknown(r store.Request, hold int64) {
	m := p.moment()
	p.of(&r, &m).SettleUnknown(&r, hold, &m)
	p.told(&m)
}
