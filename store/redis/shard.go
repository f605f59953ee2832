package redis

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// DefaultDialTimeout bounds the making of one connection.
	DefaultDialTimeout = 200 * time.Millisecond
	// DefaultPoolSize is the number of connections per server and purpose
	// with pipelining.
	DefaultPoolSize = 4
	// DefaultPlainPoolSize is the same without pipelining.
	DefaultPlainPoolSize = 64
	// DefaultMaxReplicaLag is how far a replica may be behind to be asked.
	DefaultMaxReplicaLag = 5 * time.Second
)

// Credentials yield the user, empty for the default one, and the password for a
// connection that is being made.
type Credentials func(ctx context.Context) (username, password string, err error)

// ShardOptions is how the servers of a shard are reached: by Primary and
// Replicas, by Sentinel, or by Cluster.
type ShardOptions struct {
	// Primary is the address, host:port or unix/path, of the server that takes
	// the writes.
	Primary string
	// Replicas are the addresses of its replicas, which answer checks.
	Replicas []string
	// Sentinel finds a primary and its replicas instead, and follows a failover.
	Sentinel *SentinelOptions
	// Cluster are the addresses of some nodes of a Redis Cluster, which tell the
	// others.
	Cluster []string
	// Credentials are asked for at each connection; nil for the default user
	// without a password.
	Credentials Credentials
	// TLS, if set, makes connections use it.
	TLS *tls.Config
	// DB is the database number.
	DB int
	// DialTimeout bounds the making of one connection; 0 means
	// DefaultDialTimeout.
	DialTimeout time.Duration
	// PoolSize is the number of connections to each server, once for checks
	// and once for charges; 0 means DefaultPoolSize, or DefaultPlainPoolSize
	// with NoPipelining.
	PoolSize int
	// NoPipelining sends each call by itself instead of putting into one
	// pipeline what is waiting at the same time.
	NoPipelining bool
	// dial makes connections in place of the usual way, for tests that put faults
	// between.
	dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// MaxReplicaLag is how far a replica may be behind its primary to be asked;
	// 0 means DefaultMaxReplicaLag.
	MaxReplicaLag time.Duration
}

func (o *ShardOptions) dialTimeout() time.Duration {
	if o.DialTimeout == 0 {
		return DefaultDialTimeout
	}
	return o.DialTimeout
}

func (o *ShardOptions) poolSize() int {
	switch {
	case o.PoolSize != 0:
		return o.PoolSize
	case o.NoPipelining:
		return DefaultPlainPoolSize
	default:
		return DefaultPoolSize
	}
}

// connections are one for each worker, and one to ask for the server's health.
func (o *ShardOptions) connections() int { return o.poolSize() + 1 }

func (o *ShardOptions) maxReplicaLag() time.Duration {
	if o.MaxReplicaLag == 0 {
		return DefaultMaxReplicaLag
	}
	return o.MaxReplicaLag
}

// Shard is the connections to one independent Redis: a primary and its
// replicas, or a Redis Cluster. It is safe for concurrent use and may serve
// several stores.
type Shard struct {
	opts     ShardOptions
	topology atomic.Pointer[topology]
	// finder finds the servers; nil if they were given.
	finder finder
	// cluster is the finder of a Redis Cluster, or nil.
	cluster *cluster
	// found is closed when the servers have been found; nudged makes it be asked
	// soon who they are.
	found  chan struct{}
	nudged chan struct{}

	// life ends when nothing is done in the background any more.
	life       context.Context
	end        context.CancelFunc
	started    sync.Once
	background sync.WaitGroup

	mu sync.Mutex
	// lanes are those in use, by server and purpose.
	lanes  map[laneKey]*lane
	closed bool
	// retired are no longer in use.
	retired sync.WaitGroup
	// listeners are told of events; listened is how many there ever were.
	listeners map[int]func(Event)
	listened  int
	// met are the servers that were looked at, by address.
	met map[string]sight
	// strays are its takes that nobody waits for any more.
	strays strays

	events chan Event
}

// laneKey tells lanes of a shard apart.
type laneKey struct {
	addr       string
	persistent bool
}

