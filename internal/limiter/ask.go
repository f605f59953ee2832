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

// enter opens the stores. An error fails the zones that count there.
func (e *evaluation) enter() {
	for i := range e.zones {
		z := &e.zones[i]
		sharer := slices.IndexFunc(e.zones[:i], func(other inZone) bool { return other.in == z.in })
		if sharer >= 0 && e.zones[sharer].open == nil {
			e.rareZone(i).openErr = e.rareZone(sharer).openErr
			continue
		}
		var err error
		if z.open, err = z.handle.Enter(); err != nil {
			e.rareZone(i).openErr = err
		}
	}
}

// onlyOpen returns the store in which all zones count, or nil if there are two or
// it could not be opened.
func (e *evaluation) onlyOpen() *stores.Opened {
	if e.isSplit() {
		return nil
	}
	return e.zones[0].open
}

// isSplit reports whether the zones do not all count in the same store.
func (e *evaluation) isSplit() bool {
	return e.anyZone(func(i int) bool { return e.zones[i].in != e.zones[0].in })
}

// refusesOutright reports whether a zone whose limit is 0, or in which the client is
// blocked, refuses the request, so that no store is asked.
func (e *evaluation) refusesOutright() bool {
	for i := range e.zones {
		if role := e.zones[i].role; role == blocks || role == enforces && e.reqs[i].Events == 0 {
			e.resetStates()
			return true
		}
	}
	return false
}

// resetStates sets the states as they are before any store is asked: only zones whose limit
// is 0, or in which the client is blocked, have an answer.
func (e *evaluation) resetStates() {
	e.states = slices.Grow(e.states[:0], len(e.reqs))[:len(e.reqs)]
	clear(e.states)
	for i := range e.zones {
		z := &e.zones[i]
		z.alone, z.answer = localNone, notAsked
		if z.role == blocks {
			now, until := e.limiter.Now().UnixMicro(), e.rare.zones[i].block.Until
			e.learn(i, store.State{
				Limit: max(e.reqs[i].Capacity(), 0), Reset: until, Now: now,
				RetryAfter: time.Duration(max(until-now, 1)) * time.Microsecond,
			})
		} else if e.reqs[i].Events == 0 {
			e.learn(i, store.State{RetryAfter: store.Never, Now: e.limiter.Now().UnixMicro()})
		}
	}
}

// learn sets the state of zone i.
func (e *evaluation) learn(i int, st store.State) {
	e.states[i], e.zones[i].answer = st, answerOf(&st)
}

// answering is what the plan of a request asks of a store. That of a simulation foresees the
// same answers without effects.
type answering interface {
	Overflow(ctx context.Context, reqs []store.Request, now func() time.Time) []stores.Overflow
	RefuseKnown(reqs []store.Request, states []store.State) (refused bool)
	IsFull(r *store.Request) bool
	Admit(ctx context.Context, reqs []store.Request, states []store.State)
	Take(ctx context.Context, reqs []store.Request, states []store.State)
	AdmitAlone(known, local *store.Request, takes bool) store.State
}

// answering returns what answers for an open store.
func (l *Limiter) answering(open *stores.Opened) answering {
	if l.isSimulated {
		return stores.Foresight{Opened: open}
	}
	return open
}

// countOverflow makes clients beyond the bound of a store share a bucket, unless they are known to
// have one.
func (e *evaluation) countOverflow(r *http.Request) {
	// Most requests need no list of zones.
	if open := e.onlyOpen(); open != nil {
		for _, o := range e.limiter.answering(open).Overflow(r.Context(), e.reqs, e.limiter.Now) {
			e.share(r, o.Index, o.Err)
		}
		return
	}
	for _, there := range e.byStore(e.where(func(z *inZone) bool { return z.open != nil })) {
		if len(there) > 0 {
			for _, o := range e.limiter.answering(e.zones[there[0]].open).Overflow(r.Context(), e.pick(there), e.limiter.Now) {
				e.share(r, there[o.Index], o.Err)
			}
		}
	}
}

