package limiter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// settle charges or refunds what the request costs in view of its status, and
// makes the states show it. Leases go on.
func (e *evaluation) settle(status int) {
	if e.states == nil {
		// Nothing was asked.
		return
	}
	if open := e.onlyOpen(); open != nil && e.chargesWhole(status) {
		for i, z := range e.zones {
			e.show(i, 0, e.reqs[i].Cost)
			z.Counts.Charged.Add(float64(e.reqs[i].Cost))
		}
		open.Accounts.Settle(e.reqs, nil)
		return
	}
	var told settlements
	for i, z := range e.zones {
		if z.isLease() || e.declines(i) {
			// What would have been refused would not have been charged.
			continue
		}
		cost := int64(0)
		if !z.Free.Contains(status) {
			cost = z.finalCost(e.repl, e.limiter)
		}
		spent := e.spent(i)
		e.show(i, spent, cost)
		e.countSettled(i, spent, cost, z.Free.Contains(status))
		settled := e.spendOf(i)
		settled.settled, settled.cost = true, cost
		told.add(e, i, spent, cost)
	}
	e.tell(&told)
}

// spent is what the request has spent in zone i.
func (e *evaluation) spent(i int) int64 {
	if e.has(i).taken {
		return e.reqs[i].Cost
	}
	return 0
}

// countSettled counts what a request costs zone i that has spent something. What
// a take without a reply has spent nobody knows.
func (e *evaluation) countSettled(i int, spent, cost int64, free bool) {
	counts := &e.zones[i].Counts
	if e.has(i).unknown {
		return
	}
	counts.Charged.Add(float64(cost))
	if spent > cost {
		counts.Refunded.Add(float64(spent - cost))
	} else if free {
		counts.Free.Add(float64(e.reqs[i].Cost))
	}
}

// settlements are what each store and its local counts are told.
type settlements [maxStores]struct{ store, local settlement }

// add adds what the stores of zone i are told of a request that has spent something
// and costs something else.
func (s *settlements) add(e *evaluation, i int, spent, cost int64) {
	z, m, req := e.zones[i], e.has(i), e.reqs[i]
	told := &s[z.in]
	if m.local {
		told.local.add(req, spend{held: m.held}, spent, cost)
		// The store is told as well what it costs, for it may be back.
		spent = 0
	}
	if m.unknown && !z.needsID {
		// To charge could be to charge twice.
		return
	}
	told.store.add(req, m, spent, cost)
}

// settlement is what a store is told once it is known what a request costs.
type settlement struct {
	// ended is what was in flight, at the cost that is charged, and held is the
	// cost that was.
	ended []store.Request
	held  []int64
	// again are charges of what may be there already.
	charges, again, refunds []store.Request
}

// add adds a request that is marked with m, has spent something and costs something
// else. What was taken with an unknown outcome is known by its ID: it is no mistake
// to refund what was never taken, nor to charge what was.
func (s *settlement) add(req store.Request, m spend, spent, cost int64) {
	switch {
	case m.held:
		s.held = append(s.held, req.Cost)
		req.Cost = cost
		s.ended = append(s.ended, req)
	case m.unknown && cost == 0:
		s.refunds = append(s.refunds, req)
	case m.unknown:
		req.Cost = cost
		s.again = append(s.again, req)
	case cost > spent:
		if req.Cost = cost - spent; req.ID != "" && spent > 0 {
			// What is under the old ID stays.
			req.ID = newID()
		}
		s.charges = append(s.charges, req)
	case cost < spent:
		req.Cost = spent - cost
		s.refunds = append(s.refunds, req)
	}
}

// tell tells each store what concerns it.
func (e *evaluation) tell(told *settlements) {
	for in := range told {
		if open := e.refs[in].open; open != nil {
			told[in].local.tell(open.Local.Opened)
			told[in].store.tell(open)
		}
	}
}

func (s *settlement) tell(open *stores.Opened) {
	if len(s.ended) > 0 {
		open.Accounts.Settle(s.ended, s.held)
	}
	open.Detach(open.Detacher, store.Detacher.ChargeDetached, store.Store.Charge, s.charges)
	// What may be there already is charged under its own name, and not added
	// to anything.
	open.Detach(open.Direct, store.Detacher.ChargeDetached, store.Store.Charge, s.again)
	open.Detach(open.Detacher, store.Detacher.RefundDetached, store.Store.Refund, s.refunds)
}

