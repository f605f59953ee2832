// Package examples tests the configs that are shipped: the examples, those in documents, and those of contrib.
package examples

import (
	"flag"
	"testing"

	_ "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	_ "github.com/shardlimit/caddy-shardlimit/internal/caddytest/plugins" // which documents have configs with
)

// TestMain runs the tests at the root of the repository, so that they name files as the documents do.
// Unless they go through all configs, two run at a time: twelve Caddys beside one another cost twice as much.
func TestMain(m *testing.M) {
	if !sweepsAll {
		if err := flag.Set("test.parallel", "2"); err != nil {
			panic(err)
		}
	}
	caddytest.MainIn("..", m)
}

// These names are short, as nearly every line of a test has one.
var must, eventually, adapt = caddytest.Must, caddytest.Eventually, caddytest.Adapt

func want[T comparable](what string, got, want T) error { return caddytest.Want(what, got, want) }
