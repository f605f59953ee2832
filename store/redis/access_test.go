package redis

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestDocumentedACLSuffices gives a user just the rule that the documentation
// names, and no other.
func TestDocumentedACLSuffices(t *testing.T) {
	text, err := os.ReadFile("../../docs/redis.md")
	must(t, err)
	rule := regexp.MustCompile("ACL SETUSER limiter on >secret (~rl:.*)").FindSubmatch(text)
	if rule == nil {
		t.Fatal("docs/redis.md names no ACL rule")
	}
	sh := redistest.StartShard(t, 1)
	for _, server := range append(sh.Replicas, sh.Primary) {
		args := []any{"ACL", "SETUSER", "limiter", "reset", "on", ">secret"}
		for _, word := range strings.Fields(string(rule[1])) {
			args = append(args, word)
		}
		must(t, server.Client().Do(t.Context(), args...).Err())
	}
	s := newStore(t, newShard(t, ShardOptions{
		Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()},
		Credentials: login("limiter", "secret"),
	}), nil)
	s.Warm(t.Context())
	for i := range 10 {
		if st := s.Charge(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != int64(i+1) {
			t.Fatalf("charge %d: %+v", i, st)
		}
		if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil {
			t.Fatalf("check %d: %v", i, st.Err)
		}
	}
	if st := s.Check(t.Context(), ask("other"))[0]; st.Err != nil {
		t.Fatalf("opening a window: %v", st.Err)
	}
}

func TestUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "redis.sock")
	redistest.Start(t, redistest.Args("--unixsocket", path))
	s := newStore(t, newShard(t, ShardOptions{Primary: "unix/" + path}), nil)
	if st := s.Charge(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != 1 {
		t.Fatalf("charge: %+v", st)
	}
}

func TestDatabase(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), DB: 3}), nil)
	if st := s.Charge(t.Context(), ask("k"))[0]; st.Err != nil {
		t.Fatal(st.Err)
	}
	info, err := server.Info("keyspace")
	must(t, err)
	if !strings.HasPrefix(info["db3"], "keys=1,") || info["db0"] != "" {
		t.Errorf("keys are in %v", info)
	}
}
