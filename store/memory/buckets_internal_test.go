package memory

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
)

// TestShardsShareWork has zones that count everybody together, which must not
// all wait for one lock.
func TestShardsShareWork(t *testing.T) {
	const zones = 256
	b := NewBuckets()
	shards := map[uint64]int{}
	for z := range uint32(zones) {
		shards[b.shardOf(identity.New(z, ""))]++
	}
	for s, n := range shards {
		if n > zones/8 {
			t.Errorf("shard %d has %d of %d buckets", s, n, zones)
		}
	}
}
