package shardlimit

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// shardDurations are the histograms of one shard of a store, each looked up when
// something is first measured.
type shardDurations struct {
	store, shard      string
	primary, replicas [algorithm.Peek + 1]atomic.Pointer[prometheus.Observer]
}

// observeShard returns what measures the commands of a shard for a store.
func observeShard(storeName, shard string) redis.Observer {
	d := &shardDurations{store: storeName, shard: shard}
	return func(role store.Role, op algorithm.Operation, took time.Duration, _ error) {
		d.histogram(role, op).Observe(took.Seconds())
	}
}

func (d *shardDurations) histogram(role store.Role, op algorithm.Operation) prometheus.Observer {
	cached := &d.primary[op]
	if role == store.RoleReplica {
		cached = &d.replicas[op]
	}
	if o := cached.Load(); o != nil {
		return *o
	}
	o := metrics.storeDuration.WithLabelValues(d.store, d.shard, string(role), op.String())
	cached.Store(&o)
	return o
}
