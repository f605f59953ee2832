package limiter

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// enter opens the store. An error fails the zones.
func (e *evaluation) enter() {
	var err error
	if e.open, err = e.zones[0].handle.Enter(); err != nil {
		e.ensureRare().openErr = err
	}
}

// refusesOutright reports whether a zone whose limit is 0, or in which the client is
// blocked, refuses the request, so that no store is asked.
func (e *evaluation) refusesOutright() bool {
	for _, z := range e.zones {
		if z.role == blocks || z.role == enforces && z.ask.Events == 0 {
			e.resetStates()
			return true
		}
	}
	return false
}

// resetStates sets the states as they are before any store is asked: only zones whose limit
// is 0, or in which the client is blocked, have an answer.
func (e *evaluation) resetStates() {
	e.isAsked = true
	for _, z := range e.zones {
		z.ask.State, z.alone, z.answer = store.State{}, localNone, notAsked
		if z.role == blocks {
			now, until := e.limiter.Now().UnixMicro(), z.rare.block.Until
			z.learn(store.State{
				Limit: max(z.ask.Capacity(), 0), Reset: until, Now: now,
				RetryAfter: time.Duration(max(until-now, 1)) * time.Microsecond,
			})
		} else if z.ask.Events == 0 {
			z.learn(store.State{RetryAfter: store.Never, Now: e.limiter.Now().UnixMicro()})
		}
	}
}

// learn sets the state.
func (z *inZone) learn(st store.State) {
	z.ask.State = st
	z.note()
}

// note notes that the state is set.
func (z *inZone) note() { z.answer = answerOf(&z.ask.State) }

// countOverflow makes clients beyond the bound of a store share a bucket, unless they are known to
// have one.
func (e *evaluation) countOverflow(r *http.Request) {
	if e.open == nil {
		return
	}
	for _, o := range e.open.Overflow(r.Context(), e.asks, e.limiter.Now) {
		e.zones[o.Index].share(r, o.Err)
	}
	e.shareOnce()
}

// shareOnce drops all but one of the clients of a zone that share the overflow bucket, where a request names several:
// it counts there once, as one that may be refused if there is any.
func (e *evaluation) shareOnce() {
	repeats := func(n int) bool {
		z := e.zones[n]
		return z.bucket == overflowBucket && z.itemOf() == nil && slices.ContainsFunc(e.zones, func(other *inZone) bool {
			return other.boundZone == z.boundZone && other.bucket == z.bucket &&
				(other.role < z.role || other.role == z.role && slices.Index(e.zones, other) < n)
		})
	}
	for n := len(e.zones) - 1; n >= 0; n-- {
		if repeats(n) {
			e.zones, e.asks = slices.Delete(e.zones, n, n+1), slices.Delete(e.asks, n, n+1)
		}
	}
}

// share makes the zone count the request in a bucket that clients share: the overflow bucket or,
// if the store failed with err to say whether the client is new, or to answer about the
// overflow bucket, the unknown one.
func (z *inZone) share(r *http.Request, err error) {
	req, rare := &z.ask.Request, z.ensureRare()
	if z.role == blocks {
		// It is refused as the client that it is.
		return
	}
	if z.bucket == ownBucket {
		rare.own = ownRequest{req.ClientKey, req.Events, req.Burst}
	}
	rare.err = err
	if of := z.overridesOf(req.ClientKey, z.of.limiter); of.Grant != nil || of.Limit != nil {
		// They are the client's own. A matcher that fails has ended the request before.
		if events, burst := z.limitBy(z.rule(z.of.limiter), z.replOf(), z.of.limiter); events != unlimited {
			_ = z.setLimit(req, z.requestOf(r), events, burst, stores.ClientOverrides{})
		}
	}
	req.ClientKey, z.bucket = stores.OverflowKey, overflowBucket
	if err != nil {
		req.ClientKey, z.bucket = stores.UnknownKey, unknownBucket
		if r.Context().Err() == nil {
			z.noteError(err)
		}
	}
}

// resolvedKey returns what the key of the zone yields for the request, whichever
// bucket counts it.
func (z *inZone) resolvedKey() string {
	if z.bucket == ownBucket {
		return z.ask.ClientKey
	}
	return z.rare.own.clientKey
}

// letsWait reports whether requests can wait in the zone, for which its store is
// needed.
func (z *inZone) letsWait() bool {
	return z.MaxWait > 0 && z.role == enforces && z.bucket != unknownBucket && z.of.open != nil
}

// askZones asks the stores of e, the newest evaluation. The error that it returns ends the request.
func (t *tracker) askZones(e *evaluation, r *http.Request) error {
	if slices.ContainsFunc(e.zones, (*inZone).letsWait) {
		return t.askInTurn(e, r)
	}
	return e.ask(r, nil)
}

