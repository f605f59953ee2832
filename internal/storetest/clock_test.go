//go:build check

package storetest_test

import (
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
)

func TestClock(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	c := storetest.NewClock(start)
	if now := c.Now(); !now.Equal(start) {
		t.Errorf("a new clock shows %v, want %v", now, start)
	}
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			c.Advance(time.Second)
			c.Now()
		})
	}
	wg.Wait()
	if now, want := c.Now(), start.Add(100*time.Second); !now.Equal(want) {
		t.Errorf("the clock shows %v, want %v", now, want)
	}
}
