// Package ledger keeps what this process knows of buckets in a remote store: the
// primary's last answers, the cost of requests in flight, charges that are not
// confirmed yet, and tokens taken in advance. It coalesces checks, charges
// write-behind with a retry queue for each shard, and refuses or admits requests
// without a call where its knowledge suffices. So it saves calls, and requests of
// one client cannot all pass because their charges come later.
//
// Package core decides; this package drives it: it locks a bucket, lets the core decide
// about an event, and then waits, calls the store or wakes others as the core says.
//
// A [Registry] holds the state and outlives configs; a [Ledger] is a view of it on one
// [store.Remote]. [Flights] and [Local] are the counterparts for a store in this
// process.
package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// DefaultTrust is the default of [Options.Trust].
	DefaultTrust = core.UsualTrust
	// DefaultMaxBuckets is the default of [Options.MaxBuckets].
	DefaultMaxBuckets = 1_000_000
	// UsualChargeDelay is what stores set [Options.ChargeDelay] to, unless their
	// config says otherwise.
	UsualChargeDelay = 50 * time.Millisecond
	// DefaultTimeout is the default of [Options.Timeout].
	DefaultTimeout = 50 * time.Millisecond
	// NoTrust is an [Options.Trust] with which no answer of the primary is relied upon.
	NoTrust = -time.Microsecond
)

// Options are the settings of one view of the registry.
type Options struct {
	// Trust is how long an answer of the primary is relied upon: a full bucket
	// is refused without a call, and a stale replica is overruled. 0 means
	// DefaultTrust. With less than that, no older answer is relied upon about a
	// returning client either.
	Trust time.Duration
	// MaxBuckets bounds the buckets in the registry; 0 means DefaultMaxBuckets.
	// Buckets with requests in flight may exceed it.
	MaxBuckets int
	// Timeout bounds how long a request waits for a charge in flight that
	// decides about it; 0 means DefaultTimeout.
	Timeout time.Duration
	// ChargeDelay is how long the charges of a client far from its limit wait for
	// others; 0 means that they are sent at once.
	ChargeDelay time.Duration
	// Servers identifies the servers of each shard, by its name, because another config may
	// have other servers under that name.
	Servers map[string]string
	// OnUndelivered, if set, is called when charges or refunds are given up: on which
	// shard, under which limit, for how many requests, and why. The error wraps
	// [store.ErrNotExecuted] or [store.ErrUncertain]. The call must be quick.
	OnUndelivered func(shard string, limit *store.Limit, op algorithm.Operation, requests int64, err error)
}

// Ledger is a view of a registry on a store. The registry is shared; the store and the
// settings are the view's own. What it does not override is the store's: Check admits no
// request, [Ledger.Admit] does. It is safe for concurrent use.
type Ledger struct {
	store.Remote
	registry   *Registry
	opts       Options
	trust      int64
	membership membership
	// serial numbers the views of the registry, oldest first.
	serial int64
	// hasRun is set once the view's config runs, and stopped once that has ended.
	// Both change under the lock of the registry.
	hasRun, stopped atomic.Bool
}

// New returns a view of a registry on s.
func New(registry *Registry, s store.Remote, opts Options) *Ledger {
	opts.Trust = cmp.Or(opts.Trust, DefaultTrust)
	opts.MaxBuckets = cmp.Or(opts.MaxBuckets, DefaultMaxBuckets)
	opts.Timeout = cmp.Or(opts.Timeout, DefaultTimeout)
	l := &Ledger{Remote: s, registry: registry, opts: opts, trust: opts.Trust.Microseconds()}
	l.membership.life, l.membership.end = context.WithCancel(context.Background())
	registry.attach(l)
	return l
}

// ChargeDetached is Charge without waiting, for requests that hold nothing.
func (l *Ledger) ChargeDetached(reqs []*store.Request) { l.Settle(reqs, make([]int64, len(reqs))) }

// ChargeByID charges, without waiting, requests that the store may have charged already: it knows
// them by their IDs, so they are not added to others.
func (l *Ledger) ChargeByID(reqs []*store.Request) { l.ChargeReported(reqs, nil) }

// Refund implements [store.Store].
func (l *Ledger) Refund(ctx context.Context, asks []*store.Ask) {
	sent := l.beginRefund(len(asks), func(i int) *store.Request { return &asks[i].Request })
	l.Remote.Refund(ctx, asks)
	for i, a := range asks {
		l.endRefund(sent[i], &a.Request, &a.State)
	}
}

// RefundDetached is Refund without waiting. Tokens of a batch go back to it without a call.
func (l *Ledger) RefundDetached(reqs []*store.Request) {
	l.refund(slices.DeleteFunc(reqs, l.restore))
}

