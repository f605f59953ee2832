package shardlimit

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// lease keeps the slots that a part has taken while its request runs.
type lease struct {
	part *part
	mu   sync.Mutex
	// timer renews; nil once the slots were given back.
	timer  *time.Timer
	period time.Duration
	// handedOver are zones whose local slots the store may count as well.
	handedOver []int
}

// renewals is how often a lease is renewed while it lasts: all but one may
// fail.
const renewals = 3

// holdLeases begins to renew the slots that were taken. Nothing else is taken
// afterwards.
func (p *part) holdLeases() {
	period := time.Duration(0)
	for i, z := range p.zones {
		if m := p.has(i); z.isLease() && (m.taken || m.unknown) {
			if every := z.limit.Window / renewals; period == 0 || every < period {
				period = every
			}
		}
	}
	if period == 0 {
		return
	}
	p.lease = &lease{part: p, period: period}
	// The timer's own goroutine looks for it.
	p.lease.mu.Lock()
	defer p.lease.mu.Unlock()
	p.lease.timer = time.AfterFunc(period, p.lease.renew)
}

// renew makes the slots last for another window.
func (l *lease) renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.period)
	defer cancel()
	for i, z := range l.part.zones {
		if !z.isLease() {
			// Its mark may be settled at this moment.
			continue
		}
		m, open, req := l.part.has(i), l.part.open(i), l.part.reqs[i:i+1]
		if req[0].Cost == 0 || !m.taken && !m.unknown {
			continue
		}
		if m.local && m.taken {
			open.local.Buckets.Charge(ctx, req)
		}
		// Where this fails the slot may be lost; the request goes on. What the local
		// counts gave counts in the store from now on, if that is back.
		if st := open.store.Charge(ctx, req)[0]; m.local && !errors.Is(st.Err, store.ErrNotExecuted) && !slices.Contains(l.handedOver, i) {
			l.handedOver = append(l.handedOver, i)
		}
	}
	l.timer.Reset(l.period)
}

// stop ends the renewing, and tells whether there was any. A renewal that is
// being waited for comes to its end first, lest it take back a slot that is given
// back; one that was given up may, for another window.
func (l *lease) stop() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		return false
	}
	l.timer.Stop()
	l.timer = nil
	for _, i := range l.handedOver {
		l.part.mark(i).unknown = true
	}
	return true
}

// end gives the slots back.
func (l *lease) end() {
	if l.stop() {
		l.part.giveBack(func(i int) bool { return l.part.zones[i].isLease() })
	}
}
