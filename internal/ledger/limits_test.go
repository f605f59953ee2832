package ledger

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestDifferingLimits sends requests of different limits through a [Local]. The tests of
// the Redis store do so through a Ledger.
func TestDifferingLimits(t *testing.T) {
	storetest.DifferingLimits(t, func(_ *testing.T, clock *storetest.Clock) store.Store {
		return NewLocal(NewFlights(), memory.New(memory.NewBuckets(), memory.Options{Now: clock.Now}))
	})
}
