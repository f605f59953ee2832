package shardlimit

import (
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// defaultMaxWaitQueue is how many requests of a zone wait at most.
const defaultMaxWaitQueue = 1000

// askInTurn is ask, but requests wait that do not fit yet, in zones that hold
// them, and come behind those that wait already. The error it returns ends the
// request.
func (p *part) askInTurn(r *http.Request) error {
	if !p.mayWait() {
		return p.ask(r)
	}
	began := p.limiter.Now()
	line := p.openLine()
	if line < 0 {
		if err := p.ask(r); err != nil {
			return err
		}
		if line = p.waitsFor(began); line < 0 {
			return nil
		}
		p.undo()
	} else {
		p.states = p.freshStates()
	}
	z := p.zones[line]
	w, ahead := z.room.join(lineOf(&p.reqs[line]), p.reqs[line].Cost, began, z.MaxWaitQueue)
	if w == nil {
		return p.turnAway(r, line)
	}
	defer z.room.leave(w)
	return p.wait(r, w, line, ahead, began)
}

// mayWait tells whether some zone holds requests.
func (p *part) mayWait() bool {
	for i := range p.zones {
		if p.holds(i) {
			return true
		}
	}
	return false
}

// holds tells whether zone i holds requests, for which its store is needed.
func (p *part) holds(i int) bool {
	return p.zones[i].room != nil && p.open(i) != nil && !p.observes(i)
}

// openLine returns a zone in which others wait before the request, or -1. One
// that costs nothing takes nothing from them.
func (p *part) openLine() int {
	for i, z := range p.zones {
		if p.holds(i) && p.reqs[i].Cost > 0 && z.room.hasLine(lineOf(&p.reqs[i])) {
			return i
		}
	}
	return -1
}

// waitsFor returns the zone for which the request waits longest, or -1 if it
// does not wait: because it passes, or has to be refused.
func (p *part) waitsFor(began time.Time) int {
	if p.isDenied() {
		return -1
	}
	for i := range p.zones {
		if p.refuses(i) && p.states[i].RetryAfter > p.patience(i, began) {
			return -1
		}
	}
	return p.refusedBy()
}

// patience is how long the request may still wait for zone i.
func (p *part) patience(i int, began time.Time) time.Duration {
	return p.zones[i].MaxWait - p.limiter.Now().Sub(began)
}

// wait waits in the line of a zone until nobody is before the request, and
// until the time has come that the last answer told.
func (p *part) wait(r *http.Request, w *waiter, line int, ahead int64, began time.Time) error {
	if ahead > 0 {
		p.foresee(r, line, ahead, p.patience(line, began))
		if p.refuses(line) && p.states[line].RetryAfter > p.patience(line, began) {
			return nil
		}
	}
	wake := time.NewTimer(p.patience(line, began))
	defer wake.Stop()
	select {
	case <-w.first:
	case <-wake.C:
		return p.turnAway(r, line)
	case <-r.Context().Done():
		return caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
	}
	if ahead > 0 {
		// What was foreseen is no answer.
		p.states[line] = store.State{}
	}
	for {
		if i := p.refusedBy(); i >= 0 {
			wake.Reset(p.states[i].RetryAfter)
			select {
			case <-wake.C:
			case <-r.Context().Done():
				return caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
			}
		}
		if err := p.ask(r); err != nil || p.waitsFor(began) < 0 {
			return err
		}
		p.undo()
	}
}

// foresee sets the state of a zone to what it would be if those had passed that
// are ahead. That is a lower bound of the time to wait, and the highest that is
// known without a call if it is above patience.
func (p *part) foresee(r *http.Request, i int, ahead int64, patience time.Duration) {
	req := p.reqs[i]
	req.Ahead = ahead
	st := p.open(i).checkAhead(r.Context(), req, patience)
	if st.Err != nil {
		return
	}
	if !st.Allowed {
		// What is left is for those who are ahead.
		st.Remaining = 0
	}
	p.states[i] = st
}

// turnAway makes the state of a zone refuse a request that may not wait any
// longer, or not at all because too many do.
func (p *part) turnAway(r *http.Request, i int) error {
	if !p.wasAsked(i) {
		p.foresee(r, i, 0, 0)
	}
	st := &p.states[i]
	if st.Err == nil {
		if st.Now == 0 {
			st.Now = p.limiter.Now().UnixMicro()
			st.Limit = p.reqs[i].Capacity()
		}
		st.Allowed, st.Remaining = false, 0
		st.RetryAfter = max(st.RetryAfter, time.Second)
	}
	return nil
}
