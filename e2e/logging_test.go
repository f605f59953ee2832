package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// storeLine is a line that a Redis store has logged.
type storeLine struct {
	Level, Logger, Msg, Store, Shard, Address, Purpose, Error string
}

// storeLines returns those logged so far, but none about a clock: all servers have this machine's,
// which seems to differ where a process stalls while it reads it.
func storeLines(c *caddytest.Caddy) (lines []storeLine) {
	for text := range strings.Lines(c.Logs.String()) {
		var line storeLine
		if json.Unmarshal([]byte(text), &line) == nil && line.Logger == "rate_limit.stores.redis" {
			lines = append(lines, line)
		}
	}
	return lines
}

// awaitLine waits for a line with this level, whose message begins with message and whose error
// contains words.
func awaitLine(c *caddytest.Caddy, level, message, words string) (line storeLine) {
	c.T.Helper()
	eventually(c.T, "the log says "+message+", "+words, func() error {
		lines := storeLines(c)
		for _, line = range lines {
			if line.Level == level && strings.HasPrefix(line.Msg, message) && strings.Contains(line.Error, words) {
				return nil
			}
		}
		return fmt.Errorf("it says %+v", lines)
	})
	return line
}

// countLines returns how many messages begin with message.
func countLines(c *caddytest.Caddy, message string) (n int) {
	for _, line := range storeLines(c) {
		if strings.HasPrefix(line.Msg, message) {
			n++
		}
	}
	return n
}

// clockDiffers is in the warning about a server whose answer a busy machine took seconds to read.
const clockDiffers = "its clock differs"

// mustBeQuiet fails the test if a healthy store has logged more than a busy machine may cause.
func mustBeQuiet(c *caddytest.Caddy) {
	c.T.Helper()
	for _, line := range storeLines(c) {
		if line.Msg != "servers cannot be found" && line.Msg != "servers are found again" && !strings.Contains(line.Error, clockDiffers) {
			c.T.Errorf("a healthy store says %+v", line)
		}
	}
}

// mustHide fails the test if a secret is in the log or in an answer of the admin endpoint.
func mustHide(c *caddytest.Caddy, secrets ...string) {
	c.T.Helper()
	texts := map[string]string{"log": c.Logs.String()}
	for _, path := range []string{"/config/", "/metrics", "/debug/pprof/goroutine?debug=2", "/debug/vars"} {
		_, texts[path] = c.AdminCall(http.MethodGet, path, "", "")
	}
	for name, text := range texts {
		for _, secret := range secrets {
			if strings.Contains(text, secret) {
				c.T.Errorf("%s has the secret %s", name, secret)
			}
		}
	}
}

// TestMisconfiguredServersAreLogged with advice.
func TestMisconfiguredServersAreLogged(t *testing.T) {
	t.Parallel()
	shards := caddytest.StartShards(t, 2, 1)
	evicting := redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	double := redistest.StartProxy(t, shards[1].Primary.Addr())
	stray := shards[0].Replicas[0]
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardWith("evicting", "primary "+evicting.Addr()),
		caddytest.ShardWith("demoted", "primary "+stray.Addr()),
		caddytest.ShardOf("one", shards[1]), caddytest.ShardWith("other", "primary "+double.Addr()),
		"max_replica_lag 1h",
	), 3, "1h"))

	line := awaitLine(c, "warn", "server is misconfigured", "maxmemory-policy is allkeys-lru, which lets it forget counts: set it to noeviction")
	must(t, "line", want("it", line, storeLine{
		Level: "warn", Logger: "rate_limit.stores.redis", Msg: "server is misconfigured",
		Store: "default", Shard: "evicting", Address: evicting.Addr(), Error: line.Error,
	}))
	line = awaitLine(c, "warn", "server is misconfigured", "it is given as a primary and is a replica of 127.0.0.1:")
	must(t, "line", want("its shard", line.Shard, "demoted"))
	const twins = "two shards are the same server: give each its own, or remove one of the shards"
	line = awaitLine(c, "error", twins, "")
	must(t, "line", want("one of the addresses", line.Address, shards[1].Primary.Addr()))
	lines := slices.DeleteFunc(storeLines(c), func(line storeLine) bool { return strings.Contains(line.Error, clockDiffers) })
	must(t, "log", want("lines", len(lines), 3))

	// The next config logs the faults that remain, and keeps its connections.
	c.MustLoad(apiSite(caddytest.RedisStore(
		caddytest.ShardOf("one", shards[1]), caddytest.ShardWith("other", "primary "+double.Addr()),
		"max_replica_lag 1h",
	), 3, "1h"))
	must(t, "log", want("lines about twins", countLines(c, twins), 2))
}

// TestUnreachableServerIsLogged once, and its return as well.
func TestUnreachableServerIsLogged(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	replica := servers[0].Replicas[0]
	c := caddytest.Start(t, apiSite(servers.Store("pool_size 1", "max_replica_lag 1s"), 1_000_000, "1h"))
	// Checks of new clients go to the replica.
	stop := caddytest.StartTraffic(t, 2, func(worker, i int) error {
		a, err := c.TryAsk("/", fmt.Sprintf("X-Key: client-%d-%d", worker, i))
		time.Sleep(10 * time.Millisecond) // the replica has to be asked now and then, not often
		if err == nil && (a.Status != http.StatusOK || !a.IsLimited()) {
			err = fmt.Errorf("status %d, headers %v", a.Status, a.Header)
		}
		return err
	})
	must(t, "pause replication", replica.PauseReplication())
	line := awaitLine(c, "warn", "replica lags and is left out", "behind its primary")
	must(t, "line", want("its address", line.Address, replica.Addr()))
	must(t, "resume replication", replica.ResumeReplication())
	awaitLine(c, "info", "replica has caught up", "")
	must(t, "kill the replica", replica.Kill())
	line = awaitLine(c, "warn", "server is left out", "")
	must(t, "line", want("it", line, storeLine{
		Level: "warn", Logger: "rate_limit.stores.redis", Msg: "server is left out",
		Store: "default", Shard: "a", Address: replica.Addr(), Purpose: "checks", Error: line.Error,
	}))
	must(t, "restart the replica", replica.Restart())
	awaitLine(c, "info", "server is back", "")
	stop()
	must(t, "log", want("lines about an unreachable server", countLines(c, "server is left out"), 1))
}
