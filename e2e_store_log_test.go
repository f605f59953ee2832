package shardlimit_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// storeLine is a line that a Redis store has logged.
type storeLine struct {
	Level, Logger, Msg, Store, Shard, Address, Role, Error string
}

// storeLines are those logged so far.
func storeLines(c *caddytest.Caddy) (lines []storeLine) {
	for text := range strings.Lines(c.Logs.String()) {
		var line storeLine
		if json.Unmarshal([]byte(text), &line) == nil && line.Logger == "rate_limit.stores.redis" {
			lines = append(lines, line)
		}
	}
	return lines
}

// awaitLine waits for a line that begins like this, and whose error contains
// words.
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

// countLines is how many lines begin like this.
func countLines(c *caddytest.Caddy, message string) (n int) {
	for _, line := range storeLines(c) {
		if strings.HasPrefix(line.Msg, message) {
			n++
		}
	}
	return n
}

// mustHide fails the test if a secret is in the log, or in what the admin
// endpoint tells.
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

// TestMisconfiguredServersAreLogged with what to do.
func TestMisconfiguredServersAreLogged(t *testing.T) {
	t.Parallel()
	shards := caddytest.StartShards(t, 2, 1)
	evicting := redistest.Start(t, "--maxmemory-policy", "allkeys-lru")
	double := redistest.StartProxy(t, shards[1].Primary.Addr())
	stray := shards[0].Replicas[0]
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardWith("evicting", "primary "+evicting.Addr()),
		caddytest.ShardWith("demoted", "primary "+stray.Addr()),
		caddytest.ShardWith("one", "primary "+shards[1].Primary.Addr(), "replica "+shards[1].Replicas[0].Addr()),
		caddytest.ShardWith("other", "primary "+double.Addr()),
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
	must(t, "log", want("lines", len(storeLines(c)), 3))

	// The next config is told of what is wrong still, and loses no connection.
	c.MustLoad(apiSite(caddytest.RedisStore(
		caddytest.ShardWith("one", "primary "+shards[1].Primary.Addr(), "replica "+shards[1].Replicas[0].Addr()),
		caddytest.ShardWith("other", "primary "+double.Addr()),
	), 3, "1h"))
	must(t, "log", want("lines about twins", countLines(c, twins), 2))
}

// TestServerThatIsAwayIsLogged, once, and that it is back.
func TestServerThatIsAwayIsLogged(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	replica := servers[0].Replicas[0]
	c := caddytest.Start(t, apiSite(servers.Store("pool_size 1", "max_replica_lag 1s"), 1_000_000, "1h"))
	// The replica is asked about clients that are new.
	stop := caddytest.StartTraffic(t, 2, func(worker, i int) error {
		a, err := c.TryAsk("/", fmt.Sprintf("X-Key: client-%d-%d", worker, i))
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
		Store: "default", Shard: "a", Address: replica.Addr(), Role: "checks", Error: line.Error,
	}))
	must(t, "restart the replica", replica.Restart())
	awaitLine(c, "info", "server is back", "")
	stop()
	must(t, "log", want("lines about a server that is away", countLines(c, "server is left out"), 1))
}
