package ledger

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Admit sets the states of requests as Check does, and holds the cost of each
// allowed request in flight: it counts against later requests until
// [Ledger.Settle]. If a bucket is known to refuse its request, Admit checks no
// other, and leaves their states as they were: the caller passes zero states.
func (l *Ledger) Admit(ctx context.Context, asks []*store.Ask) {
	// A single request is judged when it joins a check.
	if len(asks) > 1 && l.RefuseKnown(asks) {
		return
	}
	a := admissions.Get().(*admission)
	a.call = call{ledger: l, ctx: ctx, asks: asks}
	a.run()
	*a = admission{}
	admissions.Put(a)
}

// RefuseKnown sets the states of requests that are refused without a call, and
// reports whether there are any.
func (l *Ledger) RefuseKnown(asks []*store.Ask) (refused bool) {
	m := l.moment()
	for _, a := range asks {
		if e := l.findFor(&a.Request, &m); e != nil {
			refused = e.Refuse(&a.Request, &a.State, &m) || refused
			e.release(&m)
		}
	}
	return refused
}

// call is one call of Admit or Take.
type call struct {
	ledger *Ledger
	ctx    context.Context
	asks   []*store.Ask
	// turns has room for a message about each request; nil until one waits.
	turns chan message
}

func (c *call) waiter(place int) core.Waiter {
	return core.Waiter{Request: &c.asks[place].Request, State: &c.asks[place].State, Call: c, Place: place}
}

// expectTurn makes room for turns. The entry of the request that waits is locked.
func (c *call) expectTurn() {
	if c.turns == nil {
		c.turns = make(chan message, len(c.asks))
	}
}

// message gives a turn to the request at a place.
type message struct {
	asking
	do core.Do
}

// pass gives a waiter its turn.
func (e *entry) pass(t *core.Turn) {
	t.Call.(*call).turns <- message{asking{Check: t.Check, place: t.Place, entry: e}, t.Do}
}

// asking is a request that checks its bucket.
type asking struct {
	core.Check
	place int
	entry *entry
}

var admissions = sync.Pool{New: func() any { return new(admission) }}

// admission is one call of Admit.
type admission struct {
	call
	// asking are the requests that make a check.
	asking []asking
	// until is when the admission stops waiting for charges, once it had to.
	until time.Time

	askingRoom [2]asking
	placeRoom  [8]int
	// checked is what the store is asked, which must not set the states.
	checked     [1]store.Ask
	checkedRoom [1]*store.Ask
}

// run checks all requests: those without a check in flight in one call, the
// others with the one that makes their next check.
func (a *admission) run() {
	pending := a.placeRoom[:0]
	for i := range a.asks {
		pending = append(pending, i)
	}
	for len(pending) > 0 {
		a.asking = a.askingRoom[:0]
		waiting := 0
		m := a.ledger.moment()
		for _, i := range pending {
			if a.join(i, &m) {
				waiting++
			}
		}
		unclear := a.ask(a.asking)
		// A check that a is to make must not wait for the answer to another.
		for range waiting {
			switch t := <-a.turns; t.do {
			case core.CheckReplica, core.CheckPrimary:
				unclear = append(unclear, a.ask([]asking{t.asking})...)
			case core.Again:
				unclear = append(unclear, t.place)
			}
		}
		pending = a.awaitCharges(unclear)
	}
}

// join lets the core decide about a request, and reports whether the request waits.
func (a *admission) join(place int, m *core.Moment) (waits bool) {
	l, r := a.ledger, &a.asks[place].Request
	e := l.enterFor(r, m)
	defer e.release(m)
	q := asking{place: place, entry: e}
	switch e.Ask(a.waiter(place), &q.Check, m) {
	case core.CheckReplica, core.CheckPrimary:
		a.asking = append(a.asking, q)
	case core.Wait:
		a.expectTurn()
		return true
	}
	return false
}

