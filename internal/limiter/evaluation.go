package limiter

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// evaluation is one request in the zones of one handler. Its slices have the same
// length.
type evaluation struct {
	limiter *Limiter
	repl    *caddy.Replacer
	zones   []inZone
	// reqs have their final cost once their zones have settled.
	reqs   []store.Request
	states []store.State
	// own is the handler's own store, open until the request has settled and its leases have
	// ended. It is nil if no zone counts there, or if opening it failed.
	own *stores.Opened
	// rare is nil for most requests.
	rare *rare
}

// inZone is the request in one zone.
type inZone struct {
	*boundZone
	spend
	// observed: the zone is not enforced for this client.
	observed bool
	// hasWaited: the request has waited for the zone, which is asked before others.
	hasWaited bool
}

// rare holds the fields that few evaluations need. It is allocated on demand.
type rare struct {
	// other is the store of a rollout, as own is.
	other *stores.Opened
	// failed are the errors of stores that could not be opened.
	failed [maxStores]error
	lease  *lease
	// refusal is the decision that ended the request; only the first evaluation of a request has it.
	refusal *decision
	// blocked are the zones for which an operator has blocked the client.
	blocked map[int]store.Override
	// takes are those from the zones that forgive.
	takes map[int]take
	// diverted are the zones that count the request in a bucket that clients share.
	diverted map[int]diversion
}

// rarely returns e.rare, and makes it if there is none.
func (e *evaluation) rarely() *rare {
	if e.rare == nil {
		e.rare = new(rare)
	}
	return e.rare
}

// roomForOne is room for the slices of an evaluation in one zone, as most are, and
// roomForTwo for two. They are allocated with the tracker.
type roomForOne struct {
	zones  [1]inZone
	reqs   [1]store.Request
	states [1]store.State
}

type roomForTwo struct {
	zones  [2]inZone
	reqs   [2]store.Request
	states [2]store.State
}

func (r *roomForOne) lend(e *evaluation) {
	e.zones, e.reqs, e.states = r.zones[:0], r.reqs[:0], r.states[:0]
}

func (r *roomForTwo) lend(e *evaluation) {
	e.zones, e.reqs, e.states = r.zones[:0], r.reqs[:0], r.states[:0]
}

// add adds a zone, with the block of its client, or nil.
func (e *evaluation) add(z *boundZone, req store.Request, block *store.Override) {
	e.zones = append(e.zones, inZone{boundZone: z, observed: !z.enforces(req.ClientKey)})
	e.reqs = append(e.reqs, req)
	if block != nil {
		e.setBlock(len(e.zones)-1, block)
	}
}

// setBlock notes the block of the client of zone i.
func (e *evaluation) setBlock(i int, block *store.Override) {
	rare := e.rarely()
	if rare.blocked == nil {
		rare.blocked = map[int]store.Override{}
	}
	rare.blocked[i], e.zones[i].observed = *block, false
}

// block returns the override by which an operator has blocked the client in zone i.
func (e *evaluation) block(i int) (block store.Override, isBlocked bool) {
	if e.rare == nil {
		return store.Override{}, false
	}
	block, isBlocked = e.rare.blocked[i]
	return block, isBlocked
}

// isBlocked reports whether an operator has blocked the client in zone i.
func (e *evaluation) isBlocked(i int) bool {
	_, isBlocked := e.block(i)
	return isBlocked
}

// enter opens the stores. An error fails the zones that count there.
func (e *evaluation) enter() {
	for _, z := range e.zones {
		if e.opened(z.in) != nil || e.openError(z.in) != nil {
			continue
		}
		open, err := z.handle.Enter()
		if err != nil {
			e.rarely().failed[z.in] = err
		}
		e.setOpened(z.in, open)
	}
}

// opened returns an open store, or nil.
func (e *evaluation) opened(in int) *stores.Opened {
	switch {
	case in == ownStore:
		return e.own
	case e.rare == nil:
		return nil
	}
	return e.rare.other
}

