package limiter

import (
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// waitingRoom holds the requests that wait in one zone of this process: a line for each
// bucket and limit, in order of arrival.
type waitingRoom struct {
	mu    sync.Mutex
	lines map[lineID][]*waiter // none is empty
	// places are how many each client has, by client key. sizes has at n how many clients have
	// n places; its last element is not 0.
	places map[string]int
	sizes  []int
	held   int
}

// lineID identifies a line. Requests with different limits wait apart, because one of them may
// fit while another does not.
type lineID struct {
	limit            store.Limit
	clientKey        string
	events, capacity int64
}

func lineOf(req *store.Request) lineID {
	return lineID{*req.Limit, req.ClientKey, req.Events, req.Capacity()}
}

// waiter is a request that waits. It stands in one line at most.
type waiter struct {
	arrived time.Time
	// linedUp is when the states were asked for or foreseen.
	linedUp time.Time
	// wants are what it asks of its zones.
	wants []want
	// room and line are where it stands; room is nil if it does not. Only the request
	// itself changes them.
	room *waitingRoom
	line lineID

	// The mutex of the room guards these.
	// isFirst: no request is before this one, nor will be.
	isFirst bool
	// isDisplaced: the place was given to another client.
	isDisplaced bool
	// isWoken: an operator may have changed the limit, or the bucket may have room.
	isWoken bool
	// isOvertaken: another request stands before this one since it lined up.
	isOvertaken bool
	// bell gets a message after a change.
	bell chan struct{}
}

// want is what a request asks of a bucket.
type want struct {
	room      *waitingRoom
	limit     *store.Limit
	clientKey string
	cost      int64
}

// sameBucket reports whether both are about one bucket.
func (a *want) sameBucket(b *want) bool {
	return a.room == b.room && a.clientKey == b.clientKey && *a.limit == *b.limit
}

func newWaitingRoom() *waitingRoom {
	return &waitingRoom{lines: map[lineID][]*waiter{}, places: map[string]int{}}
}

// hasLine reports whether a request waits in a line.
func (m *waitingRoom) hasLine(id lineID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.lines[id]) > 0
}

// before returns the place of w in the line: behind the first, and those that arrived
// before it.
func before(line []*waiter, w *waiter) int {
	if place := slices.Index(line, w); place >= 0 {
		return place
	}
	place := len(line)
	for place > 1 && line[place-1].arrived.After(w.arrived) {
		place--
	}
	return place
}

// addAhead adds to ahead what those before w in a line cost in each bucket that w wants.
func (m *waitingRoom) addAhead(id lineID, w *waiter, ahead []int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	line := m.lines[id]
	for _, other := range line[:before(line, w)] {
		for i := range other.wants {
			for n := range w.wants {
				if theirs := &other.wants[i]; theirs.sameBucket(&w.wants[n]) {
					ahead[n] += theirs.cost
				}
			}
		}
	}
}

// stand makes w stand in a line, and nowhere else. If the room has that many places, and all
// are used up, the newest request of the client with most places gives way to a client that
// has fewer also with the new one. The waiters behind w check their wait again. It reports
// whether there was a place.
func (m *waitingRoom) stand(w *waiter, id lineID, places int) bool {
	if w.room == m && w.line == id {
		return true
	}
	w.leave()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held >= places {
		if m.places[id.clientKey]+1 >= len(m.sizes)-1 {
			return false
		}
		newest := m.newest(len(m.sizes) - 1)
		m.remove(newest)
		newest.isDisplaced = true
		newest.ring()
	}
	w.room, w.line = m, id
	line := m.lines[id]
	place := before(line, w)
	w.isFirst, w.isDisplaced = place == 0, false
	for _, other := range line[place:] {
		other.isOvertaken = true
		other.ring()
	}
	m.lines[id] = slices.Insert(line, place, w)
	m.resize(id.clientKey, 1)
	return true
}

// newest returns the last request of a client that has so many places.
func (m *waitingRoom) newest(places int) (newest *waiter) {
	for id, line := range m.lines {
		last := line[len(line)-1]
		if m.places[id.clientKey] == places && (newest == nil || last.arrived.After(newest.arrived)) {
			newest = last
		}
	}
	return newest
}

// resize changes how many places a client has.
func (m *waitingRoom) resize(clientKey string, by int) {
	n := m.places[clientKey]
	if n > 0 {
		m.sizes[n]--
	}
	n += by
	m.held += by
	if m.places[clientKey] = n; n == 0 {
		delete(m.places, clientKey)
	}
	for len(m.sizes) <= n {
		m.sizes = append(m.sizes, 0)
	}
	if n > 0 {
		m.sizes[n]++
	}
	for len(m.sizes) > 0 && m.sizes[len(m.sizes)-1] == 0 {
		m.sizes = m.sizes[:len(m.sizes)-1]
	}
}

// leave makes w stand nowhere.
func (w *waiter) leave() {
	m := w.room
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !w.isDisplaced {
		m.remove(w)
	}
	w.room = nil
}

// remove takes w out of its line.
func (m *waitingRoom) remove(w *waiter) {
	m.resize(w.line.clientKey, -1)
	line := m.lines[w.line]
	i := slices.Index(line, w)
	if line = slices.Delete(line, i, i+1); len(line) == 0 {
		delete(m.lines, w.line)
		return
	}
	m.lines[w.line] = line
	if i == 0 {
		line[0].isFirst = true
		line[0].ring()
	}
}

func (w *waiter) ring() {
	select {
	case w.bell <- struct{}{}:
	default:
	}
}

// news are the changes since the last look.
type news struct{ isFirst, isDisplaced, isWoken, isOvertaken bool }

func (w *waiter) news() news {
	if w.room == nil {
		return news{isFirst: true}
	}
	w.room.mu.Lock()
	defer w.room.mu.Unlock()
	n := news{w.isFirst, w.isDisplaced, w.isWoken, w.isOvertaken}
	w.isWoken, w.isOvertaken = false, false
	return n
}

// wake makes the requests of a client that are first in their lines ask again.
func (m *waitingRoom) wake(clientKey string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.places[clientKey] == 0 {
		return
	}
	m.wakeSome(func(id lineID, place int) bool { return place == 0 && id.clientKey == clientKey })
}

// wakeAll makes all requests resolve their limits, and ask, again.
func (m *waitingRoom) wakeAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wakeSome(func(lineID, int) bool { return true })
}

func (m *waitingRoom) wakeSome(isMeant func(id lineID, place int) bool) {
	for id, line := range m.lines {
		for place, w := range line {
			if isMeant(id, place) {
				w.isWoken = true
				w.ring()
			}
		}
	}
}
