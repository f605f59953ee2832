package shardlimit_test

import (
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestCommandsNeedNoRedis checks a config while nothing listens at one of its
// addresses, and while at another something does that counts its visitors.
func TestCommandsNeedNoRedis(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var visitors atomic.Int64
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			visitors.Add(1)
			_ = conn.Close()
		}
	}()
	dir := t.TempDir()
	file := dir + "/Caddyfile"
	text := fmt.Sprintf(`{
	admin off
	rate_limit {
		store redis {
			shard a {
				primary %s
				replica %s
			}
			shard b {
				primary %s
				replica redis.invalid:6379
			}
		}
	}
}
http://localhost:8080 {
	rate_limit {header.X-Key} 10 1m api
	respond ok
}
`, caddytest.FreeAddr(t), caddytest.FreeAddr(t), listener.Addr())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for command, expected := range map[string]string{
		"validate": "Valid configuration",
		"adapt":    `"module":"redis"`,
	} {
		output, err := caddytest.Command(dir, command, "--config", file, "--adapter", "caddyfile").CombinedOutput()
		if err != nil || !strings.Contains(string(output), expected) {
			t.Errorf("caddy %s: %v, output without %s:\n%s", command, err, expected, output)
		}
	}
	must(t, "validate and adapt", want("number of connections to Redis", visitors.Load(), 0))
}

// TestModulesAreListed by the command that operators look at first.
func TestModulesAreListed(t *testing.T) {
	output, err := caddytest.Command(t.TempDir(), "list-modules").CombinedOutput()
	must(t, "list-modules", err)
	for _, module := range []string{
		"rate_limit", "http.handlers.rate_limit", "admin.api.rate_limit", "rate_limit.stores.memory", "rate_limit.stores.redis",
	} {
		must(t, "list-modules", want(module+" listed", strings.Contains("\n"+string(output), "\n"+module+"\n"), true))
	}
}
