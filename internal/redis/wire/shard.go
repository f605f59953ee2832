// Package wire brings commands to the servers of a [Shard], which is given them or finds
// them, and their replies back. A [Call] of commands joins the queue of the [Lane] to a
// server, whose workers send what waits in a pipeline, repeat what certainly did not run, and
// follow redirections.
package wire

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
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

// Options locates and configures the servers of a shard. It has either
// Primary and Replicas, or Sentinel, or Cluster.
type Options struct {
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
	// AddCertificates, if set, adds the authorities and the client's certificate to a copy of TLS, for each connection.
	AddCertificates func(*tls.Config)
	DB              int
	// DialTimeout is how long connecting may take unless a store that uses the shard
	// allows more ([Shard.Use]); 0 means DefaultDialTimeout.
	DialTimeout time.Duration
	patience    *patience
	names       *names
	// moved is told of an address whose name leads elsewhere.
	moved func(addr string)
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
	// LoginRefused, if set, is called when a server refuses the credentials. It must be quick.
	LoginRefused func()
	// Dial replaces the dialler in tests that inject faults; nil for none.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// MaxReplicaLag bounds the lag of a replica that answers checks; 0 means
	// DefaultMaxReplicaLag.
	MaxReplicaLag time.Duration
}

// connections is one for each worker, one for health, and one for operators.
func (o *Options) connections() int { return o.PoolSize + 2 }

// Shard is one independent Redis, a primary and its replicas or a Redis Cluster, and the
// connections to its servers. It is safe for concurrent use and may serve several stores.
type Shard struct {
	// Options are those that it was made with, and the defaults.
	Options Options
	// Kind is static, sentinel or cluster, as figures show it.
	Kind string
	// InCluster is set if the shard is a Redis Cluster.
	InCluster bool
	// Abandoned are the takes whose callers have left.
	Abandoned Abandoned

	topology atomic.Pointer[topology]
	// upkeep, if not nil, runs in the background from the first use.
	upkeep func(ctx context.Context)
	// finder finds the servers; nil if they are given.
	finder finder
	// found is closed when the servers have been found; nudged asks for a search
	// soon.
	found  chan struct{}
	nudged chan struct{}
	// peers are the servers behind addresses.
	peers sync.Map
	// standing says which servers are followed; nil before the first search.
	standing atomic.Pointer[Standing]
	// searchFault is why the last search has failed, or nil.
	searchFault atomic.Pointer[error]

	// life ends all work in the background.
	life       context.Context
	end        context.CancelFunc
	started    sync.Once
	background sync.WaitGroup

	mu sync.Mutex
	// lanes are those in use; nil once the shard is closed.
	lanes  map[laneKey]*Lane
	closed bool
	// expected are the servers of a shard that finds them, by address, and now is the clock for these.
	expected map[string]expectation
	now      func() time.Time
	// retired are the lanes and clients that are being closed.
	retired sync.WaitGroup
	// listeners receive events; listened counts those there ever were.
	listeners map[int]func(Event)
	listened  int
	events    chan Event
	// panicked is when the last event of a panic was; nil if there was none.
	panicked atomic.Pointer[time.Time]
}

type laneKey struct {
	addr       string
	persistent bool
}

// NewShard returns a shard. It dials nothing before the first use, with which
// upkeep, if not nil, begins to run in the background, until ctx ends.
func NewShard(opts Options, upkeep func(ctx context.Context)) *Shard {
	opts.DialTimeout = cmp.Or(opts.DialTimeout, DefaultDialTimeout)
	opts.patience = &patience{users: map[*time.Duration]bool{}}
	opts.names = &names{lookup: net.DefaultResolver.LookupHost, peers: map[string]named{}}
	opts.MaxReplicaLag = cmp.Or(opts.MaxReplicaLag, DefaultMaxReplicaLag)
	if opts.NoPipelining {
		opts.PoolSize = cmp.Or(opts.PoolSize, DefaultPlainPoolSize)
	}
	opts.PoolSize = cmp.Or(opts.PoolSize, DefaultPoolSize)
	s := &Shard{
		Options:   opts,
		found:     make(chan struct{}),
		nudged:    make(chan struct{}, 1),
		lanes:     map[laneKey]*Lane{},
		upkeep:    upkeep,
		InCluster: len(opts.Cluster) > 0,
		events:    make(chan Event, eventRoom),
		listeners: map[int]func(Event){},
		expected:  map[string]expectation{},
		now:       time.Now,
	}
	s.Options.moved = s.renew
	s.life, s.end = context.WithCancel(context.Background())
	switch {
	case opts.Sentinel != nil:
		s.finder, s.Kind = NewSentinel(&s.Options), "sentinel"
	case s.InCluster:
		s.finder, s.Kind = NewCluster(&s.Options), "cluster"
	default:
		s.Kind = "static"
		s.standing.Store(&Standing{Since: time.Now()})
		s.adopt([]Roles{{Primary: opts.Primary, Replicas: opts.Replicas}})
	}
	return s
}

// start begins what runs in the background. started calls it at the first use.
func (s *Shard) start() {
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
	if s.upkeep != nil {
		s.background.Go(func() { s.upkeep(s.life) })
	}
}

// Await waits until the servers are known, or ctx ends.
func (s *Shard) Await(ctx context.Context) {
	s.started.Do(s.start)
	select {
	case <-s.found:
	case <-ctx.Done():
	}
}

