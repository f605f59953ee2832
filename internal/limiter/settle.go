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

// settle charges or refunds the request by its status, and makes the states show
// that: in the zones that settle when the response begins, or in those that settle when
// it has ended. Leases go on.
func (e *evaluation) settle(t *tracker, status int, hasEnded bool) {
	if len(e.states) == 0 {
		// Nothing was asked.
		return
	}
	if open := e.onlyOpen(); open != nil && !hasEnded && e.chargesWhole(status) {
		for i, z := range e.zones {
			e.show(i, 0, e.reqs[i].Cost)
			z.Counts.Charged.Add(float64(e.reqs[i].Cost))
			e.reportNear(i)
		}
		open.Accounts.Settle(e.reqs, nil)
		return
	}
	var all settlements
	var forgiven, emptied, freed []int
	for i, z := range e.zones {
		if z.answer == hasNoRoom {
			// What would have been refused would not have been charged.
			if z.isUncertain() && !hasEnded {
				all.add(e, i, 0, 0)
			}
			continue
		}
		if z.isLease() || z.answer != storeFailed && z.spend == (spend{}) {
			// A zone that holds nothing, and has no error, is one whose store panicked.
			continue
		}
		if z.SettleAtEnd != hasEnded {
			if z.SettleAtEnd {
				// The header is about the state before the request.
				e.show(i, e.spent(i), 0)
			}
			continue
		}
		status := t.statusFor(z.Zone, status)
		e.noteForgiven(i)
		spent, shown := e.spent(i), e.spent(i)
		if hasEnded {
			shown = 0
		}
		isForgiven := z.Forgives.Contains(status) && z.bucket == ownBucket
		if isForgiven && !e.tookAlone(i, shown) {
			forgiven = append(forgiven, i)
			continue
		}
		cost, free := int64(0), z.Free.Contains(status) || z.Forgives.Contains(status)
		if !free {
			cost = e.finalCost(t, i, status)
		}
		e.show(i, shown, cost)
		e.countSettled(i, spent, cost, free)
		e.reportNear(i)
		if isForgiven {
			emptied = append(emptied, i)
			continue
		}
		all.add(e, i, spent, cost)
		if cost < e.reqs[i].Cost {
			freed = append(freed, i)
		}
		e.reqs[i].Cost = cost
	}
	all.send(e)
	e.wakeLines(freed)
	for _, i := range forgiven {
		e.forgive(i)
	}
	for _, i := range emptied {
		e.forgiveLater(i)
	}
}

// tookAlone reports whether the take of this request, which shows this cost, found the
// bucket of zone i empty.
func (e *evaluation) tookAlone(i int, shown int64) bool {
	z, st := e.zones[i], &e.states[i]
	// A check may have found an old count. A batch, and the local counts, show the part of
	// this process.
	isExact := z.stored == phaseTaken && z.Batch == 0
	return isExact && st.Used <= shown && st.Penalty == 0
}

// forgiveLater refunds what the request has taken from the empty bucket of zone i, which
// suffices unless the reply shows that others have taken since.
func (e *evaluation) forgiveLater(i int) {
	z, l, req := e.zones[i].boundZone, e.limiter, e.reqs[i]
	e.reqs[i].Cost = 0
	z.handle.RefundReported(req, func(st store.State) {
		if st.Err != nil || st.Used > 0 || st.Penalty != 0 {
			var left spend
			if errors.Is(st.Err, store.ErrNotExecuted) {
				left.take()
			}
			l.empty(z, req, left)
			return
		}
		z.room.wake(req.ClientKey)
	})
}

// forgive ends what the request holds in flight in zone i, and empties the bucket.
func (e *evaluation) forgive(i int) {
	z, spend, req := e.zones[i].boundZone, e.zones[i].spend, e.reqs[i]
	if spend.isHeld() {
		var ended settlements
		ended.add(e, i, 0, 0)
		ended.send(e)
	}
	e.reqs[i].Cost = 0
	st := &e.states[i]
	st.Used, st.Remaining, st.Penalty = 0, st.Limit, 0
	if !algorithm.Of(req.Limit.Algorithm).Windowed {
		st.Reset = st.Now
	}
	e.limiter.empty(z, req, spend)
}

