package shardlimit

import (
	"github.com/shardlimit/caddy-shardlimit/store"
)

// refusedBy returns the zone that refuses the request for the longest time, or
// -1 if none does.
func (p *part) refusedBy() int {
	longest := -1
	for i := range p.states {
		if p.refuses(i) && (longest < 0 || p.states[i].RetryAfter > p.states[longest].RetryAfter) {
			longest = i
		}
	}
	return longest
}

// isDenied tells whether a zone ends the request because its store failed.
func (p *part) isDenied() bool {
	for i := range p.zones {
		if p.deniesByError(i) {
			return true
		}
	}
	return false
}

// penalize keeps clients refused that were refused just now, by zones that want
// that. What is in flight may turn out to cost nothing, so it earns no penalty.
// Nobody waits for it: the states show it already.
func (p *part) penalize() {
	for i, z := range p.zones {
		st := &p.states[i]
		if z.Penalty == 0 || !p.declines(i) || st.Penalty != 0 || st.InFlight || st.RetryAfter == store.Never {
			continue
		}
		penalty := z.Penalty
		st.Penalty = st.Now + penalty.Microseconds()
		st.RetryAfter = max(st.RetryAfter, penalty)
		st.Reset = max(st.Reset, st.Penalty)
		st.Remaining = 0
		req := p.reqs[i]
		req.Until = st.Penalty
		p.decider(i).penalizer.PenalizeDetached([]store.Request{req})
	}
}
