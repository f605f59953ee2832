package limiter

import (
	"fmt"
	"math"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redis"
)

// rolloutTo returns a rollout of percent, ready for use.
func rolloutTo(percent float64) *Rollout {
	return &Rollout{Percent: percent, moved: cohortsIn(percent)}
}

// TestRolloutMovesTheSameClientsAlways: other cohorts would move other clients in an
// update, some of them back.
func TestRolloutMovesTheSameClientsAlways(t *testing.T) {
	for key, want := range map[string]uint64{
		"":                  287642424617888,
		"x7Q:alice":         7896327871234878,
		"x7Q:bob":           3305308223421017,
		"p5W:192.0.2.1":     6959627072870963,
		"p5W:2001:db8::/64": 3250385399516540,
		"aB-:a key that is longer than the thirty-two bytes at a time of the hash:7:9": 8309097038379862,
	} {
		if got := cohortOf(rolloutSalt, key); got != want {
			t.Errorf("cohort of %q is %d, want %d", key, got, want)
		}
		percent := float64(want) / cohorts * 100
		if rolloutTo(percent-0.01).moves(key, nil) || !rolloutTo(percent+0.01).moves(key, nil) {
			t.Errorf("%q is not moved from %f percent on", key, percent)
		}
	}
}

func TestRolloutMovesItsShareAndNoClientBack(t *testing.T) {
	const keys = 100_000
	var before map[string]bool
	for _, percent := range []float64{0, 0.01, 0.1, 1, 2.5, 12.5, 100.0 / 3, 50, 66.66, 99.5, 99.99, 100} {
		o := rolloutTo(percent)
		moved := map[string]bool{}
		for i := range keys {
			if key := fmt.Sprintf("x7Q:client-%d", i); o.moves(key, nil) {
				moved[key] = true
			}
		}
		for key := range before {
			if !moved[key] {
				t.Fatalf("%s is moved back at %g percent", key, percent)
			}
		}
		before = moved
		share := 100 * float64(len(moved)) / keys
		if math.Abs(share-percent) > 0.5 {
			t.Errorf("%g percent move %g", percent, share)
		}
		// 0 and 100 percent are exact, and no other share is.
		if whole := percent == 0 || percent == 100; whole != (len(moved) == 0 || len(moved) == keys) {
			t.Errorf("%g percent move %d of %d", percent, len(moved), keys)
		}
	}
	if new(Rollout).moves("x7Q:client-1", nil) {
		t.Error("a client is moved without a percentage")
	}
}

// TestRolloutIsIndependentOfTheShards: it neither empties one shard of the old store
// first, nor fills one of the new store.
func TestRolloutIsIndependentOfTheShards(t *testing.T) {
	const keys = 100_000
	var members []redis.Member
	for _, name := range []string{"a", "b", "c", "d"} {
		shard := redis.NewShard(redis.ShardOptions{Primary: "localhost:6379"})
		t.Cleanup(func() { shard.Close(t.Context()) })
		members = append(members, redis.Member{Name: name, Weight: 1, Shard: shard})
	}
	store := redis.New(redis.Options{Members: members})
	for _, percent := range []float64{5, 50, 95} {
		o := rolloutTo(percent)
		owned, moved := map[string]float64{}, map[string]float64{}
		for i := range keys {
			key := fmt.Sprintf("x7Q:client-%d", i)
			owner := store.Owner(key)
			owned[owner]++
			if o.moves(key, nil) {
				moved[owner]++
			}
		}
		for owner, n := range owned {
			if share := 100 * moved[owner] / n; math.Abs(share-percent) > 1 {
				t.Errorf("%g percent move %g of shard %s", percent, share, owner)
			}
		}
	}
}
