package limiter

import (
	"cmp"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// settle charges and refunds by the status, or refunds everything if a handler
// refused the request, and leaves the stores without leases.
func (t *tracker) settle(status int) {
	t.settled = true
	if t.response != nil {
		t.response.status = status
	}
	for _, e := range t.own {
		e.count()
	}
	for _, e := range t.own {
		if !t.isEnded() {
			e.settleZones(t, status, false)
			if retryafter.Asks(status) {
				t.obey(e, status)
			}
			e.endProbes(t, status)
			e.notePace(t, status == statusLeft, func(z *Zone) bool { return !z.SettleAtEnd && !z.isLease })
		} else {
			held := e.where(func(z *inZone) bool { return z.spend != spend{} })
			e.undo()
			e.endProbes(t, statusLeft)
			e.chargeUsed()
			wakeLines(held)
		}
		if e.lease() == nil && (t.isEnded() || t.response == nil) {
			e.release()
		}
	}
}

// finish settles the zones that wait for the end of the response.
func (t *tracker) finish(how ending) {
	if t.response == nil {
		return
	}
	t.response.end(t.own[0].limiter.Now(), t.Header(), how)
	if t.isEnded() {
		return
	}
	for _, e := range t.own {
		e.settleZones(t, t.response.status, true)
		e.notePace(t, t.isCut(), func(z *Zone) bool { return z.SettleAtEnd })
	}
}

// end gives back the leases, and leaves the stores.
func (t *tracker) end() {
	for _, e := range t.own {
		t.endLease(e)
		e.release()
	}
}

// endLease gives back the leases of e. What runs on behind Caddy after its client has left
// counts for a while.
func (t *tracker) endLease(e *evaluation) {
	l := e.lease()
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		// The process ends.
		return
	}
	isAborted := t.isCut()
	if isAborted {
		e.noteAborted(t)
	}
	e.notePace(t, isAborted, func(z *Zone) bool { return z.isLease })
	l.giveBack()
}

// lease returns the lease of the request's slots, or nil.
func (e *evaluation) lease() *lease {
	if e.rare == nil {
		return nil
	}
	return e.rare.lease
}

// endBy notes the verdict that ends the request.
func (t *tracker) endBy(v verdict) { t.first.ensureRare().refusal = &v }

// refusal returns the verdict that ended the request, or nil. It has no outcome if the client left
// while the evaluation asked.
func (t *tracker) refusal() *verdict {
	if t.first.rare == nil {
		return nil
	}
	return t.first.rare.refusal
}

// isEnded reports whether a handler has ended the request: it was not served.
func (t *tracker) isEnded() bool { return t.refusal() != nil }

// StatusSet is a set of response statuses.
type StatusSet [16]uint64

// StatusGRPC is added to a status of gRPC, from 0 to 16, for its place in a StatusSet.
const StatusGRPC = 1000

// Add adds a status.
func (s *StatusSet) Add(code int) { s[code/64] |= 1 << (code % 64) }

// Contains reports whether a status is in s.
func (s *StatusSet) Contains(code int) bool {
	return code < len(s)*64 && code >= 0 && s[code/64]>>(code%64)&1 == 1
}

// IsEmpty reports whether no status is in s.
func (s *StatusSet) IsEmpty() bool { return *s == StatusSet{} }

// Complement returns the statuses that are not in s.
func (s StatusSet) Complement() (others StatusSet) {
	for i := range s {
		others[i] = ^s[i]
	}
	return others
}

// statusFor returns the status by which a zone settles: that of gRPC, if the zone has such
// statuses and the response has ended with one.
func (t *tracker) statusFor(z *Zone, status int) int {
	if !z.KnowsGRPC || status == statusLeft {
		return status
	}
	code, err := strconv.Atoi(trailerOf(t.Header(), "Grpc-Status"))
	switch {
	case err != nil && strings.HasPrefix(t.Header().Get("Content-Type"), grpcType):
		// The status of a call follows its messages, for which its client may not have waited.
		return t.unlessLeft(status)
	case err != nil || code < 0 || code > maxGRPCStatus:
		return status
	}
	return StatusGRPC + code
}