// restore puts a refund back into its batch, if it is of one, and reports whether nothing is left to do.
func (l *Ledger) restore(r *store.Request) bool {
	if r.Batch == 0 || r.Cost == 0 {
		return false
	}
	m := l.moment()
	e := l.find(r, &m)
	if e == nil {
		return false
	}
	defer e.release(&m)
	if !e.Restore(r, &m) {
		return false
	}
	r.Cost = 0
	return !r.MayHold()
}

// refund refunds to the store without waiting for it.
func (l *Ledger) refund(reqs []*store.Request) {
	for first, end := 0, 0; first < len(reqs); first = end {
		w := l.refunder(reqs[first])
		for end = first + 1; end < len(reqs) && l.refunder(reqs[end]) == w; {
			end++
		}
		l.refundBy(w, reqs[first:end], nil)
	}
}

// refunder returns the view that refunds what a request has taken: where it was, which a later
// config may not have, or reach in another way. A lease ends there in any case.
func (l *Ledger) refunder(r *store.Request) *Ledger {
	w := l.writer()
	if algorithm.Of(r.Limit.Algorithm).Lease || r.At != nil && w != l && !slices.Contains(w.Owners(r.ClientKey), r.At.Shard) {
		return l
	}
	return w
}

// refundOne refunds what a request costs, and ends what it holds, if anything.
func (l *Ledger) refundOne(r store.Request) {
	if r.Cost > 0 || r.MayHold() {
		l.refund([]*store.Request{&r})
	}
}

// RefundReported is RefundDetached of one request, past its batch, and reports its outcome.
// The report must be quick.
func (l *Ledger) RefundReported(r store.Request, report func(st store.State)) {
	l.refundBy(l.refunder(&r), []*store.Request{&r}, report)
}

func (l *Ledger) refundBy(w *Ledger, reqs []*store.Request, report func(st store.State)) {
	sent := l.beginRefund(len(reqs), func(i int) *store.Request { return reqs[i] })
	w.Remote.RefundReported(reqs, func(i int, st store.State) {
		l.refundEnded(repeat{sent[i], l, w, reqs[i], st, report})
	})
}

// ErrHeld is wrapped by the errors of refunds that give nothing back, and only end what a request held.
var ErrHeld = errors.New("end what was held")

// refundEnded notes and reports how a refund has ended, unless there is another attempt.
func (l *Ledger) refundEnded(r repeat) {
	if l.registry.repeats.add(r) {
		return
	}
	w := r.through
	if err := r.state.Err; err != nil && !errors.Is(err, store.ErrGone) && w.opts.OnUndelivered != nil {
		if r.req.Cost == 0 {
			err = fmt.Errorf("%w: %w", ErrHeld, err)
		}
		w.opts.OnUndelivered(w.shardOf(r.req), r.req.Limit, algorithm.Refund, 1, err)
	}
	w.endRefund(r.sentRefund, r.req, &r.state)
	if r.report != nil {
		r.report(r.state)
	}
}

// sentRefund is a refund in flight: its bucket, and when it was sent.
type sentRefund struct {
	*entry
	at int64
}

func (l *Ledger) beginRefund(n int, request func(i int) *store.Request) []sentRefund {
	sent, m := make([]sentRefund, n), l.moment()
	for i := range sent {
		r := request(i)
		e := l.enter(r, &m)
		e.RefundSent(r, &m)
		e.release(&m)
		sent[i] = sentRefund{e, m.Now}
	}
	return sent
}

func (l *Ledger) endRefund(sent sentRefund, r *store.Request, st *store.State) {
	m := l.moment()
	sent.acquire(&m)
	sent.RefundArrived(r, st, sent.at, &m)
	sent.release(&m)
}

// Penalize implements [store.Store].
func (l *Ledger) Penalize(ctx context.Context, asks []*store.Ask) {
	for _, a := range asks {
		l.notePenalty(&a.Request, (*core.Bucket).Penalize)
	}
	l.writer().Remote.Penalize(ctx, asks)
}

// PenalizeDetached is Penalize without waiting.
func (l *Ledger) PenalizeDetached(reqs []*store.Request) {
	for _, r := range reqs {
		l.notePenalty(r, (*core.Bucket).Penalize)
	}
	l.writer().Remote.PenalizeDetached(reqs)
}

// PenalizeAlone keeps the client of r refused here, and does not tell the store.
func (l *Ledger) PenalizeAlone(r *store.Request) { l.notePenalty(r, (*core.Bucket).PenalizeAlone) }

func (l *Ledger) notePenalty(r *store.Request, note func(b *core.Bucket, r *store.Request, m *core.Moment)) {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		return
	}
	m := l.moment()
	e := l.enter(r, &m)
	note(&e.Bucket, r, &m)
	e.release(&m)
}

// Figures are those of the registry.
func (l *Ledger) Figures() Figures { return l.registry.Figures() }

// Interface guard.
var _ store.Store = (*Ledger)(nil)
