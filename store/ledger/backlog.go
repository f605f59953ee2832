package ledger

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// backlogPause is how long a shard is left alone that refused a charge, and
	// backlogPatience is as long as that becomes.
	backlogPause    = 50 * time.Millisecond
	backlogPatience = time.Second
	// backlogBatch is how many charges are tried at a time.
	backlogBatch = 256
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
	line, ok := b.backlogs[owner]
	if !ok {
		go b.work(owner)
	}
	b.backlogs[owner] = append(line, e)
	return true
}

// dequeue returns the next entries and the view to deliver them through, or none,
// after which the caller ends.
func (b *Books) dequeue(owner string) (through *Ledger, batch []*entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	line := b.backlogs[owner]
	n := min(len(line), backlogBatch)
	if n == 0 {
		delete(b.backlogs, owner)
		return nil, nil
	}
	// It stays when it is empty: as long as there is one, the caller goes on.
	b.backlogs[owner] = line[n:]
	return b.currentLocked(), line[:n:n]
}

// work tries what waits for a shard until nothing does.
func (b *Books) work(owner string) {
	wait := backlogPause
	time.Sleep(wait)
	for {
		through, batch := b.dequeue(owner)
		if len(batch) == 0 {
			return
		}
		if through.try(batch) {
			wait = backlogPause
			continue
		}
		wait = min(2*wait, backlogPatience)
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
		case p.entries[e.id] != e || !e.debts.isUnsent():
			// It was given up, and may have begun anew.
		case e.debts.waiting.expires <= now:
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
		switch d := e.debts; {
		case d.isUnsent():
			l.giveUp(e, errEnded)
		case d != nil && d.waiting != nil:
			l.lose(d.waiting.req.ClientKey, d.waiting.requests, errEnded)
			e.setWaiting(nil)
		}
	}
}
