package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// retryBatch is how many charges a retry sends.
	retryBatch = 256
	// tickBatch is how many charges a tick sends in a call. A call is what lanes count.
	tickBatch = 32
	// flushTick is the interval at which a flush looks whether it is done.
	flushTick = 5 * time.Millisecond
)

// ErrExpired is the error of charges that could not be delivered while they
// counted.
var ErrExpired = core.ErrExpired

var (
	errNoRoom = fmt.Errorf("%w: the ledger is full", store.ErrNotExecuted)
	errEnded  = fmt.Errorf("%w: there was no time left to deliver them", store.ErrNotExecuted)
)

// Settle ends what the requests hold in flight, and charges their costs without
// waiting for the store. held has what each request holds, if that differs from
// its cost; nil means the costs. The caller must not use reqs or the requests afterwards.
func (l *Ledger) Settle(reqs []*store.Request, held []int64) {
	w, m := l.writer(), l.moment()
	out := outgoing{most: len(reqs)}
	for i := range reqs {
		hold := reqs[i].Cost
		if held != nil {
			hold = held[i]
		}
		e := l.enter(reqs[i], &m)
		n := e.Settle(reqs[i:i+1:i+1], hold, &m)
		w.finish(e, &n, reqs[i], &out, &m)
	}
	w.send(&out)
}

// finish ends an event of an entry. Its charge leaves through the view, with others. A view on trial sends only a charge
// of own, a request of its config or nil. Any other charge may contain charges of other configs, and leaves at once
// through the view that sends the charges waiting in the entry.
func (l *Ledger) finish(e *entry, n *core.Next, own *store.Request, out *outgoing, m *core.Moment) {
	if n.Do == core.Send && n.Charge[0] != own && l.isTrial() {
		w, mixed := l.sender(e), outgoing{most: 1}
		w.carry(e, n, &mixed)
		e.release(m)
		w.send(&mixed)
		return
	}
	if n.Do == core.Delay {
		l.awaitTick(e)
	}
	l.carry(e, n, out)
	e.release(m)
}

// SettleUnknown takes requests out of flight whose takes may have spent their cost, which counts here until what
// the primary says has it. A take that ends late and spent nothing is charged, and of any other the hold ends; where
// there is nil, the store knows the take by its ID.
func (l *Ledger) SettleUnknown(reqs []*store.Request, held []int64, ends []*store.Late) {
	m := l.moment()
	for i := range reqs {
		e := l.enter(reqs[i], &m)
		e.SettleUnknown(reqs[i], held[i], &m)
		e.release(&m)
	}
	for i, end := range ends {
		if req := []*store.Request{reqs[i]}; end != nil && (req[0].Cost > 0 || req[0].MayHold()) {
			end.Then(func(err error) { l.takeEnded(req, err) })
		}
	}
}

// takeEnded charges a request that was served, and whose take has ended late, if that spent nothing.
func (l *Ledger) takeEnded(req []*store.Request, err error) {
	if req[0].MayHold() && !errors.Is(err, store.ErrNotExecuted) {
		end := *req[0]
		end.Cost = 0
		l.refundOne(end)
	}
	switch w := l.writer(); {
	case err == nil, req[0].Cost == 0:
	case errors.Is(err, store.ErrNotExecuted):
		m, out := l.moment(), outgoing{most: 1}
		e := l.enter(req[0], &m)
		n := e.Charge(req, &m)
		w.finish(e, &n, req[0], &out, &m)
		w.send(&out)
	case w.opts.OnUndelivered != nil:
		w.opts.OnUndelivered(w.shardOf(req[0]), req[0].Limit, algorithm.Take, 1, err)
	}
}

// outgoing are charges that are noted as sent, each of an entry. Most are one.
type outgoing struct {
	// most is how many there are at most, or 0 if that is not known.
	most  int
	reqs  []*store.Request
	first *entry
	// entries are all, unless the first is the only one.
	entries []*entry
}

// carry adds the next charge of an entry, which is locked, to those that leave through the
// view, and reports charges that are given up.
func (l *Ledger) carry(e *entry, n *core.Next, out *outgoing) {
	if n.Lost > 0 {
		l.lose(n)
	}
	if n.Do != core.Send {
		return
	}
	switch len(out.reqs) {
	case 0:
		out.reqs, out.first = n.Charge, e
		return
	case 1:
		out.reqs = append(make([]*store.Request, 0, out.most), out.reqs...)
		out.entries = append(make([]*entry, 0, out.most), out.first)
	}
	out.reqs, out.entries = append(out.reqs, n.Charge...), append(out.entries, e)
}

