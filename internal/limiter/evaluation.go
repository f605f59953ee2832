package limiter

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// evaluation is what one handler asks of its stores for one request. Its slices have
// the same length.
type evaluation struct {
	limiter *Limiter
	repl    *caddy.Replacer
	zones   []*boundZone
	reqs    []store.Request
	states  []store.State
	// spends tell what was done beyond a check; nil if nothing was.
	spends []spend
	refs   [maxStores]ref
	// split is set if the zones do not all count in the same store.
	split bool
	lease *lease
	// observed are the zones that are not enforced for this client.
	observed []int
	// diverted has the client key of each zone that counts the request in its
	// overflow bucket.
	diverted map[int]string

	// Room for the few zones that most handlers have.
	zonesRoom  [2]*boundZone
	reqsRoom   [2]store.Request
	spendsRoom [2]spend
	stateRoom  [2]store.State
}

// freshStates are the states before any store is asked: only zones whose limit
// is 0 have an answer.
func (e *evaluation) freshStates() []store.State {
	states := e.stateRoom[:min(len(e.reqs), len(e.stateRoom))]
	if clear(states); len(states) < len(e.reqs) {
		states = make([]store.State, len(e.reqs))
	}
	for i := range e.reqs {
		if e.reqs[i].Events == 0 {
			states[i] = store.State{RetryAfter: store.Never, Now: e.limiter.Now().UnixMicro()}
		}
	}
	return states
}

// refusesOutright reports whether a zone whose limit is 0 refuses the request, so
// that no store is asked.
func (e *evaluation) refusesOutright() bool {
	for i := range e.reqs {
		if e.reqs[i].Events == 0 && !e.observes(i) {
			e.states = e.freshStates()
			return true
		}
	}
	return false
}

// spend tells where a zone's state came from.
type spend struct {
	// held: the cost is in flight.
	held bool
	// local: the local counts decided, and hold what is held there as well, or
	// spent what was taken.
	local bool
	// taken: the cost was spent and can be refunded.
	taken bool
	// unknown: a take may have spent the cost or not.
	unknown bool
	// settled: cost is what it came to.
	settled bool
	cost    int64
}

func (e *evaluation) add(z *boundZone, req store.Request) {
	e.split = e.split || len(e.zones) > 0 && e.zones[0].in != z.in
	e.zones = append(e.zones, z)
	e.reqs = append(e.reqs, req)
	if !z.enforces(req.ClientKey) {
		e.observed = append(e.observed, len(e.zones)-1)
	}
}

func (e *evaluation) spendOf(i int) *spend {
	if e.spends == nil {
		if e.spends = e.spendsRoom[:]; len(e.zones) > len(e.spends) {
			e.spends = make([]spend, len(e.zones))
		}
	}
	return &e.spends[i]
}

func (e *evaluation) has(i int) spend {
	if e.spends == nil {
		return spend{}
	}
	return e.spends[i]
}

// wasAsked tells whether there is an answer about zone i: after a refusal the
// others are not asked.
func (e *evaluation) wasAsked(i int) bool { return e.states[i].Err != nil || e.states[i].Now != 0 }

// ask sets the states: it checks, and takes if the checks let the request
// pass. An error of the store is a state's; the error it returns ends the
// request.
func (e *evaluation) ask(r *http.Request) error {
	states := e.freshStates()
	if open := e.onlyOpen(); open != nil && !e.anyTakes() && e.observed == nil {
		open.Admit(r.Context(), e.reqs, states)
		e.states = states
		e.noteHeld(nil)
		return e.handleErrors(r, nil)
	}
	e.states = states
	if len(e.observed) > 0 && e.refuseKnown(e.enforced()) {
		// Those that only observe cost such a request no call either.
		return nil
	}
	await := e.observe(r)
	err := e.askEnforced(r)
	if failed := await(); err == nil {
		err = failed
	}
	return err
}

