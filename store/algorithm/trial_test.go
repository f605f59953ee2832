package algorithm_test

import (
	"math/bits"
	"math/rand/v2"
	"testing"
)

// trials is how many cases a property is tried on.
const trials = 100

// trial is one case of a property: it draws the numbers of the case, and fails the test.
type trial struct {
	failer
	// integer draws a number from low to high.
	integer func(name string, low, high int64) int64
}

type failer interface {
	Fatalf(format string, args ...any)
}

// forAll tries a property on cases that are the same in every run. With the build tag check
// rapid draws other cases in each run, and shrinks one that fails.
var forAll = func(t *testing.T, property func(t *trial)) {
	t.Helper()
	for seed := range uint64(trials) {
		rng := rand.New(rand.NewPCG(seed, 0))
		property(&trial{seeded{t, seed}, func(_ string, low, high int64) int64 { return integer(rng, low, high) }})
	}
}

// seeded is a test that names the seed of the trial that fails.
type seeded struct {
	*testing.T
	seed uint64
}

func (s seeded) Fatalf(format string, args ...any) {
	s.Helper()
	s.T.Fatalf("seed %d: "+format, append([]any{s.seed}, args...)...)
}

// integer prefers the bounds, and draws half of the numbers by their order of magnitude.
func integer(rng *rand.Rand, low, high int64) int64 {
	span := uint64(high - low)
	switch {
	case span < 16:
	case rng.IntN(16) == 0:
		return high
	case rng.IntN(2) == 0:
		span >>= rng.IntN(bits.Len64(span) + 1)
	}
	return low + int64(rng.Uint64N(span+1))
}

func number(t *trial, name string, low, high int64) int64 { return t.integer(name, low, high) }

func (t *trial) maybe(name string) bool { return number(t, name, 0, 1) == 1 }

// among draws an element of a list.
func among[E any](t *trial, name string, list []E) E {
	return list[number(t, name, 0, int64(len(list))-1)]
}

// numbers draws one of some numbers.
type numbers func(t *trial, name string) int64

func (n numbers) draw(t *trial, name string) int64 { return n(t, name) }

func between(low, high int64) numbers {
	return func(t *trial, name string) int64 { return number(t, name, low, high) }
}

func these(list ...int64) numbers {
	return func(t *trial, name string) int64 { return among(t, name, list) }
}

func oneOf(all ...numbers) numbers {
	return func(t *trial, name string) int64 { return among(t, name+": which", all)(t, name) }
}