// ask checks the requests in one call. It returns the places of those about which a charge
// in flight decides.
func (a *admission) ask(what []asking) (unclear []int) {
	if len(what) == 0 {
		return nil
	}
	var repeated []asking
	for n, answer := range a.answers(what) {
		q := what[n]
		m := a.ledger.moment()
		q.entry.acquire(&m)
		switch q.entry.Answered(a.waiter(q.place), answer.State, &q.Check, &m) {
		case core.CheckPrimary:
			repeated = append(repeated, q)
		case core.AwaitCharge:
			unclear = append(unclear, q.place)
		}
		q.entry.release(&m)
	}
	return append(unclear, a.ask(repeated)...)
}

// answers asks the store about the buckets of some requests.
func (a *admission) answers(what []asking) []*store.Ask {
	room, asks, ctx := a.checked[:], a.checkedRoom[:], a.ctx
	if len(what) > 1 {
		room, asks = make([]store.Ask, len(what)), make([]*store.Ask, len(what))
	}
	for n, q := range what {
		if q.Joined {
			// The check outlasts this client, because others wait for it.
			ctx = context.WithoutCancel(a.ctx)
		}
		room[n], asks[n] = store.Ask{Request: a.asks[q.place].Request}, &room[n]
		room[n].Primary, room[n].Ends = q.Primary, q.Ends
	}
	a.ledger.Check(ctx, asks)
	return asks
}

// awaitCharges waits for the charges in flight that decide, and returns the
// places to ask again. It refuses a request whose charge takes too long.
func (a *admission) awaitCharges(unclear []int) (pending []int) {
	l := a.ledger
	if len(unclear) > 0 && a.until.IsZero() {
		a.until = l.registry.clock().Add(l.opts.Timeout)
	}
	for _, i := range unclear {
		if l.awaitCharge(&a.asks[i].Request, a.until) {
			pending = append(pending, i)
			continue
		}
		m := l.moment()
		e := l.enter(&a.asks[i].Request, &m)
		e.RefuseUnclear(&a.asks[i].Request, &a.asks[i].State, &m)
		e.release(&m)
	}
	return pending
}

// CheckAhead is Check of one request that waits behind others, with at most one call
// about its bucket for each time of trust. The last refusal of a bucket that cannot be
// copied answers a request of equal need, or one whose wait exceeds maxWait.
func (l *Ledger) CheckAhead(ctx context.Context, r store.Request, maxWait time.Duration) (st store.State) {
	// An answer from before a reset is asked for once more.
	for range 2 {
		st = store.State{}
		var c core.Check
		m := l.moment()
		e := l.enterFor(&r, &m)
		do := e.AskAhead(&r, &st, maxWait, &c, &m)
		e.release(&m)
		if do == core.Nothing {
			return st
		}
		asked := r
		asked.Ends, asked.Primary = c.Ends, true
		st = store.Answers(ctx, l.Check, []store.Request{asked})[0]
		m = l.moment()
		e = l.enter(&r, &m)
		do = e.AheadAnswered(&r, &st, &c, &m)
		e.release(&m)
		if do == core.Nothing {
			return st
		}
	}
	return st
}

// AdmitAlone decides about a request that the store does not answer, by what this process
// knows: the store's last answers, what is in flight, and all that this process has admitted
// since it first decided alone. If the request fits, its cost is in flight until
// [Ledger.Settle] or [Ledger.SettleUnknown].
func (l *Ledger) AdmitAlone(r *store.Request) store.State {
	m := l.moment()
	e := l.enterFor(r, &m)
	defer e.release(&m)
	return e.AskAlone(r, &m)
}

// maxForesights is how often a bucket is read again because what it says may lack what was answered meanwhile.
const maxForesights = 4

// PeekFunc reads a bucket from the store without changing it.
type PeekFunc = func(r store.Request) store.State

// copyOf returns a copy of what is known of a bucket.
func (l *Ledger) copyOf(r *store.Request, m *core.Moment) core.Bucket {
	if e := l.look(r); e != nil {
		defer e.stripe.mu.Unlock()
		return e.Copy()
	}
	return core.New(l.registry.start.UnixMicro()-1, m)
}

