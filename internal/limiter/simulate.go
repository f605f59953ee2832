package limiter

import (
	"context"
	"errors"
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
	e.resetStates()
	for i := range e.reqs {
		if !e.wasAsked(i) {
			e.states[i] = e.peek(r.Context(), i)
			if e.zones[i].isLease() && e.states[i].Err == nil && e.states[i].Allowed {
				e.refuseAborted(i, 0)
			}
		}
	}
	e.estimateWaits()
	for i := range e.zones {
		s.Answer.Zones = append(s.Answer.Zones, e.simulated(i))
	}
	return s.decide(e), nil
}

// peek returns the state that zone i would get from its store or, if that fails and
// on_error says so, from its local counts.
func (e *evaluation) peek(ctx context.Context, i int) store.State {
	z, open := e.zones[i], e.open(i)
	if open == nil {
		return store.State{Err: e.openError(z.in)}
	}
	st := open.Accounts.Foresee(e.reqs[i], z.ChargeBefore, func(r store.Request) store.State { return open.Peek(ctx, r) })
	if st.Err != nil && z.onError == stores.OnErrorLocal && !errors.Is(st.Err, stores.ErrNoPeek) {
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

// decide sets the decision, and reports whether the request goes on.
func (s *Simulation) decide(e *evaluation) (goesOn bool) {
	i := e.refusedBy()
	switch {
	case e.isDenied():
		for i, z := range e.zones {
			if e.deniesByError(i) {
				s.refuse(telemetry.ErrorRefused, z.Zone, 0)
			}
		}
		return false
	case i < 0:
		if e.anyZone(func(i int) bool { return e.outcome(i) == telemetry.ErrorAllowed }) {
			s.Answer.Decision = telemetry.ErrorAllowed.String()
		}
		return true
	case e.isBlocked(i):
		s.refuse(telemetry.Refused, e.zones[i].Zone, e.states[i].RetryAfter)
		return false
	case e.waits():
		s.Answer.Wait = max(s.Answer.Wait, e.states[i].RetryAfter.Seconds())
		return true
	}
	z, st := e.zones[i], &e.states[i]
	wait := st.RetryAfter
	switch {
	case wait == store.Never:
		wait = 0
	case z.Penalty > 0 && st.Penalty == 0 && !st.InFlight:
		wait = max(wait, z.Penalty)
	}
	s.refuse(telemetry.Refused, z.Zone, wait)
	return false
}

func (s *Simulation) refuse(o telemetry.Outcome, z *Zone, wait time.Duration) {
	s.Answer.Decision, s.Answer.Zone, s.Answer.Wait = o.String(), z.Name, wait.Seconds()
}

// waits reports whether all zones that refuse the request would hold it.
func (e *evaluation) waits() bool {
	return !e.anyZone(func(i int) bool {
		return e.refuses(i) && (!e.letsWait(i) || e.states[i].RetryAfter > e.zones[i].MaxWait)
	})
}

// EpochSeconds converts microseconds since the epoch to seconds.
func EpochSeconds(micros int64) float64 { return float64(micros) / 1e6 }
