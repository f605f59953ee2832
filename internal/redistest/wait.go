package redistest

import (
	"context"
	"testing"
	"time"
)

// WaitTimeout bounds every wait of a test, and replaces the timeouts that it does not cover.
const WaitTimeout = time.Minute

// The pauses between polls are a part of the time waited so far: what takes long costs no
// processor, and is noticed hardly later.
const (
	leastPause = 2 * time.Millisecond
	mostPause  = 50 * time.Millisecond
	pausesOf   = 16
)

// Eventually polls until f returns nil.
func Eventually(tb testing.TB, what string, f func() error) {
	tb.Helper()
	began := time.Now()
	for err := f(); err != nil; err = f() {
		waited := time.Since(began)
		if waited > WaitTimeout {
			tb.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(min(max(waited/pausesOf, leastPause), mostPause))
	}
}

// Soon calls f and fails the test if f does not return within WaitTimeout.
func Soon(tb testing.TB, what string, f func()) {
	tb.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(WaitTimeout):
		tb.Fatalf("%s takes more than %v", what, WaitTimeout)
	}
}

// CloseAtEnd closes what a test uses when the test ends.
func CloseAtEnd(tb testing.TB, c interface{ Close(ctx context.Context) }) {
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
		defer cancel()
		c.Close(ctx)
	})
}