// chargesWhole tells whether all that was asked is to be charged as it is,
// which is so for most requests.
func (e *evaluation) chargesWhole(status int) bool {
	for i, z := range e.zones {
		if z.Cost.isDynamic() || z.Cost.Number == 0 || z.Free.Contains(status) || e.has(i) != (spend{held: true}) {
			return false
		}
	}
	return true
}

// show makes the state tell what it is like once a request that has spent
// something costs something else.
func (e *evaluation) show(i int, spent, cost int64) {
	st := &e.states[i]
	if st.Err != nil || cost == spent {
		return
	}
	st.Used = max(st.Used+cost-spent, 0)
	st.Remaining = max(st.Limit-st.Used, 0)
	before, after := st.Reset, st.ResetOtherwise
	if spent > 0 {
		before, after = after, before
	}
	switch {
	case cost == 0:
		st.Reset = before
	case e.reqs[i].Limit.Algorithm == store.GCRA:
		drain, _ := algorithm.DrainTime(&e.reqs[i], cost)
		st.Reset = before + drain
	default:
		st.Reset = max(before, after)
	}
}

// showRefunds makes the states tell what they are like without what was taken.
func (t *tracker) showRefunds() {
	for _, e := range t.evaluations[t.inherited:] {
		for i := range e.zones {
			if e.has(i).taken {
				e.show(i, e.reqs[i].Cost, 0)
			}
		}
	}
}

// undo refunds what was taken, because the request does not go on.
func (e *evaluation) undo() {
	e.lease.stop()
	e.lease = nil
	e.giveBack(func(int) bool { return true })
	for i, z := range e.zones {
		m := e.has(i)
		if z.needsID && (m.taken || m.unknown) {
			// A request that waits takes again, maybe before the refund has
			// arrived, which must not find what it takes then.
			e.reqs[i].ID = newID()
		}
		if m != (spend{}) {
			// What may have been spent without a name is not spent again.
			*e.spendOf(i) = spend{unknown: m.unknown && !z.needsID}
		}
	}
}

// giveBack gives back what some zones hold in flight or have taken.
func (e *evaluation) giveBack(some func(i int) bool) {
	var told settlements
	for i, z := range e.zones {
		if !some(i) {
			continue
		}
		spent := e.spent(i)
		if !z.isLease() {
			z.Counts.Refunded.Add(float64(spent))
		}
		told.add(e, i, spent, 0)
	}
	e.tell(&told)
}

// lease keeps the slots that an evaluation has taken while its request runs.
type lease struct {
	of *evaluation
	mu sync.Mutex
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
func (e *evaluation) holdLeases() {
	period := time.Duration(0)
	for i, z := range e.zones {
		if m := e.has(i); z.isLease() && (m.taken || m.unknown) {
			if every := z.limit.Window / renewals; period == 0 || every < period {
				period = every
			}
		}
	}
	if period == 0 {
		return
	}
	e.lease = &lease{of: e, period: period}
	// The timer's own goroutine looks for it.
	e.lease.mu.Lock()
	defer e.lease.mu.Unlock()
	e.lease.timer = time.AfterFunc(period, e.lease.renew)
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
	for i, z := range l.of.zones {
		if !z.isLease() {
			// Its mark may be settled at this moment.
			continue
		}
		m, open, req := l.of.has(i), l.of.open(i), l.of.reqs[i:i+1]
		if req[0].Cost == 0 || !m.taken && !m.unknown {
			continue
		}
		if m.local && m.taken {
			open.Local.Buckets.Charge(ctx, req)
		}
		// Where this fails the slot may be lost; the request goes on. What the local
		// counts gave counts in the store from now on, if that is back.
		if st := open.Store.Charge(ctx, req)[0]; m.local && !errors.Is(st.Err, store.ErrNotExecuted) && !slices.Contains(l.handedOver, i) {
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
		l.of.spendOf(i).unknown = true
	}
	return true
}

// end gives the slots back.
func (l *lease) end() {
	if l.stop() {
		l.of.giveBack(func(i int) bool { return l.of.zones[i].isLease() })
	}
}