// ask sets the states: it checks, and takes if the checks let the request pass. Of the zones that
// take, first goes before others, unless it is nil. An error of the store is part of a
// state; the error that ask returns ends the request.
func (e *evaluation) ask(r *http.Request, first *inZone) error {
	e.resetStates()
	if e.awaitsProbe(r) {
		return nil
	}
	onlyChecks, anyObserves, anyUnknown := true, false, false
	for _, z := range e.zones {
		onlyChecks = onlyChecks && !z.ChargeBefore && z.role != observes
		anyObserves = anyObserves || z.role == observes
		anyUnknown = anyUnknown || z.bucket == unknownBucket
	}
	if anyUnknown {
		if passes, err := e.answerUnknown(r); err != nil || !passes {
			return err
		}
	} else if e.open != nil && onlyChecks {
		e.open.Admit(r.Context(), e.asks)
		noteAll(e.zones)
		noteHeld(e.zones)
		return e.handleErrors(r, e.zones)
	}
	if !anyObserves {
		return e.askEnforced(r, first)
	}
	enforced := e.where(func(z *inZone) bool { return z.isAskedAsEnforced() && !z.isUncertain() })
	if e.refuseKnown(enforced) {
		// The zones that only observe make no call for such a request either.
		return nil
	}
	await := e.askEach(r, e.where(func(z *inZone) bool {
		return z.role == observes && z.answer == notAsked && !z.isUncertain()
	}))
	return cmp.Or(e.askEnforced(r, first), await())
}

// isAskedAsEnforced reports whether the zone is asked, and may refuse the request.
func (z *inZone) isAskedAsEnforced() bool { return z.role != observes && z.bucket != unknownBucket }

// takes reports whether the zone takes. One that may have done so before the request
// waited does not.
func (z *inZone) takes() bool { return z.ChargeBefore && !z.isUncertain() }

// answerUnknown sets the states of the zones that count the request in the unknown bucket, as
// on_error says, and reports whether the request passes there.
func (e *evaluation) answerUnknown(r *http.Request) (passes bool, err error) {
	unknown := e.where(func(z *inZone) bool { return z.bucket == unknownBucket })
	for _, z := range unknown {
		z.learn(store.State{Err: z.rare.err})
	}
	err = e.handleErrors(r, unknown)
	e.noteTaken(e.where(func(z *inZone) bool { return z.bucket == unknownBucket && z.takes() }))
	return passAll(unknown), err
}

// askEach asks about some zones at the same time, each in a call of its own: a refusal of one must
// not keep another from being asked. The function that it returns waits for the answers and
// handles them.
func (e *evaluation) askEach(r *http.Request, some []*inZone) (await func() error) {
	var calls sync.WaitGroup
	var checks, takes []*inZone
	for _, z := range some {
		question, ctx := (*stores.Opened).Admit, r.Context()
		if z.ChargeBefore {
			question, ctx, takes = (*stores.Opened).Take, context.WithoutCancel(ctx), append(takes, z)
		} else {
			checks = append(checks, z)
		}
		if e.open != nil && !e.open.IsRemote {
			// Memory answers at once.
			e.askSome(ctx, question, []*inZone{z})
			continue
		}
		calls.Go(func() { e.askSome(ctx, question, []*inZone{z}) })
	}
	return func() error {
		calls.Wait()
		noteHeld(checks)
		err := e.handleErrors(r, some)
		e.noteTaken(takes)
		return err
	}
}

// askEnforced asks the zones that may each refuse the request.
func (e *evaluation) askEnforced(r *http.Request, first *inZone) error {
	checks := e.where(func(z *inZone) bool { return !z.ChargeBefore && z.isAskedAsEnforced() })
	takes := e.where(func(z *inZone) bool { return z.takes() && z.isAskedAsEnforced() })
	if len(checks) > 0 {
		// No zone is asked if another is known to refuse. A store that gets all takes
		// in one call sees to that itself.
		if e.refuseKnown(takes) {
			return nil
		}
		e.askSome(r.Context(), (*stores.Opened).Admit, checks)
		noteHeld(checks)
		if err := e.handleErrors(r, checks); err != nil || !passAll(checks) {
			return err
		}
	}
	return e.take(r, takes, first)
}

// refuseKnown sets the states of those of some zones that refuse without being
// asked, and reports whether there are any.
func (e *evaluation) refuseKnown(some []*inZone) (refused bool) {
	if len(some) == 0 || e.open == nil {
		return false
	}
	for _, z := range some {
		z.ask.State = store.State{}
	}
	refused = e.open.RefuseKnown(e.asksOf(some))
	noteAll(some)
	return refused
}

