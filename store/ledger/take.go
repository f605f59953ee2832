package ledger

import (
	"context"
	"errors"
	"slices"

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
		if m := <-t.turns; m.turn == turnAgain {
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
