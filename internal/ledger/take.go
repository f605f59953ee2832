package ledger

import (
	"context"
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Take implements [store.Store]. If a bucket is known to refuse its request, Take
// takes nothing from the others, and their states are zero. Requests with a batch
// are served from tokens taken in advance.
func (l *Ledger) Take(ctx context.Context, asks []*store.Ask) {
	for _, a := range asks {
		a.State = store.State{}
	}
	t := taking{call: call{ledger: l, ctx: ctx, asks: asks}}
	t.marks = t.roomMarks[:0]
	if !t.refuseKnown() {
		t.run()
	}
}

// IsFull reports whether the bucket of a request to take is known to refuse it, however old
// that knowledge is.
func (l *Ledger) IsFull(r *store.Request) bool {
	e := l.look(r)
	if e == nil {
		return false
	}
	m := l.moment()
	defer e.stripe.mu.Unlock()
	return e.IsFull(r, &m)
}

// taking is one call of Take.
type taking struct {
	call
	// until is when it waits no longer for what comes back, once it had to.
	until time.Time
	// marks are those of the takes in flight.
	marks     []int64
	roomMarks [2]int64
}

// refuseKnown sets the states of requests that are refused without a call, and
// reports whether there are any. Where that depends on what is about to be held no more, it waits once.
func (t *taking) refuseKnown() (refused bool) {
	m := t.ledger.moment()
	var asking []*entry
	var ending []int
	for i := range t.asks {
		r := &t.asks[i].Request
		e := t.ledger.findFor(r, &m)
		if e == nil {
			continue
		}
		if t.until.IsZero() && e.AwaitsEnd(r, &m) {
			ending = append(ending, i)
			e.release(&m)
			continue
		}
		do, asks := e.AskTake(r, &t.asks[i].State, &m)
		refused = refused || do == core.Nothing
		if asks {
			asking = append(asking, e)
		}
		e.release(&m)
	}
	if refused || ending != nil {
		for _, e := range asking {
			e.stripe.mu.Lock()
			e.AskNot()
			e.stripe.mu.Unlock()
		}
	}
	if refused || ending == nil {
		return refused
	}
	t.until = t.ledger.registry.clock().Add(t.ledger.opts.Timeout)
	t.awaitReturns(ending, t.until)
	return t.refuseKnown()
}

// run waits for what comes back to the buckets, takes what batches have, waits for batches in flight, and
// takes the rest from the store in one call.
func (t *taking) run() {
	all := make([]int, len(t.asks))
	for i := range all {
		all[i] = i
	}
	began := t.ledger.registry.now()
	if t.until.IsZero() {
		t.until = t.ledger.registry.clock().Add(t.ledger.opts.Timeout)
	}
	t.awaitReturns(all, t.until)
	var own, fetches []int
	var batches []store.Request
	waiting := 0
	for i, a := range t.asks {
		if a.Batch == 0 {
			own = append(own, i)
			continue
		}
		switch what, size := t.claim(i); what {
		case core.Fetch:
			fetches, batches = append(fetches, i), append(batches, a.Request)
			batches[len(batches)-1].FetchBatch(size)
		case core.Wait:
			waiting++
		case core.Take:
			own = append(own, i)
		}
	}
	again := t.take(own, fetches, batches)
	t.take(t.await(waiting, again), nil, nil)
	t.reclaim(began)
}

// claim serves a request from its batch, or says what it has to do.
func (t *taking) claim(i int) (do core.Do, size int64) {
	m := t.ledger.moment()
	m.Processes = t.ledger.processes(&t.asks[i].Request)
	e := t.ledger.enter(&t.asks[i].Request, &m)
	defer e.release(&m)
	if do, size = e.Claim(t.waiter(i), &m); do == core.Wait {
		t.expectTurn()
	}
	return do, size
}

func (t *taking) await(waiting int, again []int) []int {
	for range waiting {
		if turn := <-t.turns; turn.do == core.Again {
			again = append(again, turn.place)
		}
	}
	return again
}

// take takes the costs of some requests, and batches for those that fetch, in one
// call. It returns the places of those that fetched in vain, or were refused without hearing what is held.
func (t *taking) take(own, fetches []int, batches []store.Request) (again []int) {
	if len(own)+len(fetches) == 0 {
		return nil
	}
	asked, room := t.ledger.registry.now(), make([]store.Ask, len(own)+len(batches))
	var loans []core.Loan
	for n, i := range own {
		r := &room[n].Request
		*r = t.asks[i].Request
		if r.Batch != 0 && loans == nil {
			loans = make([]core.Loan, len(own))
		}
		if loans != nil {
			loans[n] = t.ledger.borrow(r)
		}
	}
	for n := range batches {
		room[len(own)+n].Request = batches[n]
	}
	t.ask(room)
	var unclear []int
	answered := func(n int) {
		r, st := &room[n].Request, &room[n].State
		if n >= len(own) {
			if i := fetches[n-len(own)]; t.fetched(i, r, st) == core.Take {
				again = append(again, i)
			}
			return
		}
		if loans != nil {
			t.ledger.repay(r, loans[n], st)
		}
		asked := t.asks[own[n]]
		if !core.Stands(&asked.State, st) {
			asked.State = *st
		}
		if core.IsUnheard(&asked.Request, r, st) {
			again = append(again, own[n])
		}
	}
	for n := range room {
		a := &room[n]
		if t.ledger.hearTake(&a.Request, &a.State, asked, t.marks[n]) == core.AwaitCharge {
			unclear = append(unclear, n)
			continue
		}
		answered(n)
	}
	if len(unclear) == 0 {
		return again
	}
	// Nobody waits for the charges of others' buckets.
	until := t.ledger.registry.clock().Add(t.ledger.opts.Timeout)
	for _, n := range unclear {
		t.ledger.judgeTake(&room[n].Request, &room[n].State, t.marks[n], until)
		answered(n)
	}
	return again
}

// ask takes from the store.
func (t *taking) ask(room []store.Ask) {
	asks := make([]*store.Ask, len(room))
	m := t.ledger.moment()
	if t.marks = t.marks[:0]; cap(t.marks) < len(asks) {
		t.marks = make([]int64, 0, len(asks))
	}
	for n := range room {
		asks[n] = &room[n]
		e := t.ledger.enter(&asks[n].Request, &m)
		t.marks = append(t.marks, e.TakeSent(&asks[n].Request, &m))
		e.release(&m)
	}
	t.ledger.Remote.Take(t.ctx, asks)
}

// hearTake takes in the answer to a take, and returns what there is to do.
func (l *Ledger) hearTake(r *store.Request, st *store.State, asked, mark int64) core.Do {
	m := l.moment()
	e := l.enter(r, &m)
	do, refund := e.TakeAnswered(r, st, asked, mark, &m)
	e.release(&m)
	l.refundOne(refund)
	return do
}

// judgeTake waits for charges in flight that decide about a take.
func (l *Ledger) judgeTake(r *store.Request, st *store.State, mark int64, until time.Time) {
	for do := core.AwaitCharge; do == core.AwaitCharge; {
		inTime := l.awaitCharge(r, until)
		m := l.moment()
		e := l.enter(r, &m)
		var refund store.Request
		do, refund = e.JudgeTake(r, st, mark, inTime, &m)
		e.release(&m)
		l.refundOne(refund)
	}
}

// borrow takes as much of a request's cost out of its batch as that has.
func (l *Ledger) borrow(r *store.Request) (loan core.Loan) {
	if r.Batch == 0 {
		return loan
	}
	m := l.moment()
	e := l.enter(r, &m)
	defer e.release(&m)
	return e.Borrow(r, &m)
}

func (l *Ledger) repay(r *store.Request, loan core.Loan, st *store.State) {
	if r.Batch == 0 {
		return
	}
	m := l.moment()
	e := l.enter(r, &m)
	refund := e.Repay(r, loan, st, &m)
	e.release(&m)
	l.refundOne(refund)
}

// fetched takes in the outcome of a fetch by the request at a place.
func (t *taking) fetched(place int, batch *store.Request, st *store.State) core.Do {
	m := t.ledger.moment()
	e := t.ledger.enter(batch, &m)
	do, leftover := e.Fetched(t.waiter(place), batch, st, &m)
	e.release(&m)
	t.ledger.refundOne(leftover)
	if errors.Is(st.Err, store.ErrUncertain) {
		end := *batch
		end.Cost = 0
		store.LateOf(st.Err).Then(func(err error) { t.ledger.takeEnded([]*store.Request{&end}, err) })
	}
	return do
}

// awaitReturns waits for what this process has sent back to the buckets of the requests at these places, for as
// long as there is time and the client stays. It reports whether it has waited.
func (t *taking) awaitReturns(places []int, until time.Time) bool {
	l := t.ledger
	var waiting []int
	for _, i := range places {
		m := l.moment()
		e := l.find(&t.asks[i].Request, &m)
		if e == nil {
			continue
		}
		if e.AwaitReturn(t.waiter(i), &m) {
			t.expectTurn()
			waiting = append(waiting, i)
		}
		e.stripe.mu.Unlock()
	}
	if len(waiting) == 0 {
		return false
	}
	for _, i := range waiting {
		// What lingers leaves at once.
		l.Hurry(t.asks[i].ClientKey)
	}
	timer := time.NewTimer(until.Sub(l.registry.clock()))
	defer timer.Stop()
	for waits := len(waiting); waits > 0; {
		select {
		case <-t.turns:
			waits--
		case <-timer.C:
			waits -= t.waitNot(waiting)
		case <-t.ctx.Done():
			waits -= t.waitNot(waiting)
		}
	}
	return true
}

// waitNot ends the waiting of requests, and returns how many have waited. The others have got their turns.
func (t *taking) waitNot(waiting []int) (waited int) {
	for _, i := range waiting {
		e := t.ledger.look(&t.asks[i].Request)
		if e == nil {
			continue
		}
		if e.WaitNot(t.waiter(i)) {
			waited++
		}
		e.stripe.mu.Unlock()
	}
	return waited
}

// reclaim tries refused requests again: a batch may have overtaken them, or refunds have arrived since.
func (t *taking) reclaim(began int64) {
	var again []int
	waiting, places := 0, core.Reclaimable(t.asks)
	t.awaitReturns(places, t.until)
	for _, i := range places {
		switch t.reclaimOne(i, began) {
		case core.Wait:
			waiting++
		case core.Take:
			again = append(again, i)
		}
	}
	t.take(t.await(waiting, again), nil, nil)
}

func (t *taking) reclaimOne(i int, began int64) core.Do {
	m := t.ledger.moment()
	e := t.ledger.find(&t.asks[i].Request, &m)
	if e == nil {
		return core.Nothing
	}
	defer e.release(&m)
	do := e.Reclaim(t.waiter(i), began, &m)
	if do == core.Wait {
		t.expectTurn()
	}
	return do
}
