// Package operate does what operators and upkeep need of a Redis store: it watches the
// health of servers, diagnoses them, keeps overrides, and inspects and removes buckets.
package operate

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Shard is a [wire.Shard] with the state of its servers, which several stores may share.
type Shard struct {
	*wire.Shard

	mu sync.Mutex
	// met are the inspected servers, by address.
	met map[string]sight
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
	// Observe, if set, receives every command that the store runs there. Of members
	// with the same Shard, the last one's Observe receives the commands of all, those of
	// previous members too.
	Observe ask.Observer
}

// Operator does what operators ask of a store. It is safe for concurrent use.
type Operator struct {
	// members are the shards of the store, and previous those before a resharding.
	members, previous []Member
	asker             *ask.Asker
	// now is this machine's clock, and most how many overrides the store keeps.
	now       func() time.Time
	most      int
	overrides *Overrides
	// mendPeriod is the time between two mendings of a shard, and followPeriod how long its server has to be followed.
	mendPeriod, followPeriod time.Duration
	// ask is askOwner, or stands for it in tests.
	ask func(ctx context.Context, shard *Shard, key string, reads bool, about func(isReplica bool) *wire.Command) (*wire.Command, error)
}

// NewOperator returns an operator of the store with these shards, which are not changed any
// more, and before a resharding the previous ones. now is this machine's clock.
func NewOperator(members, previous []Member, asker *ask.Asker, now func() time.Time, overrides *Overrides) *Operator {
	p := &Operator{members: members, previous: previous, asker: asker, now: now, most: store.MaxOverrides, overrides: overrides, mendPeriod: mendPeriod, followPeriod: wire.FollowAfter}
	p.ask = p.askOwner
	return p
}

// retired returns the shards that own nothing any more.
func (p *Operator) retired() []Member {
	return slices.DeleteFunc(slices.Clone(p.previous), func(was Member) bool {
		return slices.ContainsFunc(p.members, func(m Member) bool { return m.Name == was.Name })
	})
}

// operatorTimeout is the least time for a call for which no request waits.
const operatorTimeout = time.Second

func (p *Operator) withinTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, p.members[0].Shard.Options.ReplyWithin(operatorTimeout))
}
