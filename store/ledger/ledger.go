// Package ledger keeps what this process knows of buckets that a remote store
// does not say, or not yet: what was admitted and is not charged yet, what the
// primary said last, charges that could not be delivered, and events that were
// taken in advance. It saves calls, and closes the gap in which requests of one
// client could pass together because their charges come later.
//
// The ledger never compares two machines' clocks: a reply tells the store's
// time, and from there on only durations of this process's clock count.
package ledger

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// DefaultTrust is how long a primary's word is relied upon.
	DefaultTrust = time.Second
	// DefaultMaxBuckets is how many buckets are remembered.
	DefaultMaxBuckets = 1_000_000
	// DefaultTimeout is how long a request waits for a charge that is on its
	// way and decides about it.
	DefaultTimeout = 50 * time.Millisecond
)

// Options are the settings of one view of the books.
type Options struct {
	// Trust is how long a primary's word is relied upon: for that long a full
	// bucket is refused without a call, and a replica that says less is
	// overruled. 0 means DefaultTrust.
	Trust time.Duration
	// MaxBuckets bounds the buckets that are remembered; 0 means
	// DefaultMaxBuckets. Buckets with requests in flight are kept all the same.
	MaxBuckets int
	// Timeout bounds how long a request waits for a charge that is on its way
	// and decides about it; 0 means DefaultTimeout.
	Timeout time.Duration
	// OnUndelivered, if set, is told of charges and refunds that are given up:
	// of how many requests, on which shard, and why. The error wraps
	// [store.ErrNotExecuted] or [store.ErrUncertain]. It must be quick.
	OnUndelivered func(shard string, op algorithm.Operation, requests int64, err error)
}

// Ledger is a view of books on a store: the books are shared and last, the
// store and the settings are the view's own. It is safe for concurrent use.
type Ledger struct {
	store      Remote
	books      *Books
	opts       Options
	trust      int64
	maxBuckets int64
	membership *membership
	// serial numbers the views of the books in the order in which they came.
	serial int64
	// runs is set while the view's config does, and stopped once that has ended.
	// Both change under the lock of the books.
	runs    bool
	stopped atomic.Bool
}

// Remote is a store that a ledger is kept for.
type Remote interface {
	store.Store
	store.Reporter
}

// New returns a view of books on s.
func New(books *Books, s Remote, opts Options) *Ledger {
	if opts.Trust == 0 {
		opts.Trust = DefaultTrust
	}
	if opts.MaxBuckets == 0 {
		opts.MaxBuckets = DefaultMaxBuckets
	}
	if opts.Timeout == 0 {
		opts.Timeout = DefaultTimeout
	}
	l := &Ledger{
		store: s, books: books, opts: opts,
		trust: opts.Trust.Microseconds(), maxBuckets: int64(opts.MaxBuckets),
	}
	l.membership = newMembership(l)
	books.attach(l)
	return l
}

// Check implements [store.Store]. Nothing is held in flight.
func (l *Ledger) Check(ctx context.Context, reqs []store.Request) []store.State {
	asked := l.books.now()
	states := l.store.Check(ctx, reqs)
	for i := range reqs {
		if states[i].Err == nil {
			l.look(&reqs[i], &states[i], asked)
		}
	}
	return states
}

// look makes an answer show what is known beyond it.
func (l *Ledger) look(r *store.Request, st *store.State, asked int64) {
	e := l.find(r)
	if e == nil {
		return
	}
	defer e.page.mu.Unlock()
	e.hear(r, st, asked, l.books.now())
	e.judge(r, st, st.Now)
}

// Charge implements [store.Store].
func (l *Ledger) Charge(ctx context.Context, reqs []store.Request) []store.State {
	return l.store.Charge(ctx, reqs)
}

// Refund implements [store.Store].
func (l *Ledger) Refund(ctx context.Context, reqs []store.Request) []store.State {
	entries := l.beginRefund(reqs)
	states := l.store.Refund(ctx, reqs)
	for _, e := range entries {
		l.books.endRefund(e)
	}
	return states
}

// RefundDetached implements [store.Detacher]. What was taken in advance goes
// back to that, without a call.
func (l *Ledger) RefundDetached(reqs []store.Request) {
	l.refund(l.restore(reqs))
}

// refund gives back to the store, without being waited for. No page is locked.
func (l *Ledger) refund(reqs []store.Request) {
	if len(reqs) == 0 {
		return
	}
	entries := l.beginRefund(reqs)
	w := l.writer()
	w.store.RefundReported(reqs, func(i int, st store.State) {
		if st.Err != nil && w.opts.OnUndelivered != nil {
			w.opts.OnUndelivered(w.store.Owner(reqs[i].ClientKey), algorithm.Refund, 1, st.Err)
		}
		w.books.endRefund(entries[i])
	})
}

// beginRefund notes that refunds are on their way: until endRefund, what the store
// says about the buckets may lack them.
func (l *Ledger) beginRefund(reqs []store.Request) []*entry {
	entries := make([]*entry, len(reqs))
	now := l.books.now()
	l.books.owing.Add(int64(len(reqs)))
	for i := range reqs {
		e := l.enter(&reqs[i], now)
		e.refunds++
		e.doubted = true
		entries[i] = e
		e.page.mu.Unlock()
	}
	return entries
}

func (b *Books) endRefund(e *entry) {
	e.page.mu.Lock()
	e.refunds--
	e.refunded = b.now()
	e.confirmed = e.refunded
	e.page.mu.Unlock()
	b.owing.Add(-1)
}

// ChargeDetached implements [store.Detacher], for requests that hold nothing.
func (l *Ledger) ChargeDetached(reqs []store.Request) { l.Settle(reqs, make([]int64, len(reqs))) }

// PenalizeDetached implements [store.Penalizer], if the store does.
func (l *Ledger) PenalizeDetached(reqs []store.Request) {
	now := l.books.now()
	for i := range reqs {
		r := &reqs[i]
		if !algorithm.Copies(r.Limit.Algorithm) {
			continue
		}
		e := l.enter(r, now)
		e.known.Penalize(r, now+e.clock)
		e.keepUntil(r, now)
		e.page.mu.Unlock()
	}
	l.writer().store.(store.Penalizer).PenalizeDetached(reqs)
}

// Penalize implements [store.Penalizer], if the store does.
func (l *Ledger) Penalize(ctx context.Context, reqs []store.Request) []store.State {
	return l.store.(store.Penalizer).Penalize(ctx, reqs)
}

// Warm implements [store.Warmer].
func (l *Ledger) Warm(ctx context.Context) {
	if w, ok := l.store.(store.Warmer); ok {
		w.Warm(ctx)
	}
}

// Interface guards.
var (
	_ store.Store     = (*Ledger)(nil)
	_ store.Detacher  = (*Ledger)(nil)
	_ store.Penalizer = (*Ledger)(nil)
	_ store.Warmer    = (*Ledger)(nil)
)
