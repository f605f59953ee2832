package limiter

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// maxAbortedShare bounds, as a multiple of the capacity, a client's requests that run and
// those that it aborted and that may run on behind Caddy: nobody who cancels and tries again
// is refused, and a flood of cancelled requests is bounded.
const maxAbortedShare = 2

const (
	// maxAborting is for how many clients of a zone aborted requests are remembered: some
	// 5 MB. Beyond it the others' are forgotten, in no order.
	maxAborting = 10_000
	// abortedPeriods is into how many periods the time is divided for which they are
	// remembered. Requests of one period are forgotten together.
	abortedPeriods = 8
	// sweptAborting is how many clients an insertion looks at when there is no room.
	sweptAborting = 16
)

// abortedRequests are the requests of a zone with leases that their clients have aborted
// of late.
type abortedRequests struct {
	mu sync.Mutex
	// clients have their aborted requests by client key, oldest first; none is empty.
	clients map[string][]aborted
	// count is the number of clients.
	count atomic.Int64
}

// aborted are requests that were aborted at about the same time: the last one at an instant in
// microseconds since the epoch.
type aborted struct{ first, last, cost int64 }

// note notes an aborted request, of which others are to know for so long.
func (a *abortedRequests) note(clientKey string, cost int64, now time.Time, lasts time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, period := now.UnixMicro(), lasts.Microseconds()/abortedPeriods
	requests := a.live(clientKey, at, lasts.Microseconds())
	if n := len(requests); n > 0 && at-requests[n-1].first < period {
		requests[n-1].last, requests[n-1].cost = at, requests[n-1].cost+cost
		return
	}
	if a.clients == nil {
		a.clients = map[string][]aborted{}
	}
	if len(requests) == 0 && len(a.clients) >= maxAborting {
		a.makeRoom(at, lasts.Microseconds())
	}
	a.set(clientKey, append(requests, aborted{at, at, cost}))
}

// live returns the client's requests that still count, and forgets the others. mu is held.
func (a *abortedRequests) live(clientKey string, now, lasts int64) []aborted {
	all := a.clients[clientKey]
	n := 0
	// Those from the future are from before the clock was set back.
	for n < len(all) && (now-all[n].last >= lasts || all[n].first > now) {
		n++
	}
	if n > 0 {
		a.set(clientKey, append(all[:0], all[n:]...))
	}
	return a.clients[clientKey]
}

// set sets a client's requests. mu is held.
func (a *abortedRequests) set(clientKey string, requests []aborted) {
	if len(requests) == 0 {
		delete(a.clients, clientKey)
	} else {
		a.clients[clientKey] = requests
	}
	a.count.Store(int64(len(a.clients)))
}

// makeRoom forgets clients whose requests no longer count or, without one, any client. mu is
// held.
func (a *abortedRequests) makeRoom(now, lasts int64) {
	looked, last := 0, ""
	for clientKey := range a.clients {
		if last = clientKey; looked == sweptAborting {
			break
		}
		looked++
		a.live(clientKey, now, lasts)
	}
	if len(a.clients) >= maxAborting {
		a.set(last, nil)
	}
}

// wait returns how long a client has to wait until no more than most of its aborted requests
// count; 0 if that is so.
func (a *abortedRequests) wait(clientKey string, most int64, now time.Time, lasts time.Duration) (wait time.Duration, cost int64) {
	if a.count.Load() == 0 {
		return 0, 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	requests := a.live(clientKey, now.UnixMicro(), lasts.Microseconds())
	for _, r := range requests {
		cost += r.cost
	}
	excess := cost - most
	for _, r := range requests {
		if excess <= 0 {
			break
		}
		excess -= r.cost
		wait = lasts - time.Duration(now.UnixMicro()-r.last)*time.Microsecond
	}
	return wait, cost
}

// noteAborted notes that the client has aborted the request, unless it has run for as long
// as others commonly do.
func (e *evaluation) noteAborted(t *tracker) {
	now, took := e.limiter.Now(), t.took(e.limiter)
	for i := range e.zones {
		z := &e.zones[i]
		if lasts := z.pace.mayTake(z.limit.Window); e.holdsSlot(i) && e.reqs[i].Cost > 0 && took < lasts {
			z.aborted.note(e.decidedBy(i), e.reqs[i].Cost, now, lasts)
		}
	}
}

// boundAborted refuses a request that has just got a slot in zone i, and gives that back, if
// too many run already with those that the client has aborted.
func (e *evaluation) boundAborted(i int) {
	if e.refuseAborted(i, e.reqs[i].Cost) {
		e.giveBack(func(other int) bool { return other == i })
		e.zones[i].taken, e.zones[i].mirrored, e.reqs[i].ID = false, false, newID()
	}
}

// refuseAborted makes zone i, whose state shows a part of the request's cost, refuse a request
// beyond the bound on what runs and what the client has aborted, and reports whether it does.
func (e *evaluation) refuseAborted(i int, shown int64) bool {
	z, st, req := &e.zones[i], &e.states[i], &e.reqs[i]
	most := min(req.Capacity(), math.MaxInt64/maxAbortedShare) * maxAbortedShare
	used := st.Used - shown
	wait, cost := z.aborted.wait(e.decidedBy(i), most-used-req.Cost, e.limiter.Now(), z.pace.mayTake(z.limit.Window))
	if wait <= 0 {
		return false
	}
	st.Allowed, st.InFlight, st.RetryAfter = false, true, wait
	st.Used, st.Remaining = used+cost, 0
	return true
}
