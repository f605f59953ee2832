// Package e2e has the black-box tests of Caddy with this module: what clients, operators and Redis
// see of it. Each file is about one concern. Each Caddy is a process that internal/caddytest starts
// from the test binary, and the Redis servers are real.
package e2e

import (
	"testing"

	_ "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	_ "github.com/shardlimit/caddy-shardlimit/service" // which configs of tests have as well
)

func TestMain(m *testing.M) { caddytest.Main(m) }

// These names are short, as nearly every line of a test has one.
var must, eventually = caddytest.Must, caddytest.Eventually

func want[T comparable](what string, got, want T) error { return caddytest.Want(what, got, want) }