// NewShard returns a shard. Nothing is dialled before the first call.
func NewShard(opts ShardOptions) *Shard {
	s := &Shard{
		opts:   opts,
		found:  make(chan struct{}),
		nudged: make(chan struct{}, 1),
		lanes:  map[laneKey]*lane{},
		met:    map[string]sight{},
		events: make(chan Event, eventRoom),

		listeners: map[int]func(Event){},
	}
	s.life, s.end = context.WithCancel(context.Background())
	switch {
	case opts.Sentinel != nil:
		s.finder = newSentinel(&s.opts)
	case len(opts.Cluster) > 0:
		s.cluster = newCluster(&s.opts)
		s.finder = s.cluster
	default:
		s.adopt([]roles{{primary: opts.Primary, replicas: opts.Replicas}})
	}
	return s
}

// start begins what is done in the background, once.
func (s *Shard) start() {
	s.started.Do(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.closed {
			return
		}
		if s.finder != nil {
			s.background.Go(s.discover)
		}
		s.background.Go(s.relay)
		s.background.Go(s.probe)
		s.background.Go(s.inspect)
	})
}

// owner returns the servers that hold the buckets of a slot, or nil if none are
// known.
func (s *Shard) owner(slot uint16) *servers {
	s.start()
	return s.topology.Load().owner(slot)
}

// isFound tells whether the servers have been found.
func (s *Shard) isFound() bool { return s.topology.Load() != nil }

// await waits until the servers have been found, or ctx ends.
func (s *Shard) await(ctx context.Context) {
	s.start()
	select {
	case <-s.found:
	case <-ctx.Done():
	}
}

// adopt makes these the servers. Those that go on keep their connections.
func (s *Shard) adopt(found []roles) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(found) == 0 {
		return
	}
	before := s.topology.Load()
	next := new(topology)
	for _, r := range found {
		if s.cluster != nil {
			if len(r.slots) == 0 {
				next.spare = append(next.spare, s.laneTo(r.primary, false), s.laneTo(r.primary, true))
				continue
			}
			next.assign(r.slots, len(next.servers))
		}
		next.servers = append(next.servers, s.serversOf(r, before))
	}
	s.topology.Store(next)
	if before == nil {
		close(s.found)
	}
	s.tellPrimaries(before, next)
	s.retire(next)
}

// serversOf returns the servers in these roles. mu is held.
func (s *Shard) serversOf(r roles, before *topology) *servers {
	next := &servers{
		primary: r.primary,
		checks:  s.laneTo(r.primary, false),
		charges: s.laneTo(r.primary, true),
		tagged:  s.cluster != nil,
	}
	for _, addr := range r.replicas {
		next.replicas = append(next.replicas, s.laneTo(addr, false))
	}
	if before != nil {
		for _, was := range before.servers {
			if was.primary == r.primary {
				next.clock, next.offsets, next.turn = was.clock, was.offsets, was.turn
				return next
			}
		}
	}
	next.clock, next.offsets, next.turn = newPrimaryClock(), new(offsets), new(atomic.Uint32)
	return next
}

func (s *Shard) laneTo(addr string, persistent bool) *lane {
	key := laneKey{addr, persistent}
	l, ok := s.lanes[key]
	if !ok {
		l = newLane(s, addr, persistent)
		s.lanes[key] = l
	}
	return l
}

// reconnect replaces all connections to a server that says it is no primary.
// go-redis drops just the one it hears that on, and only from the first reply of a
// pipeline that begins with READONLY.
func (s *Shard) reconnect(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, l := range s.lanes {
		if key.addr == addr {
			l.reconnect()
		}
	}
}

// retirePause is how long connections stay after nobody shall use them any
// more, for the sake of calls that have chosen them already.
const retirePause = time.Second

// retire closes the lanes that are not in use any more. mu is held.
func (s *Shard) retire(next *topology) {
	used := map[*lane]bool{}
	for _, l := range next.lanes() {
		used[l] = true
	}
	for key, l := range s.lanes {
		if used[l] {
			continue
		}
		delete(s.lanes, key)
		s.retired.Go(func() {
			pause(s.life, retirePause)
			// What waits there is refused by a server that is no primary any more,
			// and sent again by whoever wanted it.
			ctx, cancel := context.WithTimeout(s.life, replyPatience)
			defer cancel()
			l.close(ctx)
		})
	}
}

// warm connects to all servers.
func (s *Shard) warm(ctx context.Context) {
	s.await(ctx)
	var wg sync.WaitGroup
	for _, l := range s.topology.Load().lanes() {
		wg.Go(func() { l.warm(ctx) })
	}
	wg.Wait()
}

