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
func (p *evaluation) freshStates() []store.State {
	states := p.stateRoom[:min(len(p.reqs), len(p.stateRoom))]
	if clear(states); len(states) < len(p.reqs) {
		states = make([]store.State, len(p.reqs))
	}
	for i := range p.reqs {
		if p.reqs[i].Events == 0 {
			states[i] = store.State{RetryAfter: store.Never, Now: p.limiter.Now().UnixMicro()}
		}
	}
	return states
}

// refusesOutright reports whether a zone whose limit is 0 refuses the request, so
// that no store is asked.
func (p *evaluation) refusesOutright() bool {
	for i := range p.reqs {
		if p.reqs[i].Events == 0 && !p.observes(i) {
			p.states = p.freshStates()
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

func (p *evaluation) add(z *boundZone, req store.Request) {
	p.split = p.split || len(p.zones) > 0 && p.zones[0].in != z.in
	p.zones = append(p.zones, z)
	p.reqs = append(p.reqs, req)
	if !z.enforces(req.ClientKey) {
		p.observed = append(p.observed, len(p.zones)-1)
	}
}

func (p *evaluation) spendOf(i int) *spend {
	if p.spends == nil {
		if p.spends = p.spendsRoom[:]; len(p.zones) > len(p.spends) {
			p.spends = make([]spend, len(p.zones))
		}
	}
	return &p.spends[i]
}

func (p *evaluation) has(i int) spend {
	if p.spends == nil {
		return spend{}
	}
	return p.spends[i]
}

// wasAsked tells whether there is an answer about zone i: after a refusal the
// others are not asked.
func (p *evaluation) wasAsked(i int) bool { return p.states[i].Err != nil || p.states[i].Now != 0 }

// ask sets the states: it checks, and takes if the checks let the request
// pass. An error of the store is a state's; the error it returns ends the
// request.
func (p *evaluation) ask(r *http.Request) error {
	states := p.freshStates()
	if open := p.onlyOpen(); open != nil && !p.anyTakes() && p.observed == nil {
		open.Admit(r.Context(), p.reqs, states)
		p.states = states
		p.noteHeld(nil)
		return p.handleErrors(r, nil)
	}
	p.states = states
	if len(p.observed) > 0 && p.refuseKnown(p.enforced()) {
		// Those that only observe cost such a request no call either.
		return nil
	}
	await := p.observe(r)
	err := p.askEnforced(r)
	if failed := await(); err == nil {
		err = failed
	}
	return err
}

// askEnforced asks the zones of which each may refuse the request.
func (p *evaluation) askEnforced(r *http.Request) error {
	checks := p.where(func(i int) bool { return !p.zones[i].ChargeBefore && !p.observes(i) })
	takes := p.where(func(i int) bool { return p.takes(i) && !p.observes(i) })
	// No zone is asked if another is known to refuse. What one store is asked in
	// one call it knows itself.
	known := takes
	if p.split {
		known = append(takes[:len(takes):len(takes)], checks...)
	}
	if (p.split || len(checks) > 0) && p.refuseKnown(known) {
		return nil
	}
	if len(checks) > 0 {
		p.askSome(r.Context(), (*stores.Opened).Admit, checks)
		p.noteHeld(checks)
		if err := p.handleErrors(r, checks); err != nil || !p.passes(checks) {
			return err
		}
	}
	return p.take(r, takes)
}

// refuseKnown sets the states of zones that refuse without being asked, and
// tells whether there are any.
func (p *evaluation) refuseKnown(some []int) (refused bool) {
	for in, there := range p.byStore(some) {
		open := p.refs[in].open
		if open == nil || len(there) == 0 {
			continue
		}
		states := make([]store.State, len(there))
		refused = open.Accounts.RefuseKnown(p.pick(there), states) || refused
		p.put(there, states)
	}
	return refused
}

// noteHeld marks the zones that hold the cost in flight, of some or, if that is
// nil, of all.
func (p *evaluation) noteHeld(some []int) {
	for i := range p.states {
		// Others may be asked at this moment.
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		if st := &p.states[i]; st.Err == nil && st.Allowed {
			p.spendOf(i).held = true
		}
	}
}

// take takes from some zones. Those that are known to be full go first: if they
// refuse again, the others are left alone.
func (p *evaluation) take(r *http.Request, takes []int) error {
	if len(takes) == 0 {
		return nil
	}
	if len(takes) > 1 {
		now := p.limiter.Now()
		full, others := []int{}, []int{}
		for _, i := range takes {
			if open := p.open(i); open != nil && open.Full.Has(&p.reqs[i], now) {
				full = append(full, i)
			} else {
				others = append(others, i)
			}
		}
		if len(full) > 0 && len(others) > 0 {
			if err := p.takeSome(r, full); err != nil || !p.passes(full) {
				return err
			}
			takes = others
		}
	}
	return p.takeSome(r, takes)
}

func (p *evaluation) takeSome(r *http.Request, takes []int) error {
	// A take is brought to its end although the client leaves, so that it can
	// be refunded. The store's timeout bounds it.
	p.askSome(context.WithoutCancel(r.Context()), (*stores.Opened).Take, takes)
	err := p.handleErrors(r, takes)
	p.noteTaken(takes)
	if err == nil && r.Context().Err() != nil {
		err = caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
	}
	return err
}

// noteTaken marks the zones that have spent the cost, and notes which refused.
func (p *evaluation) noteTaken(takes []int) {
	for _, i := range takes {
		switch st, m := &p.states[i], p.spendOf(i); {
		case st.Err == nil && st.Allowed:
			m.taken = true
			p.reqs[i].Receipt = st.Receipt
		case st.Err == nil && p.wasAsked(i):
			p.open(i).Full.Note(&p.reqs[i], st, p.limiter.Now())
		}
	}
}

// passes tells whether none of these zones ends the request.
func (p *evaluation) passes(some []int) bool {
	for _, i := range some {
		if st := &p.states[i]; st.Err == nil && !st.Allowed || p.deniesByError(i) {
			return false
		}
	}
	return true
}

func (p *evaluation) anyTakes() bool {
	for _, z := range p.zones {
		if z.ChargeBefore {
			return true
		}
	}
	return false
}

// takes tells whether zone i takes. One that may have done so before the request
// waited does not.
func (p *evaluation) takes(i int) bool { return p.zones[i].ChargeBefore && !p.has(i).unknown }

func (p *evaluation) where(is func(i int) bool) (some []int) {
	for i := range p.zones {
		if is(i) {
			some = append(some, i)
		}
	}
	return some
}

// openQuestion is a method of an opened store that sets the states of requests.
type openQuestion = func(open *stores.Opened, ctx context.Context, reqs []store.Request, states []store.State)

// askSome asks about some zones: each store in one call, both at the same time.
func (p *evaluation) askSome(ctx context.Context, ask openQuestion, some []int) {
	in := p.byStore(some)
	if len(in[ownStore]) == 0 || len(in[rolloutStore]) == 0 {
		p.askIn(ctx, p.zones[some[0]].in, ask, some)
		return
	}
	var others sync.WaitGroup
	others.Go(func() { p.askIn(ctx, rolloutStore, ask, in[rolloutStore]) })
	p.askIn(ctx, ownStore, ask, in[ownStore])
	others.Wait()
}

// askIn asks one store about some zones that count there.
func (p *evaluation) askIn(ctx context.Context, in int, ask openQuestion, some []int) {
	v := &p.refs[in]
	if v.open == nil {
		for _, i := range some {
			p.states[i] = store.State{Err: v.err}
		}
		return
	}
	if len(some) == len(p.reqs) {
		ask(v.open, ctx, p.reqs, p.states)
		return
	}
	states := make([]store.State, len(some))
	ask(v.open, ctx, p.pick(some), states)
	p.put(some, states)
}

// pick returns the requests of some zones.
func (p *evaluation) pick(some []int) []store.Request {
	if len(some) == len(p.reqs) {
		return p.reqs
	}
	reqs := make([]store.Request, len(some))
	for n, i := range some {
		reqs[n] = p.reqs[i]
	}
	return reqs
}

// put sets the states of some zones.
func (p *evaluation) put(some []int, states []store.State) {
	for n, i := range some {
		p.states[i] = states[n]
	}
}

// handleErrors reports what failed, and asks the local counts where that is
// wanted. some may be nil for all.
func (p *evaluation) handleErrors(r *http.Request, some []int) error {
	var failed error
	for i := range p.states {
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		if err := p.states[i].Err; err != nil {
			failed = err
			// A check spends nothing, whatever the store says.
			if p.zones[i].ChargeBefore && errors.Is(err, store.ErrUncertain) {
				p.spendOf(i).unknown = true
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
	for i, z := range p.zones {
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		err := p.states[i].Err
		if err == nil {
			continue
		}
		z.use.Failed(p.limiter.Now(), z.Name, err)
		if z.onError == stores.OnErrorLocal && p.open(i) != nil {
			p.askLocal(i)
		}
	}
	return nil
}

// askLocal makes the local counts decide about zone i. What they hold in flight the
// store holds as well, for it may be back before the request has settled.
func (p *evaluation) askLocal(i int) {
	open, reqs, m := p.open(i), p.reqs[i:i+1], p.spendOf(i)
	m.local = true
	if p.zones[i].ChargeBefore {
		copy(p.states[i:], open.Local.Buckets.Take(context.Background(), reqs))
		return
	}
	open.Local.Accounts.Admit(context.Background(), reqs, p.states[i:i+1])
	if m.held = p.states[i].Allowed; m.held {
		open.Accounts.Hold(reqs)
	}
}

// decider is the store that decided about zone i, or its local counts.
func (p *evaluation) decider(i int) *stores.Opened {
	if p.has(i).local {
		return p.open(i).Local.Opened
	}
	return p.open(i)
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
func (p *evaluation) enter() {
	for _, z := range p.zones {
		if v := &p.refs[z.in]; v.use == nil {
			v.use = z.use
			v.open, v.err = z.use.Enter()
		}
	}
}

// release lets go of the stores.
func (p *evaluation) release() {
	for in := range p.refs {
		if v := &p.refs[in]; v.open != nil {
			v.open = nil
			v.use.Leave()
		}
	}
}

// open is the store in which zone i counts, or nil if it could not be opened.
func (p *evaluation) open(i int) *stores.Opened { return p.refs[p.zones[i].in].open }

// onlyOpen is the store in which all zones count, or nil if there are two or it
// could not be opened.
func (p *evaluation) onlyOpen() *stores.Opened {
	if p.split {
		return nil
	}
	return p.open(0)
}

// byStore parts some zones by the store in which they count.
func (p *evaluation) byStore(some []int) (in [maxStores][]int) {
	if !p.split {
		in[p.zones[0].in] = some
		return in
	}
	for _, i := range some {
		in[p.zones[i].in] = append(in[p.zones[i].in], i)
	}
	return in
}

// divert makes new clients beyond the bound share a bucket, in each store in
// which the part counts.
func (p *evaluation) divert(ctx context.Context) {
	for in := range p.refs {
		open := p.refs[in].open
		if open == nil || open.Newcomers == nil {
			continue
		}
		if !p.split {
			for _, i := range open.Newcomers.Strangers(ctx, p.reqs, p.limiter.Now()) {
				p.shareOverflow(i)
			}
			continue
		}
		for i, z := range p.zones {
			if z.in == in && len(open.Newcomers.Strangers(ctx, p.reqs[i:i+1], p.limiter.Now())) > 0 {
				p.shareOverflow(i)
			}
		}
	}
}

// shareOverflow makes zone i count the request in its overflow bucket.
func (p *evaluation) shareOverflow(i int) {
	if p.diverted == nil {
		p.diverted = map[int]string{}
	}
	p.diverted[i] = p.reqs[i].ClientKey
	p.reqs[i].ClientKey = stores.OverflowKey
}

// resolvedKey is what the key of zone i yields for the request, whichever bucket
// counts it.
func (p *evaluation) resolvedKey(i int) string {
	if key, ok := p.diverted[i]; ok {
		return key
	}
	return p.reqs[i].ClientKey
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
func (p *evaluation) observes(i int) bool { return slices.Contains(p.observed, i) }

// observe asks the zones that only observe the client, while others are asked,
// and each by itself: no refusal of theirs may keep another zone from being
// asked. What it returns waits for the answers and deals with them.
func (p *evaluation) observe(r *http.Request) (await func() error) {
	checks, takes := p.observedZones()
	if len(checks)+len(takes) == 0 {
		return func() error { return nil }
	}
	var calls sync.WaitGroup
	for _, i := range checks {
		calls.Go(func() { p.askIn(r.Context(), p.zones[i].in, (*stores.Opened).Admit, []int{i}) })
	}
	for _, i := range takes {
		calls.Go(func() {
			p.askIn(context.WithoutCancel(r.Context()), p.zones[i].in, (*stores.Opened).Take, []int{i})
		})
	}
	return func() error {
		calls.Wait()
		var errs [2]error
		if len(checks) > 0 {
			p.noteHeld(checks)
			errs[0] = p.handleErrors(r, checks)
		}
		if len(takes) > 0 {
			errs[1] = p.handleErrors(r, takes)
			p.noteTaken(takes)
		}
		return cmp.Or(errs[0], errs[1])
	}
}

// enforced are the zones that may refuse the client, apart from those that may
// have taken before the request waited.
func (p *evaluation) enforced() []int {
	return p.where(func(i int) bool { return !p.observes(i) && (!p.zones[i].ChargeBefore || p.takes(i)) })
}

// observedZones are the zones that only observe the client, apart from those
// that have an answer already, and those that may have taken before the request
// waited.
func (p *evaluation) observedZones() (checks, takes []int) {
	for _, i := range p.observed {
		switch {
		case p.wasAsked(i):
		case !p.zones[i].ChargeBefore:
			checks = append(checks, i)
		case p.takes(i):
			takes = append(takes, i)
		}
	}
	return checks, takes
}
