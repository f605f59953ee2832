package ledger

import (
	"context"
	"crypto/rand"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// presenceZone is where processes count themselves. No zone can be called
	// so.
	presenceZone = "*processes"
	// presencePeriod is how often a process says that it is there, and
	// presenceLease is how long it counts if it does not.
	presencePeriod = time.Second
	presenceLease  = 5 * time.Second
)

// presence counts the processes that take batches from a store: each holds a
// lease there.
type presence struct {
	ledger *Ledger
	// count is how many there are; 0 while that is unknown, or the others may
	// not know of this one.
	count atomic.Int64
	begin sync.Once
	life  context.Context
	end   context.CancelFunc
	ended sync.WaitGroup
}

func newPresence(l *Ledger) *presence {
	p := &presence{ledger: l}
	p.life, p.end = context.WithCancel(context.Background())
	return p
}

// processes is how many processes share the limit of r, or 0 if that is not
// known yet.
func (l *Ledger) processes(r *store.Request) int64 {
	if r.Batch != store.BatchAuto {
		return 1
	}
	l.presence.begin.Do(func() { l.presence.ended.Go(l.presence.keep) })
	return l.presence.count.Load()
}

// keep renews the lease, and gives it back at the end.
func (p *presence) keep() {
	lease := []store.Request{{
		Limit:  &store.Limit{Zone: presenceZone, Algorithm: store.Concurrency, Window: presenceLease},
		Events: store.MaxMembers, Cost: 1, ID: rand.Text(),
	}}
	tick := time.NewTicker(presencePeriod)
	defer tick.Stop()
	for said := false; ; {
		if st := p.ledger.store.Charge(p.life, lease)[0]; st.Err == nil {
			if said {
				p.count.Store(max(st.Used, 1))
			}
			said = true
		}
		select {
		case <-tick.C:
		case <-p.life.Done():
			p.ledger.store.RefundDetached(lease)
			return
		}
	}
}

// leave ends the lease.
func (p *presence) leave() {
	p.end()
	p.ended.Wait()
}
