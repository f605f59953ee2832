package redis

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// DefaultDialTimeout bounds the making of one connection.
	DefaultDialTimeout = 200 * time.Millisecond
	// DefaultPoolSize is the number of connections per server and purpose
	// with pipelining.
	DefaultPoolSize = 4
	// DefaultPlainPoolSize is the same without pipelining.
	DefaultPlainPoolSize = 64
)

// ShardOptions is how the servers of a shard are reached. Two shards with equal
// options can share their connections.
type ShardOptions struct {
	// Primary is the address, host:port or unix/path, of the server that takes
	// the writes.
	Primary string
	// Replicas are the addresses of its replicas, which answer checks.
	Replicas []string
	// Username is the ACL user; empty for the default user.
	Username string
	// Password of the user; empty for none.
	Password string
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

// Shard is the connections to one independent Redis: a primary and its
// replicas. It is safe for concurrent use and may serve several stores.
type Shard struct {
	clock    *primaryClock
	checks   *lane
	charges  *lane
	replicas []*lane
	turn     atomic.Uint32
}

// NewShard returns a shard. Nothing is dialled before the first call.
func NewShard(opts ShardOptions) *Shard {
	s := &Shard{
		clock:   newPrimaryClock(),
		checks:  newLane(opts.Primary, &opts, false),
		charges: newLane(opts.Primary, &opts, true),
	}
	for _, addr := range opts.Replicas {
		s.replicas = append(s.replicas, newLane(addr, &opts, false))
	}
	return s
}

// warm connects to all servers.
func (s *Shard) warm(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { s.checks.warm(ctx) })
	wg.Go(func() { s.charges.warm(ctx) })
	for _, l := range s.replicas {
		wg.Go(func() { l.warm(ctx) })
	}
	wg.Wait()
}

// Close delivers the detached charges that are still waiting, or gives them up
// when ctx ends, and closes the connections. No call may be made afterwards.
func (s *Shard) Close(ctx context.Context) {
	var wg sync.WaitGroup
	for _, l := range append([]*lane{s.checks, s.charges}, s.replicas...) {
		wg.Go(func() { l.close(ctx) })
	}
	wg.Wait()
}

// replica returns the next replica in turn that is up, or nil.
func (s *Shard) replica() *lane {
	for range s.replicas {
		l := s.replicas[int(s.turn.Add(1)%uint32(len(s.replicas)))] //nolint:gosec // a handful
		if l.isUp() {
			return l
		}
	}
	return nil
}
