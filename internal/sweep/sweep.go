// Package sweep says how many of many similar cases a test goes through: a sample with `make test`, the same or
// more with `make check`, and all of them with `make check-all`. Which ones a sample has, a seed decides, so that
// a failure can be repeated.
//
// The environment variable SWEEP is empty, "more" or "all", and SWEEP_SEED is the seed, 1 if it is
// empty.
package sweep

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// moreTimes is how many times as many cases as a sample has SWEEP=more goes through.
const moreTimes = 3

// Size returns n, or with SWEEP=more a multiple of it; with `make check-all`, or where
// that is less, it returns all.
func Size(n, all int) int {
	switch os.Getenv("SWEEP") {
	case "":
		return min(n, all)
	case "more":
		return min(moreTimes*n, all)
	case "all":
		return all
	}
	panic("SWEEP is " + strconv.Quote(os.Getenv("SWEEP")) + ": it must be more, all, or empty")
}

// IsWhole reports whether tests go through all cases.
func IsWhole() bool { return Size(0, 1) == 1 }

// Seed returns the seed of samples.
func Seed() uint64 {
	text := os.Getenv("SWEEP_SEED")
	if text == "" {
		return 1
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic("SWEEP_SEED: " + err.Error())
	}
	return seed
}

// Of returns those of the cases that tb goes through, in their order: n of them, or what [Size]
// makes of that.
func Of[T any](tb testing.TB, cases []T, n int) []T {
	tb.Helper()
	n = Size(n, len(cases))
	if n == len(cases) {
		return cases
	}
	chosen := rand.New(rand.NewPCG(Seed(), 0)).Perm(len(cases))[:n]
	slices.Sort(chosen)
	some := make([]T, n)
	for i, at := range chosen {
		some[i] = cases[at]
	}
	tb.Logf("%d of %d cases, chosen by SWEEP_SEED=%d", n, len(cases), Seed())
	return some
}
