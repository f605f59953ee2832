package limiter

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// DefaultMaxWaitQueue is how many requests of a zone wait at most.
const DefaultMaxWaitQueue = 1000

// askInTurn is ask, but a request that does not fit yet waits in a zone that
// holds requests, behind those that wait already. The error that it returns ends
// the request.
func (e *evaluation) askInTurn(r *http.Request) error {
	began := e.limiter.Now()
	line := e.openLine()
	if line < 0 {
		if err := e.ask(r); err != nil {
			return err
		}
		if line = e.waitsFor(began); line < 0 {
			return nil
		}
	} else {
		e.resetStates()
		if e.anyZone(e.isDoubtful) {
			if passes, err := e.answerDoubtful(r); err != nil || !passes {
				return err
			}
		}
	}
	// The request may be refused without being asked again.
	e.showRefunds()
	e.undo()
	z := e.zones[line]
	w, ahead := z.room.join(lineOf(&e.reqs[line]), e.reqs[line].Cost, began, z.MaxWaitQueue)
	if w == nil {
		e.turnAway(r, line)
		return nil
	}
	defer z.room.leave(w)
	return e.wait(r, w, line, ahead, began)
}

// letsWait reports whether requests can wait in zone i, for which its store is
// needed.
func (e *evaluation) letsWait(i int) bool {
	return e.zones[i].MaxWait > 0 && e.open(i) != nil && !e.observes(i) && !e.isDoubtful(i)
}

// openLine returns a zone in which others wait before the request, or -1. A
// request without a cost takes nothing from them.
func (e *evaluation) openLine() int {
	for i, z := range e.zones {
		if e.letsWait(i) && e.reqs[i].Cost > 0 && z.room.hasLine(lineOf(&e.reqs[i])) {
			return i
		}
	}
	return -1
}

// waitsFor returns the zone for which the request waits longest, or -1 if it does
// not wait: it passes, or has to be refused.
func (e *evaluation) waitsFor(began time.Time) int {
	if e.isDenied() {
		return -1
	}
	for i := range e.zones {
		if e.refuses(i) && (!e.letsWait(i) || e.states[i].RetryAfter > e.timeLeft(i, began)) {
			return -1
		}
	}
	return e.refusedBy()
}

// timeLeft returns how long the request may still wait for zone i.
func (e *evaluation) timeLeft(i int, began time.Time) time.Duration {
	return e.zones[i].MaxWait - e.limiter.Now().Sub(began)
}

// wait waits in the line of a zone until no request is before this one, and then
// as long as the last answer says, as often as it takes.
func (e *evaluation) wait(r *http.Request, w *waiter, line int, ahead int64, began time.Time) error {
	if ahead > 0 {
		e.checkAhead(r, line, ahead, e.timeLeft(line, began))
		if e.refuses(line) && e.states[line].RetryAfter > e.timeLeft(line, began) {
			return nil
		}
	}
	wake := time.NewTimer(e.timeLeft(line, began))
	defer wake.Stop()
	left := func() error { return caddyhttp.Error(statusClientClosedRequest, r.Context().Err()) }
	select {
	case <-w.first:
	case <-wake.C:
		e.turnAway(r, line)
		return nil
	case <-r.Context().Done():
		return left()
	}
	if ahead > 0 {
		// What was foreseen is no answer.
		e.states[line] = store.State{}
	}
	for {
		if i := e.refusedBy(); i >= 0 {
			wake.Reset(e.states[i].RetryAfter)
			select {
			case <-wake.C:
			case <-r.Context().Done():
				return left()
			}
		}
		if err := e.ask(r); err != nil || e.waitsFor(began) < 0 {
			return err
		}
		e.undo()
	}
}

// checkAhead sets the state of zone i as if the requests before this one had spent
// the cost ahead. If the ledger already knows a wait longer than timeout, it makes
// no call and returns that wait, which may be too short.
func (e *evaluation) checkAhead(r *http.Request, i int, ahead int64, timeout time.Duration) {
	req := e.reqs[i]
	req.Ahead = ahead
	st := e.open(i).CheckAhead(r.Context(), req, timeout)
	if st.Err != nil {
		return
	}
	if !st.Allowed {
		// What is left is for the requests ahead.
		st.Remaining = 0
	}
	e.states[i], e.zones[i].local = st, false
}

// turnAway makes zone i refuse a request that may not wait, or not any longer.
func (e *evaluation) turnAway(r *http.Request, i int) {
	if !e.wasAsked(i) {
		e.checkAhead(r, i, 0, 0)
	}
	st := &e.states[i]
	if st.Err != nil {
		return
	}
	if st.Now == 0 {
		st.Now = e.limiter.Now().UnixMicro()
		st.Limit = e.reqs[i].Capacity()
	}
	st.Allowed, st.Remaining = false, 0
	st.RetryAfter = max(st.RetryAfter, time.Second)
}

// waitingRoom holds the requests that wait in one zone of this process: a line
// for each client, in order of arrival.
type waitingRoom struct {
	mu    sync.Mutex
	lines map[lineID][]*waiter // none is empty
	held  int
}

// lineID identifies a line. A client's requests wait apart from those of the same
// client for which more of the capacity is reserved.
type lineID struct {
	clientKey string
	reserved  int64
}

func lineOf(req *store.Request) lineID { return lineID{req.ClientKey, req.Reserved} }

// waiter is a request that waits.
type waiter struct {
	line    lineID
	cost    int64
	arrived time.Time
	// first is closed once no request is before this one.
	first chan struct{}
}

func newWaitingRoom() *waitingRoom { return &waitingRoom{lines: map[lineID][]*waiter{}} }

// hasLine reports whether a request waits.
func (m *waitingRoom) hasLine(id lineID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.lines[id]) > 0
}

// join adds a waiter to a line, behind the first and those that arrived before it.
// It returns the waiter and what those before it cost, or nil if the room holds
// most requests already.
func (m *waitingRoom) join(id lineID, cost int64, arrived time.Time, most int) (w *waiter, ahead int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held >= most {
		return nil, 0
	}
	m.held++
	line := m.lines[id]
	place := len(line)
	for place > 1 && line[place-1].arrived.After(arrived) {
		place--
	}
	for _, other := range line[:place] {
		ahead += other.cost
	}
	w = &waiter{line: id, cost: cost, arrived: arrived, first: make(chan struct{})}
	if place == 0 {
		close(w.first)
	}
	m.lines[id] = slices.Insert(line, place, w)
	return w, ahead
}

// leave removes w.
func (m *waitingRoom) leave(w *waiter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held--
	line := m.lines[w.line]
	i := slices.Index(line, w)
	if line = slices.Delete(line, i, i+1); len(line) == 0 {
		delete(m.lines, w.line)
		return
	}
	m.lines[w.line] = line
	if i == 0 {
		close(line[0].first)
	}
}
