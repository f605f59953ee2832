package identity

import (
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestLimitsAreNumberedOnce(t *testing.T) {
	const goroutines, zones = 16, 50
	var l Limits
	var numbers [goroutines][zones]uint32
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for z := range zones {
				numbers[g][z] = l.Number(&store.Limit{
					Zone: string(rune('A' + z)), Algorithm: store.FixedWindow, Window: time.Hour,
				})
			}
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for z := range zones {
		for g := range goroutines {
			if numbers[g][z] != numbers[0][z] {
				t.Fatalf("zone %d has numbers %d and %d", z, numbers[0][z], numbers[g][z])
			}
		}
		seen[numbers[0][z]] = true
	}
	again := store.Limit{Zone: "A", Algorithm: store.FixedWindow, Window: time.Hour}
	if n := l.add(&again); n != numbers[0][0] {
		t.Errorf("limit numbered %d gets %d from a late registration", numbers[0][0], n)
	}
	if len(seen) != zones {
		t.Errorf("%d limits have %d numbers", zones, len(seen))
	}
}
