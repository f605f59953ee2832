//go:build check

package algorithm_test

import (
	"testing"

	"pgregory.net/rapid"
)

func init() {
	forAll = func(t *testing.T, property func(t *trial)) {
		t.Helper()
		rapid.Check(t, func(rt *rapid.T) {
			property(&trial{rt, func(name string, low, high int64) int64 { return rapid.Int64Range(low, high).Draw(rt, name) }})
		})
	}
}
