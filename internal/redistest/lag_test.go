package redistest_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestDelayedReplicaLags: it hears of everything, that much later.
func TestDelayedReplicaLags(t *testing.T) {
	const lag = 300 * time.Millisecond
	shard := redistest.StartShard(t, 1)
	replica := shard.Replicas[0]
	if err := shard.Primary.DelayReplication(lag); err == nil {
		t.Error("the replication to a primary can be delayed")
	}
	for _, d := range []time.Duration{lag, 0} {
		if err := replica.DelayReplication(d); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			begun := time.Now()
			if err := shard.Primary.Client().Set(t.Context(), "k", i, 0).Err(); err != nil {
				t.Fatal(err)
			}
			if err := replica.WaitInSync(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(begun); got < d*9/10 {
				t.Errorf("the replica has what was written after %v, want at least %v", got, d)
			}
		}
	}
}
