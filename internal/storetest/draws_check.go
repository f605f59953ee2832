//go:build check

package storetest

import (
	"testing"

	"pgregory.net/rapid"
)

// drawn draws by rapid.
type drawn struct{ *rapid.T }

func (d drawn) Draw(name string, low, high int64) int64 {
	return rapid.Int64Range(low, high).Draw(d.T, name)
}

// histories makes histories, as many as rapid is told to, and returns how many there are to be.
func histories(t *testing.T, history func(d draws)) int {
	t.Helper()
	rapid.Check(t, func(rt *rapid.T) { history(drawn{rt}) })
	return allHistories
}
