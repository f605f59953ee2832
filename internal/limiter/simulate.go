package limiter

import (
	"context"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Simulation is a request that is evaluated without being counted.
type Simulation struct {
	Answer  adminapi.Simulation
	w       http.ResponseWriter
	tracker *tracker
	// passed is what the handlers decide together that let the request go on.
	passed decision
}

// NewSimulation returns a simulation of one request, whose response goes to w.
func NewSimulation(w http.ResponseWriter) *Simulation {
	return &Simulation{w: w, Answer: adminapi.Simulation{Decision: telemetry.Allowed.String(), Zones: []adminapi.SimulatedZone{}}}
}

// Meet asks the zones of a handler, and reports whether the request goes on.
func (s *Simulation) Meet(l *Limiter, r *http.Request) (goesOn bool, err error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if s.tracker == nil {
		repl.Map(placeholders(r))
	}
	quiet := *l
	quiet.isSimulated = true
	var e *evaluation
	s.tracker, e, err = quiet.collect(s.tracker, s.w, r, repl)
	switch {
	case err != nil:
		s.Answer.Decision = telemetry.Refused.String()
		return false, err
	case e == nil:
		return true, nil
	}
	e.enter()
	defer e.release()
	isOutright := e.refusesOutright()
	if !isOutright {
		e.resetStates()
		e.foreseeAll(r.Context())
	}
	goesOn = s.decide(e)
	if isOutright {
		// No store is asked about such a request: what they would say is only shown.
		e.foreseeAll(r.Context())
	}
	for i := range e.zones {
		s.Answer.Zones = append(s.Answer.Zones, e.simulated(i))
	}
	return goesOn, nil
}

// foreseeAll sets the states of zones that have no answer yet, as their stores would.
func (e *evaluation) foreseeAll(ctx context.Context) {
	for i := range e.reqs {
		if e.wasAsked(i) {
			continue
		}
		e.states[i] = e.peek(ctx, i)
		if e.zones[i].isLease() && e.states[i].Err == nil && e.states[i].Allowed {
			e.refuseAborted(i, 0)
		}
	}
	e.estimateWaits()
}

// peek returns the state that zone i would get from its store or, if that fails and
// on_error says so, from its local counts.
func (e *evaluation) peek(ctx context.Context, i int) store.State {
	z, open := e.zones[i], e.open(i)
	if open == nil {
		return store.State{Err: e.openError(z.in)}
	}
	st := open.Accounts.Foresee(e.reqs[i], z.ChargeBefore, func(r store.Request) store.State { return open.Peek(ctx, r) })
	if st.Err != nil && z.onError == stores.OnErrorLocal {
		st = open.ForeseeAlone(e.reqs[i], z.ChargeBefore)
	}
	return st
}

// simulated returns the answer about zone i.
func (e *evaluation) simulated(i int) adminapi.SimulatedZone {
	z, req, st := e.zones[i], &e.reqs[i], &e.states[i]
	answer := adminapi.SimulatedZone{
		Name: z.Name, Store: z.handle.Name, Client: z.ClientOf(req.ClientKey), Cost: req.Cost, Limit: max(req.Capacity(), 0),
		Allowed: st.Err == nil && st.Allowed, Outcome: e.outcome(i).String(), Reason: e.reason(i),
	}
	if st.Err != nil {
		answer.Error = st.Err.Error()
		return answer
	}
	answer.Used, answer.Remaining = st.Used, st.Remaining
	if st.Used > 0 || st.Penalty > 0 {
		// Without a count no window is open.
		answer.Reset = EpochSeconds(st.Reset)
	}
	return answer
}

// decide notes what e decides, and reports whether the request goes on.
func (s *Simulation) decide(e *evaluation) (goesOn bool) {
	if isRefused, waits := e.letsAllWait(e.limiter.Now()); isRefused && waits {
		s.Answer.Wait = max(s.Answer.Wait, e.decide(decision{}).state().RetryAfter.Seconds())
		return true
	}
	for i := range e.zones {
		e.showPenalty(i)
	}
	d := e.decide(decision{})
	if !d.ends() {
		if s.passed = e.decide(s.passed); s.passed.outcome == telemetry.ErrorAllowed {
			s.Answer.Decision = s.passed.outcome.String()
		} else {
			s.Answer.Decision = telemetry.Allowed.String()
		}
		return true
	}
	wait := time.Duration(wait(d.state())) * time.Microsecond
	s.Answer.Decision, s.Answer.Zone, s.Answer.Wait = d.outcome.String(), d.zone().Name, wait.Seconds()
	return false
}

// EpochSeconds converts microseconds since the epoch to seconds.
func EpochSeconds(micros int64) float64 { return float64(micros) / 1e6 }
