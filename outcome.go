package shardlimit

import "github.com/shardlimit/caddy-shardlimit/store"

// outcome is what zone i decided.
func (p *part) outcome(i int) outcome {
	switch {
	case i >= len(p.states) || !p.wasAsked(i):
		return undecided
	case p.deniesByError(i):
		return errorRefused
	case p.states[i].Err != nil:
		return errorAllowed
	case p.refuses(i):
		return refused
	case p.declines(i):
		return wouldRefuse
	default:
		return allowed
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
func (p *part) reason(i int) string {
	switch p.outcome(i) {
	case undecided, allowed:
		return ""
	case errorAllowed, errorRefused:
		return reasonStoreError
	}
	st, req := &p.states[i], &p.reqs[i]
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
func (p *part) declines(i int) bool {
	return p.states[i].Err == nil && p.wasAsked(i) && !p.states[i].Allowed
}

func (p *part) refuses(i int) bool { return p.declines(i) && !p.observes(i) }

// deniesByError tells whether zone i ends the request because its store failed.
func (p *part) deniesByError(i int) bool {
	return p.states[i].Err != nil && p.zones[i].onError == onErrorDeny && !p.observes(i)
}

// count counts what the zones decided.
func (p *part) count() {
	for i, z := range p.zones {
		if o := p.outcome(i); o != undecided {
			z.counts.requests.Inc()
			z.counts.decisions[o].Inc()
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
