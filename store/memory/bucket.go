package memory

import (
	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// bucket is the state of one limit for one client key. The fields fill one of
// the allocator's sizes, 48 bytes, to the last.
type bucket struct {
	key     string
	limit   uint32
	place   int32 // in its shard's queue, or removed
	content algorithm.Bucket
	// due is when to look whether the content has expired. Content that was
	// used since may last longer.
	due int64
}

const removed = -1

func newBucket(id identity.ID, limit *store.Limit) *bucket {
	return &bucket{key: id.Key, limit: id.Limit, content: algorithm.New(limit)}
}

// candidate is a live bucket that may be evicted, as it was when it was seen.
type candidate struct {
	shard          *shard
	bucket         *bucket
	weight, expiry int64
}

// offer makes b the candidate if it is to go rather than the candidate so far.
func (c *candidate) offer(s *shard, b *bucket) {
	limit := s.limits.Limit(b.limit)
	weight, expiry := b.content.Weight(limit), b.content.Expiry(limit)
	if c.bucket == nil || weight < c.weight || weight == c.weight && expiry < c.expiry {
		*c = candidate{shard: s, bucket: b, weight: weight, expiry: expiry}
	}
}
