package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// retryPause is the first pause after a shard executed none of the charges
	// it was sent. Pauses double up to maxRetryPause.
	retryPause    = 50 * time.Millisecond
	maxRetryPause = time.Second
	// retryBatch is how many charges a retry sends.
	retryBatch = 256
	// tickBatch is how many charges a tick sends in a call. A call is what lanes count.
	tickBatch = 32
	// flushTick is the interval at which a flush looks whether it is done.
	flushTick = 5 * time.Millisecond
)

var (
	errNoRoom = fmt.Errorf("%w: the ledger is full", store.ErrNotExecuted)
	// ErrExpired is the error of charges that could not be delivered while they
	// counted.
	ErrExpired = fmt.Errorf("%w: their window is over", store.ErrNotExecuted)
	errEnded   = fmt.Errorf("%w: there was no time left to deliver them", store.ErrNotExecuted)
)

// pendingCharges are the charges of one bucket that the store has not confirmed: one in
// flight, which an answer may count, and later ones, merged, which no answer counts.
type pendingCharges struct {
	// sent is set while a charge is in flight, for sentRequests requests that
	// cost sentCost.
	sent         bool
	sentRequests int64
	sentCost     int64
	// sentAt is when the charge was sent; expires is when it counts no more.
	sentAt, expires int64
	// via is the view through whose store the charge was sent.
	via *Ledger
	// base is what was known when the charge was sent; age is that of a charge that had waited.
	base algorithm.Known
	age  *age
	// waiting is the next charge, or nil.
	waiting *mergedCharge
	// held is set while waiting is for the next tick.
	held bool
	// heard sums up the answers since the charge was sent; nil without one.
	heard *algorithm.Known
	// arrived is closed when the charge is answered; nil if no request waits.
	arrived chan struct{}
	// isStale is set if the bucket was reset since the charge was sent.
	isStale bool
}

// mergedCharge is a charge for several requests.
type mergedCharge struct {
	req      store.Request
	requests int64
	expires  int64
	age      *age
}

// isQueued reports whether charges are pending and none is in flight: they are held
// for the next tick, in a retry queue, or with its goroutine.
func (p *pendingCharges) isQueued() bool { return p != nil && !p.sent }

// cost is what the charges would count by now, had they arrived at once.
func (p *pendingCharges) cost(now int64) int64 {
	if p.waiting == nil {
		return p.sentCost
	}
	return p.sentCost + p.waiting.left(now)
}

// withCharge is what was known when the charge was sent, with a cost charged on top,
// raised by what is known now.
func (p *pendingCharges) withCharge(r *store.Request, cost int64, known algorithm.Known, now int64) algorithm.Known {
	base := p.base
	base.Charge(r, cost, now)
	base.Raise(r.Limit, known, now)
	return base
}

// note remembers an answer that comes while a charge is in flight.
func (p *pendingCharges) note(limit *store.Limit, answer algorithm.Known, storeNow int64) {
	if p.heard == nil {
		p.heard = &answer
		return
	}
	p.heard.Raise(limit, answer, storeNow)
}

func (e *entry) isSent() bool { return e.pending != nil && e.pending.sent }

func (e *entry) setWaiting(w *mergedCharge) {
	p := e.pending
	if p.waiting != nil {
		e.countUnsent(-p.waiting.requests)
	}
	if p.waiting = w; w != nil {
		e.countUnsent(w.requests)
	}
}

// countUnsent counts requests whose charges wait, except for the next tick.
func (e *entry) countUnsent(requests int64) {
	if !e.pending.held {
		e.page.counts.Unsent += requests
	}
}

func (e *entry) addWaiting(r *store.Request, requests, expires, now int64) {
	w := e.pending.waiting
	if w == nil {
		w = &mergedCharge{req: *r, requests: requests, expires: expires, age: e.newAge(r, e.known, now)}
		e.setWaiting(w)
		return
	}
	w.age.add(r, now)
	w.merge(r, requests, expires)
	e.countUnsent(requests)
}

// waitAgain makes the charge that was in flight and did not run wait, before those that
// came later.
func (e *entry) waitAgain(r *store.Request, requests, now int64) {
	p := e.pending
	age := p.age
	if age == nil {
		age = e.newAge(r, p.base, p.sentAt)
	}
	w := p.waiting
	if w == nil {
		e.setWaiting(&mergedCharge{req: *r, requests: requests, expires: p.expires, age: age})
		return
	}
	later := w.req
	later.Cost = w.left(now)
	age.least = min(age.least, w.age.least)
	w.age = age
	w.age.add(&later, now)
	w.merge(r, requests, p.expires)
	e.countUnsent(requests)
}

