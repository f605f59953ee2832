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

var (
	errNoRoom = fmt.Errorf("%w: the ledger is full", store.ErrNotExecuted)
	// ErrExpired is the error of charges that could not be delivered before
	// their window was over.
	ErrExpired = fmt.Errorf("%w: their window is over", store.ErrNotExecuted)
	errEnded   = fmt.Errorf("%w: there was no time left to deliver them", store.ErrNotExecuted)
)

// debts are the charges of one bucket that the store has not confirmed. One is
// on its way at a time; what comes meanwhile is added up, and sent when that is
// answered. So an answer surely has in it what was sent before, and surely lacks
// what was not.
type pendingCharges struct {
	// sent is set while a charge is on its way; sentRequests is how many
	// requests it is for, and sentCost what they cost.
	sent         bool
	sentRequests int64
	sentCost     int64
	// sentAt is when it was sent; expires is when it is about the past.
	sentAt, expires int64
	// base is what was known when it was sent.
	base algorithm.Known
	// waiting is what comes next, or nil.
	waiting *mergedCharge
	// heard is what was said since that was sent, or nil.
	heard *algorithm.Known
	// arrived is closed when that is answered; nil if nobody waits.
	arrived chan struct{}
	// isStale is set if the bucket was reset since that was sent.
	isStale bool
}

// isUnsent reports whether there are debts of which none is on its way: they are
// in a backlog, or with the goroutine that tries it.
func (d *pendingCharges) isUnsent() bool { return d != nil && !d.sent }

// debt is charges added up.
type mergedCharge struct {
	req      store.Request
	requests int64
	expires  int64
}

// owed is what the charges cost.
func (d *pendingCharges) owed() int64 {
	if d.waiting == nil {
		return d.sentCost
	}
	return d.sentCost + d.waiting.req.Cost
}

// add adds a charge, of so many requests.
func (w *mergedCharge) add(cost, requests, expires int64) {
	w.req.Cost += min(cost, store.MaxInteger-w.req.Cost)
	w.requests += requests
	w.expires = min(w.expires, expires)
}

// onBase is what was known when that was sent, with so much charged on top, and
// raised by what is known.
func (d *pendingCharges) onBase(r *store.Request, cost int64, known algorithm.Known, now int64) algorithm.Known {
	base := d.base
	charge(&base, r, cost, now)
	base.Raise(r.Limit, known, now)
	return base
}

func (e *entry) isSent() bool { return e.pending != nil && e.pending.sent }

// note remembers what was said while a charge is on its way.
func (d *pendingCharges) note(limit *store.Limit, word algorithm.Known, storeNow int64) {
	if d.heard == nil {
		d.heard = &word
		return
	}
	d.heard.Raise(limit, word, storeNow)
}

// Settle ends what the requests hold in flight, and charges their costs, without
// being waited for. A request whose cost turned out to be another than what it
// held has its own in held; nil if none has. reqs are not changed any more.
func (l *Ledger) Settle(reqs []store.Request, held []int64) {
	now := l.books.now()
	if len(reqs) == 1 {
		if e := l.settle(&reqs[0], holdOf(reqs, held, 0), now); e != nil {
			l.deliver(reqs, e)
		}
		return
	}
	var send []sending
	for i := range reqs {
		if e := l.settle(&reqs[i], holdOf(reqs, held, i), now); e != nil {
			send = append(send, sending{&reqs[i], e})
		}
	}
	if len(send) > 0 {
		l.deliverSome(send)
	}
}

// holdOf is what a request holds in flight.
func holdOf(reqs []store.Request, held []int64, i int) int64 {
	if held == nil {
		return reqs[i].Cost
	}
	return held[i]
}

// sending is a charge that is to be sent, and the entry that owes it.
type sending struct {
	req   *store.Request
	entry *entry
}

// settle returns the entry if the charge is to be sent.
func (l *Ledger) settle(r *store.Request, hold, now int64) *entry {
	e := l.enter(r, now)
	defer e.page.mu.Unlock()
	e.hold(-hold)
	if r.Cost == 0 {
		return nil
	}
	expires := now + r.Limit.Window.Microseconds()
	if r.Limit.Algorithm == store.FixedWindow && e.known.IsOpen(r.Limit, now+e.clock) {
		expires = e.known.WindowEnd() - e.clock
	}
	e.keepUntil(r, now)
	if !algorithm.Copies(r.Limit.Algorithm) {
		e.charged = now
	}
	if e.pending == nil {
		l.books.owing.Add(1)
		e.pending = &pendingCharges{sent: true, sentRequests: 1, sentCost: r.Cost, sentAt: now, expires: expires, base: e.known}
		return e
	}
	w := e.pending.waiting
	if w != nil && w.expires <= now {
		l.lose(w.req.ClientKey, w.requests, ErrExpired)
		e.setWaiting(nil)
		w = nil
	}
	if w == nil {
		e.setWaiting(&mergedCharge{req: *r, requests: 1, expires: expires})
		return nil
	}
	e.addWaiting(r.Cost, 1, expires)
	cost := w.req.Cost
	// What the limit is now, the newer request says.
	w.req = *r
	w.req.Cost = cost
	return nil
}