// statusOf returns the status with which the server answers err.
func statusOf(err error) int {
	var handlerErr caddyhttp.HandlerError
	if errors.As(err, &handlerErr) && handlerErr.StatusCode != 0 {
		return handlerErr.StatusCode
	}
	return http.StatusInternalServerError
}

// final is what a request costs in the end, compared with what it has spent.
type final int8

const (
	costsLess final = iota
	costsSame
	costsMore
	// empties: the status of the response empties the bucket.
	empties
	// emptiesOwn: the same, of a bucket that had nothing but the request's take.
	emptiesOwn
	finals
)

func finalOf(spent, cost int64) final { return costsSame + final(cmp.Compare(cost, spent)) }

// due is what a store has to do, so that it counts the final cost.
type due uint8

const (
	dueNothing due = iota
	// dueCharge charges what the cost is more than what was spent.
	dueCharge
	// dueEnd ends what is in flight, and charges the cost. What is in flight beside an uncertain take
	// ends without a charge, whatever else is due.
	dueEnd
	// dueRepeat repeats a take under its ID, with the final cost.
	dueRepeat
	// dueRefund refunds what was spent and is more than the cost, or all of an uncertain take.
	dueRefund
	// dueEmpty empties the bucket, and ends what is in flight.
	dueEmpty
	// dueRefundFirst refunds what was spent, and empties the bucket if the reply shows more.
	dueRefundFirst
)

// dues are what settles a request. Only what was taken was spent before. The store knows an
// uncertain take by its ID: it does no harm to refund what was never taken, or to charge what was.
var dues = [storePhases][finals]due{
	phaseNone:          {costsMore: dueCharge, empties: dueEmpty},
	phaseHeld:          {costsSame: dueEnd, costsMore: dueEnd, empties: dueEmpty},
	phaseTaken:         {costsLess: dueRefund, costsMore: dueCharge, empties: dueEmpty, emptiesOwn: dueRefundFirst},
	phaseUncertain:     {costsSame: dueRefund, costsMore: dueRepeat, empties: dueEmpty},
	phaseUncertainHeld: {costsSame: dueRefund, costsMore: dueRepeat, empties: dueEmpty},
	phaseLost:          {empties: dueEmpty},
	phaseLostHeld:      {empties: dueEmpty},
}

// settleZones charges or refunds the request by its status, and makes the states show
// that: in the zones that settle when the response begins, or in those that settle when
// it has ended. Leases go on.
func (e *evaluation) settleZones(t *tracker, status int, hasEnded bool) {
	if !e.isAsked {
		// Nothing was asked.
		return
	}
	if !hasEnded && e.chargesWhole(status) {
		for _, z := range e.zones {
			z.show(0, z.ask.Cost)
			z.Counts.Charged.Add(z.ask.Cost)
			z.reportNear()
		}
		for _, z := range e.zones {
			e.posts = append(e.posts, &z.ask.Request)
		}
		e.open.Accounts.Settle(e.posts, nil)
		return
	}
	var all settlements
	var freed []*inZone
	var emptied []emptying
	for _, z := range e.zones {
		switch z.settles(hasEnded) {
		case settlesNow:
			f, cost := z.settleZone(t, status, hasEnded)
			then := all.add(z, f, z.spent(), cost)
			if back := z.refund(); back > 0 {
				all.refund(z, back)
				freed = append(freed, z)
			}
			switch {
			case f >= empties:
				emptied = append(emptied, emptying{z, then})
				continue
			case cost < z.ask.Cost:
				freed = append(freed, z)
			}
			z.ask.Cost = cost
		case settlesLater:
			// The header is about the state before the request.
			z.show(z.spent(), 0)
		case givesBack:
			all.add(z, costsSame, 0, 0)
		case settlesNothing:
		}
	}
	all.send(e.open)
	wakeLines(freed)
	for _, zone := range emptied {
		zone.forgive()
	}
}

