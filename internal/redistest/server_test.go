//go:build check

package redistest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// must is short, as nearly every line of a test has one.
var must = redistest.Must

func TestStart(t *testing.T) {
	s := redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lfu"))

	if got, err := s.Client().Ping(t.Context()).Result(); got != "PONG" || err != nil {
		t.Errorf("ping got %q, %v", got, err)
	}
	info, err := s.Info("memory")
	must(t, err)
	if got, want := info["maxmemory_policy"], "allkeys-lfu"; got != want {
		t.Errorf("maxmemory_policy %q, want the %q of the arguments", got, want)
	}
	if _, ok := info["role"]; ok {
		t.Error("section memory has a field of section replication")
	}
	if host, _, err := net.SplitHostPort(s.Addr()); host != "127.0.0.1" || err != nil {
		t.Errorf("address %s: host %q, %v; want 127.0.0.1", s.Addr(), host, err)
	}
}

func TestServersAreSeparate(t *testing.T) {
	a, b := redistest.Start(t), redistest.Start(t)
	set(t, a, "key", "a")
	set(t, b, "key", "b")
	requireValue(t, a, "key", "a")
	requireValue(t, b, "key", "b")
}

// failingTB notes what a helper would fail a test with.
type failingTB struct {
	testing.TB
	message string
}

func (tb *failingTB) Helper() {}

func (tb *failingTB) Fatal(args ...any) {
	tb.message = args[0].(error).Error()
	panic(tb)
}

func TestStartFailsWithoutRedis(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("REDISTEST_SERVER", "")
	tb := &failingTB{TB: t}
	func() {
		defer func() { _ = recover() }()
		// No test that has ended leaves a server with this argument.
		redistest.Start(tb, redistest.Args("--maxclients", "1234"))
	}()
	if want := "apt-get install redis-server"; !strings.Contains(tb.message, want) {
		t.Errorf("test failed with %q, want it to contain %q", tb.message, want)
	}
}

func TestCPU(t *testing.T) {
	s := redistest.Start(t)
	before, err := s.CPU()
	must(t, err)
	const busy = "local n = 0; for i = 1, 1e6 do n = n + i end; return n"
	for deadline := time.Now().Add(waitLimit); ; {
		must(t, s.Client().Eval(t.Context(), busy, nil).Err())
		after, err := s.CPU()
		must(t, err)
		if after-before >= 20*time.Millisecond {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a busy server went from %v to %v", before, after)
		}
	}
}

