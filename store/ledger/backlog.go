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
)

// enqueue makes an entry wait for a shard. Its page is locked.
func (b *Books) enqueue(owner string, e *entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	line, ok := b.backlogs[owner]
	if !ok {
		go b.work(owner)
	}
	b.backlogs[owner] = append(line, e)
}

// dequeue returns the next entries, or none, after which the caller ends.
func (b *Books) dequeue(owner string) []*entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	line := b.backlogs[owner]
	n := min(len(line), backlogBatch)
	if n == 0 {
		delete(b.backlogs, owner)
		return nil
	}
	// It stays when it is empty: as long as there is one, the caller goes on.
	b.backlogs[owner] = line[n:]
	return line[:n:n]
}

// work tries what waits for a shard until nothing does.
func (b *Books) work(owner string) {
	wait := backlogPause
	time.Sleep(wait)
	for {
		batch := b.dequeue(owner)
		if len(batch) == 0 {
			return
		}
		if b.try(batch) {
			wait = backlogPause
			continue
		}
		wait = min(2*wait, backlogPatience)
		time.Sleep(wait)
	}
}

// try sends what waits in the entries, waits for what becomes of it, and tells
// whether the shard answers. What it refuses is enqueued again.
func (b *Books) try(batch []*entry) bool {
	l := b.current()
	if l == nil {
		// The last view is gone, and waits no longer.
		return false
	}
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
		if p.entries[e.id] == e && e.debts != nil && e.debts.queued {
			e.debts.queued = false
			switch w := e.debts.waiting; {
			case e.debts.sent:
			case w == nil || w.expires <= now:
				l.giveUp(e, ErrExpired)
			default:
				reqs, owing = append(reqs, l.sendNext(e, now)...), append(owing, e)
			}
		}
		p.mu.Unlock()
	}
	return reqs, owing
}

// Owes tells whether something waits that would be lost with the ledger.
func (l *Ledger) Owes() bool {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	return l.books.owing.Load() > 0 || len(l.books.reserved) > 0
}

// Flush gives back what was taken in advance, and waits until the charges have
// been delivered that are on their way or wait, or until ctx ends: then it gives
// up, and reports what is left.
func (l *Ledger) Flush(ctx context.Context) {
	l.books.giveBack(0)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for l.books.owing.Load() > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			l.abandon()
			return
		}
	}
}

// abandon gives up what waits.
func (l *Ledger) abandon() {
	for i := range l.books.pages {
		p := &l.books.pages[i]
		p.mu.Lock()
		for _, e := range p.ring {
			switch d := e.debts; {
			case d == nil:
			case !d.sent:
				l.giveUp(e, errEnded)
			case d.waiting != nil:
				l.lose(d.waiting.req.ClientKey, d.waiting.requests, errEnded)
				e.setWaiting(nil)
			}
		}
		p.mu.Unlock()
	}
}
