package service_test

import (
	"flag"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"

	_ "github.com/shardlimit/caddy-shardlimit/service" // what cmd/caddy has
)

// TestMain runs three tests at a time. With more, each Caddy uses more CPU time.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "3"); err != nil {
		panic(err)
	}
	caddytest.Main(m)
}