// deliver sends one charge that is noted as sent.
func (l *Ledger) deliver(reqs []store.Request, e *entry) {
	w := l.writer()
	w.store.ChargeReported(reqs, func(_ int, st store.State) { w.delivered(e, &reqs[0], &st) })
}

// deliverSome sends several, in one call.
func (l *Ledger) deliverSome(send []sending) {
	reqs := make([]store.Request, len(send))
	for i := range send {
		reqs[i] = *send[i].req
	}
	w := l.writer()
	w.store.ChargeReported(reqs, func(i int, st store.State) { w.delivered(send[i].entry, &reqs[i], &st) })
}

// delivered takes in what became of a charge, and sends the next.
func (l *Ledger) delivered(e *entry, r *store.Request, st *store.State) {
	if next := l.conclude(e, r, st); next != nil {
		l.deliver(next, e)
	}
}

// conclude takes in what became of a charge, and returns the next. An entry
// that owes something stays in the books.
func (l *Ledger) conclude(e *entry, r *store.Request, st *store.State) []store.Request {
	e.page.mu.Lock()
	defer e.page.mu.Unlock()
	now := l.books.now()
	if e.charged > 0 {
		e.charged = now
	}
	d := e.pending
	requests, cost := d.sentRequests, d.sentCost
	d.sent, d.sentRequests, d.sentCost = false, 0, 0
	if d.arrived != nil {
		close(d.arrived)
		d.arrived = nil
	}
	heard := d.heard
	d.heard = nil
	e.confirmed = now
	switch {
	case d.isStale:
		// What it says may be about what was there before, and whether it counts
		// in what is there now is for the primary to say.
		d.isStale, e.doubted = false, true
	case st.Err == nil:
		e.clock, e.silent = st.Now-now, false
		word := algorithm.Known{Content: st.Content}
		if algorithm.Copies(r.Limit.Algorithm) {
			word.KeepPenalty(r.Limit, e.known)
			e.noteSoleWriter(r, word, st.Now, now)
		} else {
			word.Content[confirmedUsed] = st.Used
		}
		e.confirm(word, d.sentAt)
		if e.check != nil {
			e.check.landed += cost
		}
		if heard != nil {
			if e.known.Raise(r.Limit, *heard, st.Now); e.known != word {
				e.soleWriter = 0
			}
		}
		e.keepUntil(r, now)
	case errors.Is(st.Err, store.ErrUncertain):
		// It counts here as spent until the primary says otherwise.
		e.suspect(r, cost, now+e.clock)
		l.lose(r.ClientKey, requests, st.Err)
	case errors.Is(st.Err, store.ErrFinal):
		e.silent = true
		l.lose(r.ClientKey, requests, st.Err)
	default:
		e.silent = true
		l.putBack(e, r, requests)
		return nil
	}
	return l.sendNext(e, now)
}

// sendNext makes what waits be on its way, and returns it.
func (l *Ledger) sendNext(e *entry, now int64) []store.Request {
	d := e.pending
	w := d.waiting
	e.setWaiting(nil)
	if w == nil {
		e.pending = nil
		l.books.owing.Add(-1)
		return nil
	}
	reqs := []store.Request{w.req}
	d.sent, d.sentRequests, d.sentCost, d.sentAt, d.expires = true, w.requests, w.req.Cost, now, w.expires
	d.base = e.known
	return reqs
}

// suspect notes that so much may have been spent. What is known may have it
// already.
func (e *entry) suspect(r *store.Request, cost, storeNow int64) {
	e.doubted, e.soleWriter = true, 0
	e.noteUnsure(true)
	if !e.isBase(e.pending, r.Limit, storeNow) {
		e.loose += cost
		return
	}
	e.known = e.pending.onBase(r, cost, e.known, storeNow)
}

// putBack keeps a charge that did not run, and makes it wait for its shard.
func (l *Ledger) putBack(e *entry, r *store.Request, requests int64) {
	d := e.pending
	if d.waiting != nil {
		e.addWaiting(r.Cost, requests, d.expires)
	} else {
		e.setWaiting(&mergedCharge{req: *r, requests: requests, expires: d.expires})
	}
	if !l.books.enqueue(l.store.Owner(r.ClientKey), e) {
		l.giveUp(e, errEnded)
	}
}