// Close delivers the detached charges that are still waiting, or gives them up
// when ctx ends, and closes the connections. No call may be made afterwards.
func (s *Shard) Close(ctx context.Context) {
	s.strays.settle(ctx)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	// What a lane redirects to other nodes while it is being closed goes by lanes of
	// the next round: no more than maxRedirects of them.
	for s.closeLanes(ctx) {
	}
	s.end()
	s.background.Wait()
	s.retired.Wait()
	if s.finder != nil {
		s.finder.close()
	}
}

// closeLanes closes the lanes there are, and tells whether there were any. If not,
// there are none from now on.
func (s *Shard) closeLanes(ctx context.Context) bool {
	s.mu.Lock()
	lanes := s.lanes
	if s.lanes = nil; len(lanes) > 0 {
		s.lanes = map[laneKey]*lane{}
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, l := range lanes {
		wg.Go(func() { l.close(ctx) })
	}
	wg.Wait()
	return len(lanes) > 0
}

// servers are a primary and its replicas: they hold the same buckets.
type servers struct {
	primary string
	clock   *primaryClock
	offsets *offsets
	checks  *lane
	charges *lane
	// replicas answer checks, in turn.
	replicas []*lane
	turn     *atomic.Uint32
	// tagged is set for the nodes of a Redis Cluster, where keys have a hash
	// tag: the buckets of one client are on one node.
	tagged bool
}

// replica returns the next, in turn, of the replicas that can be asked, or nil.
func (s *servers) replica() *lane {
	usable := 0
	for _, l := range s.replicas {
		if l.isUsable() {
			usable++
		}
	}
	if usable == 0 {
		return nil
	}
	next := int(s.turn.Add(1) % uint32(usable)) //nolint:gosec // a handful
	for _, l := range s.replicas {
		if !l.isUsable() {
			continue
		}
		if next == 0 {
			return l
		}
		next--
	}
	return nil
}

// isUsable tells whether a replica can be asked.
func (l *lane) isUsable() bool { return l.isUp() && !l.lags.Load() }

// mayMiss tells whether a replica may know nothing of a bucket that there is: in
// a Redis Cluster a slot may be about to move, with half of its keys elsewhere.
func (s *servers) mayMiss(st *store.State) bool {
	return s != nil && s.tagged && st.Content == store.Content{} && st.Used == 0
}

// lanes are the ways to all of the servers.
func (s *servers) lanes() []*lane {
	return append([]*lane{s.checks, s.charges}, s.replicas...)
}

// roles are the addresses of a primary and of its replicas, and the slots of a
// Redis Cluster that are theirs.
type roles struct {
	primary  string
	replicas []string
	slots    []slotRange
}

// topology is which servers of a shard hold which of its buckets.
type topology struct {
	servers []*servers
	// slots are the places in servers, from 1, of those who own the slots of a
	// Redis Cluster, 0 where nobody does; nil for a shard that is none.
	slots *[slotCount]uint16
	// spare are the lanes to primaries of a Redis Cluster that own no slots: the
	// owner of a slot that one of them is about to get redirects commands there.
	spare []*lane
}

// owner returns the servers that hold the buckets of a slot, or nil if none are
// known.
func (t *topology) owner(slot uint16) *servers {
	switch {
	case t == nil || len(t.servers) == 0:
		return nil
	case t.slots == nil:
		return t.servers[0]
	case t.slots[slot] == 0:
		return nil
	default:
		return t.servers[t.slots[slot]-1]
	}
}

// lanes are all of them, each once.
func (t *topology) lanes() []*lane {
	var all []*lane
	if t != nil {
		for _, s := range t.servers {
			all = append(all, s.lanes()...)
		}
		all = append(all, t.spare...)
	}
	return all
}

// slotRange is some slots of a Redis Cluster, both ends included.
type slotRange struct{ first, last int }

// assign gives slots to the servers at a place.
func (t *topology) assign(slots []slotRange, place int) {
	if t.slots == nil {
		t.slots = new([slotCount]uint16)
	}
	for _, r := range slots {
		for n := max(r.first, 0); n <= min(r.last, slotCount-1); n++ {
			t.slots[n] = uint16(place + 1) //nolint:gosec // fewer than slots
		}
	}
}
