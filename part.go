package shardlimit

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// part is what one handler asks of its stores for one request. Its slices have
// the same length.
type part struct {
	limiter *Limiter
	repl    *caddy.Replacer
	zones   []*zoneUse
	reqs    []store.Request
	states  []store.State
	// marks tell what was done beyond a check; nil if nothing was.
	marks  []mark
	visits [mostStores]visit
	// split is set if the zones do not all count in the same store.
	split bool
	lease *lease
	// observed are the zones that are not enforced for this client.
	observed []int
	// diverted has the client key of each zone that counts the request in its
	// overflow bucket.
	diverted map[int]string

	// Room for the few zones that most handlers have.
	zonesRoom [2]*zoneUse
	reqsRoom  [2]store.Request
	marksRoom [2]mark
	stateRoom [2]store.State
}

// freshStates are the states before any store is asked: only zones whose limit
// is 0 have an answer.
func (p *part) freshStates() []store.State {
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
func (p *part) refusesOutright() bool {
	for i := range p.reqs {
		if p.reqs[i].Events == 0 && !p.observes(i) {
			p.states = p.freshStates()
			return true
		}
	}
	return false
}

// mark tells where a zone's state came from.
type mark struct {
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

func (p *part) add(z *zoneUse, req store.Request) {
	p.split = p.split || len(p.zones) > 0 && p.zones[0].in != z.in
	p.zones = append(p.zones, z)
	p.reqs = append(p.reqs, req)
	if !z.enforces(req.ClientKey) {
		p.observed = append(p.observed, len(p.zones)-1)
	}
}

func (p *part) mark(i int) *mark {
	if p.marks == nil {
		if p.marks = p.marksRoom[:]; len(p.zones) > len(p.marks) {
			p.marks = make([]mark, len(p.zones))
		}
	}
	return &p.marks[i]
}

func (p *part) has(i int) mark {
	if p.marks == nil {
		return mark{}
	}
	return p.marks[i]
}

// wasAsked tells whether there is an answer about zone i: after a refusal the
// others are not asked.
func (p *part) wasAsked(i int) bool { return p.states[i].Err != nil || p.states[i].Now != 0 }

// ask sets the states: it checks, and takes if the checks let the request
// pass. An error of the store is a state's; the error it returns ends the
// request.
func (p *part) ask(r *http.Request) error {
	states := p.freshStates()
	if open := p.onlyOpen(); open != nil && !p.anyTakes() && p.observed == nil {
		open.admit(r.Context(), p.reqs, states)
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
func (p *part) askEnforced(r *http.Request) error {
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
		p.askSome(r.Context(), (*openedStore).admit, checks)
		p.noteHeld(checks)
		if err := p.handleErrors(r, checks); err != nil || !p.passes(checks) {
			return err
		}
	}
	return p.take(r, takes)
}

// refuseKnown sets the states of zones that refuse without being asked, and
// tells whether there are any.
func (p *part) refuseKnown(some []int) (refused bool) {
	for in, there := range p.byStore(some) {
		open := p.visits[in].open
		if open == nil || len(there) == 0 {
			continue
		}
		states := make([]store.State, len(there))
		refused = open.accounts.RefuseKnown(p.pick(there), states) || refused
		p.put(there, states)
	}
	return refused
}

// noteHeld marks the zones that hold the cost in flight, of some or, if that is
// nil, of all.
func (p *part) noteHeld(some []int) {
	for i := range p.states {
		// Others may be asked at this moment.
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		if st := &p.states[i]; st.Err == nil && st.Allowed {
			p.mark(i).held = true
		}
	}
}

// take takes from some zones. Those that are known to be full go first: if they
// refuse again, the others are left alone.
func (p *part) take(r *http.Request, takes []int) error {
	if len(takes) == 0 {
		return nil
	}
	if len(takes) > 1 {
		now := p.limiter.Now()
		full, others := []int{}, []int{}
		for _, i := range takes {
			if open := p.open(i); open != nil && open.full.has(&p.reqs[i], now) {
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

func (p *part) takeSome(r *http.Request, takes []int) error {
	// A take is brought to its end although the client leaves, so that it can
	// be refunded. The store's timeout bounds it.
	p.askSome(context.WithoutCancel(r.Context()), (*openedStore).take, takes)
	err := p.handleErrors(r, takes)
	p.noteTaken(takes)
	if err == nil && r.Context().Err() != nil {
		err = caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
	}
	return err
}

// noteTaken marks the zones that have spent the cost, and notes which refused.
func (p *part) noteTaken(takes []int) {
	for _, i := range takes {
		switch st, m := &p.states[i], p.mark(i); {
		case st.Err == nil && st.Allowed:
			m.taken = true
			p.reqs[i].Receipt = st.Receipt
		case st.Err == nil && p.wasAsked(i):
			p.open(i).full.note(&p.reqs[i], st, p.limiter.Now())
		}
	}
}

// passes tells whether none of these zones ends the request.
func (p *part) passes(some []int) bool {
	for _, i := range some {
		if st := &p.states[i]; st.Err == nil && !st.Allowed || p.deniesByError(i) {
			return false
		}
	}
	return true
}

func (p *part) anyTakes() bool {
	for _, z := range p.zones {
		if z.ChargeBefore {
			return true
		}
	}
	return false
}

// takes tells whether zone i takes. One that may have done so before the request
// waited does not.
func (p *part) takes(i int) bool { return p.zones[i].ChargeBefore && !p.has(i).unknown }

func (p *part) where(is func(i int) bool) (some []int) {
	for i := range p.zones {
		if is(i) {
			some = append(some, i)
		}
	}
	return some
}

// openQuestion is a method of an opened store that sets the states of requests.
type openQuestion = func(open *openedStore, ctx context.Context, reqs []store.Request, states []store.State)

// askSome asks about some zones: each store in one call, both at the same time.
func (p *part) askSome(ctx context.Context, ask openQuestion, some []int) {
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
func (p *part) askIn(ctx context.Context, in int, ask openQuestion, some []int) {
	v := &p.visits[in]
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
func (p *part) pick(some []int) []store.Request {
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
func (p *part) put(some []int, states []store.State) {
	for n, i := range some {
		p.states[i] = states[n]
	}
}

// handleErrors reports what failed, and asks the local counts where that is
// wanted. some may be nil for all.
func (p *part) handleErrors(r *http.Request, some []int) error {
	var failed error
	for i := range p.states {
		if some != nil && !slices.Contains(some, i) {
			continue
		}
		if err := p.states[i].Err; err != nil {
			failed = err
			// A check spends nothing, whatever the store says.
			if p.zones[i].ChargeBefore && errors.Is(err, store.ErrUncertain) {
				p.mark(i).unknown = true
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
		z.use.failed(p.limiter.Now(), z.Name, err)
		if z.onError == onErrorLocal && p.open(i) != nil {
			p.askLocal(i)
		}
	}
	return nil
}

// askLocal makes the local counts decide about zone i. What they hold in flight the
// store holds as well, for it may be back before the request has settled.
func (p *part) askLocal(i int) {
	open, reqs, m := p.open(i), p.reqs[i:i+1], p.mark(i)
	m.local = true
	if p.zones[i].ChargeBefore {
		copy(p.states[i:], open.local.Buckets.Take(context.Background(), reqs))
		return
	}
	open.local.accounts.Admit(context.Background(), reqs, p.states[i:i+1])
	if m.held = p.states[i].Allowed; m.held {
		open.accounts.Hold(reqs)
	}
}

// decider is the store that decided about zone i, or its local counts.
func (p *part) decider(i int) *openedStore {
	if p.has(i).local {
		return p.open(i).local.openedStore
	}
	return p.open(i)
}

// statusClientClosedRequest is what Caddy reports where a client left.
const statusClientClosedRequest = 499