// of returns the entry of the charge at a place.
func (out *outgoing) of(place int) *entry {
	if len(out.reqs) == 1 {
		return out.first
	}
	return out.entries[place]
}

func (l *Ledger) lose(n *core.Next) {
	if l.opts.OnUndelivered != nil {
		l.opts.OnUndelivered(cmp.Or(n.Shard, l.Owner(n.ClientKey)), n.Limit, algorithm.Charge, n.Lost, n.Err)
	}
}

// send sends charges through the view. No stripe is locked.
func (l *Ledger) send(out *outgoing) {
	switch reqs, first, entries := out.reqs, out.first, out.entries; len(reqs) {
	case 0:
	case 1:
		l.ChargeReported(reqs, func(_ int, st store.State) { l.delivered(first, reqs[0], &st) })
	default:
		l.ChargeReported(reqs, func(i int, st store.State) { l.delivered(entries[i], reqs[i], &st) })
	}
}

// delivered takes in the outcome of a charge, and sends the next one through the view that
// writes now. It reports whether the shard executed the charge.
func (l *Ledger) delivered(e *entry, r *store.Request, st *store.State) (executed bool) {
	w := l.writer()
	var out outgoing
	m := w.moment()
	e.acquire(&m)
	n := e.Delivered(r, st, &m)
	executed = !errors.Is(st.Err, store.ErrNotExecuted)
	if n.Arrived != nil {
		close(n.Arrived)
	}
	if n.Delivery > 0 {
		l.registry.delivery.Store(n.Delivery)
	}
	if n.Lost > 0 {
		if !errors.Is(n.Err, store.ErrGone) {
			l.lose(&n)
		}
		n.Lost = 0
	}
	if n.Do == core.Retry && !l.registry.enqueue(l.shardOf(r), e, st.Err) {
		if n = e.GiveUp(errEnded); n.Lost > 0 {
			l.lose(&n)
			n.Lost = 0
		}
	}
	w.finish(e, &n, nil, &out, &m)
	w.send(&out)
	return executed
}

// awaitTick makes the delayed charges of an entry leave at the next tick, with all others.
func (l *Ledger) awaitTick(e *entry) {
	b := l.registry
	e.stripe.delayed = append(e.stripe.delayed, e)
	due := b.now() + l.opts.ChargeDelay.Microseconds()
	if tick := b.tick.Load(); (tick == 0 || due < tick) && b.tick.CompareAndSwap(tick, due) {
		time.AfterFunc(l.opts.ChargeDelay, func() {
			b.tick.CompareAndSwap(due, 0)
			b.sendDelayed()
		})
	}
}

func (b *Registry) sendDelayed() {
	var delayed []*entry
	for i := range b.stripes {
		p := &b.stripes[i]
		p.mu.Lock()
		delayed = append(delayed, p.delayed...)
		clear(p.delayed)
		p.delayed = p.delayed[:0]
		p.mu.Unlock()
	}
	// The last view has given them up.
	senders := b.senders()
	for through, entries := range senders.by(delayed) {
		for part := range slices.Chunk(entries, tickBatch) {
			out := through.collect(part)
			through.send(&out)
		}
	}
}

// collect notes the waiting charges of entries as sent, and gives up expired ones.
func (l *Ledger) collect(entries []*entry) (out outgoing) {
	m := l.moment()
	out.most = len(entries)
	for _, e := range entries {
		e.acquire(&m)
		n := e.Send(&m)
		l.carry(e, &n, &out)
		e.release(&m)
	}
	return out
}

// retryQueue are the entries whose charges a shard did not execute, and why it did not execute the last one.
type retryQueue struct {
	entries []*entry
	why     error
}

// enqueue puts an entry, whose charge has failed, into the retry queue of a shard, and reports whether
// a view is left to deliver its charges. The entry's stripe is locked.
func (b *Registry) enqueue(owner string, e *entry, why error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.views) == 0 {
		return false
	}
	queue, ok := b.retryQueues[owner]
	if !ok {
		queue = new(retryQueue)
		b.retryQueues[owner] = queue
		go b.work(owner)
	}
	queue.entries, queue.why = append(queue.entries, e), why
	return true
}

// dequeue returns the first entries of a queue by the view that delivers their
// charges. Without entries it removes the queue, and its goroutine ends.
func (b *Registry) dequeue(owner string) map[*Ledger][]*entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.retryQueues[owner]
	n := min(len(queue.entries), retryBatch)
	if n == 0 {
		delete(b.retryQueues, owner)
		return nil
	}
	batch := queue.entries[:n:n]
	queue.entries = queue.entries[n:]
	senders := b.sendersLocked()
	return senders.by(batch)
}

