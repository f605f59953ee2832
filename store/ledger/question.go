package ledger

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// question is what the store is asked about one bucket. There is one at a time:
// who comes while it is on its way joins the next, because what he has to know
// may have happened since it was sent.
type question struct {
	// joined are those that the answer is for, beside who asks.
	joined []*waiter
	// next are those that came since it was sent.
	next []*waiter
	// landed is what was confirmed as charged since it was sent: the answer may
	// have it or not.
	landed int64
}

// questions are given back once they are answered.
var questions = sync.Pool{New: func() any { return new(question) }}

// waiter is a request that waits for a question.
type waiter struct {
	*admission
	place int
}

func (w *waiter) tell(t turn) { w.turns <- message{t, asking{place: w.place}} }

// turn is what a waiter is told.
type turn uint8

const (
	// turnAnswered: the state is set.
	turnAnswered turn = iota
	// turnLead: the next question is the waiter's to ask.
	turnLead
	// turnAgain: a charge on its way decides.
	turnAgain
)

// join makes a request wait for the next question about its bucket, and tells
// so, or makes the question its own, or decides by what is known.
func (l *Ledger) join(a *admission, place int, now int64) bool {
	r := &a.reqs[place]
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	switch {
	case l.refusesUnasked(e, r, &a.states[place], now):
		return false
	case l.fitsUnasked(e, r, &a.states[place], now):
		return false
	case e.question == nil:
		e.question = questions.Get().(*question)
		a.asking = append(a.asking, asking{place, e, l.wantsPrimary(e, r, now), false})
		return false
	case a.turns == nil:
		// Nobody waits to tell: each place is told once.
		a.turns = make(chan message, len(a.reqs))
	}
	e.question.next = append(e.question.next, &waiter{a, place})
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
		return e.debts != nil || e.charged > 0 && now-e.charged <= r.Limit.Window.Microseconds() ||
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
		e.question.landed = 0
		return needsPrimary
	}
	progress := done
	if e.admit(r, st, &answer) == unclear {
		progress = needsTime
	}
	for _, w := range e.question.joined {
		other := &w.reqs[w.place]
		if !algorithm.Copies(r.Limit.Algorithm) && !sameQuestion(r, other) || e.admit(other, &w.states[w.place], &answer) == unclear {
			w.tell(turnAgain)
			continue
		}
		w.tell(turnAnswered)
	}
	l.nextQuestion(e, now)
	return progress
}

// fail tells those who wait that the store cannot answer, lest each of them
// finds out by himself, one after the other.
func (l *Ledger) fail(e *entry, answer *store.State) {
	if errors.Is(answer.Err, context.Canceled) {
		// A client has left, which says nothing about the store.
		for _, w := range e.question.joined {
			w.tell(turnAgain)
		}
		l.nextQuestion(e, l.books.now())
		return
	}
	e.silent = true
	for _, w := range append(e.question.joined, e.question.next...) {
		w.states[w.place] = *answer
		w.tell(turnAnswered)
	}
	e.question = nil
}

// sameQuestion tells whether an answer to r is one to other, where it is all
// that there is.
func sameQuestion(r, other *store.Request) bool {
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

// nextQuestion passes the question on to who came since it was sent, apart from
// those who are refused by what is known now.
func (l *Ledger) nextQuestion(e *entry, now int64) {
	next := e.question.next[:0]
	for _, w := range e.question.next {
		if l.refusesUnasked(e, &w.reqs[w.place], &w.states[w.place], now) {
			w.tell(turnAnswered)
		} else {
			next = append(next, w)
		}
	}
	if len(next) == 0 {
		*e.question = question{}
		questions.Put(e.question)
		e.question = nil
		return
	}
	e.question = &question{joined: next[1:]}
	w := next[0]
	w.turns <- message{turnLead, asking{w.place, e, l.wantsPrimary(e, &w.reqs[w.place], now), len(next) > 1}}
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
	if e.debts.arrived == nil {
		e.debts.arrived = make(chan struct{})
	}
	arrived := e.debts.arrived
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
