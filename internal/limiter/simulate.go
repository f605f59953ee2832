package limiter

import (
	"context"
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
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

// simulation is a request that asks what would become of it.
type simulation struct {
	Answer  simulatedAnswer
	w       http.ResponseWriter
	tracker *tracker
}

// NewSimulation simulates one request, whose response goes to w.
func NewSimulation(w http.ResponseWriter) *simulation {
	return &simulation{w: w, Answer: simulatedAnswer{Decision: telemetry.Allowed.String(), Zones: []simulatedZone{}}}
}

// Meet asks the zones of a handler, and reports whether the request goes on.
func (s *simulation) Meet(l *Limiter, r *http.Request) (goesOn bool, err error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if s.tracker == nil {
		repl.Map(placeholders(r))
	}
	quiet := *l
	quiet.isSimulated = true
	var e *evaluation
	s.tracker, e, err = quiet.collect(s.tracker, s.w, r, repl)
	if err != nil || e == nil {
		return err == nil, err
	}
	e.enter()
	defer e.release()
	e.states = e.freshStates()
	for i := range e.reqs {
		e.states[i] = e.wouldBeTold(r.Context(), i)
	}
	for i := range e.zones {
		s.Answer.Zones = append(s.Answer.Zones, e.simulated(i))
	}
	return s.decide(e), nil
}

// decide tells whether the request goes on after the part.
func (s *simulation) decide(e *evaluation) bool {
	if i := e.refusedBy(); i >= 0 {
		z, st := e.zones[i], &e.states[i]
		wait := st.RetryAfter
		if e.isDenied() {
			return s.denied(e)
		}
		if e.waits() {
			s.Answer.Wait = max(s.Answer.Wait, wait.Seconds())
			return true
		}
		if z.Penalty > 0 && st.Penalty == 0 && !st.InFlight {
			wait = max(wait, z.Penalty)
		}
		s.Answer.Decision, s.Answer.Zone, s.Answer.Wait = telemetry.Refused.String(), z.Name, 0
		if st.RetryAfter != store.Never {
			s.Answer.Wait = wait.Seconds()
		}
		return false
	}
	if e.isDenied() {
		return s.denied(e)
	}
	for i := range e.zones {
		if e.outcome(i) == telemetry.ErrorAllowed {
			s.Answer.Decision = telemetry.ErrorAllowed.String()
		}
	}
	return true
}

// denied tells which zone ends the request because its store cannot answer.
func (s *simulation) denied(e *evaluation) (goesOn bool) {
	for i, z := range e.zones {
		if e.outcome(i) == telemetry.ErrorRefused {
			s.Answer.Decision, s.Answer.Zone, s.Answer.Wait = telemetry.ErrorRefused.String(), z.Name, 0
		}
	}
	return false
}

// waits tells whether the request would be held by all zones that refuse it.
func (e *evaluation) waits() bool {
	for i := range e.zones {
		if e.refuses(i) && (!e.holds(i) || e.states[i].RetryAfter > e.zones[i].MaxWait) {
			return false
		}
	}
	return true
}

// simulated is what the admin API tells of zone i.
func (e *evaluation) simulated(i int) simulatedZone {
	z, req, st := e.zones[i], &e.reqs[i], &e.states[i]
	told := simulatedZone{
		Name: z.Name, Store: z.use.Name, ClientKey: req.ClientKey, Cost: req.Cost, Limit: max(req.Capacity(), 0),
		Allowed: st.Err == nil && st.Allowed, Outcome: e.outcome(i).String(), Reason: e.reason(i),
	}
	if st.Err != nil {
		told.Error = st.Err.Error()
		return told
	}
	told.Used, told.Remaining = st.Used, st.Remaining
	if st.Used > 0 || st.Penalty > 0 {
		// Where nothing counts, no window is open.
		told.Reset = EpochSeconds(st.Reset)
	}
	return told
}

// wouldBeTold is what zone i would be told, or its local counts where that is how
// it deals with errors.
func (e *evaluation) wouldBeTold(ctx context.Context, i int) store.State {
	z, v := e.zones[i], &e.refs[e.zones[i].in]
	switch {
	case e.wasAsked(i):
		return e.states[i]
	case v.open == nil:
		return store.State{Err: v.err}
	}
	foresee := func(open *stores.Opened) store.State {
		return open.Accounts.Foresee(e.reqs[i], z.ChargeBefore, func(r store.Request) store.State { return open.Peek(ctx, r) })
	}
	st := foresee(v.open)
	if st.Err != nil && z.onError == stores.OnErrorLocal && !errors.Is(st.Err, stores.ErrNoPeek) {
		st = foresee(v.open.Local.Opened)
	}
	return st
}

// EpochSeconds converts microseconds since the epoch to seconds.
func EpochSeconds(micros int64) float64 { return float64(micros) / 1e6 }
