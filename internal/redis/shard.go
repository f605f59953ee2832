package redis

import (
	"github.com/shardlimit/caddy-shardlimit/internal/redis/operate"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
)

// ShardOptions locates and configures the servers of a shard.
type ShardOptions = wire.Options

// SentinelOptions locate a primary and its replicas through Redis Sentinel.
type SentinelOptions = wire.SentinelOptions

// Shard is one independent Redis: a primary and its replicas, or a Redis Cluster. It is
// safe for concurrent use and may serve several stores.
type Shard = operate.Shard

// Member is a shard's place in a store.
type Member = operate.Member

// Overrides are the overrides of a store in this process.
type Overrides = operate.Overrides

// NewShard returns a shard. It dials nothing before the first call.
func NewShard(opts ShardOptions) *Shard { return operate.NewShard(opts) }