func (w *mergedCharge) merge(r *store.Request, requests, expires int64) {
	w.req.Events = algorithm.MergedEvents(&w.req, r)
	w.req.Cost += min(r.Cost, store.MaxInteger-w.req.Cost)
	w.requests += requests
	if algorithm.Of(r.Limit.Algorithm).Windowed {
		w.expires = min(w.expires, expires)
	} else {
		w.expires = max(w.expires, expires)
	}
}

// Settle ends what the requests hold in flight, and charges their costs without
// waiting for the store. held has what each request holds, if that differs from
// its cost; nil means the costs. The caller must not change reqs afterwards.
func (l *Ledger) Settle(reqs []store.Request, held []int64) {
	now, w := l.books.now(), l.writer()
	if len(reqs) == 1 {
		if due, e := l.settle(reqs, 0, holdOf(reqs, held, 0), now, w); e != nil {
			w.deliver(due, e)
		}
		return
	}
	var due []store.Request
	var entries []*entry
	for i := range reqs {
		if charges, e := l.settle(reqs, i, holdOf(reqs, held, i), now, w); e != nil {
			due, entries = append(due, charges...), append(entries, e)
		}
	}
	w.deliverAll(due, entries)
}

func holdOf(reqs []store.Request, held []int64, i int) int64 {
	if held == nil {
		return reqs[i].Cost
	}
	return held[i]
}

// settle ends what the request at a place holds, and notes its charge. It returns
// the charge and the entry if the charge is to be sent at once, through the view w.
func (l *Ledger) settle(reqs []store.Request, place int, hold, now int64, w *Ledger) ([]store.Request, *entry) {
	r := &reqs[place]
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	e.hold(-hold)
	if r.Cost == 0 {
		return nil, nil
	}
	e.countOwn(r, now)
	expires := l.expiryOf(e, r, now)
	e.keepUntil(r, now)
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		e.rarely().charged = now
	}
	holds := l.holds(e, r, now)
	switch {
	case e.pending == nil && holds:
		l.books.owing.Add(1)
		e.pending = &pendingCharges{held: true, sentAt: now, base: e.known}
		e.addWaiting(r, 1, expires, now)
		l.awaitTick(e, now)
		return nil, nil
	case e.pending == nil:
		l.books.owing.Add(1)
		e.pending = &pendingCharges{sent: true, sentRequests: 1, sentCost: r.Cost, sentAt: now, expires: expires, via: w, base: e.known}
		r.Until = e.openUntil(r, now)
		return reqs[place : place+1], e
	}
	if older := e.pending.waiting; older != nil && older.expires <= now {
		l.dropWaiting(e, ErrExpired)
	}
	e.addWaiting(r, 1, expires, now)
	// The newer request has the limit that holds now.
	merged := e.pending.waiting
	cost, events := merged.req.Cost, merged.req.Events
	merged.req = *r
	merged.req.Cost, merged.req.Events = cost, events
	if e.pending.held && (!holds || e.soleWriter == 0) {
		return w.sendNext(e, now), e
	}
	return nil, nil
}

// expiryOf is the instant from which nothing of the charge of r counts any more, with what
// is pending before it.
func (l *Ledger) expiryOf(e *entry, r *store.Request, now int64) int64 {
	t := algorithm.Of(r.Limit.Algorithm)
	switch {
	case !t.Copies():
		return now + r.Limit.Window.Microseconds()
	case t.Windowed && e.known.IsOpen(r.Limit, now+e.clock):
		return e.known.WindowEnd() - e.clock
	}
	clock, cost := e.clock, r.Cost
	if clock == 0 {
		// The store has not told its time yet.
		clock = l.books.clock().UnixMicro() - now
	}
	if p := e.pending; p != nil {
		cost += min(p.cost(now), store.MaxInteger-cost)
	}
	return e.known.ChargeExpiry(r, cost, now+clock) - clock
}