// empty empties the bucket of a request that has spent something in it.
func (l *Limiter) empty(z *boundZone, req store.Request, spend spend) {
	end := z.running.empty(&req)
	z.handle.Forgive(req, func(open *stores.Opened, err error) {
		end(err)
		if err == nil {
			z.Counts.Forgiven.Inc()
			z.room.wake(req.ClientKey)
		} else {
			z.handle.ReportError(l.Now(), z.Name, err)
		}
		// A take goes with the bucket, and a refund of it could arrive in the next one. A take
		// without a reply may arrive there as well; its refund, by ID, does no harm.
		isLeft := err != nil && spend.stored == phaseTaken || spend.isUncertain() && z.needsID()
		if open != nil && isLeft {
			open.Refund([]store.Request{req})
		}
	})
}

// noteForgiven notes that what the request took in zone i has gone with a bucket that
// was emptied since. A request that is running counts when it ends.
func (e *evaluation) noteForgiven(i int) {
	z := &e.zones[i]
	if z.Forgives.IsEmpty() || !z.isTaken() || e.rare == nil || len(e.rare.zones) <= i {
		return
	}
	if k := e.rare.zones[i].taken; k.bucket != nil && z.running.isVoid(k) {
		z.lose()
	}
}

// finalCost returns what zone i charges for a response with this status. A request whose client
// left costs what it holds, or what is known by then, whichever is more.
func (e *evaluation) finalCost(t *tracker, i, status int) int64 {
	z := e.zones[i].Zone
	if status != noVerdict {
		return z.finalCost(e.repl, e.limiter, t.response)
	}
	known := e.reqs[i].Cost
	if z.SettleAtEnd {
		return max(known, z.finalCost(e.repl, e.limiter, t.response))
	}
	return max(known, z.firstCost(e.repl))
}

// chargesWhole reports whether all zones charge what they hold in flight, as it
// is. They do for most requests.
func (e *evaluation) chargesWhole(status int) bool {
	for _, z := range e.zones {
		if z.SettleAtEnd || z.Cost.isDynamic() || z.Cost.Number == 0 || z.Free.Contains(status) || z.Forgives.Contains(status) || z.spend != (spend{stored: phaseHeld}) {
			return false
		}
	}
	return true
}

// spent returns what the request has spent in zone i.
func (e *evaluation) spent(i int) int64 {
	if e.zones[i].isTaken() {
		return e.reqs[i].Cost
	}
	return 0
}

// countSettled counts the final cost of a request in zone i. What a take without
// a reply has spent is not known.
func (e *evaluation) countSettled(i int, spent, cost int64, free bool) {
	counts := &e.zones[i].Counts
	if e.zones[i].isUncertain() {
		return
	}
	counts.Charged.Add(float64(cost))
	if spent > cost {
		counts.Refunded.Add(float64(spent - cost))
	} else if free {
		counts.Free.Add(float64(e.reqs[i].Cost))
	}
}

// undo refunds what was taken, because the request does not go on.
func (e *evaluation) undo() {
	if e.rare != nil {
		e.rare.lease.stop()
		e.rare.lease = nil
	}
	e.giveBack(func(int) bool { return true })
	for i, z := range e.zones {
		spent := z.spend
		if z.needsID() && z.ChargeBefore {
			// A request that waits takes again, maybe before a refund arrives, which must not
			// find the new take. The ledger refunds takes as well that it refuses.
			e.reqs[i].ID = newID()
		}
		var left spend
		if spent.isUncertain() && !z.needsID() {
			// What may have been spent without an ID is not spent again.
			left.stored = phaseUncertain
		}
		if spent.isLocal() {
			left.alone = localDecided
		}
		if spent != left {
			e.zones[i].spend = left
		}
	}
}

