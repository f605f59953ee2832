package redistest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestRequiredPassword(t *testing.T) {
	shard := redistest.StartShard(t, 1, "--requirepass", "a secret")
	requireAccess(t, shard.Primary, "", "", "NOAUTH")
	requireAccess(t, shard.Primary, "", "wrong", "WRONGPASS")
	requireAccess(t, shard.Primary, "", "a secret", "")
	set(t, shard.Primary, "key", "value")
	waitInSync(t, shard.Replicas[0])
	requireValue(t, shard.Replicas[0], "key", "value")

	open := shard.Primary.StartReplica(t)
	requireAccess(t, open, "", "", "")
	requireValue(t, open, "key", "value")
}

func TestUserFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.acl")
	const users = "user default off\n" +
		"user keeper on >secret ~* &* +@all\n" +
		"user reader on >password ~public:* +get +hello\n"
	if err := os.WriteFile(file, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	shard := redistest.StartShardWith(t, 1, redistest.Options{
		Args: []string{"--aclfile", file}, Username: "keeper", Password: "secret",
	})
	requireAccess(t, shard.Primary, "", "", "NOAUTH")
	requireAccess(t, shard.Primary, "keeper", "wrong", "WRONGPASS")
	set(t, shard.Primary, "public:key", "value")
	waitInSync(t, shard.Replicas[0])

	reader := newClient(t, shard.Replicas[0], "reader", "password")
	if got, err := reader.Get(t.Context(), "public:key").Result(); got != "value" || err != nil {
		t.Errorf("got %q, %v; want what the user may read", got, err)
	}
	if err := reader.Get(t.Context(), "key").Err(); err == nil || !strings.HasPrefix(err.Error(), "NOPERM") {
		t.Errorf("got error %v for another key, want NOPERM", err)
	}
	if err := shard.Replicas[0].Restart(); err != nil {
		t.Fatal(err)
	}
	waitInSync(t, shard.Replicas[0])
	requireValue(t, shard.Replicas[0], "public:key", "value")
}

func TestUserFileWithSentinelsAndCluster(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "users.acl")
	const users = "user default off\nuser keeper on >secret ~* &* +@all\n"
	if err := os.WriteFile(file, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	opts := redistest.Options{Args: []string{"--aclfile", file}, Username: "keeper", Password: "secret"}
	t.Run("sentinels", func(t *testing.T) {
		t.Parallel()
		shard := redistest.StartShardWith(t, 1, opts)
		sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 1, redistest.SentinelOptions{})
		if err := sentinels.Failover(t.Context()); err != nil {
			t.Fatal(err)
		}
		waitForMaster(t, sentinels, shard.Primary.Addr())
		waitForReplicas(t, sentinels, 1)
		// It restarts with what the sentinel made it write.
		if err := shard.Primary.Restart(); err != nil {
			t.Fatal(err)
		}
		requireReplica(t, shard.Primary)
		waitInSyncWith(t, shard.Primary, shard.Replicas[0])
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		cluster := redistest.StartClusterWith(t, 2, 1, opts)
		from := masterOf(t, cluster, "key")
		to := cluster.Nodes[0]
		if from == to {
			to = cluster.Nodes[1]
		}
		set(t, from, "key", "value")
		if err := cluster.MigrateSlot(t.Context(), redistest.Keyslot("key"), from, to); err != nil {
			t.Fatal(err)
		}
		requireValue(t, to, "key", "value")
	})
}

func TestUnixSocket(t *testing.T) {
	if path := redistest.Start(t).SocketPath(); path != "" {
		t.Errorf("a server without a socket has it at %s", path)
	}
	absolute := filepath.Join(t.TempDir(), "redis.sock")
	for _, name := range []string{"redis.sock", absolute} {
		s := redistest.Start(t, "--unixsocket", name, "--requirepass", "secret")
		if path := s.SocketPath(); !filepath.IsAbs(path) || name == absolute && path != absolute {
			t.Errorf("socket %s for %s", path, name)
		}
		for range 2 {
			client := goredis.NewClient(&goredis.Options{Network: "unix", Addr: s.SocketPath(), Password: "secret"})
			if err := client.Ping(t.Context()).Err(); err != nil {
				t.Errorf("ping through %s: %v", s.SocketPath(), err)
			}
			client.Close()
			if err := s.Restart(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// requireAccess checks that a ping with that login works, or fails with an
// error of that kind.
func requireAccess(t *testing.T, s *redistest.Server, username, password, want string) {
	t.Helper()
	err := newClient(t, s, username, password).Ping(t.Context()).Err()
	if want == "" && err != nil || want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)) {
		t.Errorf("ping as %q with password %q got %v, want %q", username, password, err, want)
	}
}
