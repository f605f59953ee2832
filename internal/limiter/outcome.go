package limiter

import (
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// penalize keeps clients refused that a zone with a penalty has just refused. Requests
// in flight may turn out to be free, so they earn no penalty, and nobody earns one for the
// clients of a shared bucket. No request waits for the
// stores: the states show the penalty already.
func (e *evaluation) penalize() {
	for i, z := range e.zones {
		st := &e.states[i]
		if z.Penalty == 0 || e.isDiverted(i) && !z.local || e.isBlocked(i) || !e.hasNoRoom(i) || st.Penalty != 0 || st.InFlight || st.RetryAfter == store.Never {
			continue
		}
		st.Penalty = st.Now + z.Penalty.Microseconds()
		st.RetryAfter = max(st.RetryAfter, z.Penalty)
		st.Reset = max(st.Reset, st.Penalty)
		st.Remaining = 0
		open, req := e.open(i), e.reqs[i]
		if z.local {
			open, req = open.Local.Opened, e.localRequest(i)
		}
		req.Until = st.Penalty
		open.Penalize(req)
	}
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

// isDenied reports whether a zone ends the request because its store failed.
func (e *evaluation) isDenied() bool { return e.anyZone(e.deniesByError) }

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

const rankError, rankAllowed = 1, 2

// rank returns how much zone i matters for the request; 0 if not at all.
func (e *evaluation) rank(i int) int {
	return [telemetry.Outcomes]int{
		telemetry.ErrorAllowed: rankError, telemetry.Allowed: rankAllowed, telemetry.WouldRefuse: 3,
		telemetry.Refused: 4, telemetry.ErrorRefused: 4, telemetry.Blocked: 4,
	}[e.outcome(i)]
}
