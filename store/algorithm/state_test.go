package algorithm_test

import (
	"math/big"
	"testing"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestMulDiv holds it to arithmetic without bounds.
func TestMulDiv(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		integer := rapid.OneOf(rapid.Int64Range(0, 100), rapid.Int64Range(0, store.MaxInteger))
		a, b, c := integer.Draw(t, "a"), integer.Draw(t, "b"), max(integer.Draw(t, "c"), 1)
		product := new(big.Int).Mul(big.NewInt(a), big.NewInt(b))
		quotient, rest := product.QuoRem(product, big.NewInt(c), new(big.Int))
		if most := big.NewInt(store.MaxInteger); quotient.Cmp(most) > 0 {
			quotient, rest = most, big.NewInt(0)
		}
		if q, r := algorithm.MulDiv(a, b, c); q != quotient.Int64() || r != rest.Int64() {
			t.Fatalf("%d × %d / %d = %d, rest %d, want %v, rest %v", a, b, c, q, r, quotient, rest)
		}
	})
}

// TestNewKnowsTheAlgorithms requires a bucket of its own kind for each.
func TestNewKnowsTheAlgorithms(t *testing.T) {
	for _, kind := range kinds {
		ok := false
		switch b := algorithm.New(&kind); kind.Algorithm {
		case store.FixedWindow:
			_, ok = b.(*algorithm.FixedWindow)
		case store.SlidingWindow:
			_, ok = b.(*algorithm.SlidingWindow)
		case store.SlidingLog:
			_, ok = b.(*algorithm.SlidingLog)
		case store.GCRA:
			_, ok = b.(*algorithm.GCRA)
		case store.Concurrency:
			_, ok = b.(*algorithm.Concurrency)
		}
		if !ok {
			t.Errorf("New(%s) is a bucket of another kind", kind.Algorithm)
		}
	}
}
