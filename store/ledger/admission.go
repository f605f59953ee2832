package ledger

import (
	"context"
	"errors"
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
			refused = !isServed && l.refuseLocally(e, &rest, &states[i], now) || refused
			e.page.mu.Unlock()
		}
	}
	return refused
}

// refuseLocally sets the state of a request that is refused without a call.
func (l *Ledger) refuseLocally(e *entry, r *store.Request, st *store.State, now int64) bool {
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
			case leader:
				unclear = append(unclear, a.ask([]asking{m.asking}, a.ledger.books.now())...)
			case retry:
				unclear = append(unclear, m.place)
			case answered:
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
		left := a.ledger.opts.Timeout - a.ledger.books.clock().Sub(a.began)
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

// question is what the store is asked about one bucket. There is one at a time:
// who comes while it is on its way joins the next, because what he has to know
// may have happened since it was sent.
type coalescedCheck struct {
	// joined are those that the answer is for, beside who asks.
	joined []*waiter
	// next are those that came since it was sent.
	next []*waiter
	// landed is what was confirmed as charged since it was sent: the answer may
	// have it or not.
	landed int64
}

// questions are given back once they are answered.
var coalescedChecks = sync.Pool{New: func() any { return new(coalescedCheck) }}

// waiter is a request that waits for a question.
type waiter struct {
	*admission
	place int
}

func (w *waiter) tell(t turn) { w.turns <- message{t, asking{place: w.place}} }

// turn is what a waiter is told.
type turn uint8

const (
	// answered: the state is set.
	answered turn = iota
	// leader: the next question is the waiter's to ask.
	leader
	// retry: a charge on its way decides.
	retry
)

// join makes a request wait for the next question about its bucket, and tells
// so, or makes the question its own, or decides by what is known.
func (l *Ledger) join(a *admission, place int, now int64) bool {
	r := &a.reqs[place]
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	switch {
	case l.refuseLocally(e, r, &a.states[place], now):
		return false
	case l.admitLocally(e, r, &a.states[place], now):
		return false
	case e.check == nil:
		e.check = coalescedChecks.Get().(*coalescedCheck)
		a.asking = append(a.asking, asking{place, e, l.wantsPrimary(e, r, now), false})
		return false
	case a.turns == nil:
		// Nobody waits to tell: each place is told once.
		a.turns = make(chan message, len(a.reqs))
	}
	e.check.next = append(e.check.next, &waiter{a, place})
	return true
}

// wantsPrimary tells whether only the primary can answer.
func (l *Ledger) wantsPrimary(e *entry, r *store.Request, now int64) bool {
	switch {
	case !e.canReach(now, l.trust):
		return false
	case e.doubted:
		return true
	case !algorithm.Copies(r.Limit.Algorithm):
		// What a replica lacks cannot be made up for.
		return e.pending != nil || e.charged > 0 && now-e.charged <= r.Limit.Window.Microseconds() ||
			e.refusesAsBefore(r, new(store.State), now+e.clock)
	case e.trusts(now, l.trust):
		return false
	default:
		// Where it was full, a replica's word is not enough to go on refusing.
		return e.judge(r, new(store.State), now+e.clock) == full
	}
}

// progress is what is left to do about an answer.
type progress uint8

const (
	done progress = iota
	needsPrimary
	needsTime
)

// answer takes in the store's answer about a bucket, sets the states of who
// waits for it, and gives the next question to who waits for that.
func (l *Ledger) answer(q *asking, r *store.Request, st *store.State, answer store.State, asked int64) progress {
	e := q.entry
	e.page.mu.Lock()
	defer e.page.mu.Unlock()
	now := l.books.now()
	if answer.Err != nil {
		*st = answer
		l.fail(e, &answer)
		return done
	}
	less := e.hear(r, &answer, asked, now)
	if q.primary {
		// Where a replica answers all the same, the primary could not.
		e.failed = 0
		if answer.Replica {
			e.failed = now
		}
	}
	if less && !e.trusts(now, l.trust) && e.canReach(now, l.trust) {
		e.check.landed = 0
		return needsPrimary
	}
	progress := done
	if e.admit(r, st, &answer) == unclear {
		progress = needsTime
	}
	for _, w := range e.check.joined {
		other := &w.reqs[w.place]
		if !algorithm.Copies(r.Limit.Algorithm) && !sameNeed(r, other) || e.admit(other, &w.states[w.place], &answer) == unclear {
			w.tell(retry)
			continue
		}
		w.tell(answered)
	}
	l.leadNext(e, now)
	return progress
}

// fail tells those who wait that the store cannot answer, lest each of them
// finds out by himself, one after the other.
func (l *Ledger) fail(e *entry, answer *store.State) {
	if errors.Is(answer.Err, context.Canceled) {
		// A client has left, which says nothing about the store.
		for _, w := range e.check.joined {
			w.tell(retry)
		}
		l.leadNext(e, l.books.now())
		return
	}
	e.silent = true
	for _, w := range append(e.check.joined, e.check.next...) {
		w.states[w.place] = *answer
		w.tell(answered)
	}
	e.check = nil
}

// sameNeed tells whether an answer to r is one to other, where it is all
// that there is.
func sameNeed(r, other *store.Request) bool {
	return r.Cost == other.Cost && r.Events == other.Events && r.Reserved == other.Reserved
}

// admit judges by an answer, and holds what fits.
func (e *entry) admit(r *store.Request, st, answer *store.State) judgement {
	judged := *answer
	j := e.judge(r, &judged, answer.Now)
	if j == unclear {
		return j
	}
	if *st = judged; j == fits {
		e.hold(r.Cost)
	}
	return j
}

// leadNext passes the question on to who came since it was sent, apart from
// those who are refused by what is known now.
func (l *Ledger) leadNext(e *entry, now int64) {
	next := e.check.next[:0]
	for _, w := range e.check.next {
		if l.refuseLocally(e, &w.reqs[w.place], &w.states[w.place], now) {
			w.tell(answered)
		} else {
			next = append(next, w)
		}
	}
	if len(next) == 0 {
		*e.check = coalescedCheck{}
		coalescedChecks.Put(e.check)
		e.check = nil
		return
	}
	e.check = &coalescedCheck{joined: next[1:]}
	w := next[0]
	w.turns <- message{leader, asking{w.place, e, l.wantsPrimary(e, &w.reqs[w.place], now), len(next) > 1}}
}

// awaitCharge waits until a charge of the bucket is no longer on its way, and
// tells whether that was within the time given.
func (l *Ledger) awaitCharge(r *store.Request, most time.Duration) bool {
	e := l.find(r)
	if e == nil {
		return true
	}
	if !e.isSent() {
		e.page.mu.Unlock()
		return true
	}
	if e.pending.arrived == nil {
		e.pending.arrived = make(chan struct{})
	}
	arrived := e.pending.arrived
	e.page.mu.Unlock()
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-arrived:
		return true
	case <-timer.C:
		return false
	}
}

