package limiter

import (
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// outcome is what zone i decided.
func (e *evaluation) outcome(i int) telemetry.Outcome {
	switch {
	case i >= len(e.states) || !e.wasAsked(i):
		return telemetry.Undecided
	case e.deniesByError(i):
		return telemetry.ErrorRefused
	case e.states[i].Err != nil:
		return telemetry.ErrorAllowed
	case e.refuses(i):
		return telemetry.Refused
	case e.declines(i):
		return telemetry.WouldRefuse
	default:
		return telemetry.Allowed
	}
}

// Why a request was, or would have been, refused, or was not decided by the
// store.
const (
	reasonOverLimit  = "over_limit"
	reasonInFlight   = "in_flight"
	reasonPenalty    = "penalty"
	reasonReserved   = "reserved"
	reasonStoreError = "store_error"
)

// reason tells why zone i decided as it did; it is empty where that is allowed.
func (e *evaluation) reason(i int) string {
	switch e.outcome(i) {
	case telemetry.Undecided, telemetry.Allowed:
		return ""
	case telemetry.ErrorAllowed, telemetry.ErrorRefused:
		return reasonStoreError
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

// declines tells whether the answer about zone i is no, which refuses the
// request if the zone is enforced for the client.
func (e *evaluation) declines(i int) bool {
	return e.states[i].Err == nil && e.wasAsked(i) && !e.states[i].Allowed
}

func (e *evaluation) refuses(i int) bool { return e.declines(i) && !e.observes(i) }

// deniesByError tells whether zone i ends the request because its store failed.
func (e *evaluation) deniesByError(i int) bool {
	return e.states[i].Err != nil && e.zones[i].onError == stores.OnErrorDeny && !e.observes(i)
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

// wait is how long a client has to wait that was told st, in microseconds; 0 if
// it was not refused, or waiting does not help.
func wait(st *store.State) int64 {
	if st.RetryAfter == store.Never {
		return 0
	}
	return st.RetryAfter.Microseconds()
}

// refusedBy returns the zone that refuses the request for the longest time, or
// -1 if none does.
func (e *evaluation) refusedBy() int {
	longest := -1
	for i := range e.states {
		if e.refuses(i) && (longest < 0 || e.states[i].RetryAfter > e.states[longest].RetryAfter) {
			longest = i
		}
	}
	return longest
}

// isDenied tells whether a zone ends the request because its store failed.
func (e *evaluation) isDenied() bool {
	for i := range e.zones {
		if e.deniesByError(i) {
			return true
		}
	}
	return false
}

// penalize keeps clients refused that were refused just now, by zones that want
// that. What is in flight may turn out to cost nothing, so it earns no penalty.
// Nobody waits for it: the states show it already.
func (e *evaluation) penalize() {
	for i, z := range e.zones {
		st := &e.states[i]
		if z.Penalty == 0 || !e.declines(i) || st.Penalty != 0 || st.InFlight || st.RetryAfter == store.Never {
			continue
		}
		penalty := z.Penalty
		st.Penalty = st.Now + penalty.Microseconds()
		st.RetryAfter = max(st.RetryAfter, penalty)
		st.Reset = max(st.Reset, st.Penalty)
		st.Remaining = 0
		req := e.reqs[i]
		req.Until = st.Penalty
		e.decider(i).Penalizer.PenalizeDetached([]store.Request{req})
	}
}
