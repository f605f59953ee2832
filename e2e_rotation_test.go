package shardlimit_test

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestPasswordIsRotated on the servers and in its file: counting goes on without
// a reload, and while the file is away on_error applies.
func TestPasswordIsRotated(t *testing.T) {
	t.Parallel()
	const first, second = "marker-of-a-secret-1", "marker-of-a-secret-2"
	servers := caddytest.StartShards(t, 1, 1)
	nodes := append(servers.Replicas(), servers[0].Primary)
	setUser := func(password string) {
		t.Helper()
		for _, node := range nodes {
			must(t, "set user", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "reset", "on", ">"+password, "~rl:*", "+@all").Err())
		}
	}
	file := writeFile(t, first+"\n")
	write := func(password string) {
		t.Helper()
		must(t, "write the password", os.WriteFile(file, []byte(password+"\n"), 0o600))
	}
	kill := func() {
		t.Helper()
		for _, node := range nodes {
			n, err := node.Client().Do(t.Context(), "CLIENT", "KILL", "USER", "limiter").Int()
			must(t, "end connections", err)
			if n == 0 {
				t.Errorf("%s had no connections of the user", node.Addr())
			}
		}
	}
	setUser(first)
	c := caddytest.Start(t, apiSite(servers.Store("username limiter", "password {file."+file+"}", "pool_size 1", "on_error deny"), 1_000_000, "1h"))
	awaitStatus(c, http.StatusOK)

	setUser(second)
	write(second)
	kill()
	awaitStatus(c, http.StatusOK)
	used := int64(0)
	for range 5 {
		used++
		must(t, "with the new password", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used))
		servers.AwaitCount(t, "api", "alice", used)
	}

	must(t, "remove the password", os.Remove(file))
	kill()
	awaitLeftOut(c, "password: placeholder {file."+file+"} is empty")
	write(second)
	awaitStatus(c, http.StatusOK)

	// What is not rotated on both sides is told.
	setUser(first)
	kill()
	awaitLeftOut(c, "WRONGPASS")
	write(first)
	awaitStatus(c, http.StatusOK)
	mustHide(c, first, second)
	must(t, "log", want("having the file's name", strings.Contains(c.Logs.String(), file), true))
}
