package redisstore

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// keyOf is the key in shardPool of the first shard of a store.
func keyOf(t *testing.T, text string) string {
	t.Helper()
	s := new(Store)
	if err := json.Unmarshal([]byte(text), s); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if err := s.provision(&loader{repl: caddy.NewReplacer()}); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if err := s.Validate(); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	key, err := s.reach(s.Shards[0]).key()
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return string(key)
}

func TestPoolKeysDiffer(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_ONE", "one")
	t.Setenv("SHARDLIMIT_TEST_OTHER", "one")
	t.Setenv("SHARDLIMIT_TEST_HOST", "redis-a")
	seen := map[string]string{}
	for _, text := range []string{
		`{"shards": [{"name": "a", "primary": "redis-a"}]}`,
		`{"shards": [{"name": "a", "primary": "redis-b"}]}`,
		`{"shards": [{"name": "a", "primary": "redis-a:6380"}]}`,
		`{"shards": [{"name": "a", "primary": "unix/redis-a"}]}`,
		`{"shards": [{"name": "a", "primary": "redis-a", "replicas": ["redis-b"]}]}`,
		`{"shards": [{"name": "a", "cluster": ["redis-a"]}]}`,
		`{"shards": [{"name": "a", "cluster": ["redis-a", "redis-b"]}]}`,
		`{"shards": [{"name": "a", "sentinel": {"master": "m", "addrs": ["redis-a:6379"]}}]}`,
		`{"shards": [{"name": "a", "sentinel": {"master": "n", "addrs": ["redis-a:6379"]}}]}`,
		`{"shards": [{"name": "a", "sentinel": {"master": "m", "addrs": ["redis-a"]}}]}`,
		`{"shards": [{"name": "a", "sentinel": {"master": "m", "addrs": ["redis-a"]}}], "sentinel_password": "x"}`,
		`{"shards": [{"name": "a", "sentinel": {"master": "m", "addrs": ["redis-a"]}}], "sentinel_username": "x", "sentinel_password": "x"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password": "x"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password": "y"}`,
		// These placeholders have the same value now, and may not later.
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password": "{env.SHARDLIMIT_TEST_ONE}"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password": "{env.SHARDLIMIT_TEST_OTHER}"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "username": "x", "password": "y"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "db": 1}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password_command": {"command": ["x"]}}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password_command": {"command": ["x", "y"]}}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "password_command": {"command": ["x"], "lifetime": "1m"}}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "pool_size": 1}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "max_replica_lag": "1s"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "pipelining": "off"}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "tls": {}}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "tls": {"server_name": "x"}}`,
		`{"shards": [{"name": "a", "primary": "redis-a"}], "tls": {"insecure_skip_verify": true}}`,
	} {
		key := keyOf(t, text)
		if other, ok := seen[key]; ok {
			t.Errorf("%s shares the connections of %s", text, other)
		}
		seen[key] = text
	}
	for _, pair := range [][2]string{
		{`{"shards": [{"name": "a", "primary": "redis-a"}]}`, `{"shards": [{"name": "b", "weight": 3, "previous_weights": [4], "primary": "{env.SHARDLIMIT_TEST_HOST}:6379"}], "db": 0}`},
		{`{"shards": [{"name": "a", "primary": "redis-a"}]}`, `{"shards": [{"name": "a", "primary": "redis-a"}], "key_prefix": "x", "key_secret": "y", "check_timeout": "1s", "charge_timeout": "1s", "ledger_trust": "2s", "read_from": "primary", "max_buckets": 9, "on_error": "deny"}`},
		{`{"shards": [{"name": "a", "primary": "redis-a", "db": 1, "username": "u", "password": "p", "tls": {}, "pool_size": 2, "max_replica_lag": "1s"}]}`,
			`{"shards": [{"name": "a", "primary": "redis-a"}], "db": 1, "username": "u", "password": "p", "tls": {}, "pool_size": 2, "max_replica_lag": "1s"}`},
		{`{"shards": [{"name": "a", "primary": "redis-a", "password": "p"}]}`, `{"shards": [{"name": "a", "primary": "redis-a", "password": "p"}], "password": "x"}`},
		// Only shards with sentinels use these options.
		{`{"shards": [{"name": "a", "primary": "redis-a"}]}`, `{"shards": [{"name": "a", "primary": "redis-a"}, {"name": "b", "sentinel": {"master": "m", "addrs": ["s"]}}], "sentinel_password": "x"}`},
	} {
		if keyOf(t, pair[0]) != keyOf(t, pair[1]) {
			t.Errorf("%s and %s do not share connections", pair[0], pair[1])
		}
	}
}

// TestCertificatesInTheSameFiles checks that a config that is loaded keeps the connections if only the certificates in its
// files differ, which new ones use anyway, and that the name of another file makes other connections.
func TestCertificatesInTheSameFiles(t *testing.T) {
	ca, other := redistest.StartAuthority(t), redistest.StartAuthority(t)
	client, err := ca.IssueClient("limiter", time.Now().Add(time.Hour))
	redistest.Must(t, err)
	file := filepath.Join(t.TempDir(), "ca.pem")
	key := func(a *redistest.Authority, file string) string {
		text, err := os.ReadFile(a.File())
		redistest.Must(t, err)
		redistest.Must(t, os.WriteFile(file, text, 0o600))
		return keyOf(t, fmt.Sprintf(`{"shards": [{"name": "a", "primary": "redis-a"}], "tls": {"ca": %q, "cert": %q, "key": %q}}`,
			file, client.CertFile(), client.KeyFile()))
	}
	first := key(ca, file)
	redistest.Must(t, client.Renew(time.Now().Add(2*time.Hour)))
	if key(ca, file) != first {
		t.Error("another client certificate makes other connections")
	}
	if key(other, file) != first {
		t.Error("another authority makes other connections")
	}
	if key(other, file+".copy") == first {
		t.Error("another file keeps the connections")
	}
}

// TestPoolKeysHoldNoSecret opens a store and looks at all keys of the pool.
func TestPoolKeysHoldNoSecret(t *testing.T) {
	const marker = "marker"
	s := new(Store)
	redistest.Must(t, json.Unmarshal([]byte(`{"shards": [{"name": "a", "primary": "redis-a"}], "username": "marker-u", "password": "marker-p", "key_secret": "marker-k"}`), s))
	s.logger = caddy.Log()
	if _, err := s.OpenStore("default"); err != nil {
		t.Fatal(err)
	}
	shards := 0
	stores.Pool.Range(func(key, _ any) bool {
		text := fmt.Sprintf("%+v", key)
		if strings.Contains(text, marker) {
			t.Errorf("key %q has a secret", text)
		}
		if _, isShard := key.(shardKey); isShard {
			shards++
			if len(text) != 64 {
				t.Errorf("key %q is no digest", text)
			}
		}
		return true
	})
	s.CloseStore()
	if shards != 1 {
		t.Errorf("%d shards were pooled, want one", shards)
	}
	stores.Pool.Range(func(key, _ any) bool {
		t.Errorf("the pool still holds %T %v", key, key)
		return true
	})
}

// TestTrialsKeepTheBoundsOfSharedShards: before its config runs, a store is as patient as it wants with its own shards
// alone.
func TestTrialsKeepTheBoundsOfSharedShards(t *testing.T) {
	open := func(timeout time.Duration, shards string) (*Store, store.Store) {
		s := new(Store)
		redistest.Must(t, json.Unmarshal([]byte(`{"shards": [`+shards+`]}`), s))
		s.CheckTimeout, s.logger = caddy.Duration(timeout), caddy.Log()
		opened, err := s.OpenStore("default")
		redistest.Must(t, err)
		t.Cleanup(s.CloseStore)
		return s, opened
	}
	const common, own = `{"name": "a", "primary": "redis-a"}`, `{"name": "b", "primary": "redis-b"}`
	bound := func(s *Store, i int) time.Duration {
		pooled, key, _, err := acquireShard(s.reach(s.Shards[i]))
		redistest.Must(t, err)
		defer func() { _, _ = stores.Pool.Delete(key) }()
		return pooled.Options.NodeTimeout()
	}
	running, opened := open(time.Second, common)
	running.RunStore("default", opened)
	trial, opened := open(3*time.Second, common+", "+own)
	if common, own := bound(trial, 0), bound(trial, 1); common != time.Second || own != 3*time.Second {
		t.Errorf("on trial the bounds are %v at the shard in use, and %v at its own one", common, own)
	}
	trial.RunStore("default", opened)
	if got := bound(running, 0); got != 3*time.Second {
		t.Errorf("the bound of the config that runs is %v", got)
	}
}

// TestOverridesOutliveAConfig that leaves them to the next one with the same store, prefix and secret.
func TestOverridesOutliveAConfig(t *testing.T) {
	mine := overridesKey{"default", "rl", ""}
	known, key := acquireOverrides(mine)
	for _, other := range []overridesKey{mine, {"other", "rl", ""}, {"default", "rl2", ""}, {"default", "rl", "secret"}} {
		got, key := acquireOverrides(other)
		if (got == known) != (other == mine) {
			t.Errorf("%+v has those of %+v: %v", other, mine, got == known)
		}
		_, _ = stores.Pool.Delete(key)
	}
	_, _ = stores.Pool.Delete(key)
	if got, key := acquireOverrides(mine); got == known {
		t.Error("they outlive the last config")
	} else {
		_, _ = stores.Pool.Delete(key)
	}
}
