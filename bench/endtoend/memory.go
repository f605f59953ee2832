package endtoend

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

// memory is what buckets take, in bytes each.
type memory struct {
	// redis is that of used_memory, store of Caddy's heap in the memory store, and
	// ledger of the heap for what Caddy knows of a bucket in Redis.
	redis, store, ledger float64
	// fill is how long it took to write the buckets into Redis.
	fill time.Duration
}

// measureMemory gives the clients of many keys the buckets that Caddy would give
// them, and measures what they take.
func (l *lab) measureMemory(ctx context.Context) (m memory, err error) {
	c := l.heap[1]
	// Its bucket shows what keys look like.
	if _, err := c.send(ctx, loadgen.Options{Requests: 1}); err != nil {
		return m, err
	}
	time.Sleep(lastCharges)
	tag, err := c.clientKeyTag(ctx)
	if err != nil {
		return m, err
	}
	if err := l.open(ctx, tag); err != nil {
		return m, err
	}
	start := time.Now()
	few := l.opts.sweepKeys()
	if err := c.charge(ctx, tag, 0, few); err != nil {
		return m, err
	}
	before, err := c.usedMemory()
	if err != nil {
		return m, err
	}
	if err := c.charge(ctx, tag, few, c.keys); err != nil {
		return m, err
	}
	m.fill = time.Since(start)
	after, err := c.usedMemory()
	if err != nil {
		return m, err
	}
	m.redis = (after - before) / float64(c.keys-few)
	for i, of := range []*float64{&m.store, &m.ledger} {
		if *of, err = l.heapPerKey(ctx, l.heap[i]); err != nil {
			return m, err
		}
	}
	return m, l.checkFilled(ctx)
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

// heapBytes is what the second Caddy's heap holds after a collection of garbage.
func (l *lab) heapBytes() (float64, error) {
	// Once is not enough for what pools hold.
	for range 2 {
		resp, err := http.Get("http://" + l.admin + "/debug/pprof/heap?gc=1")
		if err != nil {
			return 0, fmt.Errorf("collect garbage: %w", err)
		}
		resp.Body.Close()
	}
	m, err := (&caddyproc.Site{Admin: l.admin}).Metrics()
	return m.Sum("go_memstats_alloc_bytes"), err
}

// usedMemory is that of the store's only primary.
func (c *site) usedMemory() (float64, error) {
	info, err := c.store.shards[0].Primary.Info("memory")
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseFloat(info["used_memory"], 64)
	if err != nil {
		return 0, fmt.Errorf("read used_memory: %w", err)
	}
	return n, nil
}
