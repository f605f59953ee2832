package ledger

import (
	"context"
	"errors"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Take implements [store.Store]. If a bucket is known to refuse its request, Take
// takes nothing from the others, and their states are zero. Requests with a batch
// are served from tokens taken in advance.
func (l *Ledger) Take(ctx context.Context, reqs []store.Request, states []store.State) {
	clear(states)
	t := taking{call: call{ledger: l, ctx: ctx, reqs: reqs, states: states}}
	if !t.refuseKnown() {
		t.run()
	}
}

// taking is one call of Take.
type taking struct {
	call
	// moves is set if a charge is in flight to another owner of some bucket.
	moves bool
}

// refuseKnown sets the states of requests that are refused without a call, and
// reports whether there are any. Once trust has run out it lets one request through
// to ask, and refuses the others until the store has answered.
func (t *taking) refuseKnown() (refused bool) {
	now := t.ledger.books.now()
	var asking []*entry
	for i := range t.reqs {
		r := &t.reqs[i]
		e := t.ledger.find(r)
		if e == nil {
			continue
		}
		t.moves = t.moves || t.ledger.moves(e, r)
		var refusal store.State
		switch rest, isServed := e.rest(r, now); {
		case isServed || !e.refuses(&rest, &refusal, now):
		case e.isDue(now, t.ledger.trust):
			e.asked = now
			asking = append(asking, e)
		default:
			e.hideTokens(&t.reqs[i], &refusal, now)
			t.states[i], refused = refusal, true
			e.page.counts.LocalRefusals++
		}
		e.page.mu.Unlock()
	}
	if refused {
		// No request asks after all, so the next one may.
		for _, e := range asking {
			e.page.mu.Lock()
			e.asked = 0
			e.page.mu.Unlock()
		}
	}
	return refused
}

// run takes what reservations have, waits for batches in flight, and takes the
// rest from the store in one call.
func (t *taking) run() {
	asked := t.ledger.books.now()
	var own, fetches []int
	var batches []store.Request
	waiting := 0
	for i := range t.reqs {
		if t.reqs[i].Batch == 0 {
			own = append(own, i)
			continue
		}
		switch what, size := t.ledger.claim(t, i); what {
		case claimServed:
		case claimFetches:
			fetches, batches = append(fetches, i), append(batches, t.reqs[i])
			batches[len(batches)-1].Cost = size
		case claimWaits:
			waiting++
		case claimDirect:
			own = append(own, i)
		}
	}
	again := t.take(own, fetches, batches)
	t.take(t.await(waiting, again), nil, nil)
	t.retake(asked)
	t.reclaim()
}

func (t *taking) await(waiting int, again []int) []int {
	for range waiting {
		if m := <-t.turns; m.turn == retry {
			again = append(again, m.place)
		}
	}
	return again
}

// reclaim looks for what the store refused in a batch that overtook the request.
// If that ends in an error and nothing was spent, the refusal stands.
func (t *taking) reclaim() {
	var again, waiting, refused []int
	for i := range t.reqs {
		switch st := &t.states[i]; {
		case st.Err != nil || st.Allowed:
		case t.reqs[i].Batch == 0:
			// The call is refused, whatever the others find.
			return
		default:
			refused = append(refused, i)
		}
	}
	if len(refused) == 0 {
		return
	}
	was := slices.Clone(t.states)
	for _, i := range refused {
		switch t.ledger.reclaim(t, i) {
		case claimWaits:
			waiting = append(waiting, i)
		case claimDirect:
			again = append(again, i)
		}
	}
	again = t.await(len(waiting), again)
	for _, i := range waiting {
		if t.states[i].Err != nil {
			t.states[i] = was[i]
		}
	}
	t.takeAgain(again)
}

// takeAgain takes the costs of requests that the store has refused. Where that ends in an error
// and nothing was spent, the refusal stands, and takeAgain reports it.
func (t *taking) takeAgain(places []int) (failed bool) {
	was := slices.Clone(t.states)
	t.take(places, nil, nil)
	for _, i := range places {
		if errors.Is(t.states[i].Err, store.ErrNotExecuted) {
			t.states[i], failed = was[i], true
		}
	}
	return failed
}

// take takes the costs of some requests, and batches for those that fetch, in one
// call. It returns the places of those that fetched in vain.
func (t *taking) take(own, fetches []int, batches []store.Request) (again []int) {
	if len(own)+len(fetches) == 0 {
		return nil
	}
	l := t.ledger
	asked := l.books.now()
	reqs := t.reqs
	var borrowed []loan
	if len(fetches) > 0 || len(own) < len(reqs) || slices.ContainsFunc(reqs, func(r store.Request) bool { return r.Batch != 0 }) {
		reqs = make([]store.Request, 0, len(own)+len(fetches))
		borrowed = make([]loan, len(own))
		for n, i := range own {
			reqs = append(reqs, t.reqs[i])
			borrowed[n] = l.borrow(&reqs[n])
			reqs[n].Cost -= borrowed[n].tokens
		}
		reqs = append(reqs, batches...)
	}
	for n, st := range t.ask(reqs) {
		if refund := l.hearTake(&reqs[n], &st, asked); refund.Cost > 0 {
			l.refundOne(refund)
		}
		if n < len(own) {
			if borrowed != nil {
				l.repay(&reqs[n], borrowed[n], &st)
			}
			t.states[own[n]] = st
			continue
		}
		if i := fetches[n-len(own)]; l.fetched(t, i, &reqs[n], &st) {
			again = append(again, i)
		}
	}
	return again
}

func (t *taking) ask(reqs []store.Request) []store.State {
	now := t.ledger.books.now()
	for i := range reqs {
		if !algorithm.Of(reqs[i].Limit.Algorithm).Lease {
			e := t.ledger.enter(&reqs[i], now)
			e.taking += reqs[i].Cost
			e.page.mu.Unlock()
		}
	}
	if t.moves {
		if err := t.ledger.awaitMoves(reqs); err != nil {
			return slices.Repeat([]store.State{{Err: err}}, len(reqs))
		}
	}
	return store.Answers(t.ctx, t.ledger.store.Take, reqs)
}

// hearTake takes in the answer to a take. If this process has admitted requests that the
// store did not know of, and there is no room beside them, the take is refused, and
// hearTake returns its refund, if it needs one.
func (l *Ledger) hearTake(r *store.Request, st *store.State, asked int64) (refund store.Request) {
	if algorithm.Of(r.Limit.Algorithm).Lease {
		return refund
	}
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	e.taking -= r.Cost
	if st.Err != nil {
		e.silent = true
		return refund
	}
	counted := e.known.Content[confirmedUsed]
	overlaps := e.taking > 0 || e.isSent() || mayLack(asked, max(e.past().took, e.written))
	e.hear(r, st, asked, now)
	if e.reservation != nil {
		e.reservation.heard = now
	}
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		// The answer to an overlapping take may lack what this one spent.
		e.written = now
	} else {
		if overlaps {
			// Operations at the same time are not answered in their order.
			e.known.Content[confirmedUsed] = max(counted, st.Used)
		}
		e.rarely().took = now
	}
	if !st.Allowed || r.Cost == 0 {
		return refund
	}
	own := e.past().own
	e.countOwn(r, now)
	if others, exceeds := e.overtakes(r, st, now); exceeds {
		if e.rare != nil {
			e.rare.own = own
		}
		if !l.offset(e, r.Cost, now) {
			refund = *r
			refund.Receipt = st.Receipt
		}
		st.Reset, st.ResetOtherwise, st.Receipt = st.ResetOtherwise, st.Reset, store.Receipt{}
		// The take counts in what is known, and others counts without it.
		refuseForFlight(st, r, e.known, max(others-st.Used, 0))
		st.Used = max(others, 0)
		st.Remaining = max(st.Limit-st.Used, 0)
	}
	return refund
}