// IsFound reports whether the servers are known.
func (s *Shard) IsFound() bool { return s.topology.Load() != nil }

// SearchFault returns why the last search for the servers has failed, or nil.
func (s *Shard) SearchFault() error {
	if err := s.searchFault.Load(); err != nil {
		return *err
	}
	return nil
}

// Unowned returns how many slots of a Redis Cluster have no primary.
func (s *Shard) Unowned() (n int) {
	t := s.topology.Load()
	if t == nil || t.slots == nil {
		return 0
	}
	for _, place := range t.slots {
		if place == 0 {
			n++
		}
	}
	return n
}

// IsClosed reports whether the connections are closed.
func (s *Shard) IsClosed() bool { return s.life.Err() != nil }

// Finds reports whether the shard finds its servers, which else are given.
func (s *Shard) Finds() bool { return s.finder != nil }

// Servers returns the servers, or nil while none are known.
func (s *Shard) Servers() []*Servers {
	if t := s.topology.Load(); t != nil {
		return t.servers
	}
	return nil
}

// adopt replaces the servers. Those that stay keep their connections.
func (s *Shard) adopt(found []Roles) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(found) == 0 {
		return
	}
	before := s.topology.Load()
	next := new(topology)
	for _, r := range found {
		if r.Primary == "" {
			continue
		}
		if s.InCluster {
			if len(r.Slots) == 0 {
				next.spare = append(next.spare, s.laneTo(r.Primary, false), s.laneTo(r.Primary, true))
				continue
			}
			next.assign(r.Slots, len(next.servers))
		}
		next.servers = append(next.servers, s.serversIn(r, before))
	}
	s.topology.Store(next)
	if before == nil {
		close(s.found)
	}
	for _, now := range next.servers {
		if before != nil && before.ledBy(now.Primary) == nil {
			s.Emit(Event{Kind: PrimaryChanged, Addr: now.Primary})
		}
	}
	if s.Finds() {
		s.expect(found)
	}
	s.retire(next)
}

// serversIn returns the servers in these roles. mu is held.
func (s *Shard) serversIn(r Roles, before *topology) *Servers {
	next := &Servers{
		Primary: r.Primary,
		Checks:  s.laneTo(r.Primary, false),
		Charges: s.laneTo(r.Primary, true),
	}
	for _, addr := range r.Replicas {
		next.Replicas = append(next.Replicas, s.laneTo(addr, false))
	}
	if was := before.ledBy(r.Primary); was != nil {
		next.Clock, next.turn = was.Clock, was.turn
	} else {
		next.Clock, next.turn = newClock(), new(atomic.Uint32)
		next.Clock.jumped = func(by time.Duration) {
			s.Emit(Event{Kind: ClockJumped, Addr: r.Primary, Err: &Fault{
				Problem: "its clock was set by " + by.Round(time.Millisecond).String(), Remedy: "let it follow a time server that adjusts it gradually (NTP)",
			}})
		}
	}
	return next
}

// laneTo returns the lane to a server. mu is held.
func (s *Shard) laneTo(addr string, persistent bool) *Lane {
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

// renew replaces all connections to an address.
func (s *Shard) renew(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, l := range s.lanes {
		if key.addr == addr {
			l.renew()
		}
	}
}

// retire closes the lanes that are no longer in use. mu is held.
func (s *Shard) retire(next *topology) {
	used := map[*Lane]bool{}
	for _, l := range next.lanes() {
		used[l] = true
	}
	for key, l := range s.lanes {
		if used[l] {
			continue
		}
		delete(s.lanes, key)
		if _, isUsed := s.lanes[laneKey{key.addr, !key.persistent}]; !isUsed {
			s.peers.Delete(key.addr)
			if !slices.Contains(s.Options.Cluster, key.addr) {
				s.Options.names.forget(key.addr, "")
			}
		}
		s.retired.Go(func() {
			Pause(s.life, retirePause)
			// A server that is no longer the primary refuses the calls that wait there;
			// their callers send them again.
			ctx, cancel := context.WithTimeout(s.life, ReplyTimeout)
			defer cancel()
			l.close(ctx)
		})
	}
}

// Warm connects to the servers and loads scripts ahead of the first call, which reports
// any failure.
func (s *Shard) Warm(ctx context.Context, scripts []*Script) {
	s.Await(ctx)
	var wg sync.WaitGroup
	for _, l := range s.topology.Load().lanes() {
		wg.Go(func() { l.warm(ctx, scripts) })
	}
	wg.Wait()
}

// Close delivers the detached charges that still wait, until ctx ends, and closes
// the connections. No call may be made afterwards.
func (s *Shard) Close(ctx context.Context) {
	s.Abandoned.await(ctx)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	// A call that a closing lane redirects gets a lane of the next round: there are at
	// most maxRedirects.
	for s.closeLanes(ctx) {
	}
	// Those that waited for calls that have ended with the lanes.
	s.Abandoned.await(context.Background())
	s.end()
	s.background.Wait()
	s.retired.Wait()
	if s.finder != nil {
		s.finder.Close()
	}
}

// closeLanes closes the lanes and reports whether there were any. If not, it is final.
func (s *Shard) closeLanes(ctx context.Context) bool {
	s.mu.Lock()
	lanes := s.lanes
	if s.lanes = nil; len(lanes) > 0 {
		s.lanes = map[laneKey]*Lane{}
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, l := range lanes {
		wg.Go(func() { l.close(ctx) })
	}
	wg.Wait()
	return len(lanes) > 0
}
