package limiter

import (
	"cmp"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// waitingRoom holds the requests that wait in one zone of this process: a line for each
// bucket and limit, in order of arrival.
type waitingRoom struct {
	mu    sync.Mutex
	lines map[lineID]*line // none is empty
	// of are the lines of each client, by client key.
	of map[string][]*line
	// keys and addresses are how many places each client key and each address has. shares are how many of an
	// address's each client key has, and within, how many of a client key's each address has.
	keys, addresses tally
	shares, within  map[string]*tally
	held            int
	// joined numbers the requests in the order in which they joined.
	joined uint64
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
	// address is that of the client, or empty if addresses do not matter.
	address string
	// room and line are where it stands; room is nil if it does not. Only the request
	// itself changes them.
	room *waitingRoom
	line lineID
	// order is its place in the line, unless it is first.
	order order

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

// order is that of requests that arrived, and of those that arrived together as they joined.
type order struct {
	arrived int64
	joined  uint64
}

func (o order) compare(other order) int {
	return cmp.Or(cmp.Compare(o.arrived, other.arrived), cmp.Compare(o.joined, other.joined))
}

// line is a line of requests. Whoever is first stays it.
type line struct {
	id    lineID
	first *waiter
	// others are in order; sums are what they want of each bucket.
	others []*waiter
	sums   map[bucketID]*sums
}

// bucketID identifies a bucket among those that requests want something of.
type bucketID struct {
	room      *waitingRoom
	limit     store.Limit
	clientKey string
}

func (a *want) bucket() bucketID { return bucketID{a.room, *a.limit, a.clientKey} }

// costs are what w costs in each bucket of which it wants something.
func (w *waiter) costs() iter.Seq2[bucketID, int64] {
	return func(yield func(bucketID, int64) bool) {
		for i := range w.wants {
			isSame := func(other want) bool { return other.sameBucket(&w.wants[i]) }
			if slices.ContainsFunc(w.wants[:i], isSame) {
				continue
			}
			cost := int64(0)
			for _, other := range w.wants[i:] {
				if isSame(other) {
					cost += other.cost
				}
			}
			if cost > 0 && !yield(w.wants[i].bucket(), cost) {
				return
			}
		}
	}
}

// place is that of w among the others.
func (l *line) place(w *waiter) int {
	at, _ := slices.BinarySearchFunc(l.others, w.order, func(other *waiter, o order) int { return other.order.compare(o) })
	return at
}

// add adds w behind the first, and behind those that arrived before it.
func (l *line) add(w *waiter) {
	if l.sums == nil {
		l.sums = map[bucketID]*sums{}
	}
	l.others = slices.Insert(l.others, l.place(w), w)
	for id, cost := range w.costs() {
		of := l.sums[id]
		if of == nil {
			of = new(sums)
			l.sums[id] = of
		}
		of.add(w.order, cost)
	}
}

// remove removes w from the others.
func (l *line) remove(w *waiter) {
	at := l.place(w)
	l.others = slices.Delete(l.others, at, at+1)
	for id, cost := range w.costs() {
		if l.sums[id].remove(w.order, cost) {
			delete(l.sums, id)
		}
	}
}

// all are the requests in the line.
func (l *line) all() iter.Seq[*waiter] {
	return func(yield func(*waiter) bool) {
		if !yield(l.first) {
			return
		}
		for _, w := range l.others {
			if !yield(w) {
				return
			}
		}
	}
}

// sums are running sums of what requests want of a bucket: a Fenwick tree, so that nobody has to walk a line.
// What leaves stays in it with no cost until half of it has left.
type sums struct {
	orders []order
	costs  []int64
	tree   []int64
	left   int
}

// add adds a cost at its place, which most often is the last one.
func (s *sums) add(o order, cost int64) {
	if n := len(s.orders); n > 0 && s.orders[n-1].compare(o) >= 0 {
		s.compact()
		at := s.find(o)
		s.orders, s.costs = slices.Insert(s.orders, at, o), slices.Insert(s.costs, at, cost)
		s.build()
		return
	}
	s.orders, s.costs, s.tree = append(s.orders, o), append(s.costs, cost), append(s.tree, 0)
	// A node of the tree is the sum of as many costs as its lowest bit says.
	n := len(s.tree)
	for sum, at := cost, n-1; ; at -= at & -at {
		if at <= n-n&-n {
			s.tree[n-1] = sum
			return
		}
		sum += s.tree[at-1]
	}
}

// remove removes a cost, and reports whether no other is left.
func (s *sums) remove(o order, cost int64) (isEmpty bool) {
	at := s.find(o)
	s.costs[at] = 0
	for n := at + 1; n <= len(s.tree); n += n & -n {
		s.tree[n-1] -= cost
	}
	if s.left++; s.left == len(s.orders) {
		return true
	}
	if 2*s.left > len(s.orders) {
		s.compact()
		s.build()
	}
	return false
}

// before is the sum of the costs before a place.
func (s *sums) before(o order) (sum int64) {
	for at := s.find(o); at > 0; at -= at & -at {
		sum += s.tree[at-1]
	}
	return sum
}

// find returns the place of o, or where it would be.
func (s *sums) find(o order) int {
	at, _ := slices.BinarySearchFunc(s.orders, o, order.compare)
	return at
}

// compact drops what has left. The tree is not built.
func (s *sums) compact() {
	n := 0
	for i, cost := range s.costs {
		if cost != 0 {
			s.orders[n], s.costs[n] = s.orders[i], cost
			n++
		}
	}
	s.orders, s.costs, s.left = s.orders[:n], s.costs[:n], 0
}

func (s *sums) build() {
	s.tree = append(s.tree[:0], s.costs...)
	for n := 1; n <= len(s.tree); n++ {
		if up := n + n&-n; up <= len(s.tree) {
			s.tree[up-1] += s.tree[n-1]
		}
	}
}

// tally counts places.
type tally struct {
	places map[string]int
	// sizes has at n how many have n places; its last element is not 0.
	sizes []int
}

// add changes how many places one has.
func (t *tally) add(name string, by int) {
	if t.places == nil {
		t.places = map[string]int{}
	}
	n := t.places[name]
	if n > 0 {
		t.sizes[n]--
	}
	n += by
	if t.places[name] = n; n == 0 {
		delete(t.places, name)
	}
	for len(t.sizes) <= n {
		t.sizes = append(t.sizes, 0)
	}
	if n > 0 {
		t.sizes[n]++
	}
	for len(t.sizes) > 0 && t.sizes[len(t.sizes)-1] == 0 {
		t.sizes = t.sizes[:len(t.sizes)-1]
	}
}

// of is how many places one has; most, how many one has at most. A nil tally has none.
func (t *tally) of(name string) int {
	if t == nil {
		return 0
	}
	return t.places[name]
}

func (t *tally) most() int {
	if t == nil {
		return 0
	}
	return max(len(t.sizes)-1, 0)
}

func newWaitingRoom() *waitingRoom {
	return &waitingRoom{lines: map[lineID]*line{}, of: map[string][]*line{}, shares: map[string]*tally{}, within: map[string]*tally{}}
}

// hasLine reports whether a request waits in a line.
func (m *waitingRoom) hasLine(id lineID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lines[id] != nil
}

// addAhead adds to ahead what those before w in a line cost in each bucket that w wants.
func (m *waitingRoom) addAhead(id lineID, w *waiter, ahead []int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lines[id]
	if l == nil || l.first == w {
		return
	}
	for i := range l.first.wants {
		for n := range w.wants {
			if theirs := &l.first.wants[i]; theirs.sameBucket(&w.wants[n]) {
				ahead[n] += theirs.cost
			}
		}
	}
	at := w.order
	if w.room != m || w.line != id {
		at = order{w.arrived.UnixNano(), math.MaxUint64}
	}
	for n := range w.wants {
		if of := l.sums[w.wants[n].bucket()]; of != nil {
			ahead[n] += of.before(at)
		}
	}
}

// stand makes w stand in a line, and nowhere else. If the room has that many places, and all
// are used up, another request may have to give way. The waiters behind w check their wait again. It reports
// whether there was a place.
func (m *waitingRoom) stand(w *waiter, id lineID, places int) bool {
	if w.room == m && w.line == id {
		return true
	}
	w.leave()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held >= places {
		other := m.givesWay(w, id.clientKey)
		if other == nil {
			return false
		}
		m.remove(other)
		other.isDisplaced = true
		other.ring()
	}
	m.joined++
	w.room, w.line, w.order = m, id, order{w.arrived.UnixNano(), m.joined}
	l := m.lines[id]
	if w.isFirst, w.isDisplaced = l == nil, false; w.isFirst {
		l = &line{id: id, first: w}
		m.lines[id] = l
		m.of[id.clientKey] = append(m.of[id.clientKey], l)
	} else {
		l.add(w)
		for _, other := range l.others[l.place(w)+1:] {
			other.isOvertaken = true
			other.ring()
		}
	}
	m.resize(w, 1)
	return true
}

// hasPlace reports whether the room has one of so many places for w, which stands nowhere.
func (m *waitingRoom) hasPlace(w *waiter, clientKey string, places int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.held < places || m.givesWay(w, clientKey) != nil
}

// givesWay returns the request that gives way to a new one of a client, or nil: the newest of those that have most
// places, if the new one has fewer also with its own. Requests of one address are told apart by their client keys,
// and those of one client key by their addresses; others have as many places as their address or their key,
// whichever has more, so that nobody gets places by making up keys, or by coming from many addresses.
func (m *waitingRoom) givesWay(w *waiter, clientKey string) (newest *waiter) {
	own, shares, within := m.load(w.address, clientKey), m.shares[w.address], m.within[clientKey]
	share := shares.of(clientKey)
	if own+1 >= max(m.addresses.most(), m.keys.most()) && share+1 >= max(shares.most(), within.most()) {
		return nil
	}
	most := 0
	for _, l := range m.lines {
		for other := range l.all() {
			has, load := share, 0
			switch {
			case other.address == w.address:
				load = shares.of(l.id.clientKey)
			case l.id.clientKey == clientKey:
				load = within.of(other.address)
			default:
				has, load = own, m.load(other.address, l.id.clientKey)
			}
			if has+1 < load && (load > most || load == most && other.order.compare(newest.order) > 0) {
				newest, most = other, load
			}
		}
	}
	return newest
}

// load is how many places a client has.
func (m *waitingRoom) load(address, clientKey string) int {
	load := m.keys.places[clientKey]
	if address != "" {
		load = max(load, m.addresses.places[address])
	}
	return load
}

// resize changes how many places the client of w has.
func (m *waitingRoom) resize(w *waiter, by int) {
	m.held += by
	m.keys.add(w.line.clientKey, by)
	if w.address != "" {
		m.addresses.add(w.address, by)
	}
	addWithin(m.shares, w.address, w.line.clientKey, by)
	addWithin(m.within, w.line.clientKey, w.address, by)
}

// addWithin changes how many places an inner name has among those of an outer one.
func addWithin(all map[string]*tally, outer, inner string, by int) {
	t := all[outer]
	if t == nil {
		t = new(tally)
		all[outer] = t
	}
	if t.add(inner, by); t.most() == 0 {
		delete(all, outer)
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
	m.resize(w, -1)
	l := m.lines[w.line]
	switch {
	case l.first != w:
		l.remove(w)
	case len(l.others) > 0:
		l.first = l.others[0]
		l.remove(l.first)
		l.first.isFirst = true
		l.first.ring()
	default:
		delete(m.lines, w.line)
		lines := m.of[w.line.clientKey]
		if lines = slices.DeleteFunc(lines, func(other *line) bool { return other == l }); len(lines) == 0 {
			delete(m.of, w.line.clientKey)
		} else {
			m.of[w.line.clientKey] = lines
		}
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
	for _, l := range m.of[clientKey] {
		l.first.wake()
	}
}

// wakeAll makes all requests resolve their limits, and ask, again.
func (m *waitingRoom) wakeAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		for w := range l.all() {
			w.wake()
		}
	}
}

// wake makes w ask again. Its room is locked.
func (w *waiter) wake() {
	w.isWoken = true
	w.ring()
}
