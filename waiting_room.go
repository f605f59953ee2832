package shardlimit

import (
	"slices"
	"sync"
	"time"
)

// waitingRoom holds the requests that wait in one zone of this process: a line
// for each client, in order of arrival.
type waitingRoom struct {
	mu    sync.Mutex
	lines map[string][]*waiter // by client key; none is empty
	held  int
}

// waiter is a request that waits.
type waiter struct {
	clientKey string
	cost      int64
	arrived   time.Time
	// first is closed once nobody is before it.
	first chan struct{}
}

// rooms outlive configs, as the buckets do that they are for. There are few.
var rooms sync.Map // of *waitingRoom by zoneID

func roomOf(store, zone string) *waitingRoom {
	room, _ := rooms.LoadOrStore(zoneID{store, zone}, &waitingRoom{lines: map[string][]*waiter{}})
	return room.(*waitingRoom)
}

// hasLine tells whether somebody waits.
func (m *waitingRoom) hasLine(clientKey string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.lines[clientKey]) > 0
}

// join adds a waiter to the client's line, behind those that arrived before it
// and the first, and returns it and what those cost. It returns nil if as many
// as most are held already.
func (m *waitingRoom) join(clientKey string, cost int64, arrived time.Time, most int) (w *waiter, ahead int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held >= most {
		return nil, 0
	}
	m.held++
	line := m.lines[clientKey]
	place := len(line)
	for place > 1 && line[place-1].arrived.After(arrived) {
		place--
	}
	for _, other := range line[:place] {
		ahead += other.cost
	}
	w = &waiter{clientKey: clientKey, cost: cost, arrived: arrived, first: make(chan struct{})}
	if place == 0 {
		close(w.first)
	}
	m.lines[clientKey] = slices.Insert(line, place, w)
	return w, ahead
}

// leave takes w out.
func (m *waitingRoom) leave(w *waiter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held--
	line := m.lines[w.clientKey]
	i := slices.Index(line, w)
	if line = slices.Delete(line, i, i+1); len(line) == 0 {
		delete(m.lines, w.clientKey)
		return
	}
	m.lines[w.clientKey] = line
	if i == 0 {
		close(line[0].first)
	}
}
