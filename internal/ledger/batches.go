package ledger

import (
	"context"
	"crypto/rand"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// reapPause is the interval at which idle tokens are looked for.
	reapPause = 250 * time.Millisecond

	// membershipZone is the zone in which processes count themselves. No
	// configured zone can have its name.
	membershipZone = "*processes"
	// membershipPeriod is the interval at which a process renews its lease, and
	// membershipLease how long the lease lasts otherwise.
	membershipPeriod = time.Second
	membershipLease  = 5 * time.Second
)

// noteReserved has unused tokens of the entry, whose stripe is locked, given back.
func (b *Registry) noteReserved(e *entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.reserved) == 0 {
		go b.reap()
	}
	b.reserved[e] = true
}

func (b *Registry) reap() {
	for {
		time.Sleep(reapPause)
		if b.giveBack(core.IdleBatch) {
			return
		}
	}
}

// giveBack gives back the tokens that were unused for idle, and those beyond the
// rations, which shrink as processes join. It reports whether none is left.
func (b *Registry) giveBack(idle int64) bool {
	b.mu.Lock()
	entries := slices.Collect(maps.Keys(b.reserved))
	b.mu.Unlock()
	senders, refunds := b.senders(), map[*Ledger][]*store.Request{}
	for _, e := range entries {
		l := senders.of(e)
		if refund := b.surplusOf(e, l, idle); refund.Cost > 0 || refund.MayHold() {
			refunds[l] = append(refunds[l], &refund)
		}
	}
	for l, reqs := range refunds {
		l.refund(reqs)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.reserved) == 0
}

// surplusOf returns the refund of tokens that an entry gives back through the view l, or none.
func (b *Registry) surplusOf(e *entry, l *Ledger, idle int64) (refund store.Request) {
	m := core.Moment{Now: b.now()}
	e.acquire(&m)
	if l == nil {
		e.LoseTokens(&m)
	} else {
		m.Processes = l.processes(e.BatchLimit())
		refund = e.Surplus(idle, &m)
	}
	if !e.Gauges().Reserves {
		b.mu.Lock()
		delete(b.reserved, e)
		b.mu.Unlock()
	}
	e.release(&m)
	return refund
}

// membership counts the processes that take batches from a store: each holds a
// lease in it.
type membership struct {
	// count is the number of processes; 0 while it is unknown, or others may not
	// have counted this one.
	count atomic.Int64
	begin sync.Once
	life  context.Context
	end   context.CancelFunc
	ended sync.WaitGroup
}

// processes is the number of processes that share the limit of r, or 0 while it
// is unknown.
func (l *Ledger) processes(r *store.Request) int64 {
	if r.Batch != store.BatchAuto {
		return 1
	}
	l.membership.begin.Do(func() { l.membership.ended.Go(l.keepMembership) })
	return l.membership.count.Load()
}

// keepMembership renews the lease until the view ends, and gives it back.
func (l *Ledger) keepMembership() {
	m, owners := &l.membership, NewOwners(l)
	lease := store.Request{
		Limit:  &store.Limit{Zone: membershipZone, Algorithm: store.Concurrency, Window: membershipLease},
		Events: store.MaxMembers, Cost: 1, ID: rand.Text(),
	}
	tick := time.NewTicker(membershipPeriod)
	defer tick.Stop()
	for isCounted := false; ; {
		if st := owners.oneByOne(&lease, func(r *store.Request) store.State {
			return store.Answers(m.life, l.Charge, []store.Request{*r})[0]
		}); st.Err == nil {
			if isCounted {
				m.count.Store(max(st.Used, 1))
			}
			isCounted = true
		}
		select {
		case <-tick.C:
		case <-m.life.Done():
			l.Remote.RefundReported(owners.refunds(&lease), nil)
			return
		}
	}
}
