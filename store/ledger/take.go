package ledger

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger/core"
)

// maxRetakes is how often a refused take is repeated because of what came back while it was
// asked. All takes together are repeated for no more than has come back.
const maxRetakes = 4

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

// IsFull reports whether the bucket of a request to take is known to refuse it, however old
// that knowledge is.
func (l *Ledger) IsFull(r *store.Request) bool {
	e := l.find(r)
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
	// moves is set if a charge is in flight to another owner of some bucket.
	moves bool
}

// refuseKnown sets the states of requests that are refused without a call, and
// reports whether there are any.
func (t *taking) refuseKnown() (refused bool) {
	m := t.ledger.moment()
	var asking []*entry
	for i := range t.reqs {
		r := &t.reqs[i]
		e := t.ledger.find(r)
		if e == nil {
			continue
		}
		t.moves = t.moves || t.ledger.moves(e, r)
		do, asks := e.AskTake(r, &t.states[i], &m)
		refused = refused || do == core.Nothing
		if asks {
			asking = append(asking, e)
		}
		e.release(&m)
	}
	if refused {
		for _, e := range asking {
			e.stripe.mu.Lock()
			e.AskNot()
			e.stripe.mu.Unlock()
		}
	}
	return refused
}

// run takes what batches have, waits for batches in flight, and takes the
// rest from the store in one call.
func (t *taking) run() {
	asked := t.ledger.registry.now()
	var own, fetches []int
	var batches []store.Request
	waiting := 0
	for i := range t.reqs {
		if t.reqs[i].Batch == 0 {
			own = append(own, i)
			continue
		}
		switch what, size := t.claim(i); what {
		case core.Fetch:
			fetches, batches = append(fetches, i), append(batches, t.reqs[i])
			batches[len(batches)-1].Cost = size
		case core.Wait:
			waiting++
		case core.Take:
			own = append(own, i)
		}
	}
	again := t.take(own, fetches, batches)
	t.take(t.await(waiting, again), nil, nil)
	t.retake(asked)
	t.reclaim()
}