// claim is what a request with a batch has to do.
type claim uint8

const (
	// claimServed: nothing; the reservation has served the request.
	claimServed claim = iota
	// claimFetches: fetch a batch, for itself and others.
	claimFetches
	// claimWaits: wait for the batch in flight.
	claimWaits
	// claimDirect: take its cost from the store.
	claimDirect
	// claimRefused: accept the store's refusal.
	claimRefused
)

// rest is the part of a request that the reservation does not cover. isServed reports
// whether there is none, or a batch in flight is likely to serve it.
func (e *entry) rest(r *store.Request, now int64) (rest store.Request, isServed bool) {
	rest = *r
	if r.Batch == 0 {
		return rest, false
	}
	rest.Cost -= e.tokens(r, now)
	return rest, rest.Cost == 0 || e.reservation != nil && e.reservation.coming > 0
}

// tokens is how much of a request's cost the reservation covers: nothing, unless the
// request fits by its own limit beside what has been spent without the tokens.
func (e *entry) tokens(r *store.Request, now int64) int64 {
	v := e.reservation
	if v == nil || r.Batch == 0 || !v.isOpen(now+e.clock) || r.Cost > r.Capacity() {
		return 0
	}
	if st := e.known.View(r, -v.tokens, now+e.clock); !st.Allowed {
		return 0
	}
	return min(v.tokens, r.Cost)
}

