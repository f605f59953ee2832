package simulation

import (
	"context"
	"errors"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger/core"
)

// call is one call of a process, of Admit or Take. Each request has its place in states.
type call struct {
	*process
	reqs   []store.Request
	states []store.State
	// turns are called when the request at a place gets its turn.
	turns []func(t core.Turn)
	// until is when a call stops waiting for a charge, once it had to.
	until int64
	// gone is set once the client has left.
	gone bool
	// stands is set if a refusal stands because its take could not be repeated.
	stands bool
}

func (p *process) call(reqs []store.Request) *call {
	return &call{process: p, reqs: reqs, states: make([]store.State, len(reqs)), turns: make([]func(core.Turn), len(reqs))}
}

func (c *call) waiter(place int) core.Waiter {
	return core.Waiter{Request: &c.reqs[place], State: &c.states[place], Call: c, Place: place}
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
	for i := range c.reqs {
		all = append(all, i)
	}
	return all
}

// admit checks requests, and holds what they cost.
func (p *process) admit(reqs []store.Request, answered func(states []store.State)) {
	c := p.call(reqs)
	if len(reqs) > 1 && c.refuseKnown() {
		answered(c.states)
		return
	}
	all(c.places(), c.join, func() { answered(c.states) })
}

func (c *call) refuseKnown() (refused bool) {
	m := c.moment()
	for i := range c.reqs {
		refused = c.of(&c.reqs[i], &m).Refuse(&c.reqs[i], &c.states[i], &m) || refused
	}
	c.told(&m)
	return refused
}

// join asks whether a request fits.
func (c *call) join(place int, done func()) {
	m := c.moment()
	e, check := c.of(&c.reqs[place], &m), core.Check{}
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
	r := c.reqs[place]
	r.Primary = check.Primary
	if !check.Joined && c.chance(c.leaves) {
		// A check that others wait for outlasts its client.
		c.gone = true
	}
	c.net.check(r, func(st store.State) {
		if c.gone && !check.Joined {
			st = store.State{Err: context.Canceled}
		}
		m := c.moment()
		do := e.Answered(c.waiter(place), st, &check, &m)
		c.told(&m)
		c.do(e, place, do, check, done)
	})
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
		e.RefuseUnclear(&c.reqs[place], &c.states[place], &m)
		c.told(&m)
		done()
	})
}

// take takes what requests cost.
func (p *process) take(reqs []store.Request, answered func(states []store.State)) {
	c := p.call(reqs)
	if c.refuseTakes() {
		answered(c.states)
		return
	}
	retakes := core.Retakes{Asked: c.now}
	var again []int
	all(c.places(), func(i int, done func()) {
		c.claim(i, done, func() {
			again = append(again, i)
			done()
		})
	}, func() {
		all(again, c.takeOne, func() {
			c.retake(&retakes, func() { c.reclaim(func() { answered(c.states) }) })
		})
	})
}

func (c *call) refuseTakes() (refused bool) {
	m := c.moment()
	var asking []*entry
	for i := range c.reqs {
		e := c.of(&c.reqs[i], &m)
		do, asks := e.AskTake(&c.reqs[i], &c.states[i], &m)
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
	r := &c.reqs[place]
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
	r := c.reqs[place]
	r.Cost = size
	c.exchange(r, func(st store.State) {
		m := c.moment()
		do, leftover := c.of(&r, &m).Fetched(c.waiter(place), &r, &st, &m)
		c.told(&m)
		c.refund(leftover)
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
	e, asked := c.of(&r, &m), c.now
	e.TakeSent(&r)
	c.net.write(opTake, r, func(st store.State) {
		m := c.moment()
		if errors.Is(st.Err, store.ErrUncertain) {
			c.doubted(r)
		}
		refund := e.TakeAnswered(&r, &st, asked, &m)
		c.told(&m)
		c.refund(refund)
		then(st)
	})
}

// takeOne takes the cost of a request, what the batch has of it and the rest.
func (c *call) takeOne(place int, done func()) {
	r := c.reqs[place]
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
		if core.Stands(&c.states[place], &st) {
			c.stands = true
		} else {
			c.states[place] = st
		}
		done()
	})
}

// retake repeats takes for what comes back to their buckets.
func (c *call) retake(again *core.Retakes, then func()) {
	refused := again.ToRepeat(c.states)
	claims, waiting := c.claimReturns(refused, again.Asked)
	if len(claims) == 0 {
		then()
		return
	}
	again.Claimed(len(waiting) > 0, checkTimeout, c.now)
	if len(waiting) > 0 && c.chance(c.leaves) {
		c.withdraw(claims)
		then()
		return
	}
	c.awaitReturns(waiting, again.Until, func() {
		again.Asked = c.now
		all(refused, c.takeOne, func() {
			if c.stands {
				c.withdraw(claims)
				then()
				return
			}
			c.retake(again, then)
		})
	})
}

func (c *call) claimReturns(refused []int, asked int64) (claims, waiting []*core.Claim) {
	m := c.moment()
	for _, i := range refused {
		claimed := c.of(&c.reqs[i], &m).ClaimReturn(c.waiter(i), asked)
		if claimed == nil {
			c.withdraw(claims)
			return nil, nil
		}
		if claims = append(claims, claimed); !claimed.Arrived {
			waiting = append(waiting, claimed)
		}
	}
	return claims, waiting
}

func (c *call) withdraw(claims []*core.Claim) (waited int) {
	for _, claimed := range claims {
		m := c.moment()
		if c.of(claimed.Request, &m).Withdraw(claimed, &m) {
			waited++
		}
		c.told(&m)
	}
	return waited
}

func (c *call) awaitReturns(claims []*core.Claim, until int64, then func()) {
	waits := len(claims)
	if waits == 0 {
		then()
		return
	}
	arrived := func(n int) {
		if waits -= n; n > 0 && waits == 0 {
			then()
		}
	}
	for _, claimed := range claims {
		c.turns[claimed.Place] = func(core.Turn) { arrived(1) }
	}
	c.after(until-c.now, func() { arrived(c.withdraw(claims)) })
}

// reclaim looks for what the store refused in batches that overtook the requests.
func (c *call) reclaim(then func()) {
	var again []int
	all(core.Reclaimable(c.reqs, c.states), func(i int, done func()) {
		m := c.moment()
		do := c.of(&c.reqs[i], &m).Reclaim(c.waiter(i), &m)
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
