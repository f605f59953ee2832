//go:build !check

package storetest

import (
	"math/rand/v2"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// sample is how many of allHistories are made, see [sweep.Size].
const sample = 5

// seeded draws from a generator. A failure names its seed.
type seeded struct {
	*testing.T
	seed   uint64
	random *rand.Rand
}

func (s seeded) Draw(_ string, low, high int64) int64 {
	return low + s.random.Int64N(high-low+1)
}

func (s seeded) Fatalf(format string, args ...any) {
	s.Helper()
	s.T.Fatalf("seed %d: "+format, append([]any{s.seed}, args...)...)
}

// histories makes a sample of histories, and returns how many.
func histories(t *testing.T, history func(d draws)) int {
	t.Helper()
	n := sweep.Size(sample, allHistories)
	for i := range n {
		seed := sweep.Seed() + uint64(i)
		history(seeded{t, seed, rand.New(rand.NewPCG(seed, 0))})
	}
	return n
}