// chargesWhole reports whether all zones charge what they hold in flight, as it is. They do for most requests.
func (e *evaluation) chargesWhole(status int) bool {
	if e.open == nil {
		return false
	}
	for _, z := range e.zones {
		if z.SettleAtEnd || z.Cost.Text != "" || z.Cost.Number == 0 || z.Free.Contains(status) || z.Forgives.Contains(status) || z.spend != (spend{stored: phaseHeld}) {
			return false
		}
	}
	return true
}

// settling is whether a zone settles.
type settling uint8

const (
	settlesNothing settling = iota
	settlesNow
	// settlesLater: when the response has ended.
	settlesLater
	// givesBack: what would have been refused would not have been charged.
	givesBack
)

// settles returns whether the zone settles when the response begins or, if hasEnded is set, ends.
func (z *inZone) settles(hasEnded bool) settling {
	switch {
	case z.answer == hasNoRoom && z.isUncertain() && !hasEnded:
		return givesBack
	case z.answer == hasNoRoom && z.used() == 0, z.isLease:
		return settlesNothing
	case z.answer != storeFailed && z.spend == (spend{}) && z.used() == 0:
		// The store panicked.
		return settlesNothing
	case z.SettleAtEnd == hasEnded:
		return settlesNow
	case hasEnded:
		return settlesNothing
	default:
		return settlesLater
	}
}

// settleZone makes the state of the zone show what a response with this status costs, counts that,
// and returns it.
func (z *inZone) settleZone(t *tracker, status int, hasEnded bool) (f final, cost int64) {
	status = t.statusFor(z.Zone, status)
	z.noteForgiven()
	spent := z.spent()
	shown := spent
	if hasEnded {
		shown = 0
	}
	isForgiven := z.Forgives.Contains(status)
	isFree := isForgiven || z.Free.Contains(status) && z.staysFree(status)
	if !isFree {
		cost = z.finalCost(t, status)
	}
	switch f = finalOf(spent, cost); {
	case !isForgiven || z.bucket != ownBucket:
	case !z.tookAlone(shown):
		z.showEmpty()
		return empties, 0
	default:
		f = emptiesOwn
	}
	z.show(shown, cost)
	z.countSettled(spent, cost, isFree)
	z.reportNear()
	return f, cost
}

// finalCost returns what the zone charges for a response with this status. A request whose client
// left costs what it holds, or what is known by then, whichever is more.
func (z *inZone) finalCost(t *tracker, status int) int64 {
	if z.itemOf() != nil {
		return max(z.rare.amount, 0)
	}
	if status != statusLeft {
		return z.Zone.finalCost(z.of.repl, z.of.limiter, t.response)
	}
	known := z.ask.Cost
	if z.SettleAtEnd {
		return max(known, z.Zone.finalCost(z.of.repl, z.of.limiter, t.response))
	}
	return max(known, z.firstCost(z.of.repl))
}

// spent returns what the request has spent in the zone.
func (z *inZone) spent() int64 {
	if z.isTaken() {
		return z.ask.Cost
	}
	return 0
}

// lose notes that what was taken is gone.
func (s *spend) lose() {
	switch {
	case s.alone == localTaken:
		s.alone = localDecided
	case s.stored == phaseTaken:
		s.stored = phaseNone
	}
}

// countSettled counts the final cost of a request in the zone.
func (z *inZone) countSettled(spent, cost int64, free bool) {
	counts := z.Counts
	counts.Charged.Add(cost)
	if spent > cost {
		counts.Refunded.Add(spent - cost)
	} else if free {
		counts.Free.Add(z.ask.Cost)
	}
}

// tookAlone reports whether the take of this request, which shows this cost, found the
// bucket of the zone empty.
func (z *inZone) tookAlone(shown int64) bool {
	// A check may have found an old count.
	return z.stored == phaseTaken && z.ask.Used <= shown
}

// emptying is a zone whose bucket is emptied, and how.
type emptying struct {
	*inZone
	then due
}

