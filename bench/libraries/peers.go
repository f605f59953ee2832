package libraries

import (
	"context"
	"fmt"
	"time"

	"github.com/go-redis/redis_rate/v10"
	goredis "github.com/redis/go-redis/v9"
	"github.com/throttled/throttled/v2"
	throttledredis "github.com/throttled/throttled/v2/store/goredisstore.v9"
	ulule "github.com/ulule/limiter/v3"
	ululeredis "github.com/ulule/limiter/v3/drivers/store/redis"
)

// peers are set up as their documentation shows. Where it leaves the client to
// the user, that is as it is unless told otherwise, but for its pool.
var peers = []*kind{
	{
		name: "redis_rate", modules: []string{"github.com/go-redis/redis_rate/v10", goredisModule},
		pools: peerPools, commands: scripted, open: openRedisRate,
	},
	{
		name: "ulule/limiter", modules: []string{ululeModule, goredisModule},
		pools: peerPools, commands: scripted, open: openUlule,
	},
	{
		name: "throttled", modules: []string{throttledModule, goredisModule}, pools: peerPools,
		// A GET goes with every TIME; other GETs are in its script.
		commands: map[string]int64{"time": 2, "eval": 1, "setnx": 1, "expire": 1}, open: openThrottled,
	},
	{
		name: "go-redisstore", modules: []string{"github.com/sethvargo/go-redisstore", redigoModule},
		pools: peerPools, commands: scripted, open: openRedisstore,
	},
	{
		name: "envoy ratelimit", modules: []string{"github.com/envoyproxy/ratelimit", radixModule},
		pools: sharedPools, commands: map[string]int64{"incrby": 1, "expire": 1}, open: openEnvoy,
	},
}

// The modules that several have in common, and the clients.
const (
	goredisModule   = "github.com/redis/go-redis/v9"
	redigoModule    = "github.com/gomodule/redigo"
	radixModule     = "github.com/mediocregopher/radix/v4"
	ululeModule     = "github.com/ulule/limiter/v3"
	throttledModule = "github.com/throttled/throttled/v2"
)

var (
	// peerPools: with fewer connections goroutines wait for one, with more the
	// server serves each less often.
	peerPools = []int{64, 256}
	// sharedPools has the default of a pool whose connections several goroutines
	// use at the same time.
	sharedPools = []int{10, 64, 256}
)

func newClient(addr string, pool int) *goredis.Client {
	return goredis.NewClient(&goredis.Options{
		Addr:     addr,
		PoolSize: pool,
		// The second pool, which pipelines have, holds ten if it is not told.
		PipelinePoolSize: pool,
	})
}

func openRedisRate(addr string, pool int) (*limiter, error) {
	client := newClient(addr, pool)
	l := redis_rate.NewLimiter(client)
	return &limiter{
		limit: func(events int) (decide, error) {
			limit := redis_rate.PerHour(events)
			return func(ctx context.Context, key string) (bool, error) {
				res, err := l.Allow(ctx, key, limit)
				if err != nil {
					return false, err
				}
				return res.Allowed > 0, nil
			}, nil
		},
		close: func() { _ = client.Close() },
	}, nil
}

func openUlule(addr string, pool int) (*limiter, error) {
	client := newClient(addr, pool)
	store, err := ululeredis.NewStore(client)
	if err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("open the store of ulule/limiter: %w", err)
	}
	return &limiter{
		limit: func(events int) (decide, error) { return decideUlule(store, events), nil },
		close: func() { _ = client.Close() },
	}, nil
}

func decideUlule(store ulule.Store, events int) decide {
	l := ulule.New(store, ulule.Rate{Period: time.Hour, Limit: int64(events)})
	return func(ctx context.Context, key string) (bool, error) {
		state, err := l.Get(ctx, key)
		return !state.Reached, err
	}
}

func openThrottled(addr string, pool int) (*limiter, error) {
	client := newClient(addr, pool)
	store, err := throttledredis.NewCtx(client, "throttled:")
	if err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("open the store of throttled: %w", err)
	}
	return &limiter{
		limit: func(events int) (decide, error) { return decideThrottled(store, events) },
		close: func() { _ = client.Close() },
	}, nil
}

func decideThrottled(store throttled.GCRAStoreCtx, events int) (decide, error) {
	l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{
		MaxRate: throttled.PerHour(events), MaxBurst: events - 1,
	})
	if err != nil {
		return nil, fmt.Errorf("make a limit of throttled: %w", err)
	}
	return func(ctx context.Context, key string) (bool, error) {
		limited, _, err := l.RateLimitCtx(ctx, key, 1)
		return !limited, err
	}, nil
}
