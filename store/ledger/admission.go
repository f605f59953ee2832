package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Admit sets the states of requests as Check does, and holds the cost of each
// allowed request in flight: it counts against later requests until
// [Ledger.Settle]. If a bucket is known to refuse its request, Admit checks no
// other, and leaves their states as they were: the caller passes zero states.
func (l *Ledger) Admit(ctx context.Context, reqs []store.Request, states []store.State) {
	// A single request is judged when it joins a check.
	if len(reqs) > 1 && l.RefuseKnown(reqs, states) {
		return
	}
	a := admissions.Get().(*admission)
	a.call = call{ledger: l, ctx: ctx, reqs: reqs, states: states}
	a.run()
	*a = admission{}
	admissions.Put(a)
}

// RefuseKnown sets the states of requests that are refused without a call, and
// reports whether there are any.
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
	e.page.counts.LocalRefusals++
	return true
}

// refuses sets the state of a request that known refuses. It leaves the state of
// a request that fits: the store decides about that.
func (e *entry) refuses(r *store.Request, st *store.State, now int64) bool {
	if e.silent || e.doubted || e.resets {
		return false
	}
	storeNow := now + e.clock
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		return e.repeatsRefusal(r, st, storeNow)
	}
	var refusal store.State
	if e.judge(r, &refusal, storeNow) != full {
		return false
	}
	*st = refusal
	return true
}

// admitLocally admits a request of a sole writer without a call if at least half of the
// limit would be left: a second writer shows in a reply before the limit is near.
func (l *Ledger) admitLocally(e *entry, r *store.Request, st *store.State, now int64) bool {
	storeNow := now + e.clock
	switch {
	case e.soleWriter == 0:
		return false
	case e.silent, e.doubted, e.refunds > 0, r.Primary:
		return false
	case !algorithm.Of(r.Limit.Algorithm).Copies(), !e.known.IsOpen(r.Limit, storeNow):
		return false
	}
	var known store.State
	if e.judge(r, &known, storeNow) != fits || 2*(known.Remaining-r.Cost) < known.Limit || !l.reliesOn(e, r, now) {
		return false
	}
	*st = known
	e.hold(r.Cost)
	e.page.counts.UnaskedAdmissions++
	return true
}

// reliesOn reports whether the primary's last answer is recent enough to admit a request
// of a sole writer. Beyond the time of trust one request relies on it, and uses it up,
// unless the config shortens that time.
func (l *Ledger) reliesOn(e *entry, r *store.Request, now int64) bool {
	if e.trusts(now, l.trust) && now-e.soleWriter >= l.trust {
		return true
	}
	quiet := min(e.trusted-e.soleWriter, r.Limit.Window.Microseconds()/maxTrustShare)
	if l.opts.Trust < DefaultTrust || e.trusted == 0 || quiet < l.trust || now-e.trusted >= quiet || e.flight > 0 || e.pending != nil || e.past().loose > 0 {
		return false
	}
	e.trusted = 0
	return true
}

// call is one call of Admit or Take. Each request has its place in states.
type call struct {
	ledger *Ledger
	ctx    context.Context
	reqs   []store.Request
	states []store.State
	// turns has room for a message about each request; nil until one waits.
	turns chan message
}

// waiter is a request that waits for what another request asks of the store.
type waiter struct {
	*call
	place int
}

func (c *call) wait(place int) *waiter {
	if c.turns == nil {
		c.turns = make(chan message, len(c.reqs))
	}
	return &waiter{c, place}
}

func (w *waiter) send(t turn) { w.turns <- message{t, asking{place: w.place}} }

// turn is what a waiter has to do next.
type turn uint8

const (
	// answered: nothing, because the state is set.
	answered turn = iota
	// leader: make the next coalesced check.
	leader
	// retry: start again.
	retry
)

// message gives a turn to the request at a place.
type message struct {
	turn turn
	asking
}

// asking is a request that checks its bucket.
type asking struct {
	place int
	entry *entry
	// at is when it was decided whether a replica may answer; the answer is trusted from
	// then on.
	at int64
	// primary is set if only the primary can answer, joined if others wait for
	// the answer, repeated if there was an answer that does not count.
	primary, joined, repeated bool
	// moves is set if a charge is in flight to another owner of the bucket.
	moves bool
}

