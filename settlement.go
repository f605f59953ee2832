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
	if p.chargesWhole(status) {
		for i := range p.zones {
			p.show(i, 0, p.reqs[i].Cost)
		}
		p.open.accounts.Settle(p.reqs, nil)
		return
	}
	var charges, again, refunds, settled []store.Request
	var held []int64
	for i, z := range p.zones {
		if z.isLease() {
			continue
		}
		cost := int64(0)
		if !z.free.contains(status) {
			cost = z.finalCost(p.repl, p.handler)
		}
		m, spent := p.has(i), int64(0)
		if m.taken {
			spent = p.reqs[i].Cost
		}
		p.show(i, spent, cost)
		if m.held {
			req := p.reqs[i]
			req.Cost = cost
			settled, held = append(settled, req), append(held, p.reqs[i].Cost)
			continue
		}
		if m.local {
			// The store is told as well what was spent: it may be back.
			adjust(p.reqs[i], spent, cost,
				func(r store.Request) { p.askLocal(store.Store.Charge, r) },
				func(r store.Request) { p.askLocal(store.Store.Refund, r) })
			spent = 0
		}
		if m.unknown && !z.needsID {
			// To charge could be to charge twice.
			continue
		}
		if m.unknown && cost == 0 {
			// Under an ID it is no mistake to refund what was never taken, nor to
			// charge what was.
			refunds = append(refunds, p.reqs[i])
			continue
		}
		adjust(p.reqs[i], spent, cost,
			func(r store.Request) {
				if m.unknown {
					again = append(again, r)
				} else {
					charges = append(charges, r)
				}
			},
			func(r store.Request) { refunds = append(refunds, r) })
	}
	if p.open != nil {
		p.open.accounts.Settle(settled, held)
		p.detach(p.open.detacher, store.Detacher.ChargeDetached, store.Store.Charge, charges)
		// What may be there already is charged under its own name, and not added
		// to anything.
		p.detach(p.open.direct, store.Detacher.ChargeDetached, store.Store.Charge, again)
		p.detach(p.open.detacher, store.Detacher.RefundDetached, store.Store.Refund, refunds)
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

// askLocal asks the local counts.
func (p *part) askLocal(q question, req store.Request) store.State {
	return q(p.open.local, context.Background(), []store.Request{req})[0]
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

// releaseHeld ends what is in flight, for nothing.
func (p *part) releaseHeld() {
	var reqs []store.Request
	var held []int64
	for i := range p.zones {
		if p.has(i).held {
			req := p.reqs[i]
			req.Cost = 0
			reqs, held = append(reqs, req), append(held, p.reqs[i].Cost)
		}
	}
	if len(reqs) > 0 {
		p.open.accounts.Settle(reqs, held)
	}
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
	var refunds []store.Request
	for i, z := range p.zones {
		m := p.has(i)
		if !some(i) {
			continue
		}
		if m.taken && m.local {
			p.askLocal(store.Store.Refund, p.reqs[i])
		}
		// Under an ID it is no mistake to refund what was never taken.
		if m.taken && !m.local || m.unknown && z.needsID {
			refunds = append(refunds, p.reqs[i])
		}
	}
	if p.open != nil {
		p.detach(p.open.detacher, store.Detacher.RefundDetached, store.Store.Refund, refunds)
	}
}
