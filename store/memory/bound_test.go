package memory_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// TestBoundIsReached requires that as many buckets as are allowed live beside
// each other, however their keys are spread over the shards.
func TestBoundIsReached(t *testing.T) {
	for _, bound := range []int{1, 2, 10, 63, 64, 65, 200} {
		for range 20 { // each spreads keys differently
			f := newFixture(t, bound)
			hour := limit("hour", time.Hour)
			for round := range int64(3) {
				for i := range bound {
					if used := f.charge(hour, clientKey(i), 1); used != round+1 {
						t.Fatalf("bound %d, round %d, client %d: used %d", bound, round, i, used)
					}
				}
			}
			if n := f.buckets.Len(); n != bound {
				t.Fatalf("%d buckets, want %d", n, bound)
			}
		}
	}
}

func TestBoundOfOne(t *testing.T) {
	f := newFixture(t, 1)
	hour := limit("hour", time.Hour)
	for i := range 100 {
		for used := int64(1); used <= 3; used++ {
			if got := f.charge(hour, clientKey(i), 1); got != used {
				t.Fatalf("client %d: used %d, want %d", i, got, used)
			}
		}
		if n := f.buckets.Len(); n != 1 {
			t.Fatalf("%d buckets, want 1", n)
		}
	}
}

func TestBoundHoldsUnderConcurrency(t *testing.T) {
	for _, bound := range []int{1, 10, 1000} {
		t.Run(fmt.Sprint(bound), func(t *testing.T) {
			const goroutines, insertions = 16, 500
			f := newFixture(t, bound)
			windows := []time.Duration{time.Minute, time.Hour}
			var wg sync.WaitGroup
			for g := range goroutines {
				wg.Go(func() {
					own := limit("zone", windows[g%len(windows)])
					for i := range insertions {
						// Every other client is one that other goroutines
						// insert, too.
						key := clientKey(i)
						if i%2 == 0 {
							key += fmt.Sprint(" of ", g)
						}
						f.charge(own, key, int64(i%7))
						if n := f.buckets.Len(); n > bound {
							t.Errorf("%d buckets, want at most %d", n, bound)
							return
						}
						if i%100 == 0 {
							f.clock.Advance(time.Second)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestBoundIsLowered lowers the bound while there are more buckets than it
// allows: no single insertion pays for all of them.
func TestBoundIsLowered(t *testing.T) {
	const before, after = 1000, 10
	f := newFixture(t, before)
	hour := limit("hour", time.Hour)
	for i := range before {
		f.charge(hour, clientKey(i), 1)
	}
	lowered := f.view(after)
	if used := charge(lowered, hour, clientKey(0), 1); used != 2 {
		t.Errorf("charge through the other view: used %d, want 2", used)
	}
	if n := f.buckets.Len(); n != before {
		t.Errorf("%d buckets after a charge that inserted none, want %d", n, before)
	}
	for i, want := 0, before; want > after; i++ {
		want = max(want-memory.TrimSize, after)
		charge(lowered, hour, fmt.Sprint("newcomer ", i), 1)
		if n := f.buckets.Len(); n != want {
			t.Fatalf("%d buckets after %d insertions, want %d", n, i+1, want)
		}
	}
	charge(lowered, hour, "another", 1)
	if n := f.buckets.Len(); n != after {
		t.Errorf("%d buckets, want %d", n, after)
	}

	// The other view's bound is what it was.
	for i := range before {
		f.charge(hour, clientKey(i), 1)
	}
	if n := f.buckets.Len(); n != before {
		t.Errorf("%d buckets, want %d", n, before)
	}
}