// claim serves a request from its batch, or says what it has to do.
func (t *taking) claim(i int) (do core.Do, size int64) {
	m := t.ledger.moment()
	m.Processes = t.ledger.processes(&t.reqs[i])
	e := t.ledger.enter(&t.reqs[i], &m)
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
// call. It returns the places of those that fetched in vain.
func (t *taking) take(own, fetches []int, batches []store.Request) (again []int) {
	if len(own)+len(fetches) == 0 {
		return nil
	}
	asked, reqs := t.ledger.registry.now(), t.reqs
	var loans []core.Loan
	if len(fetches) > 0 || len(own) < len(reqs) || slices.ContainsFunc(reqs, func(r store.Request) bool { return r.Batch != 0 }) {
		reqs = make([]store.Request, 0, len(own)+len(fetches))
		loans = make([]core.Loan, len(own))
		for n, i := range own {
			reqs = append(reqs, t.reqs[i])
			loans[n] = t.ledger.borrow(&reqs[n])
		}
		reqs = append(reqs, batches...)
	}
	for n, st := range t.ask(reqs) {
		t.ledger.hearTake(&reqs[n], &st, asked)
		if n < len(own) {
			if loans != nil {
				t.ledger.repay(&reqs[n], loans[n], &st)
			}
			t.states[own[n]] = st
		} else if i := fetches[n-len(own)]; t.fetched(i, &reqs[n], &st) == core.Take {
			again = append(again, i)
		}
	}
	return again
}

// ask takes from the store.
func (t *taking) ask(reqs []store.Request) []store.State {
	m := t.ledger.moment()
	for i := range reqs {
		if isLease(&reqs[i]) {
			continue
		}
		e := t.ledger.enter(&reqs[i], &m)
		e.TakeSent(&reqs[i])
		e.release(&m)
	}
	if t.moves {
		if err := t.ledger.awaitMoves(reqs); err != nil {
			return slices.Repeat([]store.State{{Err: err}}, len(reqs))
		}
	}
	return store.Answers(t.ctx, t.ledger.store.Take, reqs)
}

// isLease reports whether a request takes a lease, of which the ledger knows nothing: it ends
// by itself.
func isLease(r *store.Request) bool { return algorithm.Of(r.Limit.Algorithm).Lease }

func (l *Ledger) hearTake(r *store.Request, st *store.State, asked int64) {
	if isLease(r) {
		return
	}
	m := l.moment()
	e := l.enter(r, &m)
	refund := e.TakeAnswered(r, st, asked, &m)
	e.release(&m)
	l.refundOne(refund)
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
	return do
}

// retake repeats takes that the store refused while something was on its way back to their
// buckets, once that has arrived, for up to the view's timeout. So a client that sends one
// request after the other is not refused because of what its last one gives back.
func (t *taking) retake(asked int64) {
	var until time.Time
	for retakes := 0; retakes < maxRetakes; {
		refused, claims := t.claimReturns(asked)
		if len(refused) == 0 {
			return
		}
		if until.IsZero() {
			until = t.ledger.registry.clock().Add(t.ledger.opts.Timeout)
		}
		waits := slices.ContainsFunc(claims, func(c claim) bool { return c.Come != nil })
		if !waits {
			retakes++
		} else if !t.ledger.registry.clock().Before(until) {
			retakes = maxRetakes
		}
		for _, c := range claims {
			t.awaitReturn(c, until)
		}
		hasLeft := t.ctx.Err() != nil
		asked = t.ledger.registry.now()
		if hasLeft || t.takeAgain(refused) {
			t.withdraw(claims)
			return
		}
	}
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

// claim is what a refused take claims of what comes back to its bucket.
type claim struct {
	*core.Claim
	entry     *entry
	clientKey string
}

// claimReturns returns the requests that the store refused, unless there is one to whose bucket
// nothing comes back, and what they claim of it.
func (t *taking) claimReturns(asked int64) (refused []int, claims []claim) {
	for i := range t.reqs {
		st := &t.states[i]
		if st.Err != nil || st.Allowed {
			continue
		}
		c, ok := t.ledger.claimReturn(&t.reqs[i], st, asked)
		if !ok {
			t.withdraw(claims)
			return nil, nil
		}
		refused, claims = append(refused, i), append(claims, c)
	}
	return refused, claims
}

func (l *Ledger) claimReturn(r *store.Request, st *store.State, asked int64) (c claim, ok bool) {
	e := l.find(r)
	if e == nil {
		return claim{}, false
	}
	defer e.stripe.mu.Unlock()
	c = claim{e.ClaimReturn(r, st, asked), e, r.ClientKey}
	return c, c.Claim != nil
}

func (t *taking) withdraw(claims []claim) {
	for _, c := range claims {
		t.ledger.withdraw(c)
	}
}

func (l *Ledger) withdraw(c claim) {
	c.entry.acquire()
	m := l.moment()
	c.entry.Withdraw(c.Claim, &m)
	c.entry.release(&m)
}

// awaitReturn waits until what c needs has arrived, for as long as there is time and the
// client stays.
func (t *taking) awaitReturn(c claim, until time.Time) {
	if c.Come == nil {
		return
	}
	t.ledger.store.Hurry(c.clientKey)
	timer := time.NewTimer(until.Sub(t.ledger.registry.clock()))
	defer timer.Stop()
	select {
	case <-c.Come:
	case <-timer.C:
		t.ledger.withdraw(c)
	case <-t.ctx.Done():
		t.ledger.withdraw(c)
	}
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
		switch t.reclaimOne(i) {
		case core.Wait:
			waiting = append(waiting, i)
		case core.Take:
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

func (t *taking) reclaimOne(i int) core.Do {
	e := t.ledger.find(&t.reqs[i])
	if e == nil {
		return core.Nothing
	}
	m := t.ledger.moment()
	defer e.release(&m)
	do := e.Reclaim(t.waiter(i), &m)
	if do == core.Wait {
		t.expectTurn()
	}
	return do
}
