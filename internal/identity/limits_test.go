package identity

import (
	"runtime"
	"strconv"
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
	if n := l.find(&again); n != numbers[0][0] {
		t.Errorf("limit numbered %d gets %d from a late registration", numbers[0][0], n)
	}
	if len(seen) != zones {
		t.Errorf("%d limits have %d numbers", zones, len(seen))
	}
}

// TestManyLimitsAreNotCopiedForEach numbers and finds them in memory that grows with their number.
func TestManyLimitsAreNotCopiedForEach(t *testing.T) {
	const many, most = 4000, 4 << 10
	var l Limits
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 3 {
		for i := range many {
			limit := store.Limit{Zone: strconv.Itoa(i), Algorithm: store.FixedWindow, Window: time.Hour}
			if n := l.Number(&limit); n != uint32(i) || *l.Limit(n) != limit {
				t.Fatalf("limit %d has number %d, which is %v", i, n, l.Limit(n))
			}
		}
	}
	runtime.ReadMemStats(&after)
	if bytes := (after.TotalAlloc - before.TotalAlloc) / many; bytes > most {
		t.Errorf("%d limits took %d bytes each, want %d at most", many, bytes, most)
	}
	if l.misses > 0 || len(l.fresh) > 0 {
		t.Errorf("%d limits are not in the table after %d lookups", len(l.fresh), l.misses)
	}
}
