package redisstore

import (
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestStoreThatLacksSomething is valid, logs in nowhere, and shares no connection with one that lacks nothing.
func TestStoreThatLacksSomething(t *testing.T) {
	whole := &Store{Shards: []*Shard{{Name: "a", Primary: "localhost"}}, KeySecret: strings.Repeat("x", 32)}
	lacks := &Store{Shards: []*Shard{{Name: "a", Primary: "localhost"}}, KeySecret: "{env.SHARDLIMIT_TEST_UNSET}"}
	keys := make([]shardKey, 0, 2)
	for _, s := range []*Store{whole, lacks} {
		l := &loader{repl: caddy.NewReplacer()}
		redistest.Must(t, s.provision(l))
		s.missing = l.missing
		redistest.Must(t, s.Validate())
		key, err := s.reach(s.Shards[0]).key()
		redistest.Must(t, err)
		keys = append(keys, key)
	}
	if err := whole.Missing(); err != nil || whole.reach(whole.Shards[0]).options(nil).Credentials != nil {
		t.Errorf("a whole store lacks %v", err)
	}
	const want = "key_secret: placeholder {env.SHARDLIMIT_TEST_UNSET} is empty"
	if err := lacks.Missing(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("it lacks %v", err)
	}
	if _, _, err := lacks.reach(lacks.Shards[0]).options(nil).Credentials(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("it logs in: %v", err)
	}
	if len(slices.Compact(keys)) != 2 {
		t.Error("both share connections")
	}
}