// Foresee returns what Admit would answer, or Take if the request takes, and
// changes nothing: a copy of the bucket decides, and peek stands for the store. What is heard while it reads
// counts as it does while they ask. It waits where they would, for what is in flight and decides.
func (l *Ledger) Foresee(r store.Request, takes bool, peek PeekFunc) store.State {
	until, decide := l.registry.clock().Add(l.opts.Timeout), checkOn
	if takes {
		decide = takeOn
		t := taking{call: call{ledger: l, ctx: context.Background(), asks: []*store.Ask{{Request: r}}}}
		t.awaitReturns([]int{0}, until)
	}
	for again := 0; ; {
		m := l.moment()
		var read *store.Ask
		reads := func(r store.Request) store.State {
			if read == nil || read.Cost != r.Cost {
				read = &store.Ask{Request: r, State: peek(r)}
			}
			return read.State
		}
		b := l.copyOf(&r, &m)
		st, _ := decide(&b, r, m, reads)
		if read == nil || read.Err != nil {
			return st
		}
		b = l.copyOf(&r, &m)
		isOld := b.MayLack(&r, m.Now)
		st, awaits := decide(&b, r, m, reads)
		switch {
		case awaits && l.awaitCharge(&r, until):
		case awaits, !isOld, again == maxForesights:
			return st
		default:
			again++
		}
	}
}

// checkOn decides on a copy of a bucket about a request to check, as of the instant when it asks. If a charge in
// flight decides, for which the request would wait, awaits is set.
func checkOn(b *core.Bucket, r store.Request, m core.Moment, read PeekFunc) (st store.State, awaits bool) {
	var c core.Check
	w, asked := core.Waiter{Request: &r, State: &st}, r
	do := b.Ask(w, &c, &m)
	for do == core.CheckReplica || do == core.CheckPrimary {
		do = b.Answered(w, read(asked), &c, &m)
	}
	if do == core.AwaitCharge {
		b.RefuseUnclear(&r, &st, &m)
	}
	return st, do == core.AwaitCharge
}

// takeOn is checkOn of a request to take.
func takeOn(b *core.Bucket, r store.Request, m core.Moment, read PeekFunc) (st store.State, awaits bool) {
	do, _ := b.AskTake(&r, &st, &m)
	if do == core.Take && r.Batch != 0 {
		do, _ = b.Claim(core.Waiter{Request: &r, State: &st}, &m)
	}
	switch do {
	case core.Nothing:
		return st, false
	case core.Wait:
		// The batch in flight has room.
		st = read(r)
		st.Allowed, st.RetryAfter = st.Err == nil, 0
		ShowTaken(&st, r.Cost)
		return st, false
	}
	loan := b.Borrow(&r, &m)
	asked := r
	mark := b.TakeSent(&r, &m)
	if st = read(asked); st.Allowed {
		ShowTaken(&st, r.Cost)
	}
	if do, _ = b.TakeAnswered(&r, &st, m.Now, mark, &m); do == core.AwaitCharge {
		_, _ = b.JudgeTake(&r, &st, mark, false, &m)
	}
	b.Repay(&r, loan, &st, &m)
	return st, do == core.AwaitCharge
}

// ShowTaken makes the answer to a check that of a take, which counts the cost.
func ShowTaken(st *store.State, cost int64) {
	st.Used, st.Remaining = st.Used+cost, max(st.Limit-st.Used-cost, 0)
	st.Reset, st.ResetOtherwise = st.ResetOtherwise, st.Reset
}

// ForeseeKnown is RefuseKnown, and counts nothing.
func (l *Ledger) ForeseeKnown(asks []*store.Ask) (refused bool) {
	m := l.moment()
	for _, a := range asks {
		b := l.copyOf(&a.Request, &m)
		refused = b.Refuse(&a.Request, &a.State, &m) || refused
	}
	return refused
}

// ForeseeAlone returns what AdmitAlone would answer, and changes nothing.
func (l *Ledger) ForeseeAlone(r *store.Request) store.State {
	m := l.moment()
	b := l.copyOf(r, &m)
	return b.AskAlone(r, &m)
}
