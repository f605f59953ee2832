package redis

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/redis/operate"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

// ShardOptions locates and configures the servers of a shard.
type ShardOptions = wire.Options

// SentinelOptions locate a primary and its replicas through Redis Sentinel.
type SentinelOptions = wire.SentinelOptions

// Shard is the connections to one independent Redis: a primary and its
// replicas, or a Redis Cluster. It is safe for concurrent use and may serve
// several stores.
type Shard struct{ shard *operate.Shard }

// NewShard returns a shard. It dials nothing before the first call.
func NewShard(opts ShardOptions) *Shard { return &Shard{operate.NewShard(opts)} }

// Use notes that a store with this check timeout uses the shard, until done is called.
// The most patient store decides how long connecting may take.
func (s *Shard) Use(checkTimeout time.Duration) (done func()) { return s.shard.Use(checkTimeout) }

// Listen calls f for every event from now on, one after the other, until stop is
// called.
func (s *Shard) Listen(f func(wire.Event)) (stop func()) { return s.shard.Listen(f) }

// Close delivers the detached charges that still wait, until ctx ends, and closes
// the connections. No call may be made afterwards.
func (s *Shard) Close(ctx context.Context) { s.shard.Close(ctx) }
