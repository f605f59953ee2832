package memory

import (
	"strings"
	"testing"
)

// TestDigestIsNoClientKey sends what is kept of a long client key as a client
// key.
func TestDigestIsNoClientKey(t *testing.T) {
	for _, n := range []int{maxKey + 1, 100, 10_000} {
		long := newIdentity(0, strings.Repeat("k", n))
		if forged := newIdentity(0, long.key); forged == long {
			t.Errorf("client key of %d bytes shares its bucket with its digest", n)
		}
		if len(long.key) <= maxKey {
			t.Errorf("digest of %d bytes could be a client key", len(long.key))
		}
	}
}

// TestShardsShareWork has zones that count everybody together, which must not
// all wait for one lock.
func TestShardsShareWork(t *testing.T) {
	const zones = 256
	b := NewBuckets()
	shards := map[uint64]int{}
	for z := range uint32(zones) {
		shards[b.shardOf(newIdentity(z, ""))]++
	}
	for s, n := range shards {
		if n > zones/8 {
			t.Errorf("shard %d has %d of %d buckets", s, n, zones)
		}
	}
}
