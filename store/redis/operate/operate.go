// Package operate does what operators and upkeep need of a Redis store: it watches the
// health of servers, diagnoses them, keeps overrides, and inspects and removes buckets.
package operate

import (
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

// Shard is a [wire.Shard], with what is known of its servers and overrides beyond any store.
type Shard struct {
	*wire.Shard

	mu sync.Mutex
	// met are the inspected servers, by address.
	met       map[string]sight
	overrides lastOverrides
}

// NewShard returns a shard whose servers are examined from the first use until it is closed.
func NewShard(opts wire.Options) *Shard {
	s := &Shard{met: map[string]sight{}}
	s.Shard = wire.NewShard(opts, s.examine)
	return s
}

// Member is a shard's place in a store.
type Member struct {
	// Name is the shard's identity: it decides which client keys it owns.
	Name string
	// Weight is its share of the client keys relative to the others'; 0 means
	// 1.
	Weight int
	// Shard holds the connections.
	Shard *Shard
	// Observe, if set, receives every command that the store runs there.
	Observe ask.Observer
}

// Operator does what operators ask of a store. It is safe for concurrent use.
type Operator struct {
	// Members are the shards of the store, and Previous those before a resharding.
	Members, Previous []Member
	// Asker is that of the store.
	Asker *ask.Asker
	// Now is this machine's clock, for Diagnose.
	Now func() time.Time
}

// retired returns the shards that own nothing any more.
func (o *Operator) retired() []Member {
	return slices.DeleteFunc(slices.Clone(o.Previous), func(p Member) bool {
		return slices.ContainsFunc(o.Members, func(m Member) bool { return m.Name == p.Name })
	})
}
