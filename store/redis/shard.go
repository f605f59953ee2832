package redis

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// DefaultPoolSize is the number of connections per server and purpose with
	// pipelining.
	DefaultPoolSize = 4
	// DefaultPlainPoolSize is the same without pipelining.
	DefaultPlainPoolSize = 64
	// DefaultMaxReplicaLag bounds the lag of a replica that answers checks.
	DefaultMaxReplicaLag = 5 * time.Second
)

// Credentials returns the user name, empty for the default user, and the password
// for a new connection.
type Credentials func(ctx context.Context) (username, password string, err error)

// ShardOptions locates and configures the servers of a shard. It has either
// Primary and Replicas, or Sentinel, or Cluster.
type ShardOptions struct {
	// Primary is the address, host:port or unix/path, of the server that takes
	// the writes.
	Primary string
	// Replicas are the addresses of its replicas, which answer checks.
	Replicas []string
	// Sentinel finds a primary and its replicas instead, and follows a failover.
	Sentinel *SentinelOptions
	// Cluster are the addresses of some nodes of a Redis Cluster, which name the
	// others.
	Cluster []string
	// Credentials log in at each connection; nil for the default user without a
	// password.
	Credentials Credentials
	// TLS, if set, is used for all connections.
	TLS *tls.Config
	DB  int
	// DialTimeout is how long connecting may take unless a store that uses the shard
	// allows more ([Shard.Use]); 0 means DefaultDialTimeout.
	DialTimeout time.Duration
	patience    *patience
	// ConnMaxLifetime is the age from which a connection is replaced before its next
	// use; 0 for none.
	ConnMaxLifetime time.Duration
	// PoolSize is the number of connections to each server, for checks and again
	// for charges; 0 means DefaultPoolSize, or DefaultPlainPoolSize with
	// NoPipelining.
	PoolSize int
	// NoPipelining sends each call by itself instead of pipelining those that wait
	// at the same time.
	NoPipelining bool
	// dial replaces the dialler in tests that inject faults.
	dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// MaxReplicaLag bounds the lag of a replica that answers checks; 0 means
	// DefaultMaxReplicaLag.
	MaxReplicaLag time.Duration
}

// connections is one for each worker, and one for health.
func (o *ShardOptions) connections() int { return o.PoolSize + 1 }

// Shard is the connections to one independent Redis: a primary and its
// replicas, or a Redis Cluster. It is safe for concurrent use and may serve
// several stores.
type Shard struct {
	opts     ShardOptions
	topology atomic.Pointer[topology]
	// finder finds the servers; nil if they are given. kind names it in figures.
	finder finder
	kind   string
	// found is closed when the servers have been found; nudged asks for a search
	// soon.
	found  chan struct{}
	nudged chan struct{}

	// life ends all work in the background.
	life       context.Context
	end        context.CancelFunc
	started    sync.Once
	background sync.WaitGroup

	mu sync.Mutex
	// lanes are those in use; nil once the shard is closed.
	lanes  map[laneKey]*lane
	closed bool
	// retired are the lanes and clients that are being closed.
	retired sync.WaitGroup
	// listeners receive events; listened counts those there ever were.
	listeners map[int]func(Event)
	listened  int
	// met are the inspected servers, by address.
	met       map[string]sight
	abandoned abandonedTakes
	overrides lastOverrides

	events chan Event
}

type laneKey struct {
	addr       string
	persistent bool
}

// NewShard returns a shard. It dials nothing before the first call.
func NewShard(opts ShardOptions) *Shard {
	opts.DialTimeout = cmp.Or(opts.DialTimeout, DefaultDialTimeout)
	opts.patience = &patience{users: map[*time.Duration]bool{}}
	opts.MaxReplicaLag = cmp.Or(opts.MaxReplicaLag, DefaultMaxReplicaLag)
	if opts.NoPipelining {
		opts.PoolSize = cmp.Or(opts.PoolSize, DefaultPlainPoolSize)
	}
	opts.PoolSize = cmp.Or(opts.PoolSize, DefaultPoolSize)
	s := &Shard{
		opts:      opts,
		found:     make(chan struct{}),
		nudged:    make(chan struct{}, 1),
		lanes:     map[laneKey]*lane{},
		met:       map[string]sight{},
		events:    make(chan Event, eventRoom),
		listeners: map[int]func(Event){},
	}
	s.life, s.end = context.WithCancel(context.Background())
	switch {
	case opts.Sentinel != nil:
		s.finder, s.kind = newSentinel(&s.opts), "sentinel"
	case s.isCluster():
		s.finder, s.kind = newCluster(&s.opts, findTimeout/4), "cluster"
	default:
		s.kind = "static"
		s.adopt([]roles{{primary: opts.Primary, replicas: opts.Replicas}})
	}
	return s
}

func (s *Shard) isCluster() bool { return len(s.opts.Cluster) > 0 }

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
		s.background.Go(s.examine)
	})
}

// owner returns the servers that hold the buckets of a slot, or nil.
func (s *Shard) owner(slot uint16) *servers {
	s.start()
	return s.topology.Load().owner(slot)
}

func (s *Shard) isFound() bool { return s.topology.Load() != nil }

func (s *Shard) await(ctx context.Context) {
	s.start()
	select {
	case <-s.found:
	case <-ctx.Done():
	}
}