// coalescedCheck is the check in flight of one bucket. A request that arrives
// while one is in flight joins the next one: the reply in flight may predate it.
type coalescedCheck struct {
	// joined wait for the answer, beside the leader; next wait for the next check.
	joined, next []*waiter
	// landed is the cost of charges confirmed since the check was sent. The
	// answer may count it or not.
	landed int64
}

var (
	coalescedChecks = sync.Pool{New: func() any { return new(coalescedCheck) }}
	admissions      = sync.Pool{New: func() any { return new(admission) }}
)

// admission is one call of Admit.
type admission struct {
	call
	// asking are the requests that lead a check.
	asking []asking
	// until is when the admission stops waiting for charges, once it had to.
	until time.Time

	askingRoom [2]asking
	placeRoom  [8]int
}

// run checks all requests: those without a check in flight in one call, the
// others with the leader of their next check.
func (a *admission) run() {
	pending := a.placeRoom[:0]
	for i := range a.reqs {
		pending = append(pending, i)
	}
	for len(pending) > 0 {
		a.asking = a.askingRoom[:0]
		joined := 0
		now := a.ledger.books.now()
		for _, i := range pending {
			if a.ledger.join(a, i, now) {
				joined++
			}
		}
		unclear := a.ask(a.asking)
		// A check that a is to lead must not wait for the answer to another.
		for range joined {
			switch m := <-a.turns; m.turn {
			case leader:
				unclear = append(unclear, a.ask([]asking{m.asking})...)
			case retry:
				unclear = append(unclear, m.place)
			case answered:
			}
		}
		pending = a.awaitCharges(unclear)
	}
}

// join decides about a request locally, or makes it the leader of a check, or
// makes it wait for the next one. It reports whether the request waits.
func (l *Ledger) join(a *admission, place int, now int64) bool {
	r := &a.reqs[place]
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	switch {
	case l.refuseLocally(e, r, &a.states[place], now), l.admitLocally(e, r, &a.states[place], now):
		return false
	case e.check == nil:
		e.check = coalescedChecks.Get().(*coalescedCheck)
		r.Until = e.openUntil(r, now)
		a.asking = append(a.asking, asking{place: place, entry: e, at: now, primary: l.wantsPrimary(e, r, now), moves: l.moves(e, r)})
		return false
	}
	e.check.next = append(e.check.next, a.wait(place))
	return true
}

// wantsPrimary reports whether only the primary can answer.
func (l *Ledger) wantsPrimary(e *entry, r *store.Request, now int64) bool {
	switch {
	case !e.canReach(now, l.leastTrust()):
		return false
	case e.doubted, e.wasReset(now, l.leastTrust()):
		return true
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		// What a replica lacks cannot be added to its answer.
		return e.pending != nil || e.past().charged > 0 && now-e.past().charged <= r.Limit.Window.Microseconds() ||
			e.repeatsRefusal(r, new(store.State), now+e.clock)
	case e.trusts(now, l.trust):
		return false
	default:
		// A replica's answer is not enough to go on refusing.
		return e.judge(r, new(store.State), now+e.clock) == full
	}
}

// ask checks the requests in one call, and sets their states and those of the
// waiters. It returns the places that are unclear.
func (a *admission) ask(what []asking) (unclear []int) {
	if len(what) == 0 {
		return nil
	}
	var primary []asking
	for n, answer := range a.answers(what) {
		q := what[n]
		isStale, isUnclear := a.ledger.answer(&q, &a.reqs[q.place], &a.states[q.place], answer)
		if isStale {
			q.at, q.primary, q.joined, q.repeated = a.ledger.books.now(), true, true, true
			primary = append(primary, q)
		}
		if isUnclear {
			unclear = append(unclear, q.place)
		}
	}
	return append(unclear, a.ask(primary)...)
}

