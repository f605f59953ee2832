package shardlimit_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const masterName = "limits"

func sentinelLine(sentinels *redistest.Sentinels) string {
	return "sentinel " + masterName + " " + strings.Join(sentinels.Addrs(), " ")
}

// countsOn are the counts of a zone by client on servers that share no bucket.
func countsOn(t *testing.T, zone string, servers ...*redistest.Server) map[string]int64 {
	t.Helper()
	counts := map[string]int64{}
	for _, server := range servers {
		for client, b := range caddytest.Find(t, server, zone) {
			counts[strings.TrimSuffix(client, "}")] += b.Count
		}
	}
	return counts
}

// TestShardsOfEveryKind: clients are counted on all of them, and limits hold.
func TestShardsOfEveryKind(t *testing.T) {
	t.Parallel()
	const (
		password, sentinelPassword = "data-secret", "sentinel-secret"
		events, clients            = 3, 30
	)
	var static, watched *redistest.Shard
	var sentinels *redistest.Sentinels
	var cluster *redistest.Cluster
	caddytest.Together(t, 3, func(i int) (err error) {
		switch i {
		case 0:
			static, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShard(1, "--unixsocket", "redis.sock"))
		case 1:
			watched, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShard(1, "--requirepass", password))
			if err == nil {
				sentinels, err = started(t, (*redistest.Sentinels).Stop)(redistest.LaunchSentinels(
					masterName, watched.Primary, 1, redistest.SentinelOptions{Password: sentinelPassword}))
			}
		case 2:
			cluster, err = started(t, (*redistest.Cluster).Stop)(redistest.LaunchCluster(3, 0))
		}
		return err
	})

	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		"password {file."+writeFile(t, password)+"}",
		caddytest.ShardWith("static", "primary unix/"+static.Primary.SocketPath(), "replica "+static.Replicas[0].Addr()),
		caddytest.ShardWith("watched", sentinelLine(sentinels)),
		caddytest.ShardWith("cluster", "cluster "+strings.Join(cluster.Addrs()[:2], " ")),
		"sentinel_password {file."+writeFile(t, sentinelPassword+"\n")+"}",
	), events, "1h"))
	for i := range clients {
		key := fmt.Sprintf("client-%d", i)
		for used := int64(1); used <= events; used++ {
			must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, used))
		}
		must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, events))
	}
	eventually(t, "all clients are counted", func() error {
		seen := 0
		for name, servers := range map[string][]*redistest.Server{
			"static": {static.Primary}, "watched": {watched.Primary}, "cluster": cluster.Nodes,
		} {
			counts := countsOn(t, "api", servers...)
			if len(counts) < clients/10 {
				return fmt.Errorf("shard %s has %d of %d clients", name, len(counts), clients)
			}
			for client, n := range counts {
				if n != events {
					return fmt.Errorf("%s is counted %d times on shard %s", client, n, name)
				}
			}
			seen += len(counts)
		}
		return want("clients", seen, clients)
	})
	for _, line := range storeLines(c) {
		// On a machine that stands still for a second nobody finds anybody.
		if words := line.Msg; words != "servers cannot be found" && words != "servers are found again" {
			t.Errorf("a healthy store says %+v", line)
		}
	}
	mustHide(c, password, sentinelPassword)
}

// started registers that what was launched is stopped when the test ends.
func started[T any](t *testing.T, stop func(T) error) func(launched T, err error) (T, error) {
	return func(launched T, err error) (T, error) {
		if err == nil {
			t.Cleanup(func() {
				if err := stop(launched); err != nil {
					t.Error(err)
				}
			})
		}
		return launched, err
	}
}

// writeFile returns the path of a new file.
func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	must(t, "write a file", os.WriteFile(path, []byte(text), 0o600))
	return path
}
