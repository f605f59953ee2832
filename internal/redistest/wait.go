package redistest

import (
	"context"
	"testing"
	"time"
)

const (
	// WaitTimeout replaces the timeouts that a test does not cover.
	WaitTimeout = time.Minute
	// Patience bounds the waits of a test for a condition: for a tenth of a machine too.
	Patience = 5 * time.Minute
)

// Eventually polls until f returns nil, for Patience at most.
func Eventually(tb testing.TB, what string, f func() error) {
	tb.Helper()
	if err := Poll(Patience, f); err != nil {
		tb.Fatalf("waiting until %s: %v", what, err)
	}
}

// The pauses between polls grow with the time waited, because each poll costs as much as a request.
const (
	leastPause = 2 * time.Millisecond
	mostPause  = 100 * time.Millisecond
)

// Poll calls f until it returns nil. After limit it returns f's last error.
func Poll(limit time.Duration, f func() error) error {
	for began := time.Now(); ; {
		err := f()
		waited := time.Since(began)
		if err == nil || waited > limit {
			return err
		}
		time.Sleep(min(max(waited, leastPause), mostPause))
	}
}

// Soon calls f and fails the test if f does not return within Patience.
func Soon(tb testing.TB, what string, f func()) {
	tb.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(Patience):
		tb.Fatalf("%s takes more than %v", what, Patience)
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
