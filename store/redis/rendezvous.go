package redis

import (
	"math"

	"github.com/cespare/xxhash/v2"
)

// rendezvous chooses a shard for a client key by weighted rendezvous hashing:
// every shard gets a score for the key, and the highest wins. Adding a shard
// moves only the keys that the new shard wins.
type rendezvous struct {
	seeds   []uint64
	weights []float64
	equal   bool
}

// newRendezvous depends on the shards' names and weights, not on their order.
func newRendezvous(names []string, weights []int) *rendezvous {
	r := &rendezvous{equal: true}
	for i, name := range names {
		r.seeds = append(r.seeds, xxhash.Sum64String(name))
		r.weights = append(r.weights, float64(weights[i]))
		r.equal = r.equal && weights[i] == weights[0]
	}
	return r
}

// owner returns the index of the shard that owns key.
func (r *rendezvous) owner(key string) int {
	if len(r.seeds) == 1 {
		return 0
	}
	hash := xxhash.Sum64String(key)
	best, bestScore := 0, math.Inf(-1)
	for i, seed := range r.seeds {
		// 53 bits: what a float64 holds exactly.
		u := float64(mix(hash^seed)>>11) + 0.5
		score := u
		if !r.equal {
			score = -r.weights[i] / math.Log(u/(1<<53))
		}
		if score > bestScore {
			best, bestScore = i, score
		}
	}
	return best
}

// mix is the finalizer of SplitMix64: every bit of x changes half of the
// result's bits.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