// holds reports whether the charge of a request may wait for the next tick: that makes
// pipelines longer, and the charges of one bucket become one.
func (l *Ledger) holds(e *entry, r *store.Request, now int64) bool {
	switch {
	case l.opts.ChargeDelay == 0, e.silent, e.doubted, e.unsure, e.refunds > 0, e.past().loose > 0, e.resets:
		return false
	case l.books.inUse.Load() == 0:
		// No tick is to come.
		return false
	case !algorithm.Of(r.Limit.Algorithm).Windowed, e.openUntil(r, now)-e.clock-now <= 2*l.opts.ChargeDelay.Microseconds():
		return false
	}
	asked := *r
	asked.Reserved = 0
	v := e.viewOf(&asked, nil, now+e.clock)
	st := v.ahead(0)
	return 2*(st.Remaining-v.flight-r.Cost) >= st.Limit
}

// openUntil is the end of the window that is known to be open and stored, or 0. An
// aligned window is stored once something counts in it.
func (e *entry) openUntil(r *store.Request, now int64) int64 {
	if !algorithm.Of(r.Limit.Algorithm).Windowed || e.doubted || !e.known.IsOpen(r.Limit, now+e.clock) {
		return 0
	}
	if r.Limit.Align && e.known.Content[0] == 0 {
		return 0
	}
	if e.known.Content[0] > store.MaxInteger/2 || r.Cost > store.MaxInteger/4 {
		// Only the script stops the count at MaxInteger.
		return 0
	}
	return e.known.WindowEnd()
}

// awaitTick makes the held charges of an entry leave at the next tick, with all others.
func (l *Ledger) awaitTick(e *entry, now int64) {
	b := l.books
	e.page.held = append(e.page.held, e)
	due := now + l.opts.ChargeDelay.Microseconds()
	if tick := b.tick.Load(); (tick == 0 || due < tick) && b.tick.CompareAndSwap(tick, due) {
		time.AfterFunc(l.opts.ChargeDelay, func() {
			b.tick.CompareAndSwap(due, 0)
			b.sendHeld()
		})
	}
}

func (b *Books) sendHeld() {
	through := b.current()
	if through == nil {
		// The last view gave them up.
		return
	}
	var held []*entry
	for i := range b.pages {
		p := &b.pages[i]
		p.mu.Lock()
		held = append(held, p.held...)
		clear(p.held)
		p.held = p.held[:0]
		p.mu.Unlock()
	}
	for len(held) > 0 {
		n := min(len(held), tickBatch)
		through.deliverAll(through.takeWaiting(held[:n]))
		held = held[n:]
	}
}

func (p *pendingCharges) isHeld() bool { return p != nil && p.held }

// deliver sends a charge that is noted as sent through the view.
func (l *Ledger) deliver(reqs []store.Request, e *entry) {
	l.store.ChargeReported(reqs, func(_ int, st store.State) { l.delivered(e, &reqs[0], &st) })
}

func (l *Ledger) deliverAll(reqs []store.Request, entries []*entry) {
	if len(reqs) > 0 {
		l.store.ChargeReported(reqs, func(i int, st store.State) { l.delivered(entries[i], &reqs[i], &st) })
	}
}

// delivered takes in the outcome of a charge, and sends the next one.
func (l *Ledger) delivered(e *entry, r *store.Request, st *store.State) {
	w := l.writer()
	if next := l.conclude(e, r, st, w); next != nil {
		w.deliver(next, e)
	}
}