// adopt replaces the servers. Those that stay keep their connections.
func (s *Shard) adopt(found []roles) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(found) == 0 {
		return
	}
	before := s.topology.Load()
	next := new(topology)
	for _, r := range found {
		if s.isCluster() {
			if len(r.slots) == 0 {
				next.spare = append(next.spare, s.laneTo(r.primary, false), s.laneTo(r.primary, true))
				continue
			}
			next.assign(r.slots, len(next.servers))
		}
		next.servers = append(next.servers, s.serversIn(r, before))
	}
	s.topology.Store(next)
	if before == nil {
		close(s.found)
	}
	for _, now := range next.servers {
		if before != nil && before.ledBy(now.primary) == nil {
			s.emit(Event{Kind: PrimaryChanged, Addr: now.primary})
		}
	}
	s.retire(next)
}

// serversIn returns the servers in these roles. mu is held.
func (s *Shard) serversIn(r roles, before *topology) *servers {
	next := &servers{
		primary: r.primary,
		checks:  s.laneTo(r.primary, false),
		charges: s.laneTo(r.primary, true),
	}
	for _, addr := range r.replicas {
		next.replicas = append(next.replicas, s.laneTo(addr, false))
	}
	if was := before.ledBy(r.primary); was != nil {
		next.clock, next.offsets, next.turn = was.clock, was.offsets, was.turn
	} else {
		next.clock, next.offsets, next.turn = newPrimaryClock(), new(offsets), new(atomic.Uint32)
		next.clock.jumped = func(by time.Duration) {
			s.emit(Event{Kind: ClockJumped, Addr: r.primary, Err: &fault{
				problem: "its clock was set by " + by.Round(time.Millisecond).String(), remedy: "let it follow a time server that adjusts it gradually (NTP)",
			}})
		}
	}
	return next
}

// laneTo returns the lane to a server. mu is held.
func (s *Shard) laneTo(addr string, persistent bool) *lane {
	key := laneKey{addr, persistent}
	l, ok := s.lanes[key]
	if !ok {
		l = newLane(s, addr, persistent)
		s.lanes[key] = l
	}
	return l
}

// reconnect replaces all connections to a server that says it is no primary: go-redis
// drops only the one that says so, and only as the first reply of a pipeline.
func (s *Shard) reconnect(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, l := range s.lanes {
		if key.addr == addr {
			l.reconnect()
		}
	}
}

// retire closes the lanes that are no longer in use. mu is held.
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
			// A server that is no longer the primary refuses the calls that wait there;
			// their callers send them again.
			ctx, cancel := context.WithTimeout(s.life, replyTimeout)
			defer cancel()
			l.close(ctx)
		})
	}
}

func (s *Shard) warm(ctx context.Context) {
	s.await(ctx)
	var wg sync.WaitGroup
	for _, l := range s.topology.Load().lanes() {
		wg.Go(func() { l.warm(ctx) })
	}
	wg.Wait()
}

// Close delivers the detached charges that still wait, until ctx ends, and closes
// the connections. No call may be made afterwards.
func (s *Shard) Close(ctx context.Context) {
	s.abandoned.settle(ctx)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	// A call that a closing lane redirects gets a lane of the next round: there are at
	// most maxRedirects.
	for s.closeLanes(ctx) {
	}
	s.end()
	s.background.Wait()
	s.retired.Wait()
	if s.finder != nil {
		s.finder.close()
	}
}

// closeLanes closes the lanes and reports whether there were any. If not, it is final.
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

// servers are a primary and its replicas, which hold the same buckets.
type servers struct {
	primary string
	clock   *primaryClock
	offsets *offsets
	// checks is the primary's lane for calls that a request waits for: checks, takes,
	// migrations and resets. charges is its lane for charges, refunds and penalties,
	// whose calls are retried.
	checks  *lane
	charges *lane
	// replicas answer checks, in turn.
	replicas []*lane
	turn     *atomic.Uint32
}

func (s *servers) replica() *lane {
	usable := make([]*lane, 0, 8)
	for _, l := range s.replicas {
		if l.isUsable() {
			usable = append(usable, l)
		}
	}
	if len(usable) == 0 {
		return nil
	}
	return usable[s.turn.Add(1)%uint32(len(usable))] //nolint:gosec // a handful
}

func (s *Shard) lags(lag time.Duration) bool { return lag > s.opts.MaxReplicaLag }

// mayMiss reports whether a replica's answer may miss an existing bucket: while a
// slot of a Redis Cluster moves, half of its keys are elsewhere.
func (s *servers) mayMiss(st *store.State) bool {
	return s != nil && s.checks.shard.isCluster() && st.Content == store.Content{} && st.Used == 0
}

// roles are the addresses of a primary and its replicas, which of them are considered
// down, and their slots in a Redis Cluster.
type roles struct {
	primary  string
	replicas []string
	down     []string
	slots    []slotRange
}

// slotRange is a range of slots, both ends included.
type slotRange struct{ first, last int }

// topology maps the buckets of a shard to servers.
type topology struct {
	servers []*servers
	// slots, in a Redis Cluster, are the places of their owners in servers, from 1;
	// 0 for a slot without an owner.
	slots *[slotCount]uint16
	// spare are the lanes to primaries of a Redis Cluster without slots: the owner
	// of a slot that is about to move to one redirects commands there.
	spare []*lane
}

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

func (t *topology) ledBy(primary string) *servers {
	if t != nil {
		for _, s := range t.servers {
			if s.primary == primary {
				return s
			}
		}
	}
	return nil
}

func (t *topology) lanes() []*lane {
	var all []*lane
	if t != nil {
		for _, s := range t.servers {
			all = append(append(all, s.checks, s.charges), s.replicas...)
		}
		all = append(all, t.spare...)
	}
	return all
}

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
