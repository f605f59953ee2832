package endtoend

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

// memory is what buckets take, in bytes each, by round.
type memory struct {
	// redis is that of used_memory, store of Caddy's heap in the memory store, and
	// ledger of the heap for what Caddy knows of a bucket in Redis.
	redis, store, ledger []float64
}

// measureMemory measures what the buckets take that Caddy gives to clients, who
// have the tag before their names.
func (l *lab) measureMemory(ctx context.Context, tag string) (m memory, err error) {
	for range l.opts.Rounds {
		each, err := l.redisPerKey(ctx, tag)
		if err != nil {
			return m, err
		}
		m.redis = append(m.redis, each)
		// One that has had clients has room for more.
		if err := l.restartSecond(); err != nil {
			return m, err
		}
		for i, of := range []*[]float64{&m.store, &m.ledger} {
			each, err := l.heapPerKey(ctx, l.heap[i])
			if err != nil {
				return m, err
			}
			*of = append(*of, each)
		}
	}
	return m, nil
}

// redisPerKey empties the servers of many keys, gives some clients buckets, and
// tells by how much the second half of them has made the primary grow: with the
// first half Redis has all that it keeps for its replica.
func (l *lab) redisPerKey(ctx context.Context, tag string) (float64, error) {
	c, half := l.heap[1], l.opts.redisKeys()/2
	if err := c.store.shards[0].Primary.Client().FlushAll(ctx).Err(); err != nil {
		return 0, fmt.Errorf("empty Redis: %w", err)
	}
	if err := c.charge(ctx, tag, 0, half); err != nil {
		return 0, err
	}
	before, err := c.usedMemory(ctx)
	if err != nil {
		return 0, err
	}
	if err := c.charge(ctx, tag, half, 2*half); err != nil {
		return 0, err
	}
	after, err := c.usedMemory(ctx)
	return (after - before) / float64(half), err
}

// heapPerKey sends one request of each client, and tells by how much the heap
// has grown.
func (l *lab) heapPerKey(ctx context.Context, c *site) (float64, error) {
	// What is made for the first requests is not for a client.
	if _, err := c.send(ctx, loadgen.Options{Connections: l.opts.Connections, Requests: l.opts.heapKeys() / 10}); err != nil {
		return 0, err
	}
	before, err := l.heapBytes()
	if err != nil {
		return 0, err
	}
	count := l.opts.heapKeys() * 9 / 10
	if _, err := c.send(ctx, loadgen.Options{Connections: l.opts.Connections, Requests: count}); err != nil {
		return 0, err
	}
	time.Sleep(lastCharges)
	after, err := l.heapBytes()
	return (after - before) / float64(count), err
}

// heapAlloc is the size of the heap in a profile of it as text. It is read before
// the profile is written, which leaves garbage of a megabyte.
var heapAlloc = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)$`)

// heapBytes is what the second Caddy's heap holds after a collection of garbage.
func (l *lab) heapBytes() (n float64, err error) {
	// Once is not enough for what pools hold.
	for range 2 {
		resp, err := http.Get("http://" + l.admin + "/debug/pprof/heap?gc=1&debug=1")
		if err != nil {
			return 0, fmt.Errorf("collect garbage: %w", err)
		}
		profile, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return 0, fmt.Errorf("read the profile of the heap: %w", err)
		}
		found := heapAlloc.FindSubmatch(profile)
		if found == nil {
			return 0, fmt.Errorf("the profile does not say how large the heap is: %.200s", profile)
		}
		if n, err = strconv.ParseFloat(string(found[1]), 64); err != nil {
			return 0, fmt.Errorf("read the size of the heap: %w", err)
		}
	}
	return n, nil
}

// usedMemory is that of the store's only primary, once it keeps nothing that its
// replicas have not had yet.
func (c *site) usedMemory(ctx context.Context) (float64, error) {
	shard := c.store.shards[0]
	for _, replica := range shard.Replicas {
		if err := replica.WaitInSyncWith(ctx, shard.Primary); err != nil {
			return 0, err
		}
	}
	info, err := shard.Primary.Info("memory")
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseFloat(info["used_memory"], 64)
	if err != nil {
		return 0, fmt.Errorf("read used_memory: %w", err)
	}
	return n, nil
}
