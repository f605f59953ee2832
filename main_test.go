package shardlimit_test

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func TestMain(m *testing.M) { caddytest.Main(m) }

// These names are short, as nearly every line of a test has one.
var must, adapt = caddytest.Must, caddytest.Adapt

func want[T comparable](what string, got, want T) error { return caddytest.Want(what, got, want) }
