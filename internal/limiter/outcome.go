package limiter

import (
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// decision is what one zone decides about a request or, of several zones, what the one decides
// that matters most: the one that headers, placeholders, logs and a simulation are about.
type decision struct {
	asked
	outcome telemetry.Outcome
}

// ranks say how much a decision matters; 0 is not at all.
var ranks = [telemetry.Outcomes]int{
	telemetry.ErrorAllowed: rankError, telemetry.Allowed: 2, telemetry.WouldRefuse: 3,
	telemetry.ErrorRefused: rankEnd, telemetry.Refused: rankRefusal, telemetry.Blocked: rankRefusal,
}

const rankError, rankEnd, rankRefusal = 1, 4, 5

// ends reports whether the request ends here.
func (d decision) ends() bool { return ranks[d.outcome] >= rankEnd }

// refuses reports whether the request ends because it has no room, or its client is blocked.
func (d decision) refuses() bool { return ranks[d.outcome] == rankRefusal }

// outranks reports whether d matters more than another decision: of those that refuse the one
// that makes the client wait longest, of those that let it pass the one with the least left.
func (d decision) outranks(other decision) bool {
	if a, b := ranks[d.outcome], ranks[other.outcome]; a != b || a == 0 {
		return a > b
	}
	if d.outcome == telemetry.Allowed {
		return d.state().Remaining < other.state().Remaining
	}
	return d.state().RetryAfter > other.state().RetryAfter
}

// decide returns the decision of a zone of e that outranks all others and d, or d.
func (e *evaluation) decide(d decision) decision {
	for i := range e.zones {
		if of := (decision{asked{e, i}, e.outcome(i)}); of.outranks(d) {
			d = of
		}
	}
	return d
}

// decide returns what all handlers that the request has met decide together.
func (t *tracker) decide() (d decision) {
	for _, e := range t.own() {
		d = e.decide(d)
	}
	return d
}

// reported returns the decision that placeholders and the access log are about: the one that
// ended the request, or else that of all zones, also of those before an error.
func (t *tracker) reported() (d decision) {
	if t.isEnded() && t.refusal().ends() {
		return *t.refusal()
	}
	for _, e := range t.evaluations {
		d = e.decide(d)
	}
	return d
}

// penalize keeps clients refused that a zone with a penalty has just refused. No request waits
// for the stores: the states show the penalty already.
func (e *evaluation) penalize() {
	for i, z := range e.zones {
		if !e.showPenalty(i) {
			continue
		}
		open, req := e.open(i), e.reqs[i]
		if z.isLocal() {
			open, req = open.Local.Opened, e.localRequest(i)
		}
		req.Until = e.states[i].Penalty
		open.Penalize(req)
	}
}

// showPenalty makes the state of zone i show the penalty that its refusal earns, and reports
// whether it earns one. Requests in flight may turn out to be free, so they earn none, and
// nobody earns one for the clients of a shared bucket.
func (e *evaluation) showPenalty(i int) bool {
	z, st := &e.zones[i], &e.states[i]
	if z.Penalty == 0 || e.isDiverted(i) && !z.isLocal() || e.isBlocked(i) || !e.hasNoRoom(i) || st.Penalty != 0 || st.InFlight || st.RetryAfter == store.Never {
		return false
	}
	st.Penalty = st.Now + z.Penalty.Microseconds()
	st.RetryAfter = max(st.RetryAfter, z.Penalty)
	st.Reset = max(st.Reset, st.Penalty)
	st.Remaining = 0
	return true
}

// count counts what the zones decided.
func (e *evaluation) count() {
	for i, z := range e.zones {
		if o := e.outcome(i); o != telemetry.Undecided {
			z.Counts.Requests.Inc()
			z.Counts.Decisions[o].Inc()
		}
	}
}

// outcome returns what zone i decided.
func (e *evaluation) outcome(i int) telemetry.Outcome {
	switch {
	case i >= len(e.states) || !e.wasAsked(i):
		return telemetry.Undecided
	case e.deniesByError(i):
		return telemetry.ErrorRefused
	case e.states[i].Err != nil:
		return telemetry.ErrorAllowed
	case e.isBlocked(i):
		return telemetry.Blocked
	case e.refuses(i):
		return telemetry.Refused
	case e.hasNoRoom(i):
		return telemetry.WouldRefuse
	default:
		return telemetry.Allowed
	}
}

// Reasons for which a request was, or would have been, refused, or the store did
// not decide about it.
const (
	reasonOverLimit  = "over_limit"
	reasonInFlight   = "in_flight"
	reasonPenalty    = "penalty"
	reasonReserved   = "reserved"
	reasonStoreError = "store_error"
	reasonBlocked    = "blocked"
)

// reason returns why zone i decided as it did; it is empty if the zone allowed the
// request.
func (e *evaluation) reason(i int) string {
	switch e.outcome(i) {
	case telemetry.Undecided, telemetry.Allowed:
		return ""
	case telemetry.ErrorAllowed, telemetry.ErrorRefused:
		return reasonStoreError
	case telemetry.Blocked:
		return reasonBlocked
	}
	st, req := &e.states[i], &e.reqs[i]
	switch {
	case st.Penalty != 0:
		return reasonPenalty
	case st.InFlight:
		return reasonInFlight
	case req.Reserved > 0 && st.Used+req.Cost <= req.Capacity()+req.Reserved:
		return reasonReserved
	default:
		return reasonOverLimit
	}
}

// hasNoRoom reports whether zone i found no room, which refuses the request if the
// zone is enforced for the client.
func (e *evaluation) hasNoRoom(i int) bool {
	return e.states[i].Err == nil && e.wasAsked(i) && !e.states[i].Allowed
}

// refuses reports whether zone i refuses the request.
func (e *evaluation) refuses(i int) bool { return e.hasNoRoom(i) && !e.observes(i) }

// deniesByError reports whether zone i ends the request because its store failed.
func (e *evaluation) deniesByError(i int) bool {
	return e.states[i].Err != nil && e.zones[i].onError == stores.OnErrorDeny && !e.observes(i)
}

// wait returns how long st makes a client wait, in microseconds; 0 if the client
// was not refused, or waiting does not help.
func wait(st *store.State) int64 {
	if st.RetryAfter == store.Never {
		return 0
	}
	return st.RetryAfter.Microseconds()
}