func TestPauseAndResume(t *testing.T) {
	s := redistest.Start(t)
	must(t, s.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := s.Client().Ping(ctx).Err(); !isTimeout(err) {
		t.Errorf("ping of a paused server got %v, want a timeout", err)
	}
	must(t, s.Resume())
	if err := s.Client().Ping(t.Context()).Err(); err != nil {
		t.Errorf("ping after resuming: %v", err)
	}
}

func TestKillAndRestart(t *testing.T) {
	s := redistest.Start(t)
	addr := s.Addr()
	set(t, s, "key", "value")
	for range 2 {
		must(t, s.Kill())
	}
	if err := s.Client().Ping(t.Context()).Err(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("ping of a killed server got %v, want connection refused", err)
	}
	if err := s.Pause(); err == nil {
		t.Error("pausing a killed server worked")
	}
	// Once from the killed and once from the running state.
	for range 2 {
		must(t, s.Restart())
		if s.Addr() != addr {
			t.Errorf("address %s after restart, want %s", s.Addr(), addr)
		}
		requireValue(t, s, "key", "")
		set(t, s, "key", "value")
	}
}

func TestKillAndRestartPaused(t *testing.T) {
	s := redistest.Start(t)
	must(t, s.Pause())
	must(t, s.Restart())
	requireValue(t, s, "key", "")
}

func TestRestartKeepsPersistedData(t *testing.T) {
	s := redistest.Start(t, redistest.Args("--appendonly", "yes", "--appendfsync", "always"))
	set(t, s, "key", "value")
	must(t, s.Restart())
	requireValue(t, s, "key", "value")
}

func TestStoppedServer(t *testing.T) {
	s := redistest.Start(t)
	for range 2 {
		must(t, s.Stop())
	}
	for name, operation := range map[string]func() error{
		"Pause":   s.Pause,
		"Resume":  s.Resume,
		"Kill":    s.Kill,
		"Restart": s.Restart,
		"Ping":    func() error { return s.Client().Ping(t.Context()).Err() },
	} {
		if err := operation(); err == nil {
			t.Errorf("%s of a stopped server worked", name)
		}
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func set(t *testing.T, s *redistest.Server, key, value string) {
	t.Helper()
	must(t, s.Client().Set(t.Context(), key, value, 0).Err())
}

// requireValue checks a key's value; an empty one means that there is no key.
func requireValue(t *testing.T, s *redistest.Server, key, want string) {
	t.Helper()
	if got := value(t, s, key); got != want {
		t.Errorf("%s has %s = %q, want %q", s.Addr(), key, got, want)
	}
}

// waitForValue waits until a key has a value.
func waitForValue(t *testing.T, s *redistest.Server, key, want string) {
	t.Helper()
	redistest.Eventually(t, "the key has the value", func() error {
		if got := value(t, s, key); got != want {
			return fmt.Errorf("%s still has %s = %q, want %q", s.Addr(), key, got, want)
		}
		return nil
	})
}

func value(t *testing.T, s *redistest.Server, key string) string {
	t.Helper()
	got, err := s.Client().Get(t.Context(), key).Result()
	if err != nil && !errors.Is(err, goredis.Nil) {
		t.Fatal(err)
	}
	return got
}

func TestRequiredPassword(t *testing.T) {
	shard := redistest.StartShard(t, 1, redistest.Args("--requirepass", "a secret"))
	requireAccess(t, shard.Primary, "", "", "NOAUTH")
	requireAccess(t, shard.Primary, "", "wrong", "WRONGPASS")
	requireAccess(t, shard.Primary, "", "a secret", "")
	set(t, shard.Primary, "key", "value")
	must(t, shard.Replicas[0].WaitInSync(t.Context()))
	requireValue(t, shard.Replicas[0], "key", "value")

	open := redistest.Start(t, redistest.ReplicaOf(shard.Primary))
	requireAccess(t, open, "", "", "")
	requireValue(t, open, "key", "value")
}

func TestUserFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.acl")
	const users = "user default off\n" +
		"user keeper on >secret ~* &* +@all\n" +
		"user reader on >password ~public:* +get +hello\n"
	must(t, os.WriteFile(file, []byte(users), 0o600))
	shard := redistest.StartShard(t, 1, redistest.Args("--aclfile", file), redistest.Login("keeper", "secret"))
	requireAccess(t, shard.Primary, "", "", "NOAUTH")
	requireAccess(t, shard.Primary, "keeper", "wrong", "WRONGPASS")
	set(t, shard.Primary, "public:key", "value")
	must(t, shard.Replicas[0].WaitInSync(t.Context()))

	reader := newClient(t, shard.Replicas[0], "reader", "password")
	if got, err := reader.Get(t.Context(), "public:key").Result(); got != "value" || err != nil {
		t.Errorf("got %q, %v; want what the user may read", got, err)
	}
	if err := reader.Get(t.Context(), "key").Err(); err == nil || !strings.HasPrefix(err.Error(), "NOPERM") {
		t.Errorf("got error %v for another key, want NOPERM", err)
	}
	must(t, shard.Replicas[0].Restart())
	must(t, shard.Replicas[0].WaitInSync(t.Context()))
	requireValue(t, shard.Replicas[0], "public:key", "value")
}

func TestUserFileWithSentinelsAndCluster(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "users.acl")
	const users = "user default off\nuser keeper on >secret ~* &* +@all\n"
	must(t, os.WriteFile(file, []byte(users), 0o600))
	opts := []redistest.Option{redistest.Args("--aclfile", file), redistest.Login("keeper", "secret")}
	t.Run("sentinels", func(t *testing.T) {
		t.Parallel()
		shard := redistest.StartShard(t, 1, opts...)
		sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 1, patient)
		must(t, sentinels.Failover(t.Context()))
		waitForMaster(t, sentinels, shard.Primary.Addr())
		must(t, sentinels.WaitForReplicas(t.Context(), 1))
		// It restarts with what the sentinel made it write.
		must(t, shard.Primary.Restart())
		requireReplica(t, shard.Primary)
		must(t, shard.Primary.WaitInSyncWith(t.Context(), shard.Replicas[0]))
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		cluster := redistest.StartCluster(t, 2, 1, append(opts, redistest.NodeTimeout(waitLimit))...)
		from := masterOf(t, cluster, "key")
		to := otherMaster(cluster, from)
		set(t, from, "key", "value")
		must(t, cluster.MigrateSlot(t.Context(), redistest.Keyslot("key"), from, to))
		requireValue(t, to, "key", "value")
	})
}

func TestUnixSocket(t *testing.T) {
	if path := redistest.Start(t).SocketPath(); path != "" {
		t.Errorf("a server without a socket has it at %s", path)
	}
	absolute := filepath.Join(t.TempDir(), "redis.sock")
	for _, name := range []string{"redis.sock", absolute} {
		s := redistest.Start(t, redistest.Args("--unixsocket", name, "--requirepass", "secret"))
		if path := s.SocketPath(); !filepath.IsAbs(path) || name == absolute && path != absolute {
			t.Errorf("socket %s for %s", path, name)
		}
		for range 2 {
			client := goredis.NewClient(&goredis.Options{Network: "unix", Addr: s.SocketPath(), Password: "secret"})
			if err := client.Ping(t.Context()).Err(); err != nil {
				t.Errorf("ping through %s: %v", s.SocketPath(), err)
			}
			client.Close()
			must(t, s.Restart())
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

// deadline is a context that ends after d.
func deadline(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// newClient makes a client of a server that is not the server's own.
func newClient(t *testing.T, s *redistest.Server, username, password string) *goredis.Client {
	t.Helper()
	client := goredis.NewClient(&goredis.Options{
		Addr: s.Addr(), Username: username, Password: password, MaxRetries: -1,
		DialTimeout: waitLimit, ReadTimeout: waitLimit, WriteTimeout: waitLimit,
	})
	t.Cleanup(func() { client.Close() })
	return client
}