// giveBack gives back what some zones hold in flight or have taken.
func (e *evaluation) giveBack(some func(i int) bool) {
	var all settlements
	for i, z := range e.zones {
		if !some(i) {
			continue
		}
		e.noteForgiven(i)
		spent := e.spent(i)
		if !z.isLease() {
			z.Counts.Refunded.Add(float64(spent))
		}
		all.add(e, i, spent, 0)
	}
	all.send(e)
}

// settlements are for each store and its local counts.
type settlements [maxStores]struct{ store, local settlement }

// settlement is what a store is to do once the cost of a request is known.
type settlement struct {
	// ended are requests whose cost was in flight, with their final cost; held is
	// what each held.
	ended []store.Request
	held  []int64
	// unknown are those whose takes may have spent the cost, with what each held.
	unknown     []store.Request
	heldUnknown []int64
	// again are repeats of takes of unknown outcome, under their ID.
	charges, again, refunds []store.Request
}

// add notes what zone i has to charge or refund so that spent becomes cost.
func (s *settlements) add(e *evaluation, i int, spent, cost int64) {
	z, req := e.zones[i], e.reqs[i]
	in := &s[z.in]
	if z.alone != localNone {
		phase := phaseNone
		if z.alone == localHeld {
			phase = phaseHeld
		}
		in.local.add(e.localRequest(i), phase, spent, cost)
	}
	if z.isLocal() {
		// The store may be back, so it settles the cost as well.
		spent = 0
	}
	phase := z.stored
	if phase == phaseUncertainHeld {
		in.store.addUnknown(req, cost)
		phase = phaseUncertain
	}
	if phase == phaseUncertain && !z.needsID() {
		// A charge could be the second one.
		return
	}
	in.store.add(req, phase, spent, cost)
}

// addUnknown notes the final cost of a take of unknown outcome.
func (s *settlement) addUnknown(req store.Request, cost int64) {
	s.heldUnknown = append(s.heldUnknown, req.Cost)
	req.Cost = cost
	s.unknown = append(s.unknown, req)
}

// add notes what turns spent into cost.
func (s *settlement) add(req store.Request, phase storePhase, spent, cost int64) {
	switch phase.due(spent, cost) {
	case dueSettle:
		s.held = append(s.held, req.Cost)
		req.Cost = cost
		s.ended = append(s.ended, req)
	case dueAgain:
		req.Cost = cost
		s.again = append(s.again, req)
	case dueCharge:
		if req.Cost = cost - spent; req.ID != "" && spent > 0 {
			// What is under the old ID stays.
			req.ID = newID()
		}
		s.charges = append(s.charges, req)
	case dueRefund:
		if phase != phaseUncertain {
			req.Cost = spent - cost
		}
		s.refunds = append(s.refunds, req)
	}
}

// send sends each store what concerns it.
func (s *settlements) send(e *evaluation) {
	for in := range s {
		if open := e.opened(in); open != nil {
			s[in].local.send(open.Local.Opened)
			s[in].store.send(open)
		}
	}
}

func (s *settlement) send(open *stores.Opened) {
	if len(s.ended) > 0 {
		open.Accounts.Settle(s.ended, s.held)
	}
	if len(s.unknown) > 0 {
		open.Accounts.SettleUnknown(s.unknown, s.heldUnknown)
	}
	open.Charge(s.charges)
	open.ChargeByID(s.again)
	open.Refund(s.refunds)
}

// show changes the state of zone i, which shows spent, to show cost.
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
	case e.reqs[i].Limit.Algorithm.HasBurst():
		drain, _ := algorithm.DrainTime(&e.reqs[i], cost)
		st.Reset = before + drain
	default:
		st.Reset = max(before, after)
	}
}

// showRefunds makes the states show that what was taken is refunded.
func (e *evaluation) showRefunds() {
	for i := range e.zones {
		if e.zones[i].isTaken() {
			e.show(i, e.reqs[i].Cost, 0)
		}
	}
}

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
		open, req := l.of.open(i), l.of.reqs[i:i+1]
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
		l.of.zones[i].becomeUncertain()
	}
	return true
}
