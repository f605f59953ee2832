package ledger

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Take implements [store.Store]. Where a bucket is known to refuse its request,
// nothing is taken from the others, and their states are zero. Requests with a
// batch are served from what was taken in advance.
func (l *Ledger) Take(ctx context.Context, reqs []store.Request) []store.State {
	t := taking{ledger: l, ctx: ctx, reqs: reqs, states: make([]store.State, len(reqs))}
	if !t.refuseKnown() {
		t.run()
	}
	return t.states
}

// taking is one call of Take.
type taking struct {
	ledger *Ledger
	ctx    context.Context
	reqs   []store.Request
	states []store.State
	turns  chan message
}

// refuseKnown sets the states of requests that are refused without a call, and
// tells whether there are any.
func (t *taking) refuseKnown() (refused bool) {
	now := t.ledger.books.now()
	var let []letThrough
	for i := range t.reqs {
		r := &t.reqs[i]
		e := t.ledger.find(r)
		if e == nil {
			continue
		}
		if rest, isServed := e.rest(r, now); !isServed {
			was := e.asked
			if t.ledger.refusesTake(e, &rest, &t.states[i], now) {
				refused = true
			} else if e.asked != was {
				let = append(let, letThrough{e, was})
			}
		}
		e.page.mu.Unlock()
	}
	for _, l := range let {
		if refused {
			// Nobody asks, so somebody else may.
			l.entry.page.mu.Lock()
			l.entry.asked = l.was
			l.entry.page.mu.Unlock()
		}
	}
	return refused
}

// letThrough is an entry about which a request may ask, and when one did last.
type letThrough struct {
	entry *entry
	was   int64
}

// refusesTake tells whether a request is refused without a call. Once trust has
// run out one request is let through to ask, and the others are refused as
// before until it has an answer.
func (l *Ledger) refusesTake(e *entry, r *store.Request, st *store.State, now int64) bool {
	var refusal store.State
	if !e.refuses(r, &refusal, now) {
		return false
	}
	if !e.trusts(now, l.trust) && (e.asked == 0 || now-e.asked > l.trust) {
		e.asked = now
		return false
	}
	*st = refusal
	e.page.counts.refusals++
	return true
}

// run takes: what there is from reservations, what others fetch from what they
// fetch, and the rest from the store in one call.
func (t *taking) run() {
	var own, fetches []int
	waiting := 0
	for i := range t.reqs {
		if t.reqs[i].Batch == 0 {
			own = append(own, i)
			continue
		}
		switch t.ledger.claim(t, i) {
		case claimServed:
		case claimFetches:
			fetches = append(fetches, i)
		case claimWaits:
			waiting++
		case claimDirect:
			own = append(own, i)
		}
	}
	again := t.take(own, fetches)
	t.take(t.await(waiting, again), nil)
	t.reclaim()
}

// await waits for batches, and adds the places of those to which they were of
// no use.
func (t *taking) await(waiting int, again []int) []int {
	for range waiting {
		if m := <-t.turns; m.turn == retry {
			again = append(again, m.place)
		}
	}
	return again
}