func (e *evaluation) setOpened(in int, open *stores.Opened) {
	if in == ownStore {
		e.own = open
	} else {
		e.rarely().other = open
	}
}

// openError returns the error with which opening a store failed, or nil.
func (e *evaluation) openError(in int) error {
	if e.rare == nil {
		return nil
	}
	return e.rare.failed[in]
}

// release leaves the stores.
func (e *evaluation) release() {
	e.endTakes()
	for _, z := range e.zones {
		if e.opened(z.in) != nil {
			e.setOpened(z.in, nil)
			z.handle.Leave()
		}
	}
}

// beginTake notes the take from zone i, which forgives, for as long as the request runs.
func (e *evaluation) beginTake(i int) {
	r, running := e.rarely(), &e.zones[i].running
	if r.takes == nil {
		r.takes = map[int]take{}
	}
	if before, ok := r.takes[i]; ok {
		// The request has waited since.
		running.end(before)
	}
	taken := e.reqs[i]
	taken.ClientKey = e.decidedBy(i)
	r.takes[i] = running.begin(&taken)
}

func (e *evaluation) endTakes() {
	if e.rare == nil {
		return
	}
	for i, k := range e.rare.takes {
		e.zones[i].running.end(k)
	}
	e.rare.takes = nil
}

// refusesOutright reports whether a zone whose limit is 0, or in which the client is
// blocked, refuses the request, so that no store is asked.
func (e *evaluation) refusesOutright() bool {
	for i := range e.reqs {
		if e.isBlocked(i) || e.reqs[i].Events == 0 && !e.observes(i) {
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
	for i := range e.reqs {
		e.zones[i].alone = localNone
		if block, isBlocked := e.block(i); isBlocked {
			now := e.limiter.Now().UnixMicro()
			e.states[i] = store.State{
				Limit: max(e.reqs[i].Capacity(), 0), Reset: block.Until, Now: now,
				RetryAfter: time.Duration(max(block.Until-now, 1)) * time.Microsecond,
			}
		} else if e.reqs[i].Events == 0 {
			e.states[i] = store.State{RetryAfter: store.Never, Now: e.limiter.Now().UnixMicro()}
		}
	}
}

// divert makes clients beyond the bound of a store share a bucket, unless they are known to
// have one.
func (e *evaluation) divert(ctx context.Context) {
	// Most requests need no list of zones.
	if open := e.onlyOpen(); open != nil {
		for _, n := range open.Overflow(ctx, e.reqs, e.limiter.Now) {
			e.share(ctx, n.Index, n.Err)
		}
		return
	}
	for in, there := range e.byStore(e.where(func(int) bool { return true })) {
		if open := e.opened(in); open != nil {
			for _, n := range open.Overflow(ctx, e.pick(there), e.limiter.Now) {
				e.share(ctx, there[n.Index], n.Err)
			}
		}
	}
}

// share makes zone i count the request in a bucket that clients share: the overflow bucket or,
// if the store failed with err to say whether the client is new, or to answer about the
// overflow bucket, the unknown one. In the second case on_error decides.
func (e *evaluation) share(ctx context.Context, i int, err error) {
	rare := e.rarely()
	if rare.diverted == nil {
		rare.diverted = map[int]diversion{}
	}
	r, z := &e.reqs[i], &e.zones[i]
	if own, ok := rare.diverted[i]; ok {
		own.err = err
		rare.diverted[i] = own
	} else {
		rare.diverted[i] = diversion{r.ClientKey, r.Events, r.Burst, err}
	}
	if z.handle.HasOverrides() {
		// A grant is the client's own.
		r.Events, r.Burst = z.eventsFor(e.repl, e.limiter)
	}
	r.ClientKey = stores.OverflowKey
	if err != nil {
		r.ClientKey = stores.UnknownKey
		if ctx.Err() == nil {
			z.handle.ReportError(e.limiter.Now(), z.Name, err)
		}
	}
}

// diversion is why a zone counts the request in a bucket that clients share.
type diversion struct {
	// clientKey, events and burst are the client's own.
	clientKey     string
	events, burst int64
	err           error // why the store did not answer, if it did not
}

// doubt returns the error with which zone i is answered without being asked, or nil.
func (e *evaluation) doubt(i int) error {
	if e.rare == nil {
		return nil
	}
	return e.rare.diverted[i].err
}

func (e *evaluation) isDoubtful(i int) bool { return e.doubt(i) != nil }

// isDiverted reports whether zone i counts the request in a bucket that clients share.
func (e *evaluation) isDiverted(i int) bool {
	if e.rare == nil {
		return false
	}
	_, ok := e.rare.diverted[i]
	return ok
}

// resolvedKey returns what the key of zone i yields for the request, whichever
// bucket counts it.
func (e *evaluation) resolvedKey(i int) string {
	if e.isDiverted(i) {
		return e.rare.diverted[i].clientKey
	}
	return e.reqs[i].ClientKey
}

// ask sets the states: it checks, and takes if the checks let the request pass.
// An error of the store is part of a state; the error that ask returns ends the
// request.
func (e *evaluation) ask(r *http.Request) error {
	e.resetStates()
	onlyChecks := !slices.ContainsFunc(e.zones, func(z inZone) bool { return z.ChargeBefore || z.observed })
	if e.anyZone(e.isDoubtful) {
		if passes, err := e.answerDoubtful(r); err != nil || !passes {
			return err
		}
	} else if open := e.onlyOpen(); open != nil && onlyChecks {
		open.Admit(r.Context(), e.reqs, e.states)
		e.noteHeld(nil)
		return e.handleErrors(r, nil)
	}
	if e.anyZone(e.observes) {
		enforced := e.where(func(i int) bool { return !e.observes(i) && !e.zones[i].isUnknown() && !e.isDoubtful(i) })
		if e.refuseKnown(enforced) {
			// The zones that only observe make no call for such a request either.
			return nil
		}
	}
	await := e.observe(r)
	return cmp.Or(e.askEnforced(r), await())
}

// answerDoubtful sets the states of the doubtful zones as on_error says, and reports whether
// the request passes there.
func (e *evaluation) answerDoubtful(r *http.Request) (passes bool, err error) {
	doubtful := e.where(e.isDoubtful)
	for _, i := range doubtful {
		e.states[i] = store.State{Err: e.doubt(i)}
	}
	err = e.handleErrors(r, doubtful)
	e.noteTaken(e.where(func(i int) bool { return e.isDoubtful(i) && e.takes(i) }))
	return e.passes(e.where(func(i int) bool { return e.isDoubtful(i) && !e.observes(i) })), err
}

// observe asks the zones that only observe the client while others are asked, and
// each in a call of its own: a refusal of one must not keep another from being
// asked. The function that it returns waits for the answers and handles them.
func (e *evaluation) observe(r *http.Request) (await func() error) {
	if !e.anyZone(e.observes) {
		return func() error { return nil }
	}
	var calls sync.WaitGroup
	var checks, takes []int
	for i := range e.zones {
		switch {
		case !e.observes(i), e.wasAsked(i):
		case !e.zones[i].ChargeBefore:
			checks = append(checks, i)
			calls.Go(func() { e.askIn(r.Context(), e.zones[i].in, (*stores.Opened).Admit, []int{i}) })
		case e.takes(i):
			takes = append(takes, i)
			calls.Go(func() {
				e.askIn(context.WithoutCancel(r.Context()), e.zones[i].in, (*stores.Opened).Take, []int{i})
			})
		}
	}
	return func() error {
		calls.Wait()
		var errs [2]error
		if len(checks) > 0 {
			e.noteHeld(checks)
			errs[0] = e.handleErrors(r, checks)
		}
		if len(takes) > 0 {
			errs[1] = e.handleErrors(r, takes)
			e.noteTaken(takes)
		}
		return cmp.Or(errs[0], errs[1])
	}
}

// askEnforced asks the zones that may each refuse the request.
func (e *evaluation) askEnforced(r *http.Request) error {
	checks := e.where(func(i int) bool { return !e.zones[i].ChargeBefore && !e.observes(i) && !e.isDoubtful(i) })
	takes := e.where(func(i int) bool { return e.takes(i) && !e.observes(i) && !e.isDoubtful(i) })
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
		e.askSome(r.Context(), (*stores.Opened).Admit, checks)
		e.noteHeld(checks)
		if err := e.handleErrors(r, checks); err != nil || !e.passes(checks) {
			return err
		}
	}
	return e.take(r, takes)
}

// refuseKnown sets the states of those of some zones that refuse without being
// asked, and reports whether there are any.
func (e *evaluation) refuseKnown(some []int) (refused bool) {
	for in, there := range e.byStore(some) {
		open := e.opened(in)
		if open == nil || len(there) == 0 {
			continue
		}
		states := make([]store.State, len(there))
		refused = open.Accounts.RefuseKnown(e.pick(there), states) || refused
		e.put(there, states)
	}
	return refused
}

// take takes from some zones. Those that are known to be full, or for which the request has
// waited, go first: if they refuse again, the others are not touched.
func (e *evaluation) take(r *http.Request, takes []int) error {
	if len(takes) > 1 {
		now := e.limiter.Now()
		var full, others []int
		for _, i := range takes {
			if open := e.open(i); open != nil && (e.zones[i].hasWaited || open.IsFull(&e.reqs[i], now)) {
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
	e.askSome(context.WithoutCancel(r.Context()), (*stores.Opened).Take, takes)
	err := e.handleErrors(r, takes)
	e.noteTaken(takes)
	if err == nil && r.Context().Err() != nil {
		err = caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
	}
	return err
}

// question is a method of an opened store that sets the states of requests.
type question = func(open *stores.Opened, ctx context.Context, reqs []store.Request, states []store.State)

// askSome asks about some zones: each store in one call, both at the same time.
func (e *evaluation) askSome(ctx context.Context, ask question, some []int) {
	in := e.byStore(some)
	if len(in[ownStore]) == 0 || len(in[rolloutStore]) == 0 {
		e.askIn(ctx, e.zones[some[0]].in, ask, some)
		return
	}
	var other sync.WaitGroup
	other.Go(func() { e.askIn(ctx, rolloutStore, ask, in[rolloutStore]) })
	e.askIn(ctx, ownStore, ask, in[ownStore])
	other.Wait()
}

// askIn asks one store about some zones that count there.
func (e *evaluation) askIn(ctx context.Context, in int, ask question, some []int) {
	open := e.opened(in)
	switch {
	case open == nil:
		for _, i := range some {
			e.states[i] = store.State{Err: e.openError(in)}
		}
	case len(some) == len(e.reqs):
		ask(open, ctx, e.reqs, e.states)
	default:
		states := make([]store.State, len(some))
		ask(open, ctx, e.pick(some), states)
		e.put(some, states)
	}
}

// statusClientClosedRequest is what Caddy reports if a client left.
const statusClientClosedRequest = 499

// handleErrors reports the errors of some zones, or of all if some is nil, and
// asks the local counts where on_error says so.
func (e *evaluation) handleErrors(r *http.Request, some []int) error {
	var failed error
	for i := range e.states {
		if !within(some, i) || e.states[i].Err == nil {
			continue
		}
		failed = e.states[i].Err
		// A check spends nothing, whatever the store says, nor does a look for a bucket.
		if e.zones[i].ChargeBefore && !e.isDoubtful(i) && errors.Is(failed, store.ErrUncertain) {
			e.zones[i].doubt()
		}
	}
	if failed == nil {
		return nil
	}
	if r.Context().Err() != nil {
		// The client left while the store was asked.
		return caddyhttp.Error(statusClientClosedRequest, failed)
	}
	for i, z := range e.zones {
		if !within(some, i) || e.states[i].Err == nil {
			continue
		}
		switch {
		case e.isDoubtful(i):
			// The error was reported when the doubt arose.
		case e.isDiverted(i) && !z.isUnknown():
			// Requests that on_error admits must not fill the overflow bucket, which
			// would refuse new clients later.
			e.share(r.Context(), i, e.states[i].Err)
		default:
			z.handle.ReportError(e.limiter.Now(), z.Name, e.states[i].Err)
		}
		if z.onError == stores.OnErrorLocal && e.open(i) != nil {
			e.askLocal(i)
		}
	}
	return nil
}

// within reports whether i is among some, where nil stands for all. The states of
// others must not be read: a call may be setting them.
func within(some []int, i int) bool { return some == nil || slices.Contains(some, i) }

// askLocal makes this process decide about zone i by itself. The ledger holds the cost in
// flight as well: the store may be back before the request has settled.
func (e *evaluation) askLocal(i int) {
	z, local := &e.zones[i], e.localRequest(i)
	var known *store.Request
	if !z.isLease() && !e.isDiverted(i) {
		known = &e.reqs[i]
	}
	e.states[i] = e.open(i).AdmitAlone(known, &local, z.ChargeBefore)
	z.alone = localDecided
	if !e.states[i].Allowed {
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
	if e.isDiverted(i) {
		own := e.rare.diverted[i]
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

// noteHeld notes which of some zones, or of all if some is nil, hold the cost in
// flight.
func (e *evaluation) noteHeld(some []int) {
	for i := range e.states {
		if within(some, i) && e.states[i].Err == nil && e.states[i].Allowed {
			e.zones[i].hold()
		}
	}
}

// noteTaken notes which zones have spent the cost, and which refused.
func (e *evaluation) noteTaken(takes []int) {
	for _, i := range takes {
		switch st := &e.states[i]; {
		case st.Err == nil && st.Allowed:
			e.zones[i].take()
			if !e.zones[i].Forgives.IsEmpty() {
				e.beginTake(i)
			}
			e.reqs[i].Receipt = st.Receipt
			e.mirror(i)
			if e.zones[i].isLease() {
				e.boundAborted(i)
			}
		case e.hasNoRoom(i) && !e.zones[i].isLocal():
			e.open(i).NoteFull(&e.reqs[i], st, e.limiter.Now())
		}
	}
}

// mirror takes a slot that the store gave in the local counts as well: they have to know of
// it once they decide.
func (e *evaluation) mirror(i int) {
	z := &e.zones[i]
	if z.isLease() && !z.isLocal() && z.onError == stores.OnErrorLocal && e.open(i).IsRemote {
		e.open(i).Local.Charge([]store.Request{e.localRequest(i)})
		z.alone = localMirrored
	}
}

// passes reports whether none of some zones, which are enforced, ends the request.
func (e *evaluation) passes(some []int) bool {
	for _, i := range some {
		if st := &e.states[i]; st.Err == nil && !st.Allowed || e.deniesByError(i) {
			return false
		}
	}
	return true
}

// wasAsked reports whether there is an answer about zone i: after a refusal the
// others are not asked.
func (e *evaluation) wasAsked(i int) bool { return e.states[i].Err != nil || e.states[i].Now != 0 }

// takes reports whether zone i takes. One that may have done so before the request
// waited does not.
func (e *evaluation) takes(i int) bool { return e.zones[i].ChargeBefore && !e.zones[i].isUnknown() }

// observes reports whether zone i only observes the client.
func (e *evaluation) observes(i int) bool { return e.zones[i].observed }

// open returns the store in which zone i counts, or nil if it could not be opened.
func (e *evaluation) open(i int) *stores.Opened { return e.opened(e.zones[i].in) }

// onlyOpen returns the store in which all zones count, or nil if there are two or
// it could not be opened.
func (e *evaluation) onlyOpen() *stores.Opened {
	if e.isSplit() {
		return nil
	}
	return e.open(0)
}

// isSplit reports whether the zones do not all count in the same store.
func (e *evaluation) isSplit() bool {
	return e.anyZone(func(i int) bool { return e.zones[i].in != e.zones[0].in })
}

// where returns the zones for which is holds.
func (e *evaluation) where(is func(i int) bool) (some []int) {
	for i := range e.zones {
		if is(i) {
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
		e.states[i] = states[n]
	}
}
