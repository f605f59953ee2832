package main

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// way is one way of counting, as the configuration writes it.
type way struct {
	name      string
	algorithm store.Algorithm
	align     bool
	// burst is how many may come at once; 0 means all.
	burst int64
}

var ways = []way{
	{name: "fixed_window", algorithm: store.FixedWindow},
	{name: "fixed_window, align", algorithm: store.FixedWindow, align: true},
	{name: "sliding_window", algorithm: store.SlidingWindow},
	{name: "sliding_log", algorithm: store.SlidingLog},
	{name: "gcra", algorithm: store.GCRA},
	{name: "gcra, burst 2", algorithm: store.GCRA, burst: 2},
	{name: "concurrency", algorithm: store.Concurrency},
}

func (w way) limit(window time.Duration) *store.Limit {
	return &store.Limit{Zone: w.name, Algorithm: w.algorithm, Window: window, Align: w.align}
}

// counter is one bucket.
type counter struct {
	bucket algorithm.Bucket
	store.Request
}

func newCounter(limit *store.Limit, events, burst int64) *counter {
	return &counter{algorithm.New(limit), store.Request{Limit: limit, Events: events, Burst: burst, Cost: 1}}
}

// do does op for one request.
func (c *counter) do(op algorithm.Operation, id string, now int64) store.State {
	c.ID = id
	return op.Run(c.bucket, &c.Request, now)
}

// most is the largest number of instants in any interval of that length, of
// which one end does not belong to it.
func most(instants []int64, length int64) int {
	n, first := 0, 0
	for i, last := range instants {
		for instants[first] <= last-length {
			first++
		}
		n = max(n, i-first+1)
	}
	return n
}
