package shardlimit_test

import (
	"os"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// asCaddy, set in the environment, makes the test binary be Caddy, so that
// tests run it as processes of their own, race detector included.
const asCaddy = "SHARDLIMIT_TEST_AS_CADDY"

func TestMain(m *testing.M) {
	if os.Getenv(asCaddy) != "" {
		caddycmd.Main()
		return
	}
	os.Exit(redistest.RunTests(m))
}
