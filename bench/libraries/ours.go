package libraries

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// timeout replaces the 50 ms after which a Take gives up: on a machine that is
// busy with something else they pass, and what is measured is speed.
const timeout = 5 * time.Second

// takeBounds are what a Take is to reach.
var takeBounds = map[int]float64{64: 1.3, 256: 1.8, 1024: 2.0}

// Ours have the pool that they have unless told otherwise.
var (
	takeFixedWindow = &kind{
		name: "Take, fixed window", ours: true, bounds: takeBounds,
		pools: []int{redis.DefaultPoolSize}, commands: scripted, open: openOurs(store.FixedWindow, false, take),
	}
	// A single goroutine never has two calls to put into one pipeline.
	takePlain = &kind{
		name: "Take, fixed window, pipelining off", ours: true, bounds: map[int]float64{1: 0.9}, goroutines: []int{1},
		pools: []int{redis.DefaultPlainPoolSize}, commands: scripted, open: openOurs(store.FixedWindow, true, take),
	}
	takeGCRA = &kind{
		name: "Take, GCRA", ours: true, bounds: takeBounds, extra: true,
		pools: []int{redis.DefaultPoolSize}, commands: scripted, open: openOurs(store.GCRA, false, take),
	}
	checkAndCharge = &kind{
		name: "check + charge, fixed window", ours: true, bounds: map[int]float64{64: 0.75, 256: 1},
		pools: []int{redis.DefaultPoolSize}, commands: scripted, open: openOurs(store.FixedWindow, false, takeInTwo),
	}
	// What the handler does: nobody waits for the charge.
	checkAndDetach = &kind{
		name: "check + detached charge, fixed window", ours: true, bounds: checkAndCharge.bounds,
		pools: []int{redis.DefaultPoolSize}, commands: scripted, open: openDetaching,
	}
	ours = []*kind{takeFixedWindow, takePlain, takeGCRA, checkAndCharge, checkAndDetach}

	ourMemory = []*kind{
		{name: "Take, fixed window", ours: true, pools: unpooled, open: openOurMemory(store.FixedWindow)},
		{name: "Take, GCRA", ours: true, pools: unpooled, open: openOurMemory(store.GCRA)},
	}
)

// calling is how a decision is made of a store's calls.
type calling func(ctx context.Context, s store.Store, reqs []store.Request) store.State

func take(ctx context.Context, s store.Store, reqs []store.Request) store.State {
	return s.Take(ctx, reqs)[0]
}

// takeInTwo checks, and waits for the charge of what is admitted.
func takeInTwo(ctx context.Context, s store.Store, reqs []store.Request) store.State {
	checked := s.Check(ctx, reqs)[0]
	if checked.Err == nil && checked.Allowed {
		checked.Err = s.Charge(ctx, reqs)[0].Err
	}
	return checked
}

func openOurs(algorithm store.Algorithm, plain bool, call calling) func(addr string, pool int) (*limiter, error) {
	return func(addr string, pool int) (*limiter, error) {
		shard := redis.NewShard(redis.ShardOptions{
			Primary: addr, PoolSize: pool, NoPipelining: plain, DialTimeout: timeout,
		})
		s := redis.New(redis.Options{
			Members:       []redis.Member{{Name: "a", Shard: shard}},
			CheckTimeout:  timeout,
			ChargeTimeout: timeout,
		})
		return &limiter{
			limit: limitOf(s, algorithm, call),
			close: func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				shard.Close(ctx)
			},
		}, nil
	}
}

// openDetaching is openOurs, where what is admitted is charged without waiting.
func openDetaching(addr string, pool int) (*limiter, error) {
	var pending sync.WaitGroup
	var failed atomic.Pointer[error]
	call := func(ctx context.Context, s store.Store, reqs []store.Request) store.State {
		checked := s.Check(ctx, reqs)[0]
		if checked.Err == nil && checked.Allowed {
			pending.Add(1)
			s.(store.Reporter).ChargeReported(reqs, func(_ int, st store.State) {
				if st.Err != nil {
					failed.Store(&st.Err)
				}
				pending.Done()
			})
		}
		return checked
	}
	l, err := openOurs(store.FixedWindow, false, call)(addr, pool)
	if err != nil {
		return nil, err
	}
	l.settle = func() error {
		pending.Wait()
		if err := failed.Load(); err != nil {
			return *err
		}
		return nil
	}
	return l, nil
}

func openOurMemory(algorithm store.Algorithm) func(string, int) (*limiter, error) {
	return func(string, int) (*limiter, error) {
		return &limiter{
			limit: func(events int) (decide, error) {
				return limitOf(memory.New(memory.NewBuckets(), memory.Options{}), algorithm, take)(events)
			},
			close: func() {},
		}, nil
	}
}

func limitOf(s store.Store, algorithm store.Algorithm, call calling) func(events int) (decide, error) {
	zone := &store.Limit{Zone: "bench", Algorithm: algorithm, Window: time.Hour}
	return func(events int) (decide, error) {
		return func(ctx context.Context, key string) (bool, error) {
			st := call(ctx, s, []store.Request{{Limit: zone, ClientKey: key, Events: int64(events), Cost: 1}})
			return st.Allowed, st.Err
		}, nil
	}
}
