package redistest_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestStart(t *testing.T) {
	s := redistest.Start(t, "--maxmemory-policy", "allkeys-lfu")

	if got, err := s.Client().Ping(t.Context()).Result(); got != "PONG" || err != nil {
		t.Errorf("ping got %q, %v", got, err)
	}
	info, err := s.Info("memory")
	if err != nil {
		t.Fatal(err)
	}
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
	tb := &failingTB{TB: t}
	func() {
		defer func() { _ = recover() }()
		redistest.Start(tb)
	}()
	if want := "apt-get install redis-server"; !strings.Contains(tb.message, want) {
		t.Errorf("test failed with %q, want it to contain %q", tb.message, want)
	}
}

func TestCPU(t *testing.T) {
	s := redistest.Start(t)
	before, err := s.CPU()
	if err != nil {
		t.Fatal(err)
	}
	const busy = "local n = 0; for i = 1, 1e6 do n = n + i end; return n"
	for deadline := time.Now().Add(waitLimit); ; {
		if err := s.Client().Eval(t.Context(), busy, nil).Err(); err != nil {
			t.Fatal(err)
		}
		after, err := s.CPU()
		if err != nil {
			t.Fatal(err)
		}
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
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := s.Client().Ping(ctx).Err(); !isTimeout(err) {
		t.Errorf("ping of a paused server got %v, want a timeout", err)
	}
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := s.Client().Ping(t.Context()).Err(); err != nil {
		t.Errorf("ping after resuming: %v", err)
	}
}

func TestKillAndRestart(t *testing.T) {
	s := redistest.Start(t)
	addr := s.Addr()
	set(t, s, "key", "value")
	for range 2 {
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Client().Ping(t.Context()).Err(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("ping of a killed server got %v, want connection refused", err)
	}
	if err := s.Pause(); err == nil {
		t.Error("pausing a killed server worked")
	}
	// Once from the killed and once from the running state.
	for range 2 {
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		if s.Addr() != addr {
			t.Errorf("address %s after restart, want %s", s.Addr(), addr)
		}
		requireValue(t, s, "key", "")
		set(t, s, "key", "value")
	}
}

func TestKillAndRestartPaused(t *testing.T) {
	s := redistest.Start(t)
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	requireValue(t, s, "key", "")
}

func TestRestartKeepsPersistedData(t *testing.T) {
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	set(t, s, "key", "value")
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	requireValue(t, s, "key", "value")
}

func TestStoppedServer(t *testing.T) {
	s := redistest.Start(t)
	for range 2 {
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
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
	if err := s.Client().Set(t.Context(), key, value, 0).Err(); err != nil {
		t.Fatal(err)
	}
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
	for deadline := time.Now().Add(waitLimit); ; time.Sleep(time.Millisecond) {
		got := value(t, s, key)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s still has %s = %q, want %q", s.Addr(), key, got, want)
		}
	}
}

func value(t *testing.T, s *redistest.Server, key string) string {
	t.Helper()
	got, err := s.Client().Get(t.Context(), key).Result()
	if err != nil && !errors.Is(err, goredis.Nil) {
		t.Fatal(err)
	}
	return got
}
