package shardlimit

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// simulatedAnswer is what the admin API tells of a request that was simulated.
type simulatedAnswer struct {
	// Decision is allowed, refused, error_allowed or error_refused.
	Decision string `json:"decision"`
	// Zone is the one that refuses.
	Zone string `json:"zone,omitempty"`
	// Wait is for how many seconds a refused client has to wait, or for how many
	// an allowed request is held.
	Wait float64 `json:"wait,omitempty"`
	// Zones are those that count the request, in the order in which it meets
	// them.
	Zones []simulatedZone `json:"zones"`
	// PassedOver are the modules of handlers before or between them that were
	// not run, and that may answer a request or change it.
	PassedOver []string `json:"passed_over,omitempty"`
	// Error tells why the request comes to an end that has nothing to do with
	// limits.
	Error string `json:"error,omitempty"`
}

// simulatedZone is what a zone says to a request that was simulated.
type simulatedZone struct {
	Name      string  `json:"name"`
	Store     string  `json:"store"`
	ClientKey string  `json:"client_key"`
	Limit     int64   `json:"limit"`
	Used      int64   `json:"used"`
	Remaining int64   `json:"remaining"`
	Reset     float64 `json:"reset,omitempty"`
	Cost      int64   `json:"cost"`
	Allowed   bool    `json:"allowed"`
	Outcome   string  `json:"outcome"`
	Reason    string  `json:"reason"`
	Error     string  `json:"error"`
}

// simulationPatience bounds a simulation.
const simulationPatience = 5 * time.Second

// adminSimulate answers POST /rate_limit/simulate: what would become of a
// request, of which nothing is counted.
func adminSimulate(_ *App, r *http.Request) (any, error) {
	w := nowhere{}
	asked, err := readSimulatedRequest(w, r.Body)
	if err != nil {
		return nil, err
	}
	web, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return nil, apiError(http.StatusNotFound, errors.New("the running config has no HTTP servers"))
	}
	ctx, cancel := context.WithTimeout(r.Context(), simulationPatience)
	defer cancel()
	request, server, err := asked.prepare(ctx, w, web.(*caddyhttp.App))
	if err != nil {
		if apiErr := new(caddy.APIError); !errors.As(err, apiErr) {
			err = apiError(http.StatusBadRequest, err)
		}
		return nil, err
	}
	s := &simulation{w: w, answer: simulatedAnswer{Decision: allowed.String(), Zones: []simulatedZone{}}}
	k := &walk{server: server, w: w, groups: map[string]bool{}, meet: s.meet}
	err = k.routes(server.Routes, request, func(*http.Request) error { return nil })
	if err != nil {
		s.answer.Error = err.Error()
	}
	s.answer.PassedOver = k.passedOver
	return s.answer, nil
}

// simulation is a request that asks what would become of it.
type simulation struct {
	w       http.ResponseWriter
	tracker *tracker
	answer  simulatedAnswer
}

// meet asks the zones of a handler, and tells whether the request goes on.
func (s *simulation) meet(h *Handler, r *http.Request) (goesOn bool, err error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if s.tracker == nil {
		repl.Map(placeholders(r))
	}
	quiet := *h
	quiet.isSimulated = true
	var p *part
	s.tracker, p, err = quiet.collect(s.tracker, s.w, r, repl)
	if err != nil || p == nil {
		return err == nil, err
	}
	p.enter()
	defer p.release()
	p.states = p.freshStates()
	for i := range p.reqs {
		p.states[i] = p.wouldBeTold(r.Context(), i)
	}
	for i := range p.zones {
		s.answer.Zones = append(s.answer.Zones, p.simulated(i))
	}
	return s.decide(p), nil
}