// share makes zone i count the request in a bucket that clients share: the overflow bucket or,
// if the store failed with err to say whether the client is new, or to answer about the
// overflow bucket, the unknown one.
func (e *evaluation) share(r *http.Request, i int, err error) {
	req, z, rare := &e.reqs[i], &e.zones[i], e.rareZone(i)
	if z.role == blocks {
		// It is refused as the client that it is.
		return
	}
	if z.bucket == ownBucket {
		rare.own = ownRequest{req.ClientKey, req.Events, req.Burst}
	}
	rare.err = err
	if of := z.overridesOf(req.ClientKey, e.limiter); of.Grant != nil || of.Limit != nil {
		// They are the client's own. A matcher that fails has ended the request before.
		if events, burst := z.limitBy(z.rule(e.limiter), e.replOf(i), e.limiter); events != unlimited {
			_ = z.setLimit(req, e.requestOf(i, r), events, burst, stores.ClientOverrides{})
		}
	}
	req.ClientKey, z.bucket = stores.OverflowKey, overflowBucket
	if err != nil {
		req.ClientKey, z.bucket = stores.UnknownKey, unknownBucket
		if r.Context().Err() == nil {
			e.noteError(i, err)
		}
	}
}

// resolvedKey returns what the key of zone i yields for the request, whichever
// bucket counts it.
func (e *evaluation) resolvedKey(i int) string {
	if e.zones[i].bucket == ownBucket {
		return e.reqs[i].ClientKey
	}
	return e.rare.zones[i].own.clientKey
}

// letsWait reports whether requests can wait in zone i, for which its store is
// needed.
func (e *evaluation) letsWait(i int) bool {
	z := &e.zones[i]
	return z.MaxWait > 0 && z.role == enforces && z.bucket != unknownBucket && z.open != nil
}

// askZones asks the stores of e, the newest evaluation. The error that it returns ends the request.
func (t *tracker) askZones(e *evaluation, r *http.Request) error {
	if e.anyZone(e.letsWait) {
		return t.askInTurn(e, r)
	}
	return e.ask(r, noFirst)
}

// noFirst stands for no zone that is asked before others.
const noFirst = -1

