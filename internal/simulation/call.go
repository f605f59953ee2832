package simulation

import (
	"context"
	"errors"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// call is one call of a process, of Admit or Take.
type call struct {
	*process
	asks []*store.Ask
	// turns are called when the request at a place gets its turn.
	turns []func(t core.Turn)
	// until is when a call stops waiting for a charge, once it had to.
	until int64
	// began is when a call of Take began.
	began int64
	// gone is set once the client has left; leaving are called then.
	gone    bool
	leaving []func()
}

func (p *process) call(reqs []store.Request) *call {
	c := &call{process: p, asks: store.Asks(reqs), turns: make([]func(core.Turn), len(reqs))}
	if p.chance(p.leaves) {
		p.after(p.between(0, oneOf[int64](p.world, 2000, checkTimeout)), c.leave)
	}
	return c
}

// leave is what happens when the client leaves, at any instant of the call.
func (c *call) leave() {
	c.gone = true
	leaving := c.leaving
	c.leaving = nil
	for _, f := range leaving {
		f()
	}
}

// orLeft returns a function that passes an answer on, unless the client leaves before it comes: then
// it was the error.
func (c *call) orLeft(err error, answer func(st store.State)) func(st store.State) {
	answered := false
	once := func(st store.State) {
		if !answered {
			answered = true
			answer(st)
		}
	}
	c.leaving = append(c.leaving, func() { once(store.State{Err: err}) })
	return once
}

func (c *call) waiter(place int) core.Waiter {
	return core.Waiter{Request: &c.asks[place].Request, State: &c.asks[place].State, Call: c, Place: place}
}

// all calls f for each of some places, and then, once each is done, what follows.
func all(places []int, f func(place int, done func()), then func()) {
	left := len(places)
	if left == 0 {
		then()
		return
	}
	for _, i := range places {
		f(i, func() {
			if left--; left == 0 {
				then()
			}
		})
	}
}

func (c *call) places() (all []int) {
	for i := range c.asks {
		all = append(all, i)
	}
	return all
}

// admit checks requests, and holds what they cost.
func (p *process) admit(reqs []store.Request, answered func(states []store.State)) {
	c := p.call(reqs)
	if len(reqs) > 1 && c.refuseKnown() {
		answered(store.States(c.asks))
		return
	}
	all(c.places(), c.join, func() { answered(store.States(c.asks)) })
}

func (c *call) refuseKnown() (refused bool) {
	m := c.moment()
	for i := range c.asks {
		refused = c.of(&c.asks[i].Request, &m).Refuse(&c.asks[i].Request, &c.asks[i].State, &m) || refused
	}
	c.told(&m)
	return refused
}

// join asks whether a request fits.
func (c *call) join(place int, done func()) {
	m := c.moment()
	e, check := c.of(&c.asks[place].Request, &m), core.Check{}
	c.turns[place] = func(t core.Turn) { c.do(e, place, t.Do, t.Check, done) }
	do := e.Ask(c.waiter(place), &check, &m)
	c.told(&m)
	if do != core.Wait {
		c.do(e, place, do, check, done)
	}
}

func (c *call) do(e *entry, place int, do core.Do, check core.Check, done func()) {
	switch do {
	case core.Nothing:
		done()
	case core.CheckReplica, core.CheckPrimary:
		c.ask(e, place, check, done)
	case core.AwaitCharge:
		c.awaitUnclear(e, place, done)
	case core.Again:
		c.join(place, done)
	}
}

func (c *call) ask(e *entry, place int, check core.Check, done func()) {
	r := c.asks[place].Request
	r.Primary, r.Ends = check.Primary, check.Ends
	answered := func(st store.State) {
		m := c.moment()
		do := e.Answered(c.waiter(place), st, &check, &m)
		c.told(&m)
		c.do(e, place, do, check, done)
	}
	switch {
	case check.Joined:
		// A check that others wait for outlasts its client.
		c.net.check(r, answered)
	case c.gone:
		c.after(0, func() { answered(store.State{Err: errLeft}) })
	default:
		c.net.check(r, c.orLeft(errLeft, answered))
	}
}

// awaitUnclear waits for the charge in flight that decides.
func (c *call) awaitUnclear(e *entry, place int, done func()) {
	if c.until == 0 {
		c.until = c.now + checkTimeout
	}
	c.awaitCharge(e, c.until, func(inTime bool) {
		if inTime && c.now < c.until {
			c.join(place, done)
			return
		}
		m := c.moment()
		e.RefuseUnclear(&c.asks[place].Request, &c.asks[place].State, &m)
		c.told(&m)
		done()
	})
}

// take takes what requests cost.
func (p *process) take(reqs []store.Request, answered func(states []store.State)) {
	c := p.call(reqs)
	c.began = p.now
	if c.refuseTakes() {
		answered(store.States(c.asks))
		return
	}
	c.awaitReturns(func() {
		var again []int
		all(c.places(), func(i int, done func()) {
			c.claim(i, done, func() {
				again = append(again, i)
				done()
			})
		}, func() {
			all(again, c.takeOne, func() { c.reclaim(func() { answered(store.States(c.asks)) }) })
		})
	})
}

func (c *call) refuseTakes() (refused bool) {
	m := c.moment()
	var asking []*entry
	for i := range c.asks {
		e := c.of(&c.asks[i].Request, &m)
		do, asks := e.AskTake(&c.asks[i].Request, &c.asks[i].State, &m)
		refused = refused || do == core.Nothing
		if asks {
			asking = append(asking, e)
		}
	}
	c.told(&m)
	if refused {
		for _, e := range asking {
			e.AskNot()
		}
	}
	return refused
}

// claim serves a request from the batch of its bucket, or from the store. Some have to ask again.
func (c *call) claim(place int, done, again func()) {
	r := &c.asks[place].Request
	if r.Batch == 0 {
		c.takeOne(place, done)
		return
	}
	c.reapLater()
	m := c.moment()
	do, size := c.of(r, &m).Claim(c.waiter(place), &m)
	c.told(&m)
	switch do {
	case core.Nothing:
		done()
	case core.Fetch:
		c.fetch(place, size, done, again)
	case core.Wait:
		c.await(place, done, again)
	case core.Take:
		c.takeOne(place, done)
	}
}

// await waits for a batch in flight.
func (c *call) await(place int, done, again func()) {
	c.turns[place] = func(t core.Turn) {
		if t.Do == core.Again {
			again()
			return
		}
		done()
	}
}

func (c *call) fetch(place int, size int64, done, again func()) {
	r := c.asks[place].Request
	r.FetchBatch(size)
	c.exchange(r, func(st store.State) {
		m := c.moment()
		e := c.of(&r, &m)
		do, leftover := e.Fetched(c.waiter(place), &r, &st, &m)
		c.told(&m)
		if st.Err == nil && st.Allowed {
			e.period = st.Reset
		}
		c.refund(leftover)
		c.reapLater()
		if do == core.Take {
			again()
			return
		}
		done()
	})
}

// exchange takes a cost from the store.
func (c *call) exchange(r store.Request, then func(st store.State)) {
	m := c.moment()
	e, asked, full := c.of(&r, &m), c.now, r
	mark := e.TakeSent(&r, &m)
	answered := func(st store.State) {
		m := c.moment()
		if errors.Is(st.Err, store.ErrUncertain) {
			c.doubted(r)
			end := r
			end.Cost = 0
			// The take has ended by then.
			c.after(longestService, func() { c.refund(end) })
		}
		do, refund := e.TakeAnswered(&r, &st, asked, mark, &m)
		c.told(&m)
		if do == core.AwaitCharge {
			c.judgeTake(e, &r, &st, mark, c.now+checkTimeout, func() { then(st) })
			return
		}
		c.refund(refund)
		if core.IsUnheard(&full, &r, &st) {
			c.exchange(full, then)
			return
		}
		then(st)
	}
	if c.gone {
		c.after(0, func() { answered(store.State{Err: errLeftBefore}) })
		return
	}
	c.net.write(opTake, r, c.orLeft(errLeftSince, answered))
}

// judgeTake waits for charges in flight that decide about a take.
func (c *call) judgeTake(e *entry, r *store.Request, st *store.State, mark, until int64, then func()) {
	c.awaitCharge(e, until, func(inTime bool) {
		m := c.moment()
		do, refund := e.JudgeTake(r, st, mark, inTime && c.now < until, &m)
		c.told(&m)
		if do == core.AwaitCharge {
			c.judgeTake(e, r, st, mark, until, then)
			return
		}
		c.refund(refund)
		then()
	})
}

// The errors of a client that has left: of a check, and of a take that was not sent, or was.
var (
	errLeft       = context.Canceled
	errLeftBefore = store.NotExecuted(context.Canceled)
	errLeftSince  = fmt.Errorf("%w: %w", store.ErrUncertain, context.Canceled)
)

// takeOne takes the cost of a request, what the batch has of it and the rest.
func (c *call) takeOne(place int, done func()) {
	r := c.asks[place].Request
	m := c.moment()
	e, loan := c.of(&r, &m), core.Loan{}
	if r.Batch != 0 {
		loan = e.Borrow(&r, &m)
	}
	c.told(&m)
	c.exchange(r, func(st store.State) {
		if r.Batch != 0 {
			m := c.moment()
			refund := e.Repay(&r, loan, &st, &m)
			c.told(&m)
			c.refund(refund)
		}
		was := c.asks[place].State
		if !core.Stands(&c.asks[place].State, &st) {
			c.asks[place].State = st
		}
		if errors.Is(st.Err, store.ErrNotExecuted) {
			c.repeated(&r, &was, &c.asks[place].State)
		}
		done()
	})
}

// isCovered reports whether the only request is refused, and its batch has enough for it.
func (c *call) isCovered() bool {
	r, st, m := &c.asks[0].Request, &c.asks[0].State, c.moment()
	if r.Batch == 0 || st.Err != nil || st.Allowed || st.InFlight || st.Penalty != 0 {
		return false
	}
	e := c.of(r, &m)
	// Of what was used, the answer shows no tokens that are left.
	return e.period == st.Reset && e.Gauges().Tokens >= r.Cost && st.Used+r.Cost <= r.Capacity()
}

// awaitReturns waits for what the process has sent back to the buckets.
func (c *call) awaitReturns(then func()) {
	var waiting []int
	m := c.moment()
	for i := range c.asks {
		if c.of(&c.asks[i].Request, &m).AwaitReturn(c.waiter(i), &m) {
			waiting = append(waiting, i)
		}
	}
	c.told(&m)
	waits := len(waiting)
	if waits == 0 {
		then()
		return
	}
	arrived := func(n int) {
		if waits -= n; n > 0 && waits == 0 {
			then()
		}
	}
	for _, i := range waiting {
		c.turns[i] = func(core.Turn) { arrived(1) }
	}
	leave := func() {
		waited := 0
		for _, i := range waiting {
			m := c.moment()
			if c.of(&c.asks[i].Request, &m).WaitNot(c.waiter(i)) {
				waited++
			}
			c.told(&m)
		}
		arrived(waited)
	}
	if c.gone {
		leave()
		return
	}
	c.leaving = append(c.leaving, leave)
	c.after(checkTimeout, leave)
}

// reclaim looks for what the store refused in batches that overtook the requests.
func (c *call) reclaim(then func()) {
	if len(c.asks) == 1 && c.isCovered() {
		answered := then
		then = func() {
			c.covered(&c.asks[0].Request, &c.asks[0].State)
			answered()
		}
	}
	var again []int
	all(core.Reclaimable(c.asks), func(i int, done func()) {
		m := c.moment()
		do := c.of(&c.asks[i].Request, &m).Reclaim(c.waiter(i), c.began, &m)
		c.told(&m)
		takeAgain := func() {
			again = append(again, i)
			done()
		}
		switch do {
		case core.Wait:
			c.await(i, done, takeAgain)
		case core.Take:
			takeAgain()
		default:
			done()
		}
	}, func() { all(again, c.takeOne, then) })
}
