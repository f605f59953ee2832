package limit_test

import (
	"fmt"
	"os"
	"testing"

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

// These names are short, as nearly every line of a test has one.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	redistest.Eventually(t, what, f)
}

// must ends the test unless err is nil.
func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// want returns an error unless got is want.
func want[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, want %v", what, got, want)
	}
	return nil
}
