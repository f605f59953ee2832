package limiter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// lease keeps the slots that an evaluation has taken while its request runs.
type lease struct {
	of *evaluation
	mu sync.Mutex
	// timer renews; it is nil once the slots were given back.
	timer  *time.Timer
	period time.Duration
	// handedOver are zones whose local slots the store may count as well.
	handedOver []int
}

// renewals is how often a lease is renewed while it lasts: all but one may fail.
const renewals = 3

// holdLeases begins to renew the slots that were taken. Nothing else is taken
// afterwards.
func (e *evaluation) holdLeases() {
	period := time.Duration(0)
	for i, z := range e.zones {
		if e.holdsSlot(i) {
			if every := z.limit.Window / renewals; period == 0 || every < period {
				period = every
			}
		}
	}
	if period == 0 {
		return
	}
	lease := &lease{of: e, period: period}
	// renew may run before the timer is set.
	lease.mu.Lock()
	defer lease.mu.Unlock()
	lease.timer = time.AfterFunc(period, lease.renew)
	e.rarely().lease = lease
}

// holdsSlot reports whether the request has, or may have, a slot in zone i that lasts until it
// ends. It reads the spend of lease zones only; others may be settling.
func (e *evaluation) holdsSlot(i int) bool {
	z := &e.zones[i]
	return z.isLease() && (z.isTaken() || z.isUncertain()) && z.answer != hasNoRoom
}

// lease returns the lease of the request's slots, or nil.
func (e *evaluation) lease() *lease {
	if e.rare == nil {
		return nil
	}
	return e.rare.lease
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
	for i := range l.of.zones {
		z := &l.of.zones[i]
		open, req := z.open, l.of.reqs[i:i+1]
		if !l.of.holdsSlot(i) || req[0].Cost == 0 {
			continue
		}
		if z.alone == localTaken || z.alone == localMirrored {
			open.Local.Buckets.Charge(ctx, req)
		}
		// If this fails the slot may be lost; the request goes on. A local slot counts
		// in the store from now on, if that is back.
		if st := open.Store.Charge(ctx, req)[0]; z.isLocal() && !errors.Is(st.Err, store.ErrNotExecuted) && !slices.Contains(l.handedOver, i) {
			l.handedOver = append(l.handedOver, i)
		}
	}
	l.timer.Reset(l.period)
}

// end gives the slots back.
func (l *lease) end() {
	if l.stop() {
		l.of.giveBack(l.of.holdsSlot)
	}
}

// stop ends the renewing, and reports whether there was any. It waits for a
// renewal that runs, which could take back a slot that is given back. A renewal
// that timed out may still do so, for another window.
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
		l.of.zones[i].becomeUncertain(true)
	}
	return true
}
