package service_test

import (
	"flag"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"

	_ "github.com/shardlimit/caddy-shardlimit/service" // what cmd/caddy has
)

// TestMain runs three tests at a time: more Caddys beside one another cost each of them more.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "3"); err != nil {
		panic(err)
	}
	caddytest.Main(m)
}
