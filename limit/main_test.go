package limit_test

import (
	"os"
	"testing"

	_ "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestMain runs the tests or, in a process that [startWorker] starts, a worker.
func TestMain(m *testing.M) {
	if addr := os.Getenv(asWorker); addr != "" {
		work(addr)
		return
	}
	caddytest.Main(m)
}

// These names are short, as nearly every line of a test has one.
var must, eventually = caddytest.Must, caddytest.Eventually

func want[T comparable](what string, got, want T) error { return caddytest.Want(what, got, want) }