// serve serves a request from the reservation, if that covers all of it.
func (e *entry) serve(r *store.Request, st *store.State, now int64) bool {
	if r.Cost == 0 || e.tokens(r, now) < r.Cost {
		return false
	}
	e.reservation.tokens -= r.Cost
	e.reservation.used = now
	e.showTokens(r, st, now+e.clock)
	return true
}

// claim serves the request at a place from the reservation, or returns what it
// has to do, and the size of the batch if it fetches one.
func (l *Ledger) claim(t *taking, place int) (what claim, size int64) {
	r := &t.reqs[place]
	processes := l.processes(r)
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	if e.reservation == nil {
		e.reservation = new(reservation)
	}
	v := e.reservation
	switch {
	case v.isDue(e, now, l.leastTrust()):
		v.heard = now
		return claimDirect, 0
	case e.serve(r, &t.states[place], now):
		return claimServed, 0
	case v.isOpen(now+e.clock) && v.tokens >= r.Cost:
		// Its own limit refuses it, or a penalty does.
		return claimDirect, 0
	case v.coming > 0:
		if v.wait(t, place) {
			return claimWaits, 0
		}
		return claimDirect, 0
	}
	if v.tokens > 0 && now+e.clock >= v.ends {
		e.page.counts.TokensExpired += v.tokens
		v.waste()
	} else if v.tokens < r.Cost && v.began != 0 {
		v.size, v.began = GrownBatch(r, v.size, processes, now-v.began), 0
	}
	size = BatchSize(r, v.size, processes)
	if r.Cost == 0 || r.Cost > size || v.isShort(r, now+e.clock) {
		return claimDirect, 0
	}
	v.coming, v.claimed = size, r.Cost
	return claimFetches, size
}

// reclaim serves the request at a place, which the store refused, from a batch that was
// fetched since, or returns what the request has to do.
func (l *Ledger) reclaim(t *taking, place int) claim {
	r, st := &t.reqs[place], &t.states[place]
	e := l.find(r)
	if e == nil {
		return claimRefused
	}
	defer e.page.mu.Unlock()
	v, now := e.reservation, l.books.now()
	tokens := e.tokens(r, now)
	switch {
	case e.serve(r, st, now):
		return claimServed
	case v != nil && v.wait(t, place):
		return claimWaits
	case tokens > 0 && tokens+st.Remaining >= r.Cost:
		return claimDirect
	}
	return claimRefused
}

// fetched takes in the outcome of a fetch, and serves the waiters. It reports
// whether the request that fetched has to take its cost from the store.
func (l *Ledger) fetched(t *taking, place int, batch *store.Request, st *store.State) (again bool) {
	var leftover store.Request
	// Deferred first, to run after the page is unlocked.
	defer func() { l.refundOne(leftover) }()
	now := l.books.now()
	e := l.enter(batch, now)
	defer e.page.mu.Unlock()
	v := e.reservation
	waiters := append([]*waiter{{&t.call, place}}, v.waiters...)
	v.coming, v.claimed, v.waiters = 0, 0, nil
	e.page.counts.Fetches++
	switch {
	case st.Err == nil && st.Allowed:
		e.page.counts.TokensFetched += batch.Cost
		leftover = v.add(batch, st, batch.Cost, now)
		e.page.counts.TokensReturned += leftover.Cost
	case st.Err == nil:
		v.shortfall(batch, st)
	}
	for n, w := range waiters {
		r, turn := &w.reqs[w.place], retry
		switch {
		case st.Err != nil:
			w.states[w.place], turn = *st, answered
		case st.Allowed && e.serve(r, &w.states[w.place], now):
			turn = answered
		}
		if n > 0 {
			w.send(turn)
		} else {
			again = turn == retry
		}
	}
	if v.isStale {
		// The batch may predate the reset.
		e.page.counts.TokensExpired += v.abandon()
	}
	if v.tokens > 0 {
		l.books.noteReserved(e)
	}
	return again
}