// reclaim looks for what the store refused, because a batch overtook it on its
// way there, in that batch. Where that ends in an error and nothing was spent, the
// refusal stands.
func (t *taking) reclaim() {
	var again, waiting, refused []int
	for i := range t.reqs {
		switch st := &t.states[i]; {
		case st.Err != nil || st.Allowed:
		case t.reqs[i].Batch == 0:
			// Whatever the others find, it would be given back.
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
	t.take(again, nil)
	for _, i := range again {
		if errors.Is(t.states[i].Err, store.ErrNotExecuted) {
			t.states[i] = was[i]
		}
	}
}

// take takes what some requests cost, and batches for those that fetch, in one
// call. It returns the places of those that fetched in vain.
func (t *taking) take(own, fetches []int) (again []int) {
	if len(own)+len(fetches) == 0 {
		return nil
	}
	l := t.ledger
	asked := l.books.now()
	reqs := t.reqs
	var borrowed []loan
	if len(fetches) > 0 || len(own) < len(reqs) || t.anyBatch() {
		reqs = make([]store.Request, 0, len(own)+len(fetches))
		borrowed = make([]loan, len(own))
		for n, i := range own {
			reqs = append(reqs, t.reqs[i])
			borrowed[n] = l.borrow(&reqs[n])
			reqs[n].Cost -= borrowed[n].tokens
		}
		for _, i := range fetches {
			reqs = append(reqs, l.batch(&t.reqs[i]))
		}
	}
	for n, st := range l.store.Take(t.ctx, reqs) {
		l.hearTake(&reqs[n], &st, asked)
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

func (t *taking) anyBatch() bool {
	for i := range t.reqs {
		if t.reqs[i].Batch != 0 {
			return true
		}
	}
	return false
}

// hearTake remembers what a take was told, of buckets that are full or known
// already.
func (l *Ledger) hearTake(r *store.Request, st *store.State, asked int64) {
	var e *entry
	now := l.books.now()
	switch {
	case r.Limit.Algorithm == store.Concurrency:
		return
	case st.Err == nil && !st.Allowed:
		e = l.enter(r, now)
	default:
		if e = l.find(r); e == nil {
			return
		}
	}
	defer e.page.mu.Unlock()
	if st.Err != nil {
		e.silent = true
		return
	}
	e.hear(r, st, asked, now)
	if algorithm.Copies(r.Limit.Algorithm) {
		// Takes overlap: one that was asked for before this answer may lack what
		// this one spent.
		e.confirmed = now
	}
}

// outcome is what becomes of a request with a batch.
type outcome uint8

const (
	// claimServed: from what was taken in advance.
	claimServed outcome = iota
	// claimFetches: the request fetches a batch, for itself and others.
	claimFetches
	// claimWaits: for the batch that is being fetched.
	claimWaits
	// claimDirect: the request takes what it costs by itself.
	claimDirect
	// claimRefused: there is nothing for the request here.
	claimRefused
)

// tokens is what the reservation can serve of a request.
func (e *entry) tokens(r *store.Request, now int64) int64 {
	if v := e.reservation; v != nil && r.Batch != 0 && now+e.clock < v.ends {
		return min(v.tokens, r.Cost)
	}
	return 0
}

// isFetching tells whether a batch is on its way.
func (e *entry) isFetching() bool { return e.reservation != nil && e.reservation.coming > 0 }

// rest is what the store has to give of a request, beside what is reserved; it
// need not give anything where the request is served here, or is likely to be.
func (e *entry) rest(r *store.Request, now int64) (rest store.Request, isServed bool) {
	rest = *r
	if r.Batch == 0 {
		return rest, false
	}
	rest.Cost -= e.tokens(r, now)
	return rest, e.isFetching() || rest.Cost == 0
}

// loan is what was taken out of a reservation for a request of which the store
// is to give the rest.
type loan struct {
	entry          *entry
	tokens, period int64
	resets         int64
}

// borrow takes as much of a request's cost out of the reservation as there is.
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

// repay ends a loan, once the store has answered about the rest.
func (l *Ledger) repay(r *store.Request, b loan, st *store.State) {
	if b.tokens > 0 {
		l.refund(l.endLoan(r, b, st))
	}
}

// endLoan is repay, but returns the refund that is to be made.
func (l *Ledger) endLoan(r *store.Request, b loan, st *store.State) (refunds []store.Request) {
	b.entry.page.mu.Lock()
	defer b.entry.page.mu.Unlock()
	v := b.entry.reservation
	v.lent -= b.tokens
	switch {
	case st.Err == nil && st.Allowed:
		if st.Receipt.Period != b.period {
			// Parts of it are of two windows: it cannot be given back.
			st.Receipt = store.Receipt{}
		}
	case v.resets != b.resets:
		// The bucket was reset: they are no part of the new one.
		b.entry.page.counts.expired += b.tokens
	case v.period == b.period:
		v.tokens += b.tokens
		l.books.noteReserved(b.entry)
	default:
		// The window is over, or soon will be; the store knows what is left of it.
		b.entry.page.counts.returned += b.tokens
		refund := *r
		refund.Cost, refund.Receipt = b.tokens, store.Receipt{Period: b.period}
		refunds = append(refunds, refund)
	}
	return refunds
}

// claim serves the request at a place of t from the reservation, or tells what
// it has to do.
func (l *Ledger) claim(t *taking, place int) outcome {
	r := &t.reqs[place]
	processes := l.processes(r)
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	if e.reservation == nil {
		e.reservation = new(reservation)
	}
	v := e.reservation
	if r.Cost > 0 && v.use(r.Cost, now+e.clock, now) {
		e.showTokens(r, &t.states[place], now+e.clock)
		return claimServed
	}
	if v.coming > 0 {
		if v.wait(t, place) {
			return claimWaits
		}
		return claimDirect
	}
	if v.tokens > 0 && now+e.clock >= v.ends {
		e.page.counts.expired += v.tokens
		v.waste()
	} else if v.tokens < r.Cost && v.began != 0 {
		v.adapt(r, processes, now)
		v.began = 0
	}
	size := v.ration(r, processes)
	if r.Cost == 0 || r.Cost > size || now+e.clock < v.short {
		return claimDirect
	}
	v.coming, v.claimed = size, r.Cost
	return claimFetches
}

// wait lets the request at a place of t have a part of the batch that is being
// fetched, if there is one for it: whoever waits is sure of his part.
func (v *reservation) wait(t *taking, place int) bool {
	cost := t.reqs[place].Cost
	if cost == 0 || v.claimed+cost > v.coming {
		return false
	}
	if t.turns == nil {
		t.turns = make(chan message, len(t.reqs))
	}
	v.claimed += cost
	v.claims = append(v.claims, &claim{t, place})
	return true
}

// reclaim serves the request at a place of t, which the store has refused, from
// what was fetched meanwhile, or tells what it has to do.
func (l *Ledger) reclaim(t *taking, place int) outcome {
	r, st := &t.reqs[place], &t.states[place]
	e := l.find(r)
	if e == nil {
		return claimRefused
	}
	defer e.page.mu.Unlock()
	v, now := e.reservation, l.books.now()
	tokens := e.tokens(r, now)
	switch {
	case tokens > 0 && v.use(r.Cost, now+e.clock, now):
		e.showTokens(r, st, now+e.clock)
		return claimServed
	case v != nil && v.wait(t, place):
		return claimWaits
	case tokens > 0 && tokens+st.Remaining >= r.Cost:
		return claimDirect
	}
	return claimRefused
}

// batch is the request that fetches.
func (l *Ledger) batch(r *store.Request) store.Request {
	e := l.find(r)
	defer e.page.mu.Unlock()
	fetch := *r
	fetch.Cost = e.reservation.coming
	return fetch
}

// fetched takes in what became of a batch, and serves those that wait for it.
// It tells whether the request that fetched has to take by itself.
func (l *Ledger) fetched(t *taking, place int, batch *store.Request, st *store.State) (again bool) {
	again, refunds := l.share(t, place, batch, st)
	l.refund(refunds)
	return again
}

// share is fetched, but returns the refund that is to be made.
func (l *Ledger) share(t *taking, place int, batch *store.Request, st *store.State) (again bool, refunds []store.Request) {
	now := l.books.now()
	e := l.enter(batch, now)
	defer e.page.mu.Unlock()
	v := e.reservation
	claims := append([]*claim{{t, place}}, v.claims...)
	v.coming, v.claimed, v.claims = 0, 0, nil
	e.page.counts.fetches++
	switch {
	case st.Err == nil && st.Allowed:
		e.page.counts.fetched += batch.Cost
		if leftover := v.add(batch, st, batch.Cost, now); leftover.Cost > 0 {
			e.page.counts.returned += leftover.Cost
			refunds = append(refunds, leftover)
		}
	case st.Err == nil:
		v.shortfall(batch, st)
	}
	for n, c := range claims {
		r, turn := &c.reqs[c.place], retry
		switch {
		case st.Err != nil:
			c.states[c.place], turn = *st, answered
		case st.Allowed && v.use(r.Cost, st.Now, now):
			e.showTokens(r, &c.states[c.place], st.Now)
			turn = answered
		}
		if n > 0 {
			c.turns <- message{turn, asking{place: c.place}}
		} else {
			again = turn == retry
		}
	}
	if v.isStale {
		// It may be of what was there before the reset.
		e.page.counts.expired += v.abandon()
	}
	if v.tokens > 0 {
		l.books.noteReserved(e)
	}
	return again, refunds
}

// showTokens sets the state of a request that was served from the reservation.
func (e *entry) showTokens(r *store.Request, st *store.State, storeNow int64) {
	asked := *r
	asked.Cost = 0
	*st = e.known.View(&asked, storeNow)
	st.Allowed, st.RetryAfter = true, 0
	st.Used = max(st.Used-e.reservation.tokens, r.Cost)
	st.Remaining = max(st.Limit-st.Used, 0)
	st.Receipt = store.Receipt{Period: e.reservation.period}
}

// restore puts back what was taken from reservations, and returns the other
// refunds.
func (l *Ledger) restore(reqs []store.Request) (others []store.Request) {
	kept := 0
	for i := range reqs {
		if !l.restoreOne(&reqs[i]) {
			reqs[kept] = reqs[i]
			kept++
		}
	}
	return reqs[:kept]
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

// noteReserved sees to it that the entry's tokens are given back when they are
// not used. Its page is locked.
func (b *Books) noteReserved(e *entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.reserved) == 0 {
		go b.reap()
	}
	b.reserved[e] = true
}

// reapPause is how often idle batches are looked for.
const reapPause = 250 * time.Millisecond

// reap gives back what is not used, until nothing is reserved.
func (b *Books) reap() {
	for {
		time.Sleep(reapPause)
		if b.giveBack(idleBatch) {
			return
		}
	}
}

// giveBack gives back what was not used for so long, and what became too much
// because there are more processes now. It tells whether nothing is left.
func (b *Books) giveBack(idle int64) bool {
	b.mu.Lock()
	entries := make([]*entry, 0, len(b.reserved))
	for e := range b.reserved {
		entries = append(entries, e)
	}
	b.mu.Unlock()
	l, now := b.current(), b.now()
	var refunds []store.Request
	for _, e := range entries {
		e.page.mu.Lock()
		v := e.reservation
		switch refund := v.surplus(l, idle, now); {
		case refund.Cost == 0:
		case l != nil && now+e.clock < v.ends:
			e.page.counts.returned += refund.Cost
			refunds = append(refunds, refund)
		default:
			e.page.counts.expired += refund.Cost
		}
		if v.tokens == 0 {
			b.mu.Lock()
			delete(b.reserved, e)
			b.mu.Unlock()
		}
		e.page.mu.Unlock()
	}
	l.refund(refunds)
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.reserved) == 0
}