// giveUp drops what waits.
func (l *Ledger) giveUp(e *entry, err error) {
	if w := e.pending.waiting; w != nil {
		l.lose(w.req.ClientKey, w.requests, err)
		e.setWaiting(nil)
	}
	e.pending = nil
	l.books.owing.Add(-1)
}

func (l *Ledger) lose(clientKey string, requests int64, err error) {
	if l.opts.OnUndelivered != nil {
		l.opts.OnUndelivered(l.store.Owner(clientKey), algorithm.Charge, requests, err)
	}
}

const (
	// retryPause is how long a shard is left alone that refused a charge, and
	// maxRetryPause is as long as that becomes.
	retryPause    = 50 * time.Millisecond
	maxRetryPause = time.Second
	// retryBatch is how many charges are tried at a time.
	retryBatch = 256
	// flushTick is how often a flush looks whether it is done.
	flushTick = 5 * time.Millisecond
)

// enqueue makes an entry wait for a shard, and reports whether there is a view to
// deliver its charges. Its page is locked.
func (b *Books) enqueue(owner string, e *entry) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.views) == 0 {
		return false
	}
	line, ok := b.retryQueues[owner]
	if !ok {
		go b.work(owner)
	}
	b.retryQueues[owner] = append(line, e)
	return true
}

// dequeue returns the next entries and the view to deliver them through, or none,
// after which the caller ends.
func (b *Books) dequeue(owner string) (through *Ledger, batch []*entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	line := b.retryQueues[owner]
	n := min(len(line), retryBatch)
	if n == 0 {
		delete(b.retryQueues, owner)
		return nil, nil
	}
	// It stays when it is empty: as long as there is one, the caller goes on.
	b.retryQueues[owner] = line[n:]
	return b.currentLocked(), line[:n:n]
}

// work tries what waits for a shard until nothing does.
func (b *Books) work(owner string) {
	wait := retryPause
	time.Sleep(wait)
	for {
		through, batch := b.dequeue(owner)
		if len(batch) == 0 {
			return
		}
		if through.try(batch) {
			wait = retryPause
			continue
		}
		wait = min(2*wait, maxRetryPause)
		time.Sleep(wait)
	}
}

// try sends what waits in the entries, waits for what becomes of it, and reports
// whether the shard answers. What it refuses is enqueued again.
func (l *Ledger) try(batch []*entry) bool {
	reqs, owing := l.takeWaiting(batch)
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
		l.delivered(owing[i], &reqs[i], &st)
		if left.Add(-1) == 0 {
			close(finished)
		}
	})
	<-finished
	return refused.Load() < int64(len(reqs))
}

// takeWaiting makes what waits in the entries be on its way, and gives up what
// is about the past.
func (l *Ledger) takeWaiting(batch []*entry) (reqs []store.Request, owing []*entry) {
	now := l.books.now()
	for _, e := range batch {
		p := e.page
		p.mu.Lock()
		switch {
		case p.entries[e.id] != e || !e.pending.isUnsent():
			// It was given up, and may have begun anew.
		case e.pending.waiting.expires <= now:
			l.giveUp(e, ErrExpired)
		default:
			reqs, owing = append(reqs, l.sendNext(e, now)...), append(owing, e)
		}
		p.mu.Unlock()
	}
	return reqs, owing
}

// Owes reports whether the books have charges or refunds that were not delivered,
// or events to give back.
func (l *Ledger) Owes() bool {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	return l.books.owes()
}

// owes is [Ledger.Owes], with mu held.
func (b *Books) owes() bool { return b.owing.Load() > 0 || len(b.reserved) > 0 }

// IsNeeded reports whether something is owed that is delivered through this view.
// It is not once a later view runs.
func (l *Ledger) IsNeeded() bool {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	return l.books.owes() && l.books.currentLocked() == l
}

// Flush gives back what was taken in advance, and waits until the charges and
// refunds have been delivered that are on their way or wait, until another view
// delivers them, or until ctx ends. Books that began before a refund arrived would
// trust a word that lacks it.
func (l *Ledger) Flush(ctx context.Context) {
	if !l.IsNeeded() {
		return
	}
	l.books.giveBack(0)
	tick := time.NewTicker(flushTick)
	defer tick.Stop()
	for l.books.owing.Load() > 0 && l.books.current() == l {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// giveUpAll gives up what waits in p, which is locked.
func (l *Ledger) giveUpAll(p *page) {
	for _, e := range p.ring {
		switch d := e.pending; {
		case d.isUnsent():
			l.giveUp(e, errEnded)
		case d != nil && d.waiting != nil:
			l.lose(d.waiting.req.ClientKey, d.waiting.requests, errEnded)
			e.setWaiting(nil)
		}
	}
}
