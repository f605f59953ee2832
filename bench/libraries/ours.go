package main

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// timeout replaces the 50 ms after which a Take gives up: on a machine that is
// busy with something else they pass, and what is measured is speed.
const timeout = 5 * time.Second

// ours have the pool that they have unless told otherwise.
var ours = []*kind{
	{name: "Take, fixed window", ours: true, pools: []int{redis.DefaultPoolSize}, open: openOurs(store.FixedWindow)},
	{name: "Take, GCRA", ours: true, pools: []int{redis.DefaultPoolSize}, open: openOurs(store.GCRA)},
}

func openOurs(algorithm store.Algorithm) func(addr string, pool int) (*limiter, error) {
	return func(addr string, pool int) (*limiter, error) {
		shard := redis.NewShard(redis.ShardOptions{Primary: addr, PoolSize: pool, DialTimeout: timeout})
		s := redis.New(redis.Options{
			Members:      []redis.Member{{Name: "a", Shard: shard}},
			CheckTimeout: timeout,
		})
		zone := &store.Limit{Zone: "bench", Algorithm: algorithm, Window: time.Hour}
		return &limiter{
			limit: func(events int) (decide, error) {
				return func(ctx context.Context, key string) (bool, error) {
					st := s.Take(ctx, []store.Request{{Limit: zone, ClientKey: key, Events: int64(events), Cost: 1}})[0]
					return st.Allowed, st.Err
				}, nil
			},
			close: func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				shard.Close(ctx)
			},
		}, nil
	}
}
