package limiter

import (
	"context"
	"net/http"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// Simulation is a request that is evaluated without being counted.
type Simulation struct {
	Answer  Prediction
	w       http.ResponseWriter
	tracker *tracker
}

// Prediction is the foreseen outcome of a request.
type Prediction struct {
	// Decision is any outcome but WouldRefuse.
	Decision telemetry.Outcome
	// Zone is the one that refuses, or that holds an allowed request.
	Zone string
	// Wait is how many seconds a refused client has to wait, or an allowed request is held.
	Wait float64
	// Zones are those that count the request, in the order in which it meets them.
	Zones []PredictedZone
}

// PredictedZone is the answer of a zone to a simulated request. Error is set if the store failed.
type PredictedZone struct {
	Name, Store            string
	Client                 Client
	Limit, Used, Remaining int64
	// Reset is in seconds since the epoch; 0 if no window is open.
	Reset   float64
	Cost    int64
	Allowed bool
	Outcome telemetry.Outcome
	Reason  string
	Error   error
}

// NewSimulation returns a simulation of one request, whose response goes to w.
func NewSimulation(w http.ResponseWriter) *Simulation {
	return &Simulation{w: w, Answer: Prediction{Decision: telemetry.Allowed}}
}

// Meet asks the zones of a handler, and reports whether the request goes on.
func (s *Simulation) Meet(l *Limiter, r *http.Request) (goesOn bool, err error) {
	quiet := *l
	quiet.simulation = s
	var e *evaluation
	s.tracker, e, err = quiet.collect(s.tracker, s.w, r)
	switch {
	case err != nil:
		s.Answer.Decision = telemetry.Refused
		return false, err
	case e == nil:
		return true, nil
	}
	e.enter()
	defer e.release()
	if e.open != nil {
		e.open = e.open.Foresight(r.Context())
	}
	// The client of a simulated request does not leave, so nothing returns an error.
	r = r.WithContext(context.WithoutCancel(r.Context()))
	v, _ := s.tracker.decide(e, r)
	goesOn = s.tell(v)
	e.askTheRest(r)
	e.takeBack()
	for _, z := range e.zones {
		s.Answer.Zones = append(s.Answer.Zones, z.predicted())
	}
	return goesOn, nil
}

// foreseeWait makes the newest zones give the answers that follow if the request may wait.
func (s *Simulation) foreseeWait(r *http.Request, began time.Time) {
	t := s.tracker
	for _, e := range t.own {
		e.takeBack()
	}
	w := t.newWaiter(began, r)
	line, waits := t.findLine(w, t.ahead(w), r)
	switch {
	case !waits:
		return
	case line != nil && !line.room.hasPlace(w, line.ask.ClientKey, line.latest().MaxWaitQueue):
		t.turnAway(w, line)
		return
	}
	t.own[len(t.own)-1].askTheRest(r)
	switch v := t.verdict(anyHandler); {
	case endsRequest(v.outcome) && !t.mayWait(began):
		return
	case refuses(v.outcome):
		line = v.inZone
	case line == nil:
		return
	}
	line.estimateWait()
	if wait := line.ask.RetryAfter.Seconds(); wait > s.Answer.Wait {
		s.Answer.Zone, s.Answer.Wait = line.Name, wait
	}
	for _, z := range t.zones() {
		if refuses(z.outcome()) {
			z.answer = hasRoom
		}
	}
}

// takeBack makes the states show the buckets without what the simulated request has taken.
func (e *evaluation) takeBack() {
	e.showRefunds()
	for _, z := range e.zones {
		z.lose()
	}
}

// tell makes the answer that of a verdict, and reports whether the request goes on.
func (s *Simulation) tell(v verdict) (goesOn bool) {
	switch {
	case endsRequest(v.outcome):
		s.Answer.Zone, s.Answer.Wait = v.Name, EpochSeconds(wait(&v.ask.State))
	case v.outcome != telemetry.ErrorAllowed:
		v.outcome = telemetry.Allowed
	}
	s.Answer.Decision = v.outcome
	return !endsRequest(v.outcome)
}

// askTheRest sets the states of zones that have not been asked, and that the request would not ask.
func (e *evaluation) askTheRest(r *http.Request) {
	if e.refusesOutright() {
		e.countOverflow(r)
		_, _ = e.answerUnknown(r)
	}
	rest := e.where(func(z *inZone) bool { return z.answer == notAsked })
	_ = e.askEach(r, rest)()
	for _, z := range rest {
		z.estimateWait()
	}
}

// predicted returns the answer of the zone.
func (z *inZone) predicted() PredictedZone {
	req, st := &z.ask.Request, &z.ask.State
	answer := PredictedZone{
		Name: z.Name, Store: z.handle.Name, Client: z.ClientOf(z.decidedBy()), Cost: req.Cost, Limit: max(req.Capacity(), 0),
		Allowed: z.answer == hasRoom, Outcome: z.outcome(), Reason: z.reason().String(),
	}
	if z.answer == storeFailed {
		answer.Error = st.Err
		return answer
	}
	answer.Used, answer.Remaining = st.Used, st.Remaining
	if st.Used > 0 || st.Penalty > 0 {
		// Without a count no window is open.
		answer.Reset = EpochSeconds(st.Reset)
	}
	return answer
}

// EpochSeconds converts microseconds since the epoch to seconds.
func EpochSeconds(micros int64) float64 { return float64(micros) / 1e6 }