func (a *admission) answers(what []asking) []store.State {
	reqs, ctx, own, moves := a.reqs, a.ctx, false, false
	for n, q := range what {
		moves = moves || q.moves
		if q.joined {
			// The check outlasts this client, because others wait for it.
			ctx = context.WithoutCancel(a.ctx)
		}
		// Repeated checks come in another order.
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
	if moves {
		if err := a.ledger.awaitMoves(reqs); err != nil {
			return slices.Repeat([]store.State{{Err: err}}, len(reqs))
		}
	}
	return store.Answers(ctx, a.ledger.store.Check, reqs)
}

// answer takes in the answer about a bucket, sets the states of the requests that wait,
// and hands over to the leader of the next check, unless the primary has to be asked.
func (l *Ledger) answer(q *asking, r *store.Request, st *store.State, answer store.State) (isStale, isUnclear bool) {
	e := q.entry
	e.page.mu.Lock()
	defer e.page.mu.Unlock()
	now := l.books.now()
	if answer.Err != nil {
		*st = answer
		l.fail(e, &answer)
		return false, false
	}
	if q.primary {
		e.noteReach(&answer, q.at, now)
	}
	isStale = e.hear(r, &answer, q.at, now) && !e.trusts(now, l.trust)
	if e.predatesReset(q.at) {
		// The check is repeated once, so that resets that follow each other hold up no
		// request.
		isStale = !q.repeated
	}
	if isStale && e.canReach(now, l.leastTrust()) {
		e.check.landed = 0
		return true, false
	}
	isUnclear = e.admit(r, st, &answer) == unclear
	for _, w := range e.check.joined {
		other := &w.reqs[w.place]
		if !algorithm.Of(r.Limit.Algorithm).Copies() && !sameNeed(r, other) || e.admit(other, &w.states[w.place], &answer) == unclear {
			w.send(retry)
			continue
		}
		w.send(answered)
	}
	l.leadNext(e, now)
	return false, isUnclear
}

// fail passes an error of the store on to all waiters, so that they do not meet
// it one after the other.
func (l *Ledger) fail(e *entry, answer *store.State) {
	if errors.Is(answer.Err, context.Canceled) {
		// The client has left, which says nothing about the store.
		for _, w := range e.check.joined {
			w.send(retry)
		}
		l.leadNext(e, l.books.now())
		return
	}
	e.silent = true
	for _, w := range append(e.check.joined, e.check.next...) {
		w.states[w.place] = *answer
		w.send(answered)
	}
	e.check = nil
}

// sameNeed reports whether an answer to r also answers other, where buckets
// cannot be copied.
func sameNeed(r, other *store.Request) bool {
	return r.Cost == other.Cost && r.Events == other.Events && r.Reserved == other.Reserved
}

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

// leadNext makes the first waiter that is not refused locally the leader of the
// next check.
func (l *Ledger) leadNext(e *entry, now int64) {
	next := e.check.next[:0]
	for _, w := range e.check.next {
		if l.refuseLocally(e, &w.reqs[w.place], &w.states[w.place], now) {
			w.send(answered)
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
	w.reqs[w.place].Until = e.openUntil(&w.reqs[w.place], now)
	w.turns <- message{leader, asking{
		place: w.place, entry: e, at: now, primary: l.wantsPrimary(e, &w.reqs[w.place], now), joined: len(next) > 1, moves: l.moves(e, &w.reqs[w.place]),
	}}
}

// awaitCharges waits for the charges in flight that decide, and returns the
// places to check again. It refuses a request whose charge takes too long.
func (a *admission) awaitCharges(unclear []int) (pending []int) {
	if len(unclear) > 0 && a.until.IsZero() {
		a.until = a.ledger.books.clock().Add(a.ledger.opts.Timeout)
	}
	for _, i := range unclear {
		if a.ledger.awaitCharge(&a.reqs[i], a.until) {
			pending = append(pending, i)
		} else {
			a.ledger.refuseUnclear(&a.reqs[i], &a.states[i])
		}
	}
	return pending
}

// awaitCharge waits until the bucket's charge in flight is answered, and reports
// whether that happened in time.
func (l *Ledger) awaitCharge(r *store.Request, until time.Time) bool {
	left := until.Sub(l.books.clock())
	if left <= 0 {
		return false
	}
	arrived := l.arrival(r, false)
	if arrived == nil {
		return true
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-arrived:
		return true
	case <-timer.C:
		return false
	}
}

var errMoves = fmt.Errorf("%w: a charge is on its way to the previous shard", store.ErrNotExecuted)

// awaitMoves waits until no charge of the requests' buckets is in flight to another
// owner: the call that follows may copy a bucket from there, which would lack it.
func (l *Ledger) awaitMoves(reqs []store.Request) error {
	until := l.books.clock().Add(l.opts.Timeout)
	for i := range reqs {
		for l.arrival(&reqs[i], true) != nil {
			if !l.awaitCharge(&reqs[i], until) {
				return errMoves
			}
		}
	}
	return nil
}

// arrival returns a channel that is closed when the bucket's charge in flight is
// answered, or nil if there is none, or none that moves if only those matter.
func (l *Ledger) arrival(r *store.Request, moving bool) <-chan struct{} {
	e := l.find(r)
	if e == nil {
		return nil
	}
	defer e.page.mu.Unlock()
	if !e.isSent() || moving && !l.moves(e, r) {
		return nil
	}
	if e.pending.arrived == nil {
		e.pending.arrived = make(chan struct{})
	}
	return e.pending.arrived
}

// moves reports whether a charge is in flight to another owner than l has.
func (l *Ledger) moves(e *entry, r *store.Request) bool {
	if !e.isSent() || e.pending.via == l {
		return false
	}
	return e.pending.via.store.Owner(r.ClientKey) != l.store.Owner(r.ClientKey)
}

// refuseUnclear refuses a request about which a charge in flight decides.
func (l *Ledger) refuseUnclear(r *store.Request, st *store.State) {
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	now += e.clock
	*st = store.State{Limit: max(r.Capacity(), 0), Now: now}
	v := e.viewOf(r, nil, now)
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		*st = v.ahead(0)
		e.showAhead(st, &v)
	}
	refuseForFlight(st, r, v.known, v.flight)
}

// CheckAhead is Check of one request that waits behind others, with at most one call
// about its bucket for each time of trust. The last refusal of a bucket that cannot be
// copied answers a request of equal need, or one whose wait exceeds maxWait.
func (l *Ledger) CheckAhead(ctx context.Context, r store.Request, maxWait time.Duration) store.State {
	st, isOld := l.checkAhead(ctx, r, maxWait)
	if isOld {
		st, _ = l.checkAhead(ctx, r, maxWait)
	}
	return st
}

// checkAhead also reports whether the answer is from before a reset.
func (l *Ledger) checkAhead(ctx context.Context, r store.Request, maxWait time.Duration) (st store.State, isOld bool) {
	asked := l.books.now()
	e := l.enter(&r, asked)
	if st, isKnown := l.knowsAhead(e, &r, maxWait, asked); isKnown {
		if !st.Allowed && st.RetryAfter > maxWait {
			e.page.counts.LocalRefusals++
		}
		e.page.mu.Unlock()
		return st, false
	}
	was, moves := e.asked, l.moves(e, &r)
	e.asked = asked
	e.page.mu.Unlock()
	r.Primary = true
	reqs := []store.Request{r}
	if moves {
		st.Err = l.awaitMoves(reqs)
	}
	if st.Err == nil {
		st = store.Answers(ctx, l.store.Check, reqs)[0]
	}
	now := l.books.now()
	e = l.enter(&r, now)
	defer e.page.mu.Unlock()
	switch {
	case st.Err == nil:
		isOld = e.predatesReset(asked)
		e.hear(&r, &st, asked, now)
		e.noteReach(&st, asked, now)
		e.judge(&r, &st, st.Now)
	case errors.Is(st.Err, context.Canceled):
		// The client has left, which says nothing about the store.
		e.asked = was
	default:
		e.silent = true
	}
	return st, isOld
}

// knowsAhead returns the ledger's answer, unless the store has to answer.
func (l *Ledger) knowsAhead(e *entry, r *store.Request, maxWait time.Duration, now int64) (st store.State, isKnown bool) {
	switch {
	case e.isDue(now, l.trust) || e.silent || e.doubted:
		return st, false
	case !algorithm.Of(r.Limit.Algorithm).Copies():
		c := &e.known.Content
		isSame := r.Need() == c[refusalCost] && r.Capacity() == c[refusalCapacity]
		isKnown = e.repeatsRefusal(r, &st, now+e.clock) && (isSame || st.RetryAfter > maxWait)
		return st, isKnown
	}
	// An unclear request gets a zero state.
	e.judge(r, &st, now+e.clock)
	return st, true
}
