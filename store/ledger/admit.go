package ledger

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Admit sets the states of requests as Check tells them, but the cost of what is
// allowed is held in flight: it counts against what comes later, until
// [Ledger.Settle] ends that. Where a bucket is known to refuse its request, the
// others are not asked about, and their states stay as they were, which is to be
// zero.
func (l *Ledger) Admit(ctx context.Context, reqs []store.Request, states []store.State) {
	// A single one is looked at when it joins a question.
	if len(reqs) > 1 && l.RefuseKnown(reqs, states) {
		return
	}
	a := admissions.Get().(*admission)
	a.ledger, a.ctx, a.reqs, a.states = l, ctx, reqs, states
	a.run()
	*a = admission{}
	admissions.Put(a)
}

// Hold holds the costs of requests in flight that were admitted without the store,
// until [Ledger.Settle] ends that.
func (l *Ledger) Hold(reqs []store.Request) {
	now := l.books.now()
	for i := range reqs {
		e := l.enter(&reqs[i], now)
		e.hold(reqs[i].Cost)
		e.page.mu.Unlock()
	}
}

// admissions are given back once nobody has anything to tell them.
var admissions = sync.Pool{New: func() any { return new(admission) }}

// RefuseKnown sets the states of requests that are refused without a call, and
// tells whether there are any.
func (l *Ledger) RefuseKnown(reqs []store.Request, states []store.State) (refused bool) {
	now := l.books.now()
	for i := range reqs {
		if e := l.find(&reqs[i]); e != nil {
			rest, isServed := e.rest(&reqs[i], now)
			refused = !isServed && l.refusesUnasked(e, &rest, &states[i], now) || refused
			e.page.mu.Unlock()
		}
	}
	return refused
}

// refusesUnasked sets the state of a request that is refused without a call.
func (l *Ledger) refusesUnasked(e *entry, r *store.Request, st *store.State, now int64) bool {
	if !e.trusts(now, l.trust) || !e.refuses(r, st, now) {
		return false
	}
	e.page.counts.refusals++
	return true
}

// refuses sets the state of a request that is refused by what is known.
func (e *entry) refuses(r *store.Request, st *store.State, now int64) bool {
	if e.silent || e.doubted {
		return false
	}
	storeNow := now + e.clock
	if !algorithm.Copies(r.Limit.Algorithm) {
		return e.refusesAsBefore(r, st, storeNow)
	}
	// What fits is not let through: the store is to be asked.
	var refusal store.State
	if e.judge(r, &refusal, storeNow) != full {
		return false
	}
	*st = refusal
	return true
}

// admission is one call of Admit. Each of reqs has its place in states.
type admission struct {
	ledger *Ledger
	ctx    context.Context
	reqs   []store.Request
	states []store.State
	// asking are the requests whose questions are the admission's.
	asking []asking
	// began is when it had to wait for a charge first.
	began time.Time
	turns chan message

	askingRoom [2]asking
}

// asking is a request about whose bucket the store is to be asked.
type asking struct {
	place int
	entry *entry
	// primary is set if the primary is to be asked, joined if others wait for
	// the answer.
	primary, joined bool
}

// message tells an admission about the request at a place.
type message struct {
	turn turn
	asking
}

// run asks about all requests: those about whose buckets nobody is asking in
// one call, and the others by whoever asks next.
func (a *admission) run() {
	pending := places(len(a.reqs))
	for len(pending) > 0 {
		a.asking = a.askingRoom[:0]
		joined := 0
		now := a.ledger.books.now()
		for _, i := range pending {
			if a.ledger.join(a, i, now) {
				joined++
			}
		}
		unclear := a.ask(a.asking, now)
		// A question that is given to a must not wait for another's answer.
		for range joined {
			switch m := <-a.turns; m.turn {
			case turnLead:
				unclear = append(unclear, a.ask([]asking{m.asking}, a.ledger.books.now())...)
			case turnAgain:
				unclear = append(unclear, m.place)
			case turnAnswered:
			}
		}
		pending = a.awaitCharges(unclear)
	}
}

// first are the places of the few requests that most calls have.
var first = [...]int{0, 1, 2, 3, 4, 5, 6, 7}

// places are 0, 1, 2 ... n-1.
func places(n int) []int {
	if n <= len(first) {
		return first[:n:n]
	}
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// awaitCharges waits until the charges have arrived that decide, and returns
// what is to be asked again.
func (a *admission) awaitCharges(unclear []int) (pending []int) {
	if len(unclear) > 0 && a.began.IsZero() {
		a.began = a.ledger.books.clock()
	}
	for _, i := range unclear {
		left := a.ledger.opts.Patience - a.ledger.books.clock().Sub(a.began)
		if left > 0 && a.ledger.awaitCharge(&a.reqs[i], left) {
			pending = append(pending, i)
		} else {
			a.ledger.refuseUnclear(&a.reqs[i], &a.states[i])
		}
	}
	return pending
}

// ask asks the store, and sets the states of the requests, and those of who
// joined. It returns the places of which nothing is clear yet.
func (a *admission) ask(what []asking, asked int64) (unclear []int) {
	if len(what) == 0 {
		return nil
	}
	var primary []asking
	for n, answer := range a.answers(what) {
		q := what[n]
		switch a.ledger.answer(&q, &a.reqs[q.place], &a.states[q.place], answer, asked) {
		case needsPrimary:
			q.primary, q.joined = true, true
			primary = append(primary, q)
		case needsTime:
			unclear = append(unclear, q.place)
		case done:
		}
	}
	return append(unclear, a.ask(primary, a.ledger.books.now())...)
}

// answers asks the store.
func (a *admission) answers(what []asking) []store.State {
	reqs, ctx, own := a.reqs, a.ctx, false
	for n, q := range what {
		if q.joined {
			// Others wait for the answer.
			ctx = context.WithoutCancel(a.ctx)
		}
		// What is unclear comes in another order.
		if !own && (q.primary || len(what) < len(reqs) || q.place != n) {
			reqs, own = make([]store.Request, len(what)), true
			for n, q := range what {
				reqs[n] = a.reqs[q.place]
			}
		}
		if q.primary {
			reqs[n].Primary = true
		}
	}
	return a.ledger.store.Check(ctx, reqs)
}
