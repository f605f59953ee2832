package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// resetTimeout bounds the wait for charges in flight, so that they do not arrive
// after the reset.
const resetTimeout = 500 * time.Millisecond

// look makes an answer show what the ledger knows beyond it, and changes no entry.
func (l *Ledger) look(r *store.Request, st *store.State, asked int64) {
	e := l.find(r)
	if e == nil {
		return
	}
	defer e.page.mu.Unlock()
	c := *e
	c.page = &page{delivery: e.page.delivery}
	past := e.past()
	c.rare = &past
	if e.pending != nil {
		pending := *e.pending
		pending.heard = nil
		c.pending = &pending
	}
	c.hear(r, st, asked, l.books.now())
	c.judge(r, st, st.Now)
}

// PeekFunc reads a bucket from the store without changing it.
type PeekFunc = func(r store.Request) store.State

// Foresee returns what Admit would answer, or Take if the request takes, and
// changes nothing. It knows no more of the store than word returns: where Admit
// would wait for a charge in flight, Foresee counts the charge as arrived.
func (l *Ledger) Foresee(r store.Request, takes bool, peek PeekFunc) store.State {
	asked := l.books.now()
	rest, isServed := r, false
	if e := l.find(&r); e != nil {
		if takes {
			rest, isServed = e.rest(&r, asked)
		}
		var refusal store.State
		refused := !isServed && e.trusts(asked, l.trust) && e.refuses(&rest, &refusal, asked)
		e.page.mu.Unlock()
		if refused {
			return refusal
		}
	}
	st := peek(rest)
	switch {
	case st.Err != nil:
	case isServed:
		st.Allowed, st.RetryAfter = true, 0
	case !takes:
		l.look(&r, &st, asked)
	}
	return st
}

// walkSize is how many entries of a page are visited at a time, so that requests need not
// wait for long: see BenchmarkWalk.
const walkSize = 256

// Walk visits the buckets that are known, as [store.Operable] says. A state counts what is in
// flight, and charges that the store has not confirmed.
func (l *Ledger) Walk(reqs []store.Request, visit func(i int, clientKey string, st *store.State)) {
	asked := make(map[uint32]int, len(reqs))
	for i := range reqs {
		asked[l.books.limits.Number(reqs[i].Limit)] = i
	}
	var entries []*entry
	var st store.State
	for n := range l.books.pages {
		p := &l.books.pages[n]
		p.mu.Lock()
		entries = slices.AppendSeq(entries[:0], p.entries.all)
		p.mu.Unlock()
		for some := range slices.Chunk(entries, walkSize) {
			p.mu.Lock()
			now := l.books.now()
			for _, e := range some {
				i, ok := asked[e.id.Limit]
				if !ok || e.isIdle() && e.until <= now {
					continue
				}
				st = e.estimate(&reqs[i], now)
				visit(i, e.id.Key, &st)
			}
			p.mu.Unlock()
		}
	}
}

// estimate returns what a request of no cost would see of the bucket, by what is known.
func (e *entry) estimate(r *store.Request, now int64) store.State {
	answer := store.State{Limit: max(r.Capacity(), 0), Used: e.known.Content[confirmedUsed]}
	v := e.viewOf(r, &answer, now+e.clock)
	st := v.ahead(0)
	e.showAhead(&st, &v)
	return st
}

// Owner returns the name of the shard that has the client's buckets.
func (l *Ledger) Owner(clientKey string) string { return l.store.Owner(clientKey) }

// Delays reports whether charges wait until a shard executes them again.
func (l *Ledger) Delays(shard string) bool {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	_, waits := l.books.retryQueues[shard]
	return waits
}

// Account returns what is known of a bucket beyond what the store says, or nil.
func (l *Ledger) Account(r *store.Request) *store.Account {
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
	a := &store.Account{InFlight: e.flight, Used: e.used(r, now)}
	if e.pending != nil {
		a.Unsent = e.pending.cost(now) - e.pending.sentCost
	}
	if v := e.reservation; v != nil && now+e.clock < v.ends {
		a.Reserved = v.tokens
	}
	// Full means that even a request of the least cost is refused.
	asked.Cost = 1
	a.Full = e.trusts(now, l.trust) && e.refuses(&asked, new(store.State), now)
	return a
}

// Reset implements [store.Store]. After an error, what is known stays, and so do, in any case,
// requests in flight. Other processes notice the reset when their trust in the primary's last answer
// runs out.
func (l *Ledger) Reset(ctx context.Context, r store.Request) error {
	// A response that empties the bucket may outlast its config, as charges do.
	s := l.writer().store
	l.releaseForReset(&r)
	until := l.books.clock().Add(resetTimeout)
	for waits := true; waits && l.arrival(&r, false) != nil; {
		waits = l.awaitCharge(&r, until)
	}
	if err := s.Reset(ctx, r); err != nil {
		e := l.enter(&r, l.books.now())
		defer e.page.mu.Unlock()
		e.resets = false
		e.receive(wholeBucket)
		return err
	}
	l.forget(&r)
	return nil
}

// releaseForReset sends the held charges of a bucket, so that the reset can wait for
// them, and lets none be held until it is over: a tick could make the bucket anew.
func (l *Ledger) releaseForReset(r *store.Request) {
	e := l.enter(r, l.books.now())
	w := l.writer()
	var next []store.Request
	e.resets = true
	e.expect(wholeBucket)
	if e.pending.isHeld() {
		next = w.sendNext(e, l.books.now())
	}
	e.page.mu.Unlock()
	if next != nil {
		w.deliver(next, e)
	}
}

// forget drops what is known of a bucket that was reset, its waiting charges and
// its tokens. Requests ask the primary for a while, because replicas may be stale.
func (l *Ledger) forget(r *store.Request) {
	e := l.enter(r, l.books.now())
	defer e.page.mu.Unlock()
	// Read under the lock, so that checks that began before it are older.
	now := l.books.now()
	e.known = algorithm.Known{}
	e.forgetLoose()
	e.trusted, e.soleWriter, e.asked = 0, 0, 0
	e.doubted, e.resets = true, false
	past := e.rarely()
	past.reset, past.failed, past.alone = now, 0, 0
	e.receive(wholeBucket)
	e.noteUnsure(false)
	if p := e.pending; p != nil {
		p.base, p.heard = algorithm.Known{}, nil
		e.setWaiting(nil)
		if p.isStale = p.sent; !p.sent {
			l.endPending(e)
		}
	}
	if e.reservation != nil {
		e.page.counts.TokensExpired += e.reservation.abandon()
	}
	e.until = max(e.until, now+l.leastTrust())
}

// leastTrust is the trust, and no less than the usual one, however short the config makes it: so long
// replicas are not asked after a reset, because they may show the old bucket, and the primary is not
// after a failure.
func (l *Ledger) leastTrust() int64 { return max(l.trust, DefaultTrust.Microseconds()) }
