package ledger

import (
	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Word is what a store says about a bucket, without changing it.
type Word = func(r store.Request) store.State

// Foresee tells what Admit would answer, or Take if the request takes, and
// changes nothing. It sees no further than word does: where Admit would wait for
// a charge that is on its way, that counts as arrived.
func (l *Ledger) Foresee(r store.Request, takes bool, word Word) store.State {
	asked := l.books.now()
	rest, isServed := r, false
	var refusal store.State
	refused := false
	if e := l.find(&r); e != nil {
		if takes {
			rest, isServed = e.rest(&r, asked)
		}
		refused = !isServed && e.trusts(asked, l.trust) && e.refuses(&rest, &refusal, asked)
		e.page.mu.Unlock()
	}
	if refused {
		return refusal
	}
	st := word(rest)
	switch {
	case st.Err != nil:
	case isServed:
		st.Allowed, st.RetryAfter = true, 0
	case !takes:
		l.foresee(&r, &st, asked)
	}
	return st
}

// foresee makes the store's word show what is known beyond it, as look does, but
// takes in nothing.
func (l *Ledger) foresee(r *store.Request, st *store.State, asked int64) {
	e := l.find(r)
	if e == nil {
		return
	}
	defer e.page.mu.Unlock()
	copied := *e
	copied.clock = st.Now - l.books.now()
	overlaps := st.Replica || e.isSent() || e.refunds > 0 || asked < e.confirmed
	word := algorithm.Known{Content: st.Content}
	switch {
	case !overlaps && algorithm.Copies(r.Limit.Algorithm):
		copied.known, copied.loose = word, 0
		if e.debts != nil {
			debts := *e.debts
			debts.base, copied.debts = word, &debts
		}
	case !overlaps:
		copied.known.Content[confirmedUsed], copied.loose = st.Used, 0
	case algorithm.Copies(r.Limit.Algorithm):
		copied.known.Raise(r.Limit, word, st.Now)
	}
	copied.judge(r, st, st.Now)
}

// Foresee is [Ledger.Foresee].
func (l *Local) Foresee(r store.Request, takes bool, word Word) store.State {
	held := int64(0)
	if !takes {
		held = l.flights.held(&r)
	}
	asked := r
	asked.Ahead += held
	st := word(asked)
	if st.Err != nil || held == 0 {
		return st
	}
	if st.Allowed {
		showFlight(&st, held)
		return st
	}
	if st = word(r); st.Err == nil && st.Allowed {
		refuseForFlight(&st)
		showFlight(&st, held)
	}
	return st
}

// held is what is in flight of the bucket.
func (f *Flights) held(r *store.Request) int64 {
	id := identity.New(f.limits.Number(r.Limit), r.ClientKey)
	p := &f.pages[placeOf(f.seed, id)]
	p.mu.Lock()
	fl, ok := p.flights[id]
	if !ok {
		p.mu.Unlock()
		return 0
	}
	fl.users++
	p.mu.Unlock()
	fl.mu.Lock()
	cost := fl.cost
	p.leave(id, fl, 1, 0)
	return cost
}