// ask sets the states: it checks, and takes if the checks let the request pass. Of the zones that
// take, the one with the index first goes before others. An error of the store is part of a
// state; the error that ask returns ends the request.
func (e *evaluation) ask(r *http.Request, first int) error {
	e.resetStates()
	onlyChecks, anyObserves, anyUnknown := true, false, false
	for i := range e.zones {
		z := &e.zones[i]
		onlyChecks = onlyChecks && !z.ChargeBefore && z.role != observes
		anyObserves = anyObserves || z.role == observes
		anyUnknown = anyUnknown || z.bucket == unknownBucket
	}
	if anyUnknown {
		if passes, err := e.answerUnknown(r); err != nil || !passes {
			return err
		}
	} else if open := e.onlyOpen(); open != nil && onlyChecks {
		e.limiter.answering(open).Admit(r.Context(), e.reqs, e.states)
		e.learnAll()
		e.noteHeld(nil)
		return e.handleErrors(r, nil)
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
	for _, i := range unknown {
		e.learn(i, store.State{Err: e.rare.zones[i].err})
	}
	err = e.handleErrors(r, unknown)
	e.noteTaken(e.where(func(z *inZone) bool { return z.bucket == unknownBucket && z.takes() }))
	return e.passes(unknown), err
}

// askEach asks about some zones at the same time, each in a call of its own: a refusal of one must
// not keep another from being asked. The function that it returns waits for the answers and
// handles them.
func (e *evaluation) askEach(r *http.Request, some []int) (await func() error) {
	var calls sync.WaitGroup
	checks, takes := []int{}, []int{}
	for _, i := range some {
		question, ctx := answering.Admit, r.Context()
		if e.zones[i].ChargeBefore {
			question, ctx, takes = answering.Take, context.WithoutCancel(ctx), append(takes, i)
		} else {
			checks = append(checks, i)
		}
		if open := e.zones[i].open; open != nil && !open.IsRemote {
			// Memory answers at once.
			e.askIn(ctx, question, []int{i})
			continue
		}
		calls.Go(func() { e.askIn(ctx, question, []int{i}) })
	}
	return func() error {
		calls.Wait()
		e.noteHeld(checks)
		err := e.handleErrors(r, some)
		e.noteTaken(takes)
		return err
	}
}

// askEnforced asks the zones that may each refuse the request.
func (e *evaluation) askEnforced(r *http.Request, first int) error {
	checks := e.where(func(z *inZone) bool { return !z.ChargeBefore && z.isAskedAsEnforced() })
	takes := e.where(func(z *inZone) bool { return z.takes() && z.isAskedAsEnforced() })
	// No zone is asked if another is known to refuse. A store that gets all takes
	// in one call sees to that itself.
	known, isSplit := takes, e.isSplit()
	if isSplit {
		known = append(takes[:len(takes):len(takes)], checks...)
	}
	if (isSplit || len(checks) > 0) && e.refuseKnown(known) {
		return nil
	}
	if len(checks) > 0 {
		e.askSome(r.Context(), answering.Admit, checks)
		e.noteHeld(checks)
		if err := e.handleErrors(r, checks); err != nil || !e.passes(checks) {
			return err
		}
	}
	return e.take(r, takes, first)
}

// refuseKnown sets the states of those of some zones that refuse without being
// asked, and reports whether there are any.
func (e *evaluation) refuseKnown(some []int) (refused bool) {
	for _, there := range e.byStore(some) {
		if len(there) == 0 || e.zones[there[0]].open == nil {
			continue
		}
		states := make([]store.State, len(there))
		refused = e.limiter.answering(e.zones[there[0]].open).RefuseKnown(e.pick(there), states) || refused
		e.put(there, states)
	}
	return refused
}

// take takes from some zones. Those that are known to be full, and the one for which the request
// has waited, go first: if they refuse again, the others are not touched.
func (e *evaluation) take(r *http.Request, takes []int, first int) error {
	if len(takes) > 1 {
		var full, others []int
		for _, i := range takes {
			if open := e.zones[i].open; open != nil && (i == first || e.limiter.answering(open).IsFull(&e.reqs[i])) {
				full = append(full, i)
			} else {
				others = append(others, i)
			}
		}
		if len(full) > 0 && len(others) > 0 {
			if err := e.takeSome(r, full); err != nil || !e.passes(full) {
				return err
			}
			takes = others
		}
	}
	return e.takeSome(r, takes)
}

func (e *evaluation) takeSome(r *http.Request, takes []int) error {
	if len(takes) == 0 {
		return nil
	}
	// A take runs to its end even if the client leaves, so that it can be refunded.
	// The store's timeout bounds it.
	e.askSome(context.WithoutCancel(r.Context()), answering.Take, takes)
	err := e.handleErrors(r, takes)
	e.noteTaken(takes)
	if item := e.itemOf(takes[0]); err == nil && (item == nil || !item.Exactly) {
		err = e.limiter.leftBy(r, r.Context().Err())
	}
	return err
}

// question is a method of answering that sets the states of requests.
type question = func(by answering, ctx context.Context, reqs []store.Request, states []store.State)

// askSome asks about some zones: each store in one call, both at the same time.
func (e *evaluation) askSome(ctx context.Context, ask question, some []int) {
	in := e.byStore(some)
	if len(in[ownStore]) == 0 || len(in[rolloutStore]) == 0 {
		e.askIn(ctx, ask, some)
		return
	}
	var other sync.WaitGroup
	other.Go(func() { e.askIn(ctx, ask, in[rolloutStore]) })
	e.askIn(ctx, ask, in[ownStore])
	other.Wait()
}

// askIn asks the store in which some zones count.
func (e *evaluation) askIn(ctx context.Context, ask question, some []int) {
	open := e.zones[some[0]].open
	switch {
	case open == nil:
		for _, i := range some {
			e.learn(i, store.State{Err: e.rare.zones[i].openErr})
		}
	case len(some) == len(e.reqs):
		ask(e.limiter.answering(open), ctx, e.reqs, e.states)
		e.learnAll()
	default:
		states := make([]store.State, len(some))
		ask(e.limiter.answering(open), ctx, e.pick(some), states)
		e.put(some, states)
	}
}

// learnAll notes that the states of all zones are set.
func (e *evaluation) learnAll() {
	for i := range e.zones {
		e.zones[i].answer = answerOf(&e.states[i])
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

// noteHeld notes which of some zones, or of all if some is nil, hold the cost in
// flight.
func (e *evaluation) noteHeld(some []int) {
	for i := range e.zones {
		if within(some, i) && e.zones[i].answer == hasRoom {
			e.zones[i].hold()
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

// leftBy returns the error, for err, of a request whose client has left, or nil. That of a
// simulation cannot leave.
func (l *Limiter) leftBy(r *http.Request, err error) error {
	if l.isSimulated || r.Context().Err() == nil {
		return nil
	}
	return caddyhttp.Error(statusClientClosedRequest, err)
}

// handleErrors reports the errors of some zones, or of all if some is nil, and
// asks the local counts where on_error says so.
func (e *evaluation) handleErrors(r *http.Request, some []int) error {
	var failed error
	for i := range e.zones {
		z := &e.zones[i]
		if !within(some, i) || z.answer != storeFailed {
			continue
		}
		failed = e.states[i].Err
		// A check spends nothing, whatever the store says, nor does a look for a bucket.
		if z.ChargeBefore && z.bucket != unknownBucket && errors.Is(failed, store.ErrUncertain) {
			// Requests that on_error admits must not fill a bucket that clients share.
			if z.becomeUncertain(z.needsID); z.isLost() && z.bucket == ownBucket {
				e.noteEnd(i, failed)
			}
		}
	}
	if failed == nil {
		return nil
	}
	if err := e.limiter.leftBy(r, failed); err != nil {
		return err
	}
	for i := range e.zones {
		if within(some, i) && e.zones[i].answer == storeFailed {
			e.handleError(r, i)
		}
	}
	return nil
}

// noteEnd notes how the take of zone i ends that failed with err. What fails after it takes nothing.
func (e *evaluation) noteEnd(i int, err error) {
	r := e.ensureRare()
	if r.ends == nil {
		r.ends = map[int]*store.Late{}
	}
	if r.ends[i] == nil {
		r.ends[i] = store.LateOf(err)
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

func (e *evaluation) handleError(r *http.Request, i int) {
	z, err := &e.zones[i], e.states[i].Err
	switch {
	case z.bucket == unknownBucket:
		// The error was noted when the bucket was chosen.
	case z.bucket == overflowBucket && !z.isUncertain():
		// Requests that on_error admits must not fill the overflow bucket, which
		// would refuse new clients later.
		e.share(r, i, err)
	default:
		e.noteError(i, err)
	}
	if z.onError == stores.OnErrorLocal && z.open != nil {
		e.askLocal(i)
	}
}

// noteError notes that the store of zone i has failed to answer.
func (e *evaluation) noteError(i int, err error) {
	if z := &e.zones[i]; !e.limiter.isSimulated {
		z.handle.ReportError(e.limiter.Now(), z.Name, e.reqs[i].ClientKey, err)
	}
}

// within reports whether i is among some, where nil stands for all. The states of
// others must not be read: a call may be setting them.
func within(some []int, i int) bool { return some == nil || slices.Contains(some, i) }

// askLocal makes this process decide about zone i by itself. The ledger holds the cost in
// flight as well: the store may be back before the request has settled.
func (e *evaluation) askLocal(i int) {
	z, local := &e.zones[i], e.localRequest(i)
	var known *store.Request
	if !z.isLease && z.bucket == ownBucket {
		known = &e.reqs[i]
	}
	e.learn(i, e.limiter.answering(z.open).AdmitAlone(known, &local, z.ChargeBefore))
	z.alone = localDecided
	if z.answer != hasRoom {
		return
	}
	if known != nil {
		z.hold()
	}
	if !z.ChargeBefore {
		z.alone = localHeld
	}
}

// localRequest is the request to the local counts of zone i, where no client shares a bucket:
// while the store does not answer, most clients may have one of their own.
func (e *evaluation) localRequest(i int) store.Request {
	req := e.reqs[i]
	if e.zones[i].bucket != ownBucket {
		own := &e.rare.zones[i].own
		req.ClientKey, req.Events, req.Burst = own.clientKey, own.events, own.burst
	}
	return req
}

// decidedBy returns the client key of the bucket that has decided in zone i.
func (e *evaluation) decidedBy(i int) string {
	if e.zones[i].isLocal() {
		return e.resolvedKey(i)
	}
	return e.reqs[i].ClientKey
}

// noteTaken notes which zones have spent the cost, and which refused.
func (e *evaluation) noteTaken(takes []int) {
	for _, i := range takes {
		z := &e.zones[i]
		switch {
		case e.limiter.isSimulated:
			if z.isLease && z.answer == hasRoom {
				e.refuseAborted(i, 0)
			}
		case z.answer == hasRoom && e.findsNothing(i):
			e.refuseLook(i)
		case z.answer == hasRoom:
			e.noteTake(i)
		}
	}
}

// noteTake notes that zone i has spent the cost.
func (e *evaluation) noteTake(i int) {
	z := &e.zones[i]
	z.take()
	if !z.Forgives.IsEmpty() {
		e.beginTake(i)
	}
	e.reqs[i].Receipt = e.states[i].Receipt
	e.mirror(i)
	if z.isLease {
		e.boundAborted(i)
	}
}

// take notes that the cost was spent where it was decided.
func (s *spend) take() {
	if s.isLocal() {
		s.alone = localTaken
	} else {
		s.stored = phaseTaken
	}
}

// mirror takes a slot that the store gave in the local counts as well: they have to know of
// it once they decide.
func (e *evaluation) mirror(i int) {
	z := &e.zones[i]
	if z.isLease && !z.isLocal() && z.onError == stores.OnErrorLocal && z.open.IsRemote {
		z.open.Local.Charge([]store.Request{e.localRequest(i)})
		z.alone = localMirrored
	}
}

// passes reports whether none of some zones ends the request.
func (e *evaluation) passes(some []int) bool {
	return !slices.ContainsFunc(some, func(i int) bool { return endsRequest(e.zones[i].outcome()) })
}

// where returns the zones for which is holds; not nil, which would stand for all.
func (e *evaluation) where(is func(z *inZone) bool) []int {
	some := []int{}
	for i := range e.zones {
		if is(&e.zones[i]) {
			some = append(some, i)
		}
	}
	return some
}

// anyZone reports whether is holds for a zone.
func (e *evaluation) anyZone(is func(i int) bool) bool {
	for i := range e.zones {
		if is(i) {
			return true
		}
	}
	return false
}

// byStore parts some zones by the store in which they count.
func (e *evaluation) byStore(some []int) (in [maxStores][]int) {
	if !e.isSplit() {
		in[e.zones[0].in] = some
		return in
	}
	for _, i := range some {
		in[e.zones[i].in] = append(in[e.zones[i].in], i)
	}
	return in
}

// pick returns the requests of some zones.
func (e *evaluation) pick(some []int) []store.Request {
	if len(some) == len(e.reqs) {
		return e.reqs
	}
	reqs := make([]store.Request, len(some))
	for n, i := range some {
		reqs[n] = e.reqs[i]
	}
	return reqs
}

// put sets the states of some zones.
func (e *evaluation) put(some []int, states []store.State) {
	for n, i := range some {
		e.learn(i, states[n])
	}
}
