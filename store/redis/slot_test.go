package redis

import (
	"fmt"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestSlotIsWhatRedisSays for keys of every kind.
func TestSlotIsWhatRedisSays(t *testing.T) {
	server := redistest.Start(t, redistest.Args("--cluster-enabled", "yes"))
	for _, keys := range []bucketKeys{
		{prefix: "rl", tagged: true},
		{prefix: "rl", secret: []byte("secret"), tagged: true},
	} {
		for i, client := range []string{"10.0.0.1", "a{b}c", "", fmt.Sprintf("%0100d", 1), "2001:db8::/64"} {
			key := keys.key(hourly, client)
			want, err := server.Client().ClusterKeySlot(t.Context(), key).Result()
			must(t, err)
			if got := keys.slot(client); int64(got) != want {
				t.Errorf("slot of %s is %d, want %d", key, got, want)
			}
			other := store.Limit{Zone: fmt.Sprint("zone", i), Algorithm: store.GCRA, Window: hourly.Window}
			if second, err := server.Client().ClusterKeySlot(t.Context(), keys.key(&other, client)).Result(); err != nil || second != want {
				t.Errorf("the buckets of %q are in slots %d and %d, %v", client, want, second, err)
			}
		}
	}
}