// take takes from some zones. Those that are known to be full, and the one for which the request
// has waited, go first: if they refuse again, the others are not touched.
func (e *evaluation) take(r *http.Request, takes []*inZone, first *inZone) error {
	if len(takes) > 1 {
		var full, others []*inZone
		for _, z := range takes {
			if e.open != nil && (z == first || e.open.IsFull(&z.ask.Request)) {
				full = append(full, z)
			} else {
				others = append(others, z)
			}
		}
		if len(full) > 0 && len(others) > 0 {
			if err := e.takeSome(r, full); err != nil || !passAll(full) {
				return err
			}
			takes = others
		}
	}
	return e.takeSome(r, takes)
}

func (e *evaluation) takeSome(r *http.Request, takes []*inZone) error {
	if len(takes) == 0 {
		return nil
	}
	// A take runs to its end even if the client leaves, so that it can be refunded.
	// The store's timeout bounds it.
	e.askSome(context.WithoutCancel(r.Context()), (*stores.Opened).Take, takes)
	err := e.handleErrors(r, takes)
	e.noteTaken(takes)
	if item := takes[0].itemOf(); err == nil && (item == nil || !item.Exactly) {
		err = leftBy(r, r.Context().Err())
	}
	return err
}

// question is a method of a store that sets the states of asks.
type question = func(by *stores.Opened, ctx context.Context, asks []*store.Ask)

// askSome asks about some zones in one call.
func (e *evaluation) askSome(ctx context.Context, ask question, some []*inZone) {
	if e.open == nil {
		for _, z := range some {
			z.learn(store.State{Err: e.rare.openErr})
		}
		return
	}
	ask(e.open, ctx, e.asksOf(some))
	noteAll(some)
}

// asksOf returns the asks of some zones.
func (e *evaluation) asksOf(some []*inZone) []*store.Ask {
	if len(some) == len(e.asks) {
		return e.asks
	}
	asks := make([]*store.Ask, len(some))
	for n, z := range some {
		asks[n] = &z.ask
	}
	return asks
}

// noteAll notes that the states of some zones are set.
func noteAll(some []*inZone) {
	for _, z := range some {
		z.note()
	}
}

// answerOf returns what a state says. A store leaves the states of requests zero that it does not
// decide.
func answerOf(st *store.State) answer {
	switch {
	case st.Err != nil:
		return storeFailed
	case st.Allowed:
		return hasRoom
	case st.Now != 0:
		return hasNoRoom
	default:
		return notAsked
	}
}

// noteHeld notes which of some zones hold the cost in flight.
func noteHeld(some []*inZone) {
	for _, z := range some {
		if z.answer == hasRoom {
			z.hold()
		}
	}
}

// inFlight are the phases in which the cost is in flight as well.
var inFlight = [storePhases]storePhase{
	phaseNone: phaseHeld, phaseHeld: phaseHeld, phaseTaken: phaseHeld, phaseUncertain: phaseUncertainHeld,
	phaseUncertainHeld: phaseUncertainHeld, phaseLost: phaseLostHeld, phaseLostHeld: phaseLostHeld,
}

// hold notes that the cost is in flight to the store.
func (s *spend) hold() { s.stored = inFlight[s.stored] }

// statusClientClosedRequest is what Caddy reports if a client left.
const statusClientClosedRequest = 499

// leftBy returns the error, for err, of a request whose client has left, or nil.
func leftBy(r *http.Request, err error) error {
	if r.Context().Err() == nil {
		return nil
	}
	return caddyhttp.Error(statusClientClosedRequest, err)
}

// handleErrors reports the errors of some zones, and lets this process decide where on_error says so.
func (e *evaluation) handleErrors(r *http.Request, some []*inZone) error {
	var failed error
	for _, z := range some {
		if z.answer != storeFailed {
			continue
		}
		failed = z.ask.Err
		// A check spends nothing, whatever the store says, nor does a look for a bucket.
		if z.ChargeBefore && z.bucket != unknownBucket && errors.Is(failed, store.ErrUncertain) {
			if z.becomeUncertain(z.needsID); z.isLost() {
				z.noteEnd(failed)
			}
		}
	}
	if failed == nil {
		return nil
	}
	if err := leftBy(r, failed); err != nil {
		return err
	}
	for _, z := range some {
		if z.answer == storeFailed {
			z.handleError(r)
		}
	}
	return nil
}

// noteEnd notes how the take ends that failed with err. What fails after it takes nothing.
func (z *inZone) noteEnd(err error) {
	if rare := z.ensureRare(); rare.end == nil {
		rare.end = store.LateOf(err)
	}
}

