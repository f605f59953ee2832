package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

const (
	measuredClients = 2_000
	measuredCallers = 64
	measuredRounds  = 5
	measuredTimes   = 5
	measuredCalls   = measuredClients * measuredTimes
)

// sizes are how many events the measured buckets have had.
var sizes = []int{1, 100, 1000}

// measured are the operations of which the cost is.
var measured = []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take}

// cost is what Redis needs for one way of counting.
type cost struct {
	// bytes are those of a bucket of each of the sizes.
	bytes []int64
	// micros is the CPU time of redis-server for each operation, by round.
	micros [][]float64
}

// measureRedis returns the cost of each of the ways that Redis tells apart.
func measureRedis() (map[string]*cost, error) {
	server, err := redistest.Launch(redistest.Options{})
	if err != nil {
		return nil, err
	}
	costs := map[string]*cost{}
	err = measureOn(server, costs)
	return costs, errors.Join(err, server.Stop())
}

// apart are the ways that differ in what Redis keeps or does.
func apart() (list []way) {
	for _, w := range ways {
		if !w.align && w.burst == 0 {
			list = append(list, w)
		}
	}
	return list
}

func measureOn(server *redistest.Server, costs map[string]*cost) error {
	shard := redis.NewShard(redis.ShardOptions{Primary: server.Addr()})
	defer shard.Close(context.Background())
	s := redis.New(redis.Options{
		Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: time.Minute, ChargeTimeout: time.Minute,
	})
	for _, w := range apart() {
		costs[w.name] = &cost{bytes: make([]int64, len(sizes)), micros: make([][]float64, len(measured))}
		if err := measureMemory(server, s, w, costs[w.name]); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	// One more: the first loads scripts and opens connections.
	for round := range measuredRounds + 1 {
		for _, w := range apart() {
			micros, err := measureCPU(server, s, w, round)
			if err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			for i, m := range micros {
				if round > 0 {
					costs[w.name].micros[i] = append(costs[w.name].micros[i], m)
				}
			}
		}
	}
	return nil
}

// id is one of the length that the handler gives to requests.
func id(n int) string { return fmt.Sprintf("%011d", n) }

// measureMemory fills the only bucket there is.
func measureMemory(server *redistest.Server, s *redis.Store, w way, c *cost) error {
	ctx, client := context.Background(), server.Client()
	done := 0
	for i, size := range sizes {
		var reqs []store.Request
		for ; done < size; done++ {
			reqs = append(reqs, store.Request{
				Limit: w.limit(window), ClientKey: "x7Q:203.0.113.7", Events: int64(size), Cost: 1, ID: id(done),
			})
		}
		for _, st := range s.Charge(ctx, reqs) {
			if st.Err != nil {
				return st.Err
			}
		}
		key, err := client.RandomKey(ctx).Result()
		if err != nil {
			return fmt.Errorf("find the bucket: %w", err)
		}
		if c.bytes[i], err = client.MemoryUsage(ctx, key, 0).Result(); err != nil {
			return fmt.Errorf("measure the bucket: %w", err)
		}
	}
	return client.FlushAll(ctx).Err()
}

// measureCPU does every operation for every client, some times in turn, and
// returns how many microseconds redis-server took for each. Before, each client
// has had as many charges, so that nothing is empty.
func measureCPU(server *redistest.Server, s *redis.Store, w way, round int) (micros []float64, err error) {
	limit := w.limit(window)
	limit.Zone += strconv.Itoa(round)
	if err := callAll(s, limit, algorithm.Charge, 0); err != nil {
		return nil, err
	}
	for i, op := range measured {
		before, err := server.CPU()
		if err != nil {
			return nil, err
		}
		if err := callAll(s, limit, op, i+1); err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		after, err := server.CPU()
		if err != nil {
			return nil, err
		}
		micros = append(micros, float64((after-before).Microseconds())/measuredCalls)
	}
	return micros, server.Client().FlushAll(context.Background()).Err()
}

// callAll makes some calls for each client, from many callers at a time, as the
// turn-th of all.
func callAll(s *redis.Store, limit *store.Limit, op algorithm.Operation, turn int) error {
	calls := map[algorithm.Operation]func(context.Context, []store.Request) []store.State{
		algorithm.Check: s.Check, algorithm.Charge: s.Charge, algorithm.Take: s.Take,
	}
	errs := make([]error, measuredCallers)
	var wg sync.WaitGroup
	for caller := range measuredCallers {
		wg.Go(func() {
			for n := range measuredTimes {
				for c := caller; c < measuredClients; c += measuredCallers {
					st := calls[op](context.Background(), []store.Request{{
						Limit: limit, ClientKey: "x7Q:" + id(c), Events: 100, Cost: 1,
						ID: id(turn*measuredCalls + n*measuredClients + c),
					}})[0]
					if errs[caller] == nil && st.Err == nil && !st.Allowed {
						st.Err = errors.New("it was refused")
					}
					errs[caller] = errors.Join(errs[caller], st.Err)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// median is of an odd number of values.
func median(values []float64) float64 {
	values = slices.Sorted(slices.Values(values))
	return values[len(values)/2]
}
