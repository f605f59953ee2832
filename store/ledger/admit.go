package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Admit is Check, but the cost of what is allowed is held in flight: it counts
// against what comes later, until [Ledger.Settle] ends that. Where a bucket is
// known to refuse its request, the others are not asked about, and their states
// are zero.
func (l *Ledger) Admit(ctx context.Context, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	if len(reqs) == 0 || l.refuseKnown(reqs, states) {
		return states
	}
	a := admission{ledger: l, ctx: ctx, reqs: reqs, states: states, began: l.books.clock()}
	a.run()
	return states
}

// refuseKnown sets the states of requests that are refused without a call, and
// tells whether there are any.
func (l *Ledger) refuseKnown(reqs []store.Request, states []store.State) (refused bool) {
	now := l.books.now()
	for i := range reqs {
		p, e := l.find(&reqs[i])
		if e == nil {
			continue
		}
		if e.trusts(now, l.trust) && l.refuses(e, &reqs[i], &states[i], now) {
			refused = true
		}
		p.mu.Unlock()
	}
	return refused
}

// refuses sets the state of a request that is refused by what is known.
func (l *Ledger) refuses(e *entry, r *store.Request, st *store.State, now int64) bool {
	if e.silent || e.doubted {
		return false
	}
	storeNow := now + e.clock
	refusal, isFull := store.State{}, false
	if algorithm.Copies(r.Limit.Algorithm) {
		// What fits is not let through: the store is to be asked.
		isFull = e.judge(r, &refusal, storeNow) == full
	} else {
		isFull = e.refusesAsBefore(r, &refusal, storeNow)
	}
	if !isFull {
		return false
	}
	*st = refusal
	return true
}

// admission is one call of Admit.
type admission struct {
	ledger *Ledger
	ctx    context.Context
	reqs   []store.Request
	states []store.State
	began  time.Time
	turns  chan message
}

// message tells an admission about the request at a place.
type message struct {
	place int
	turn  turn
}

// run asks about all requests: those about whose buckets nobody is asking in
// one call, and the others by whoever asks next.
func (a *admission) run() {
	pending := places(len(a.reqs))
	for len(pending) > 0 {
		lead, joined := a.join(pending)
		unclear := a.ask(lead)
		// A question that is given to a must not wait for another's answer.
		for range joined {
			switch m := <-a.turns; m.turn {
			case turnLead:
				unclear = append(unclear, a.ask([]int{m.place})...)
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

// join makes the requests at these places wait for the next question, where
// there is one, and returns the others, and how many wait.
func (a *admission) join(places []int) (lead []int, joined int) {
	for n, i := range places {
		if !a.ledger.join(a, i) {
			if joined > 0 {
				lead = append(lead, i)
			}
			continue
		}
		if joined == 0 {
			lead = slices.Clone(places[:n])
		}
		joined++
	}
	if joined == 0 {
		return places, 0
	}
	return lead, joined
}

// awaitCharges waits until the charges have arrived that decide, and returns
// what is to be asked again.
func (a *admission) awaitCharges(unclear []int) (pending []int) {
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

// ask asks the store about the requests at these places, whose questions are
// a's, and sets their states, and those of who joined. It returns the places
// of which nothing is clear yet.
func (a *admission) ask(places []int) (unclear []int) {
	if len(places) == 0 {
		return nil
	}
	var primary []int
	asked := a.ledger.books.now()
	for n, answer := range a.answers(places, false) {
		i := places[n]
		switch a.ledger.answer(&a.reqs[i], &a.states[i], answer, asked) {
		case needsPrimary:
			primary = append(primary, i)
		case needsTime:
			unclear = append(unclear, i)
		case done:
		}
	}
	if len(primary) == 0 {
		return unclear
	}
	asked = a.ledger.books.now()
	for n, answer := range a.answers(primary, true) {
		i := primary[n]
		if a.ledger.answer(&a.reqs[i], &a.states[i], answer, asked) == needsTime {
			unclear = append(unclear, i)
		}
	}
	return unclear
}

// answers asks the store, the primary if that is wanted or has to be.
func (a *admission) answers(places []int, primary bool) []store.State {
	reqs, ctx, own := a.reqs, a.ctx, false
	if len(places) < len(reqs) {
		reqs, own = a.some(places), true
	}
	for n, i := range places {
		toPrimary, joined := a.ledger.beginQuestion(&a.reqs[i])
		if joined {
			// Others wait for the answer.
			ctx = context.WithoutCancel(a.ctx)
		}
		if !toPrimary && !primary {
			continue
		}
		if !own {
			reqs, own = a.some(places), true
		}
		reqs[n].Primary = true
	}
	return a.ledger.buckets.Check(ctx, reqs)
}

func (a *admission) some(places []int) []store.Request {
	reqs := make([]store.Request, len(places))
	for n, i := range places {
		reqs[n] = a.reqs[i]
	}
	return reqs
}
