package caddytest

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const (
	// WaitLimit replaces the timeouts that a test does not cover.
	WaitLimit = redistest.WaitTimeout
	// Patience bounds every wait for a condition. Even a slow machine meets it
	// earlier.
	Patience = redistest.Patience
)

// Eventually polls until f returns nil, for Patience at most.
func Eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	redistest.Eventually(t, what, f)
}

// Want returns an error unless got is want.
func Want[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, want %v", what, got, want)
	}
	return nil
}

// Must ends the test unless err is nil.
func Must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// Together runs f n times at the same time. When all have ended, their errors
// end the test.
func Together(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, n)
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			errs[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// StartTraffic runs n workers, each of which calls f repeatedly, with a pause that leaves the
// machine to other tests. A call of stop, or the end of the test, ends and awaits them; their errors
// fail the test.
func StartTraffic(t *testing.T, n int, f func(worker, i int) error) (stop func()) {
	t.Helper()
	var ended atomic.Bool
	var wg sync.WaitGroup
	errs := make([]error, n)
	for worker := range n {
		wg.Go(func() {
			for i := 0; !ended.Load() && errs[worker] == nil; i++ {
				errs[worker] = f(worker, i)
				time.Sleep(2 * time.Millisecond) // the pause
			}
		})
	}
	stop = sync.OnceFunc(func() {
		ended.Store(true)
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// Tally counts by client. The zero value is ready for use.
type Tally struct {
	// N has the count of each client; it is for when the last Add has returned.
	N  map[string]int64
	mu sync.Mutex
}

// Add counts one for a client.
func (c *Tally) Add(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.N == nil {
		c.N = map[string]int64{}
	}
	c.N[client]++
}

// Total returns the sum of all counts.
func (c *Tally) Total() (sum int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.N {
		sum += n
	}
	return sum
}

// Clients returns how many clients c has counted.
func (c *Tally) Clients() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.N)
}

// AwaitGrowth waits until c has counted n more.
func (c *Tally) AwaitGrowth(t *testing.T, n int64) {
	t.Helper()
	wanted := c.Total() + n
	Eventually(t, "requests are answered", func() error {
		if got := c.Total(); got < wanted {
			return fmt.Errorf("%d were, want %d", got, wanted)
		}
		return nil
	})
}
