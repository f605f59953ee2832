package endtoend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// fillWriters is how many write buckets at a time, and fillChunk how many at
// once.
const (
	fillWriters = 4
	fillChunk   = 500
)

// fill gives all clients the buckets that Caddy would give them, those of many
// keys last, and measures meanwhile what they take.
func (l *lab) fill(ctx context.Context, r *Result) error {
	c := l.heap[1]
	// Its bucket shows what keys look like.
	if _, err := c.send(ctx, loadgen.Options{Requests: 1}); err != nil {
		return err
	}
	time.Sleep(lastCharges)
	tag, err := c.clientKeyTag(ctx)
	if err != nil {
		return err
	}
	if err := l.open(ctx, tag); err != nil {
		return err
	}
	if r.memory, err = l.measureMemory(ctx, tag); err != nil {
		return err
	}
	start, there := time.Now(), l.opts.redisKeys()
	if err := c.charge(ctx, tag, there, c.keys); err != nil {
		return err
	}
	r.fillRate = float64(c.keys-there) / time.Since(start).Seconds()
	return l.checkFilled(ctx)
}

// open gives the clients of the sweep their buckets: to open one takes a call
// more, which is seldom in the long run. A tag is what Caddy puts before the
// clients' names.
func (l *lab) open(ctx context.Context, tag string) error {
	for _, list := range [][]*site{l.cases, l.sweep, l.distances} {
		for _, c := range list {
			if len(c.limits) == 0 || c.isAlone {
				continue
			}
			// In a quick run no more of them will come.
			end := c.keys
			if l.opts.Quick {
				end = min(end, 2*l.opts.sweepKeys())
			}
			if err := c.charge(ctx, tag, 0, end); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
	}
	return nil
}

// charge charges the clients from first up to end once in each of the site's
// limits, through the store that Caddy uses.
func (c *site) charge(ctx context.Context, tag string, first, end int64) error {
	opts := redis.Options{CheckTimeout: 5 * time.Second, ChargeTimeout: 5 * time.Second}
	for i, servers := range c.store.shards {
		shard := redis.NewShard(redis.ShardOptions{Primary: servers.Primary.Addr(), DialTimeout: 5 * time.Second})
		defer shard.Close(ctx)
		opts.Members = append(opts.Members, redis.Member{Name: shardName(i), Shard: shard})
	}
	s := redis.New(opts)
	var (
		wg   sync.WaitGroup
		errs [fillWriters]error
	)
	for w := range int64(fillWriters) {
		wg.Go(func() {
			for from := first + w*fillChunk; from < end && errs[w] == nil; from += fillWriters * fillChunk {
				errs[w] = c.chargeSome(ctx, s, tag, from, min(from+fillChunk, end))
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return fmt.Errorf("fill Redis: %w", err)
	}
	return nil
}

func (c *site) chargeSome(ctx context.Context, s *redis.Store, tag string, first, end int64) error {
	var reqs []store.Request
	for _, limit := range c.limits {
		for n := first; n < end; n++ {
			reqs = append(reqs, store.Request{Limit: limit, ClientKey: tag + clientName(n), Events: 50_000_000, Cost: 1})
		}
	}
	for _, st := range s.Charge(ctx, reqs) {
		if st.Err != nil {
			return st.Err
		}
	}
	return nil
}

// clientKeyTag is what Caddy puts before the clients' names, as seen in a key
// that it has made.
func (c *site) clientKeyTag(ctx context.Context) (string, error) {
	key, err := c.store.shards[0].Primary.Client().RandomKey(ctx).Result()
	if err != nil {
		return "", fmt.Errorf("find a key of Caddy: %w", err)
	}
	parts := strings.Split(key, ":")
	if len(parts) < 3 || !slices.Contains(parts, c.limits[0].Zone) {
		return "", fmt.Errorf("the key %q is not of the zone", key)
	}
	return parts[len(parts)-2] + ":", nil
}

// checkFilled requires that the clients of many keys have the buckets that were
// made for them, and none beside.
func (l *lab) checkFilled(ctx context.Context) error {
	c := l.heap[1]
	n, err := c.store.shards[0].Primary.Client().DBSize(ctx).Result()
	if err != nil {
		return fmt.Errorf("count keys: %w", err)
	}
	if n != c.keys {
		return fmt.Errorf("there are %d keys for %d clients", n, c.keys)
	}
	return nil
}