// forgive empties a bucket that a status forgives.
func (e emptying) forgive() {
	z, spent, l, req := e.boundZone, e.spend, e.of.limiter, e.ask.Request
	e.ask.Cost = 0
	if e.then == dueEmpty {
		l.empty(z, req, spent)
		return
	}
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

// empty empties the bucket of a request that has spent something in it.
func (l *Limiter) empty(z *boundZone, req store.Request, spent spend) {
	end := z.running.empty(&req)
	z.handle.Forgive(req, func(open *stores.Opened, err error) {
		end(err)
		if err == nil {
			z.Counts.Forgiven.Inc()
			z.room.wake(req.ClientKey)
		} else {
			z.handle.ReportError(l.Now(), z.Name, req.ClientKey, err)
		}
		// A take goes with the bucket, and a refund of it could arrive in the next one. A take
		// without a reply may arrive there as well; its refund, by ID, does no harm.
		isLeft := err != nil && spent.stored == phaseTaken || spent.stored == phaseUncertain || spent.stored == phaseUncertainHeld
		if open != nil && isLeft {
			open.Refund([]*store.Request{&req})
		}
	})
}

// undo refunds what was taken, because the request does not go on.
func (e *evaluation) undo() {
	all := func(*inZone) bool { return true }
	if l := e.lease(); l == nil {
		e.giveBack(all)
	} else {
		l.mu.Lock()
		defer l.mu.Unlock()
		e.rare.lease = nil
		l.giveBackWith(all)
	}
	for _, z := range e.zones {
		spent := z.spend
		if z.needsID && z.ChargeBefore {
			// A request that waits takes again, maybe before a refund arrives, which must not
			// find the new take. The ledger refunds takes as well that it refuses.
			z.ask.ID = identity.NewRequestID()
		}
		// The same applies to what it is held under.
		z.ask.Hold = z.newHold(z.itemOf())
		var left spend
		if spent.isLost() {
			left.stored = phaseLost
		}
		if spent.isLocal() {
			left.alone = localDecided
		}
		if spent != left {
			z.spend = left
		}
	}
}

// giveBack gives back what some zones hold in flight or have taken.
func (e *evaluation) giveBack(some func(z *inZone) bool) {
	var all settlements
	for _, z := range e.zones {
		if !some(z) {
			continue
		}
		z.noteForgiven()
		spent := z.spent()
		if !z.isLease {
			z.Counts.Refunded.Add(spent)
		}
		all.add(z, finalOf(spent, 0), spent, 0)
	}
	all.send(e.open)
}

// settlements are for the store and for memory.
type settlements struct{ store, local settlement }

// settlement is what a store is to do once the cost of a request is known.
type settlement struct {
	// ended are requests whose cost was in flight, with their final cost; held is
	// what each held.
	ended []*store.Request
	held  []int64
	// unknown are those whose takes may have spent the cost, with what each held, and how those end that have no ID.
	unknown     []*store.Request
	heldUnknown []int64
	ends        []*store.Late
	// again are repeats of uncertain takes, under their ID.
	charges, again, refunds []*store.Request
}

// add notes what the zone has to do so that spent becomes cost, and returns it.
func (s *settlements) add(z *inZone, f final, spent, cost int64) due {
	if f >= empties {
		spent = 0
	}
	if z.alone == localMirrored || z.alone == localTaken {
		req := z.localRequest()
		s.local.endHold(req, phaseTaken, s.local.add(req, phaseTaken, finalOf(spent, cost), spent, cost))
	}
	if z.alone == localTaken && f < empties {
		// The store may be back, so it settles the cost as well.
		spent, f = 0, finalOf(0, cost)
	}
	d := s.store.add(z.ask.Request, z.stored, f, spent, cost)
	if !z.keepsHold() {
		s.store.endHold(z.ask.Request, z.stored, d)
	}
	if z.isLost() && z.rare != nil {
		if z.bucket != ownBucket {
			// Where others count, what was not taken is not charged late: only what it holds ends.
			end := z.ask.Request
			end.Cost = 0
			s.store.unknown, s.store.heldUnknown, s.store.ends = append(s.store.unknown, &end), append(s.store.heldUnknown, 0), append(s.store.ends, nil)
		}
		s.store.ends[len(s.store.ends)-1] = z.rare.end
	}
	return d
}

func (s *settlement) add(req store.Request, phase storePhase, f final, spent, cost int64) due {
	d := dues[phase][f]
	// Most need no copy of the request.
	posted := func(cost int64) *store.Request {
		r := req
		r.Cost = cost
		return &r
	}
	switch phase {
	case phaseHeld:
		s.ended, s.held = append(s.ended, posted(cost)), append(s.held, req.Cost)
	case phaseUncertainHeld, phaseLostHeld:
		s.unknown, s.heldUnknown, s.ends = append(s.unknown, posted(cost)), append(s.heldUnknown, req.Cost), append(s.ends, nil)
	case phaseLost:
		s.unknown, s.heldUnknown, s.ends = append(s.unknown, posted(cost)), append(s.heldUnknown, 0), append(s.ends, nil)
	case phaseNone, phaseTaken, phaseUncertain:
	}
	switch d {
	case dueCharge:
		r := posted(cost - spent)
		if r.ID != "" && spent > 0 {
			// What is under the old ID stays.
			r.ID = identity.NewRequestID()
		}
		s.charges = append(s.charges, r)
	case dueRepeat:
		s.again = append(s.again, posted(cost))
	case dueRefund:
		back := req.Cost
		if phase == phaseTaken {
			back = spent - cost
		}
		s.refunds = append(s.refunds, posted(back))
	case dueNothing, dueEnd, dueEmpty, dueRefundFirst:
	}
	return d
}

// endHold ends what a take holds, unless what is due does that anyway.
func (s *settlement) endHold(req store.Request, phase storePhase, d due) {
	isOpen := d == dueRepeat || phase == phaseTaken && (d == dueNothing || d == dueCharge)
	if isOpen && req.MayHold() {
		// Most end nothing, and need no copy.
		end := req
		end.Cost = 0
		s.refunds = append(s.refunds, &end)
	}
}

// send sends it, unless the store could not be opened.
func (s *settlements) send(open *stores.Opened) {
	if open != nil {
		s.local.send(open.Local.Opened)
		s.store.send(open)
	}
}

func (s *settlement) send(open *stores.Opened) {
	if len(s.ended) > 0 {
		open.Accounts.Settle(s.ended, s.held)
	}
	if len(s.unknown) > 0 {
		open.Accounts.SettleUnknown(s.unknown, s.heldUnknown, s.ends)
	}
	open.Charge(s.charges)
	open.ChargeByID(s.again)
	open.Refund(s.refunds)
}

// show changes the state of the zone, which shows spent, to show cost.
func (z *inZone) show(spent, cost int64) {
	st := &z.ask.State
	if st.Err != nil || cost == spent {
		return
	}
	st.Used = max(st.Used+cost-spent, 0)
	st.Remaining = max(st.Limit-st.Used, 0)
	before, after := st.Reset, st.ResetOtherwise
	if spent > 0 {
		before, after = after, before
	}
	st.Reset = resetAfter(&z.ask.Request, cost, before, after)
}

// resetAfter returns the reset once cost is spent, given the resets before spending and after spending r's cost.
func resetAfter(r *store.Request, cost, before, after int64) int64 {
	if cost == 0 {
		return before
	}
	switch aging := algorithm.Of(r.Limit.Algorithm).Aging; aging {
	case algorithm.Draining:
		drain, _ := algorithm.DrainTime(r, cost)
		return before + drain
	case algorithm.AtWindowEnd, algorithm.ByClock, algorithm.OneByOne:
		return max(before, after)
	default:
		panic(aging.Unknown())
	}
}

// showEmpty makes the state of the zone show a bucket that was emptied.
func (z *inZone) showEmpty() {
	st := &z.ask.State
	st.Used, st.Remaining, st.Penalty = 0, st.Limit, 0
	if !algorithm.Of(z.ask.Request.Limit.Algorithm).Windowed() {
		st.Reset = st.Now
	}
}

// showRefunds makes the states show that what was taken is refunded.
func (e *evaluation) showRefunds() {
	for _, z := range e.zones {
		if z.isTaken() {
			z.show(z.ask.Cost, 0)
		}
	}
}

// release leaves the store.
func (e *evaluation) release() {
	e.endTakes()
	if e.open != nil {
		e.open = nil
		e.zones[0].handle.Leave()
	}
}
