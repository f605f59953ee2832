package shardlimit

import (
	"context"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// settle charges or refunds what the request costs in view of its status, and
// makes the states show it. Leases go on.
func (p *part) settle(status int) {
	if p.states == nil {
		// Nothing was asked.
		return
	}
	if open := p.onlyOpen(); open != nil && p.chargesWhole(status) {
		for i, z := range p.zones {
			p.show(i, 0, p.reqs[i].Cost)
			z.counts.charged.Add(float64(p.reqs[i].Cost))
		}
		open.accounts.Settle(p.reqs, nil)
		return
	}
	var told [mostStores]settlement
	for i, z := range p.zones {
		if z.isLease() || p.declines(i) {
			// What would have been refused would not have been charged.
			continue
		}
		cost := int64(0)
		if !z.free.contains(status) {
			cost = z.finalCost(p.repl, p.handler)
		}
		tell, m, spent := &told[z.in], p.has(i), int64(0)
		if m.taken {
			spent = p.reqs[i].Cost
		}
		p.show(i, spent, cost)
		p.countSettled(i, spent, cost, z.free.contains(status))
		settled := p.mark(i)
		settled.settled, settled.cost = true, cost
		if m.held {
			tell.endFlight(p.reqs[i], cost)
			continue
		}
		if m.local {
			// The store is told as well what was spent: it may be back.
			adjust(p.reqs[i], spent, cost,
				func(r store.Request) { p.askLocal(i, store.Store.Charge, r) },
				func(r store.Request) { p.askLocal(i, store.Store.Refund, r) })
			spent = 0
		}
		if m.unknown && !z.needsID {
			// To charge could be to charge twice.
			continue
		}
		if m.unknown && cost == 0 {
			// Under an ID it is no mistake to refund what was never taken, nor to
			// charge what was.
			tell.refunds = append(tell.refunds, p.reqs[i])
			continue
		}
		adjust(p.reqs[i], spent, cost,
			func(r store.Request) {
				if m.unknown {
					tell.again = append(tell.again, r)
				} else {
					tell.charges = append(tell.charges, r)
				}
			},
			func(r store.Request) { tell.refunds = append(tell.refunds, r) })
	}
	p.tell(&told)
}

// countSettled counts what a request costs zone i that has spent something. What
// a take without a reply has spent nobody knows.
func (p *part) countSettled(i int, spent, cost int64, free bool) {
	counts := &p.zones[i].counts
	if p.has(i).unknown {
		return
	}
	counts.charged.Add(float64(cost))
	if spent > cost {
		counts.refunded.Add(float64(spent - cost))
	} else if free {
		counts.free.Add(float64(p.reqs[i].Cost))
	}
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

// endFlight adds a request that was in flight.
func (s *settlement) endFlight(req store.Request, cost int64) {
	s.held = append(s.held, req.Cost)
	req.Cost = cost
	s.ended = append(s.ended, req)
}

// tell tells each store what concerns it.
func (p *part) tell(told *[mostStores]settlement) {
	for in := range told {
		open, s := p.visits[in].open, &told[in]
		if open == nil {
			continue
		}
		if len(s.ended) > 0 {
			open.accounts.Settle(s.ended, s.held)
		}
		open.detach(open.detacher, store.Detacher.ChargeDetached, store.Store.Charge, s.charges)
		// What may be there already is charged under its own name, and not added
		// to anything.
		open.detach(open.direct, store.Detacher.ChargeDetached, store.Store.Charge, s.again)
		open.detach(open.detacher, store.Detacher.RefundDetached, store.Store.Refund, s.refunds)
	}
}

// adjust charges or refunds the difference between what a request has spent and
// what it costs.
func adjust(req store.Request, spent, cost int64, charge, refund func(store.Request)) {
	switch {
	case cost > spent:
		if req.Cost = cost - spent; req.ID != "" && spent > 0 {
			// What is under the old ID stays.
			req.ID = newID()
		}
		charge(req)
	case cost < spent:
		req.Cost = spent - cost
		refund(req)
	}
}

// askLocal asks the local counts of zone i.
func (p *part) askLocal(i int, q question, req store.Request) store.State {
	return q(p.open(i).local, context.Background(), []store.Request{req})[0]
}

// chargesWhole tells whether all that was asked is to be charged as it is,
// which is so for most requests.
func (p *part) chargesWhole(status int) bool {
	for i, z := range p.zones {
		if z.Cost.isDynamic() || z.cost == 0 || z.free.contains(status) || p.has(i) != (mark{held: true}) {
			return false
		}
	}
	return true
}

// show makes the state tell what it is like once a request that has spent
// something costs something else.
func (p *part) show(i int, spent, cost int64) {
	st := &p.states[i]
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
	case p.reqs[i].Limit.Algorithm == store.GCRA:
		drain, _ := algorithm.DrainTime(&p.reqs[i], cost)
		st.Reset = before + drain
	default:
		st.Reset = max(before, after)
	}
}

// showRefunds makes the states tell what they are like without what was taken.
func (t *tracker) showRefunds() {
	for _, p := range t.parts[t.inherited:] {
		for i := range p.zones {
			if p.has(i).taken {
				p.show(i, p.reqs[i].Cost, 0)
			}
		}
	}
}

// releaseHeld ends what is in flight, for nothing.
func (p *part) releaseHeld() {
	var told [mostStores]settlement
	for i, z := range p.zones {
		if p.has(i).held {
			told[z.in].endFlight(p.reqs[i], 0)
		}
	}
	p.tell(&told)
}

// undo refunds what was taken, because the request does not go on.
func (p *part) undo() {
	p.lease.stop()
	p.lease = nil
	p.releaseHeld()
	p.refund(func(int) bool { return true })
	for i, z := range p.zones {
		m := p.has(i)
		if z.needsID && (m.taken || m.unknown) {
			// A request that waits takes again, maybe before the refund has
			// arrived, which must not find what it takes then.
			p.reqs[i].ID = newID()
		}
		if m != (mark{}) {
			// What may have been spent without a name is not spent again.
			*p.mark(i) = mark{unknown: m.unknown && !z.needsID}
		}
	}
}

// refund gives back what was taken by some zones.
func (p *part) refund(some func(i int) bool) {
	var told [mostStores]settlement
	for i, z := range p.zones {
		m := p.has(i)
		if !some(i) {
			continue
		}
		if m.taken && m.local {
			p.askLocal(i, store.Store.Refund, p.reqs[i])
		}
		if m.taken && !z.isLease() {
			z.counts.refunded.Add(float64(p.reqs[i].Cost))
		}
		// Under an ID it is no mistake to refund what was never taken.
		if m.taken && !m.local || m.unknown && z.needsID {
			told[z.in].refunds = append(told[z.in].refunds, p.reqs[i])
		}
	}
	p.tell(&told)
}