// becomeUncertain notes that a take, which may have an ID, may have spent the cost.
func (s *spend) becomeUncertain(hasID bool) {
	isHeld := s.stored == inFlight[s.stored]
	if s.stored = phaseUncertain; !hasID {
		s.stored = phaseLost
	}
	if isHeld {
		s.hold()
	}
}

func (z *inZone) handleError(r *http.Request) {
	err := z.ask.Err
	switch {
	case z.bucket == unknownBucket:
		// The error was noted when the bucket was chosen.
	case z.bucket == overflowBucket && !z.isUncertain():
		// Requests that on_error admits must not fill the overflow bucket, which
		// would refuse new clients later.
		z.share(r, err)
	default:
		z.noteError(err)
	}
	if z.onError == stores.OnErrorLocal && z.of.open != nil {
		z.askLocal()
	}
}

// noteError notes that the store has failed to answer.
func (z *inZone) noteError(err error) {
	if z.of.limiter.simulation == nil {
		z.handle.ReportError(z.of.limiter.Now(), z.Name, z.ask.ClientKey, err)
	}
}

// askLocal makes this process decide by itself: the ledger, which holds the cost in flight, or a
// bucket in memory, which spends it.
func (z *inZone) askLocal() {
	open, req := z.decider()
	st := open.Accounts.AdmitAlone(&req)
	if st.InFlight && z.ChargeBefore && !req.MayHold() {
		// The cost that runs never comes back.
		st.InFlight, st.RetryAfter = false, time.Duration(st.ResetOtherwise-st.Now)*time.Microsecond
	}
	z.learn(st)
	z.alone = localDecided
	switch {
	case z.answer != hasRoom:
	case open == z.of.open:
		z.hold()
	default:
		z.alone, z.ask.Request.Receipt = localTaken, z.ask.State.Receipt
	}
}

// decider returns the opened store whose accounts decide without the store, and the request to them: the store's
// own, which are its ledger, or those in memory where the ledger keeps no count, that is for slots, for clients of a
// shared bucket, and for stores without a ledger.
func (z *inZone) decider() (*stores.Opened, store.Request) {
	if open := z.of.open; open.IsRemote && !z.isLease && z.bucket == ownBucket {
		return open, z.ask.Request
	}
	return z.of.open.Local.Opened, z.localRequest()
}

// localRequest is the request to a bucket in memory, where no client shares a bucket:
// while the store does not answer, most clients may have one of their own.
func (z *inZone) localRequest() store.Request {
	req := z.ask.Request
	if z.bucket != ownBucket {
		own := z.rare.own
		req.ClientKey, req.Events, req.Burst = own.clientKey, own.events, own.burst
	}
	return req
}

// decidedBy returns the client key of the bucket that has decided.
func (z *inZone) decidedBy() string {
	if z.isLocal() {
		return z.resolvedKey()
	}
	return z.ask.ClientKey
}

// noteTaken notes which zones have spent the cost, and which refused.
func (e *evaluation) noteTaken(takes []*inZone) {
	for _, z := range takes {
		switch {
		case z.answer != hasRoom:
		case z.findsNothing():
			z.refuseLook()
		case z.alone == localDecided:
			// The ledger holds the cost.
		default:
			z.noteTake()
		}
	}
}

// noteTake notes that the zone has spent the cost.
func (z *inZone) noteTake() {
	z.take()
	if !z.Forgives.IsEmpty() {
		z.beginTake()
	}
	z.ask.Request.Receipt = z.ask.State.Receipt
	if !z.isUncertain() {
		z.ask.NoteHold(&z.ask.State)
	}
	z.mirror()
	if z.isLease {
		z.boundAborted()
	}
}

// take notes that the cost was spent where it was decided.
func (s *spend) take() {
	if s.alone != localTaken {
		s.stored = phaseTaken
	}
}

// mirror takes a slot in memory as well that the store gave: memory decides about slots without the store.
func (z *inZone) mirror() {
	if z.isLease && !z.isLocal() && z.onError == stores.OnErrorLocal && z.of.open.IsRemote {
		req := z.localRequest()
		z.of.open.Local.Charge([]*store.Request{&req})
		z.alone = localMirrored
	}
}

// passAll reports whether none of some zones ends the request.
func passAll(some []*inZone) bool {
	return !slices.ContainsFunc(some, func(z *inZone) bool { return endsRequest(z.outcome()) })
}

// where returns the zones for which is holds.
func (e *evaluation) where(is func(z *inZone) bool) (some []*inZone) {
	for _, z := range e.zones {
		if is(z) {
			some = append(some, z)
		}
	}
	return some
}
