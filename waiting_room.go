package shardlimit

import (
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// waitingRoom holds the requests that wait in one zone of this process: a line
// for each client, in order of arrival.
type waitingRoom struct {
	mu    sync.Mutex
	lines map[lineID][]*waiter // none is empty
	held  int
}

// lineID tells lines apart: nobody waits behind those from whom capacity is kept
// for him.
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
	// first is closed once nobody is before it.
	first chan struct{}
}

func newWaitingRoom() *waitingRoom { return &waitingRoom{lines: map[lineID][]*waiter{}} }

// hasLine tells whether somebody waits.
func (m *waitingRoom) hasLine(id lineID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.lines[id]) > 0
}

// join adds a waiter to a line, behind those that arrived before it
// and the first, and returns it and what those cost. It returns nil if as many
// as most are held already.
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

// leave takes w out.
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
