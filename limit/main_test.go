package limit_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestMain runs the tests or, in a process that [startWorker] starts, a worker.
func TestMain(m *testing.M) {
	if addr := os.Getenv(asWorker); addr != "" {
		work(addr)
		return
	}
	os.Exit(redistest.RunTests(m))
}

// must ends the test unless err is nil.
func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// eventually calls f until it returns nil, for a minute at most.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(2 * time.Millisecond) // before f is asked again
	}
}

// want returns an error unless got is want.
func want[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, want %v", what, got, want)
	}
	return nil
}