// refuseUnclear refuses a request for which a charge on its way decides that
// does not arrive.
func (l *Ledger) refuseUnclear(r *store.Request, st *store.State) {
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	now += e.clock
	*st = store.State{Limit: max(r.Capacity(), 0), Now: now}
	if algorithm.Copies(r.Limit.Algorithm) {
		v := e.viewOf(r, nil, now)
		*st = v.ahead(0)
		e.showAhead(st, &v)
	}
	refuseForFlight(st)
}

// noteSoleWriter notes whether the primary's reply to a charge counts that charge on
// top of what was known, and nothing else.
func (e *entry) noteSoleWriter(r *store.Request, word algorithm.Known, storeNow, now int64) {
	expected := e.pending.base
	expected.Charge(r, storeNow)
	switch {
	case word != expected:
		e.soleWriter = 0
	case e.soleWriter == 0:
		e.soleWriter = now
	}
}

// admitLocally sets the state of a request that is admitted without a call, and
// holds its cost: what the primary said last is trusted still, for as long as
// that nobody else has charged the bucket, and at least half of it would be left.
// So a client whose requests all come to this process costs no checks, and where
// another process begins to serve it as well, that is seen within the time of
// trust and before the limit is near.
func (l *Ledger) admitLocally(e *entry, r *store.Request, st *store.State, now int64) bool {
	storeNow := now + e.clock
	switch {
	case e.soleWriter == 0, now-e.soleWriter < l.trust, !e.trusts(now, l.trust):
		return false
	case e.silent, e.doubted, e.refunds > 0, r.Primary:
		return false
	case !algorithm.Copies(r.Limit.Algorithm), !e.known.IsOpen(r.Limit, storeNow):
		return false
	}
	var known store.State
	if e.judge(r, &known, storeNow) != fits || 2*(known.Remaining-r.Cost) < known.Limit {
		return false
	}
	*st = known
	e.hold(r.Cost)
	e.page.counts.admissions++
	return true
}

// CheckAhead is Check of one request that waits behind others, but asks about its
// bucket no more than once for the time of trust: in between, what is known
// answers. Of buckets that cannot be copied only the last refusal is known. It is
// the answer where it is about as much as r needs, or says that r has to wait for
// longer than maxWait.
func (l *Ledger) CheckAhead(ctx context.Context, r store.Request, maxWait time.Duration) store.State {
	asked := l.books.now()
	e := l.enter(&r, asked)
	if st, isKnown := l.knowsAhead(e, &r, maxWait, asked); isKnown {
		if !st.Allowed && st.RetryAfter > maxWait {
			e.page.counts.refusals++
		}
		e.page.mu.Unlock()
		return st
	}
	was := e.asked
	e.asked = asked
	e.page.mu.Unlock()
	r.Primary = true
	st := l.store.Check(ctx, []store.Request{r})[0]
	now := l.books.now()
	e = l.enter(&r, now)
	defer e.page.mu.Unlock()
	switch {
	case st.Err == nil:
		e.hear(&r, &st, asked, now)
		if e.failed = 0; st.Replica {
			e.failed = now
		}
		e.judge(&r, &st, st.Now)
	case errors.Is(st.Err, context.Canceled):
		// A client has left, which says nothing about the store.
		e.asked = was
	default:
		e.silent = true
	}
	return st
}

// knowsAhead returns what is known of a bucket, unless the store is to be asked.
func (l *Ledger) knowsAhead(e *entry, r *store.Request, maxWait time.Duration, now int64) (st store.State, isKnown bool) {
	isDue := !e.trusts(now, l.trust) && (e.asked == 0 || now-e.asked > l.trust)
	switch {
	case isDue || e.silent || e.doubted:
		return st, false
	case !algorithm.Copies(r.Limit.Algorithm):
		c := &e.known.Content
		isSame := r.Need() == c[refusalCost] && r.Capacity() == c[refusalCapacity]
		isKnown = e.refusesAsBefore(r, &st, now+e.clock) && (isSame || st.RetryAfter > maxWait)
		return st, isKnown
	}
	// Where a charge on its way decides, nothing is set.
	e.judge(r, &st, now+e.clock)
	return st, true
}