// conclude takes in the outcome of a charge, and returns the next one, which goes
// through the view w. An entry with pending charges stays in the books.
func (l *Ledger) conclude(e *entry, r *store.Request, st *store.State, w *Ledger) []store.Request {
	e.page.mu.Lock()
	defer e.page.mu.Unlock()
	now := l.books.now()
	if e.past().charged > 0 {
		e.rarely().charged = now
	}
	p := e.pending
	requests, cost, heard := p.sentRequests, p.sentCost, p.heard
	p.sent, p.sentRequests, p.sentCost, p.heard = false, 0, 0, nil
	if p.arrived != nil {
		close(p.arrived)
		p.arrived = nil
	}
	e.written = now
	switch {
	case p.isStale:
		// The reply may predate the reset, and only the primary knows whether
		// the charge counts after it.
		p.isStale, e.doubted = false, true
	case st.Err == nil:
		e.clock, e.silent = st.Now-now, false
		l.books.noteDelivery(now - p.sentAt)
		reply := algorithm.Known{Content: st.Content}
		if algorithm.Of(r.Limit.Algorithm).Copies() {
			reply.KeepPenalty(r.Limit, e.known)
			e.noteSoleWriter(r, reply, st.Now, now)
		} else {
			if reply.Content[confirmedUsed] = st.Used; mayLack(p.sentAt, e.past().took) {
				// A take may have come later, and been answered first.
				reply.Content[confirmedUsed] = max(st.Used, e.known.Content[confirmedUsed])
			}
		}
		e.confirm(reply, p.sentAt)
		if e.check != nil {
			e.check.landed += cost
		}
		if heard != nil {
			if e.known.Raise(r.Limit, *heard, st.Now); e.known != reply {
				e.soleWriter = 0
			}
		}
		e.keepUntil(r, now)
	case errors.Is(st.Err, store.ErrUncertain):
		e.suspect(r, cost, now+e.clock)
		l.lose(r.ClientKey, requests, st.Err)
	case errors.Is(st.Err, store.ErrFinal):
		e.silent = true
		l.lose(r.ClientKey, requests, st.Err)
	default:
		e.silent = true
		// The charge did not run: it waits for its shard.
		e.waitAgain(r, requests, now)
		if !l.books.enqueue(l.store.Owner(r.ClientKey), e) {
			l.giveUp(e, errEnded)
		}
		return nil
	}
	if next := p.waiting; next != nil && e.soleWriter != 0 && w.holds(e, &next.req, now) {
		e.page.counts.Unsent -= next.requests
		p.held, p.sentAt, p.base = true, now, e.known
		w.awaitTick(e, now)
		return nil
	}
	return w.sendNext(e, now)
}

// noteDelivery notes how long a charge took.
func (b *Books) noteDelivery(took int64) {
	took = max(took, 1)
	was := b.delivery.Load()
	if was > 0 {
		took = was + (took-was)/8
	}
	b.delivery.Store(took)
}

// noteSoleWriter notes whether the reply adds the charge to what was known, and no more.
func (e *entry) noteSoleWriter(r *store.Request, reply algorithm.Known, storeNow, now int64) {
	expected := e.pending.base
	expected.Charge(r, r.Cost, storeNow)
	switch {
	case reply != expected:
		e.soleWriter = 0
	case e.soleWriter == 0:
		e.soleWriter = now
	}
}

// suspect counts a charge of unknown outcome until the primary answers. What is
// known may count it already.
func (e *entry) suspect(r *store.Request, cost, storeNow int64) {
	e.doubted, e.soleWriter = true, 0
	e.noteUnsure(true)
	if !e.countsInOpenWindow(e.pending, r.Limit, storeNow) {
		e.rarely().loose += cost
		return
	}
	e.known = e.pending.withCharge(r, cost, e.known, storeNow)
}

// sendNext notes the waiting charge as sent through the view, and returns it.
func (l *Ledger) sendNext(e *entry, now int64) []store.Request {
	p := e.pending
	w := p.waiting
	e.setWaiting(nil)
	if w == nil {
		l.endPending(e)
		return nil
	}
	w.shrink(now)
	p.age = w.age
	p.sent, p.sentRequests, p.sentCost, p.sentAt, p.expires = true, w.requests, w.req.Cost, now, w.expires
	p.held, p.via, p.base = false, l, e.known
	w.req.Until = e.openUntil(&w.req, now)
	return []store.Request{w.req}
}

func (l *Ledger) endPending(e *entry) {
	e.pending = nil
	l.books.owing.Add(-1)
}

// giveUp drops the charges of an entry that has none in flight.
func (l *Ledger) giveUp(e *entry, err error) {
	l.dropWaiting(e, err)
	l.endPending(e)
}

// offset makes the waiting charges spend less by what a refused take has spent, and reports
// whether they were as much. So nothing depends on a refund, which may fail.
func (l *Ledger) offset(e *entry, cost, now int64) bool {
	p := e.pending
	if p == nil || p.waiting == nil || p.waiting.expires <= now {
		return false
	}
	if p.waiting.shrink(now); p.waiting.req.Cost < cost {
		return false
	}
	if p.waiting.req.Cost -= cost; p.waiting.req.Cost == 0 {
		if e.setWaiting(nil); !p.sent {
			l.endPending(e)
		}
	}
	return true
}