// askEnforced asks the zones of which each may refuse the request.
func (e *evaluation) askEnforced(r *http.Request) error {
	checks := e.where(func(i int) bool { return !e.zones[i].ChargeBefore && !e.observes(i) })
	takes := e.where(func(i int) bool { return e.takes(i) && !e.observes(i) })
	// No zone is asked if another is known to refuse. What one store is asked in
	// one call it knows itself.
	known := takes
	if e.split {
		known = append(takes[:len(takes):len(takes)], checks...)
	}
	if (e.split || len(checks) > 0) && e.refuseKnown(known) {
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

// refuseKnown sets the states of zones that refuse without being asked, and
// tells whether there are any.
func (e *evaluation) refuseKnown(some []int) (refused bool) {
	for in, there := range e.byStore(some) {
		open := e.refs[in].open
		if open == nil || len(there) == 0 {
			continue
		}
		states := make([]store.State, len(there))
		refused = open.Accounts.RefuseKnown(e.pick(there), states) || refused
		e.put(there, states)
	}
	return refused
}

// noteHeld marks the zones that hold the cost in flight, of some or, if that is
// nil, of all.
func (e *evaluation) noteHeld(some []int) {
	for i := range e.states {
		// Others may be asked at this moment.
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		if st := &e.states[i]; st.Err == nil && st.Allowed {
			e.spendOf(i).held = true
		}
	}
}

// take takes from some zones. Those that are known to be full go first: if they
// refuse again, the others are left alone.
func (e *evaluation) take(r *http.Request, takes []int) error {
	if len(takes) == 0 {
		return nil
	}
	if len(takes) > 1 {
		now := e.limiter.Now()
		full, others := []int{}, []int{}
		for _, i := range takes {
			if open := e.open(i); open != nil && open.Full.Has(&e.reqs[i], now) {
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
	// A take is brought to its end although the client leaves, so that it can
	// be refunded. The store's timeout bounds it.
	e.askSome(context.WithoutCancel(r.Context()), (*stores.Opened).Take, takes)
	err := e.handleErrors(r, takes)
	e.noteTaken(takes)
	if err == nil && r.Context().Err() != nil {
		err = caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
	}
	return err
}

// noteTaken marks the zones that have spent the cost, and notes which refused.
func (e *evaluation) noteTaken(takes []int) {
	for _, i := range takes {
		switch st, m := &e.states[i], e.spendOf(i); {
		case st.Err == nil && st.Allowed:
			m.taken = true
			e.reqs[i].Receipt = st.Receipt
		case st.Err == nil && e.wasAsked(i):
			e.open(i).Full.Note(&e.reqs[i], st, e.limiter.Now())
		}
	}
}

// passes tells whether none of these zones ends the request.
func (e *evaluation) passes(some []int) bool {
	for _, i := range some {
		if st := &e.states[i]; st.Err == nil && !st.Allowed || e.deniesByError(i) {
			return false
		}
	}
	return true
}

func (e *evaluation) anyTakes() bool {
	for _, z := range e.zones {
		if z.ChargeBefore {
			return true
		}
	}
	return false
}

// takes tells whether zone i takes. One that may have done so before the request
// waited does not.
func (e *evaluation) takes(i int) bool { return e.zones[i].ChargeBefore && !e.has(i).unknown }

func (e *evaluation) where(is func(i int) bool) (some []int) {
	for i := range e.zones {
		if is(i) {
			some = append(some, i)
		}
	}
	return some
}

// openQuestion is a method of an opened store that sets the states of requests.
type openQuestion = func(open *stores.Opened, ctx context.Context, reqs []store.Request, states []store.State)

// askSome asks about some zones: each store in one call, both at the same time.
func (e *evaluation) askSome(ctx context.Context, ask openQuestion, some []int) {
	in := e.byStore(some)
	if len(in[ownStore]) == 0 || len(in[rolloutStore]) == 0 {
		e.askIn(ctx, e.zones[some[0]].in, ask, some)
		return
	}
	var others sync.WaitGroup
	others.Go(func() { e.askIn(ctx, rolloutStore, ask, in[rolloutStore]) })
	e.askIn(ctx, ownStore, ask, in[ownStore])
	others.Wait()
}

// askIn asks one store about some zones that count there.
func (e *evaluation) askIn(ctx context.Context, in int, ask openQuestion, some []int) {
	v := &e.refs[in]
	if v.open == nil {
		for _, i := range some {
			e.states[i] = store.State{Err: v.err}
		}
		return
	}
	if len(some) == len(e.reqs) {
		ask(v.open, ctx, e.reqs, e.states)
		return
	}
	states := make([]store.State, len(some))
	ask(v.open, ctx, e.pick(some), states)
	e.put(some, states)
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

// handleErrors reports what failed, and asks the local counts where that is
// wanted. some may be nil for all.
func (e *evaluation) handleErrors(r *http.Request, some []int) error {
	var failed error
	for i := range e.states {
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		if err := e.states[i].Err; err != nil {
			failed = err
			// A check spends nothing, whatever the store says.
			if e.zones[i].ChargeBefore && errors.Is(err, store.ErrUncertain) {
				e.spendOf(i).unknown = true
			}
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
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		err := e.states[i].Err
		if err == nil {
			continue
		}
		z.use.Failed(e.limiter.Now(), z.Name, err)
		if z.onError == stores.OnErrorLocal && e.open(i) != nil {
			e.askLocal(i)
		}
	}
	return nil
}

// askLocal makes the local counts decide about zone i. What they hold in flight the
// store holds as well, for it may be back before the request has settled.
func (e *evaluation) askLocal(i int) {
	open, reqs, m := e.open(i), e.reqs[i:i+1], e.spendOf(i)
	m.local = true
	if e.zones[i].ChargeBefore {
		copy(e.states[i:], open.Local.Buckets.Take(context.Background(), reqs))
		return
	}
	open.Local.Accounts.Admit(context.Background(), reqs, e.states[i:i+1])
	if m.held = e.states[i].Allowed; m.held {
		open.Accounts.Hold(reqs)
	}
}

// decider is the store that decided about zone i, or its local counts.
func (e *evaluation) decider(i int) *stores.Opened {
	if e.has(i).local {
		return e.open(i).Local.Opened
	}
	return e.open(i)
}

// statusClientClosedRequest is what Caddy reports where a client left.
const statusClientClosedRequest = 499

// ref is a part's stay in one of the stores in which its handler counts. It
// lasts until the request has settled and its leases have ended.
type ref struct {
	use *stores.Handle
	// open is nil where the store could not be opened, because of err.
	open *stores.Opened
	err  error
}

// enter opens the stores. Where that fails, it fails the zones that count there.
func (e *evaluation) enter() {
	for _, z := range e.zones {
		if v := &e.refs[z.in]; v.use == nil {
			v.use = z.use
			v.open, v.err = z.use.Enter()
		}
	}
}

// release lets go of the stores.
func (e *evaluation) release() {
	for in := range e.refs {
		if v := &e.refs[in]; v.open != nil {
			v.open = nil
			v.use.Leave()
		}
	}
}

// open is the store in which zone i counts, or nil if it could not be opened.
func (e *evaluation) open(i int) *stores.Opened { return e.refs[e.zones[i].in].open }

// onlyOpen is the store in which all zones count, or nil if there are two or it
// could not be opened.
func (e *evaluation) onlyOpen() *stores.Opened {
	if e.split {
		return nil
	}
	return e.open(0)
}

// byStore parts some zones by the store in which they count.
func (e *evaluation) byStore(some []int) (in [maxStores][]int) {
	if !e.split {
		in[e.zones[0].in] = some
		return in
	}
	for _, i := range some {
		in[e.zones[i].in] = append(in[e.zones[i].in], i)
	}
	return in
}

// divert makes new clients beyond the bound share a bucket, in each store in
// which the part counts.
func (e *evaluation) divert(ctx context.Context) {
	for in := range e.refs {
		open := e.refs[in].open
		if open == nil || open.Newcomers == nil {
			continue
		}
		if !e.split {
			for _, i := range open.Newcomers.Strangers(ctx, e.reqs, e.limiter.Now()) {
				e.shareOverflow(i)
			}
			continue
		}
		for i, z := range e.zones {
			if z.in == in && len(open.Newcomers.Strangers(ctx, e.reqs[i:i+1], e.limiter.Now())) > 0 {
				e.shareOverflow(i)
			}
		}
	}
}

// shareOverflow makes zone i count the request in its overflow bucket.
func (e *evaluation) shareOverflow(i int) {
	if e.diverted == nil {
		e.diverted = map[int]string{}
	}
	e.diverted[i] = e.reqs[i].ClientKey
	e.reqs[i].ClientKey = stores.OverflowKey
}

// resolvedKey is what the key of zone i yields for the request, whichever bucket
// counts it.
func (e *evaluation) resolvedKey(i int) string {
	if key, ok := e.diverted[i]; ok {
		return key
	}
	return e.reqs[i].ClientKey
}

// enforceSalt makes the order in which a zone is enforced independent of that
// in which clients are moved by a rollout. If it changed, it would be enforced
// for others.
const enforceSalt = 0x656e666f726365

// enforces tells whether the zone refuses this client, and does not only
// observe it.
func (z *Zone) enforces(clientKey string) bool {
	return z.enforced == cohorts || cohortOf(enforceSalt, clientKey) < z.enforced
}

// observes tells whether zone i only observes the client.
func (e *evaluation) observes(i int) bool { return slices.Contains(e.observed, i) }

// observe asks the zones that only observe the client, while others are asked,
// and each by itself: no refusal of theirs may keep another zone from being
// asked. What it returns waits for the answers and deals with them.
func (e *evaluation) observe(r *http.Request) (await func() error) {
	checks, takes := e.observedZones()
	if len(checks)+len(takes) == 0 {
		return func() error { return nil }
	}
	var calls sync.WaitGroup
	for _, i := range checks {
		calls.Go(func() { e.askIn(r.Context(), e.zones[i].in, (*stores.Opened).Admit, []int{i}) })
	}
	for _, i := range takes {
		calls.Go(func() {
			e.askIn(context.WithoutCancel(r.Context()), e.zones[i].in, (*stores.Opened).Take, []int{i})
		})
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

// enforced are the zones that may refuse the client, apart from those that may
// have taken before the request waited.
func (e *evaluation) enforced() []int {
	return e.where(func(i int) bool { return !e.observes(i) && (!e.zones[i].ChargeBefore || e.takes(i)) })
}

// observedZones are the zones that only observe the client, apart from those
// that have an answer already, and those that may have taken before the request
// waited.
func (e *evaluation) observedZones() (checks, takes []int) {
	for _, i := range e.observed {
		switch {
		case e.wasAsked(i):
		case !e.zones[i].ChargeBefore:
			checks = append(checks, i)
		case e.takes(i):
			takes = append(takes, i)
		}
	}
	return checks, takes
}