// showTokens sets the state of a request that the reservation served.
func (e *entry) showTokens(r *store.Request, st *store.State, storeNow int64) {
	asked := *r
	asked.Cost = 0
	*st = e.known.View(&asked, 0, storeNow)
	st.Allowed, st.RetryAfter = true, 0
	st.Used = max(st.Used-e.reservation.tokens, r.Cost)
	st.Remaining = max(st.Limit-st.Used, 0)
	st.Receipt = store.Receipt{Period: e.reservation.period}
}

// hideTokens makes the store's answer show what was used, without the tokens that are
// left.
func (e *entry) hideTokens(r *store.Request, st *store.State, now int64) {
	if v := e.reservation; v == nil || r.Batch == 0 || st.Err != nil || !v.isOpen(now+e.clock) {
		return
	}
	st.Used = max(st.Used-e.reservation.tokens, 0)
	if st.Penalty == 0 {
		st.Remaining = max(st.Limit-st.Used, 0)
	}
}

// loan is the part of a request's cost that comes from a reservation, while the
// store decides about the rest.
type loan struct {
	entry          *entry
	tokens, period int64
	resets         int64
}

// borrow takes as much of a request's cost out of the reservation as it has.
func (l *Ledger) borrow(r *store.Request) loan {
	if r.Batch == 0 {
		return loan{}
	}
	e := l.find(r)
	if e == nil {
		return loan{}
	}
	defer e.page.mu.Unlock()
	tokens := e.tokens(r, l.books.now())
	if tokens == 0 {
		return loan{}
	}
	v := e.reservation
	v.tokens -= tokens
	v.lent += tokens
	return loan{e, tokens, v.period, v.resets}
}

// repay ends a loan, if there is one, once the store has answered about the rest, and
// makes the answer show what was used without the tokens that are left.
func (l *Ledger) repay(r *store.Request, b loan, st *store.State) {
	if b.tokens == 0 {
		if e := l.find(r); e != nil {
			e.hideTokens(r, st, l.books.now())
			e.page.mu.Unlock()
		}
		return
	}
	var refund store.Request
	// Deferred first, to run after the page is unlocked.
	defer func() { l.refundOne(refund) }()
	e, now := b.entry, l.books.now()
	e.page.mu.Lock()
	defer e.page.mu.Unlock()
	v := e.reservation
	v.lent -= b.tokens
	switch {
	case st.Err != nil && r.Cost == 0:
		// The store was only to be heard: the tokens cover the whole cost.
		whole := *r
		whole.Cost = b.tokens
		e.showTokens(&whole, st, now+e.clock)
		st.Receipt.Period = b.period
		return
	case st.Err == nil && st.Allowed:
		if st.Receipt.Period != b.period {
			// The cost is of two windows, and cannot be refunded.
			st.Receipt = store.Receipt{}
		}
	case v.resets != b.resets:
		// The tokens are no part of the bucket since its reset.
		e.page.counts.TokensExpired += b.tokens
	case v.period == b.period:
		v.tokens += b.tokens
		l.books.noteReserved(e)
	default:
		// The store knows what is left of the tokens' window.
		e.page.counts.TokensReturned += b.tokens
		refund = *r
		refund.Cost, refund.Receipt = b.tokens, store.Receipt{Period: b.period}
	}
	e.hideTokens(r, st, now)
}

// refundOne refunds what a request costs, if anything. No page is locked.
func (l *Ledger) refundOne(r store.Request) {
	if r.Cost > 0 {
		l.refund([]store.Request{r})
	}
}

// restore puts refunds back into their reservations, and returns the others.
func (l *Ledger) restore(reqs []store.Request) (others []store.Request) {
	return slices.DeleteFunc(reqs, func(r store.Request) bool { return l.restoreOne(&r) })
}

func (l *Ledger) restoreOne(r *store.Request) bool {
	if r.Batch == 0 || r.Cost == 0 {
		return false
	}
	e := l.find(r)
	if e == nil {
		return false
	}
	defer e.page.mu.Unlock()
	v, now := e.reservation, l.books.now()
	if v == nil || v.period == 0 || v.period != r.Receipt.Period || now+e.clock >= v.ends {
		return false
	}
	v.tokens += r.Cost
	v.used = now
	l.books.noteReserved(e)
	return true
}