func (l *Ledger) dropWaiting(e *entry, err error) {
	if w := e.pending.waiting; w != nil {
		l.lose(w.req.ClientKey, w.requests, err)
		e.setWaiting(nil)
	}
}

// giveUpAll drops all waiting charges of p, which is locked.
func (l *Ledger) giveUpAll(p *page) {
	for e := range p.entries.all {
		switch {
		case e.pending.isQueued():
			l.giveUp(e, errEnded)
		case e.pending != nil:
			l.dropWaiting(e, errEnded)
		}
	}
}

func (l *Ledger) lose(clientKey string, requests int64, err error) {
	if l.opts.OnUndelivered != nil {
		l.opts.OnUndelivered(l.store.Owner(clientKey), algorithm.Charge, requests, err)
	}
}

// enqueue puts an entry into the retry queue of a shard, and reports whether a
// view is left to deliver its charges. The entry's page is locked.
func (b *Books) enqueue(owner string, e *entry) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.views) == 0 {
		return false
	}
	queue, ok := b.retryQueues[owner]
	if !ok {
		go b.work(owner)
	}
	b.retryQueues[owner] = append(queue, e)
	return true
}

// dequeue returns the first entries of a queue and the view that delivers their
// charges. Without entries it removes the queue, and its goroutine ends.
func (b *Books) dequeue(owner string) (through *Ledger, batch []*entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.retryQueues[owner]
	n := min(len(queue), retryBatch)
	if n == 0 {
		delete(b.retryQueues, owner)
		return nil, nil
	}
	b.retryQueues[owner] = queue[n:]
	return b.currentLocked(), queue[:n:n]
}

func (b *Books) work(owner string) {
	pause := retryPause
	time.Sleep(pause)
	for {
		through, batch := b.dequeue(owner)
		if len(batch) == 0 {
			return
		}
		if through.retry(batch) {
			pause = retryPause
			continue
		}
		pause = min(2*pause, maxRetryPause)
		time.Sleep(pause)
	}
}

// retry sends the charges of entries, waits for their outcome, and reports
// whether the shard answers. Charges that did not run are queued again.
func (l *Ledger) retry(batch []*entry) bool {
	reqs, entries := l.takeWaiting(batch)
	if len(reqs) == 0 {
		return true
	}
	var left, refused atomic.Int64
	left.Store(int64(len(reqs)))
	finished := make(chan struct{})
	l.store.ChargeReported(reqs, func(i int, st store.State) {
		if errors.Is(st.Err, store.ErrNotExecuted) && !errors.Is(st.Err, store.ErrFinal) {
			refused.Add(1)
		}
		l.delivered(entries[i], &reqs[i], &st)
		if left.Add(-1) == 0 {
			close(finished)
		}
	})
	<-finished
	return refused.Load() < int64(len(reqs))
}

// takeWaiting notes the queued charges of entries as sent, and gives up expired ones.
func (l *Ledger) takeWaiting(batch []*entry) (reqs []store.Request, entries []*entry) {
	now := l.books.now()
	for _, e := range batch {
		p := e.page
		p.mu.Lock()
		switch {
		case !e.pending.isQueued():
			// It was given up.
		case e.pending.waiting.expires <= now:
			l.giveUp(e, ErrExpired)
		default:
			reqs, entries = append(reqs, l.sendNext(e, now)...), append(entries, e)
		}
		p.mu.Unlock()
	}
	return reqs, entries
}

// IsNeeded reports whether charges or refunds are undelivered, or tokens are to be given
// back, and this view does that. A later view that runs does it instead.
func (l *Ledger) IsNeeded() bool {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	return (l.books.owing.Load() > 0 || len(l.books.reserved) > 0) && l.books.currentLocked() == l
}

// Flush gives reserved tokens back, and waits until all charges and refunds are
// delivered, another view delivers them, or ctx ends. Books that began before a
// refund arrived would trust an answer that lacks it.
func (l *Ledger) Flush(ctx context.Context) {
	if !l.IsNeeded() {
		return
	}
	l.books.giveBack(0)
	l.books.sendHeld()
	tick := time.NewTicker(flushTick)
	defer tick.Stop()
	for l.books.owing.Load() > 0 && l.books.current() == l {
		select {
		case <-tick.C:
			l.books.sendHeld()
		case <-ctx.Done():
			return
		}
	}
}