// decide tells whether the request goes on after the part.
func (s *simulation) decide(p *part) bool {
	if i := p.refusedBy(); i >= 0 {
		z, st := p.zones[i], &p.states[i]
		wait := st.RetryAfter
		if p.isDenied() {
			return s.denied(p)
		}
		if p.waits() {
			s.answer.Wait = max(s.answer.Wait, wait.Seconds())
			return true
		}
		if z.Penalty > 0 && st.Penalty == 0 && !st.InFlight {
			wait = max(wait, time.Duration(z.Penalty))
		}
		s.answer.Decision, s.answer.Zone, s.answer.Wait = refused.String(), z.Name, 0
		if st.RetryAfter != store.Never {
			s.answer.Wait = wait.Seconds()
		}
		return false
	}
	if p.isDenied() {
		return s.denied(p)
	}
	for i := range p.zones {
		if p.outcome(i) == errorAllowed {
			s.answer.Decision = errorAllowed.String()
		}
	}
	return true
}

// denied tells which zone ends the request because its store cannot answer.
func (s *simulation) denied(p *part) (goesOn bool) {
	for i, z := range p.zones {
		if p.outcome(i) == errorRefused {
			s.answer.Decision, s.answer.Zone, s.answer.Wait = errorRefused.String(), z.Name, 0
		}
	}
	return false
}

// waits tells whether the request would be held by all zones that refuse it.
func (p *part) waits() bool {
	for i := range p.zones {
		if p.refuses(i) && (!p.holds(i) || p.states[i].RetryAfter > time.Duration(p.zones[i].MaxWait)) {
			return false
		}
	}
	return true
}

// simulated is what the admin API tells of zone i.
func (p *part) simulated(i int) simulatedZone {
	z, req, st := p.zones[i], &p.reqs[i], &p.states[i]
	told := simulatedZone{
		Name: z.Name, Store: z.use.name, ClientKey: req.ClientKey, Cost: req.Cost, Limit: max(req.Capacity(), 0),
		Allowed: st.Err == nil && st.Allowed, Outcome: p.outcome(i).String(), Reason: p.reason(i),
	}
	if st.Err != nil {
		told.Error = st.Err.Error()
		return told
	}
	told.Used, told.Remaining = st.Used, st.Remaining
	if st.Used > 0 || st.Penalty > 0 {
		// Where nothing counts, no window is open.
		told.Reset = secondsSince1970(st.Reset)
	}
	return told
}

func secondsSince1970(microseconds int64) float64 { return float64(microseconds) / 1e6 }

// wouldBeTold is what zone i would be told, or its local counts where that is how
// it deals with errors.
func (p *part) wouldBeTold(ctx context.Context, i int) store.State {
	z, v := p.zones[i], &p.visits[p.zones[i].in]
	switch {
	case p.wasAsked(i):
		return p.states[i]
	case v.open == nil:
		return store.State{Err: v.err}
	}
	foresee := func(open *openedStore) store.State {
		return open.accounts.Foresee(p.reqs[i], z.takes, func(r store.Request) store.State { return open.peek(ctx, r) })
	}
	st := foresee(v.open)
	if st.Err != nil && z.onError == onErrorLocal && !errors.Is(st.Err, errNoPeek) {
		st = foresee(v.open.local.openedStore)
	}
	return st
}

// errNoPeek is the error of a store that cannot be asked without being changed.
var errNoPeek = errors.New("the store cannot tell what is in a bucket without changing it")

// peek is what the store, without what is known of it, says about a bucket. The
// server that is written to is asked first.
func (open *openedStore) peek(ctx context.Context, r store.Request) store.State {
	var s any = open.direct
	if open.direct == nil {
		s = open.store
	}
	inspector, ok := s.(store.Inspector)
	if !ok {
		if peeker, ok := s.(store.Peeker); ok {
			return peeker.Peek(ctx, []store.Request{r})[0]
		}
		return store.State{Err: errNoPeek}
	}
	found := inspector.Inspect(ctx, r)
	if found.Former != nil && !found.Copies[0].Exists {
		found = *found.Former
	}
	for i := range found.Copies {
		if found.Copies[i].State.Err == nil {
			return found.Copies[i].State
		}
	}
	return found.Copies[0].State
}

// nowhere is where the response of a request goes that is simulated.
type nowhere http.Header

// Header implements [http.ResponseWriter].
func (w nowhere) Header() http.Header { return http.Header(w) }

// Write implements [http.ResponseWriter].
func (nowhere) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements [http.ResponseWriter].
func (nowhere) WriteHeader(int) {}