func (b *Registry) work(owner string) {
	for pause := core.RetryPause(0, false); ; {
		time.Sleep(pause)
		batches := b.dequeue(owner)
		if len(batches) == 0 {
			return
		}
		isAnswered := false
		for through, batch := range batches {
			isAnswered = through.retry(batch) || isAnswered
		}
		pause = core.RetryPause(pause, isAnswered)
	}
}

// retry sends the charges of entries, waits for their outcome, and reports
// whether the shard answers. Charges that did not run are queued again.
func (l *Ledger) retry(batch []*entry) bool {
	out := l.collect(batch)
	if len(out.reqs) == 0 {
		return true
	}
	var executed atomic.Bool
	var left sync.WaitGroup
	left.Add(len(out.reqs))
	l.ChargeReported(out.reqs, func(i int, st store.State) {
		if l.delivered(out.of(i), out.reqs[i], &st) {
			executed.Store(true)
		}
		left.Done()
	})
	left.Wait()
	return executed.Load()
}

// awaitCharge waits until the bucket's charge in flight is answered, and reports
// whether that happened in time.
func (l *Ledger) awaitCharge(r *store.Request, until time.Time) bool {
	left := until.Sub(l.registry.clock())
	if left <= 0 {
		return false
	}
	arrived := l.arrival(r)
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

// awaitCharges waits until no charge of the bucket is in flight, and reports whether that happened in time.
func (l *Ledger) awaitCharges(r *store.Request, until time.Time) bool {
	for l.arrival(r) != nil {
		if !l.awaitCharge(r, until) {
			return false
		}
	}
	return true
}

// arrival returns a channel that is closed when the bucket's charge in flight is
// answered, or nil if there is none.
func (l *Ledger) arrival(r *store.Request) <-chan struct{} {
	e := l.look(r)
	if e == nil {
		return nil
	}
	defer e.stripe.mu.Unlock()
	t := e.Transit()
	if t == nil {
		return nil
	}
	if t.Arrived == nil {
		t.Arrived = make(chan struct{})
	}
	return t.Arrived
}

// shardOf returns the name of the shard that keeps the bucket of a request.
func (l *Ledger) shardOf(r *store.Request) string {
	if r.At != nil {
		return r.At.Shard
	}
	return l.Owner(r.ClientKey)
}

// IsNeeded reports whether charges or refunds are undelivered, or tokens are to be given
// back, and this view does that. A later view that runs does it instead, unless the view's
// config was rejected, and only that has the shard.
func (l *Ledger) IsNeeded() bool {
	b := l.registry
	b.mu.Lock()
	isCurrent, reserves := b.currentLocked() == l, len(b.reserved) > 0
	b.mu.Unlock()
	owes := b.owing.Load() > 0
	switch {
	case isCurrent:
		return owes || reserves
	case !l.isTrial():
		return false
	}
	senders := b.senders()
	return reserves && b.reservesThrough(l, &senders) || owes && b.owesThrough(l, &senders)
}

// reservesThrough reports whether the view gives back tokens.
func (b *Registry) reservesThrough(l *Ledger, senders *senders) bool {
	b.mu.Lock()
	reserved := slices.Collect(maps.Keys(b.reserved))
	b.mu.Unlock()
	return slices.ContainsFunc(reserved, func(e *entry) bool { return senders.of(e) == l })
}

// owesThrough reports whether the view sends what is undelivered.
func (b *Registry) owesThrough(l *Ledger, senders *senders) bool {
	for i := range b.stripes {
		p := &b.stripes[i]
		p.mu.Lock()
		for e := range p.entries.all {
			if e.Gauges().Owing > 0 && senders.of(e) == l {
				p.mu.Unlock()
				return true
			}
		}
		p.mu.Unlock()
	}
	return false
}

// Flush gives tokens back, and waits until all charges and refunds are
// delivered, another view delivers them, or ctx ends. A registry that began before a
// refund arrived would trust an answer that lacks it.
func (l *Ledger) Flush(ctx context.Context) {
	if !l.IsNeeded() {
		return
	}
	pause, isDone := flushTick, func() bool { return l.registry.owing.Load() == 0 || l.registry.current() != l }
	if l.registry.current() == l {
		l.registry.giveBack(0)
	} else {
		// Others go on to use what they have in their batches.
		pause, isDone = core.RetryPause(0, false), func() bool { return !l.IsNeeded() }
	}
	l.registry.sendDelayed()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for !isDone() {
		select {
		case <-tick.C:
			l.registry.sendDelayed()
		case <-ctx.Done():
			return
		}
	}
}
