package memory

import "github.com/shardlimit/caddy-shardlimit/store/algorithm"

// bucket is the state of one limit for one client key. The fields fill one of
// the allocator's sizes, 48 bytes, to the last.
type bucket struct {
	identity
	algorithm.FixedWindow
	// place is where the bucket is in its shard's queue, or removed.
	place int
}

const removed = -1

// candidate is a live bucket that may be evicted, as it was when it was seen.
type candidate struct {
	shard  *shard
	bucket *bucket
	window algorithm.FixedWindow
}

// offer makes b the candidate if it is to go rather than the candidate so far.
func (c *candidate) offer(s *shard, b *bucket) {
	if c.bucket == nil || b.Used < c.window.Used ||
		b.Used == c.window.Used && b.Reset < c.window.Reset {
		*c = candidate{shard: s, bucket: b, window: b.FixedWindow}
	}
}
