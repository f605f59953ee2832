package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// resetTimeout bounds the wait for charges that are on their way, so that they
// do not come after the reset.
const resetTimeout = 500 * time.Millisecond

// Peek implements [store.Peeker], if the store does: what it tells shows what is
// known beyond it.
func (l *Ledger) Peek(ctx context.Context, reqs []store.Request) []store.State {
	asked := l.books.now()
	states := l.store.(store.Peeker).Peek(ctx, reqs)
	for i := range reqs {
		if states[i].Err == nil {
			l.look(&reqs[i], &states[i], asked)
		}
	}
	return states
}

// Inspect implements [store.Inspector], if the store does.
func (l *Ledger) Inspect(ctx context.Context, r store.Request) store.Inspection {
	var found store.Inspection
	if s, ok := l.store.(store.Inspector); ok {
		found = s.Inspect(ctx, r)
	}
	found.Account = l.account(&r)
	return found
}

// Owner is the name of the shard that keeps the client's buckets.
func (l *Ledger) Owner(clientKey string) string { return l.store.Owner(clientKey) }

// account is what is known of a bucket, or nil.
func (l *Ledger) account(r *store.Request) *store.Account {
	e := l.find(r)
	if e == nil {
		return nil
	}
	defer e.page.mu.Unlock()
	now := l.books.now()
	if e.isIdle() && e.until <= now {
		return nil
	}
	asked := *r
	asked.Cost = 0
	a := &store.Account{InFlight: e.flight, Used: e.known.Content[confirmedUsed]}
	if algorithm.Copies(r.Limit.Algorithm) {
		a.Used = e.known.View(&asked, now+e.clock).Used
	}
	if e.pending != nil {
		a.Unsent = e.pending.owed() - e.pending.sentCost
	}
	if v := e.reservation; v != nil && now+e.clock < v.ends {
		a.Reserved = v.tokens
	}
	// What would be refused is a request of the least cost.
	asked.Cost = 1
	a.Full = e.trusts(now, l.trust) && e.refuses(&asked, new(store.State), now)
	return a
}

// Reset implements [store.Resetter], if the store does. What is in flight stays
// so; other processes hear of it once they trust the primary's last word no
// longer.
func (l *Ledger) Reset(ctx context.Context, r store.Request) error {
	s, ok := l.store.(store.Resetter)
	if !ok {
		return fmt.Errorf("%w: the store cannot reset a bucket", errors.ErrUnsupported)
	}
	l.awaitCharges(&r)
	if err := s.Reset(ctx, r); err != nil {
		return err
	}
	l.forget(&r)
	return nil
}

// awaitCharges waits until no charge of the bucket is on its way.
func (l *Ledger) awaitCharges(r *store.Request) {
	began := l.books.clock()
	for left := resetTimeout; left > 0 && l.isSent(r); left = resetTimeout - l.books.clock().Sub(began) {
		l.awaitCharge(r, left)
	}
}

func (l *Ledger) isSent(r *store.Request) bool {
	e := l.find(r)
	if e == nil {
		return false
	}
	defer e.page.mu.Unlock()
	return e.isSent()
}

// forget drops what is known of a bucket that was reset, the charges that wait,
// and what was taken in advance. Whoever comes next asks the primary, for a
// replica may not know yet.
func (l *Ledger) forget(r *store.Request) {
	now := l.books.now()
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	e.known, e.loose = algorithm.Known{}, 0
	e.trusted, e.soleWriter, e.asked = 0, 0, 0
	e.confirmed, e.doubted = now, true
	e.noteUnsure(false)
	if d := e.pending; d != nil {
		d.base, d.heard = algorithm.Known{}, nil
		e.setWaiting(nil)
		if d.isStale = d.sent; !d.sent {
			e.pending = nil
			l.books.owing.Add(-1)
		}
	}
	if e.reservation != nil {
		e.page.counts.expired += e.reservation.abandon()
	}
	e.until = max(e.until, now+l.trust)
}

// Interface guards.
var (
	_ store.Peeker    = (*Ledger)(nil)
	_ store.Inspector = (*Ledger)(nil)
	_ store.Resetter  = (*Ledger)(nil)
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
		if e.pending != nil {
			pending := *e.pending
			pending.base, copied.pending = word, &pending
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
