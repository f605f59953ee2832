package caddytest

import (
	"context"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// Shards are real Redis shards, which configs call a, b, c and so on.
type Shards []*redistest.Shard

// StartShards starts n primaries, each with as many replicas as asked for.
func StartShards(t *testing.T, n, replicas int, opts ...redistest.Option) Shards {
	t.Helper()
	s := make(Shards, n)
	for i := range s {
		s[i] = redistest.StartShard(t, replicas, opts...)
	}
	return s
}

// StartLastingShards starts n shards whose data survives a restart, as far as
// their servers have replied.
func StartLastingShards(t *testing.T, n, replicas int) Shards {
	t.Helper()
	return StartShards(t, n, replicas, redistest.Args("--appendonly", "yes", "--appendfsync", "no"))
}

// Kill ends all servers at once.
func (s Shards) Kill(t *testing.T) {
	t.Helper()
	for _, shard := range s {
		Must(t, "kill the primary", shard.Primary.Kill())
		for _, replica := range shard.Replicas {
			Must(t, "kill the replica", replica.Kill())
		}
	}
}

// Restart starts them again.
func (s Shards) Restart(t *testing.T) {
	t.Helper()
	for _, shard := range s {
		Must(t, "restart the primary", shard.Primary.Restart())
		for _, replica := range shard.Replicas {
			Must(t, "restart the replica", replica.Restart())
		}
	}
}

// Replicas returns those of all shards.
func (s Shards) Replicas() (all []*redistest.Server) {
	for _, shard := range s {
		all = append(all, shard.Replicas...)
	}
	return all
}

// AwaitReplicas waits until the replicas have what the primaries have.
func (s Shards) AwaitReplicas(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), WaitLimit)
	defer cancel()
	for _, shard := range s {
		Must(t, "replicate", shard.WaitReplicated(ctx))
	}
}

// Store returns the global option for a Redis store on the shards. Options are lines
// such as "db 1".
func (s Shards) Store(options ...string) string { return s.StoreAfter(len(s), options...) }

// StoreAfter is Store of shards of which the first n were there before a resharding.
func (s Shards) StoreAfter(n int, options ...string) string {
	var lines []string
	for i, shard := range s {
		var isNew []string
		if i >= n {
			isNew = []string{"weight 1 was 0"}
		}
		lines = append(lines, ShardOf(ShardName(i), shard, isNew...))
	}
	return RedisStore(append(lines, options...)...)
}

// ShardName returns the name of the shard with that index in configs.
func ShardName(i int) string { return string(rune('a' + i)) }

// Patient are timeouts that even a busy machine keeps, for tests of other
// matters.
var Patient = []string{"check_timeout 1m", "charge_timeout 1m"}

// RedisStore returns the global option for a Redis store with these lines, and
// with those of [Patient] that they do not set.
func RedisStore(lines ...string) string {
	given := map[string]bool{}
	for _, line := range lines {
		name, _, _ := strings.Cut(line, " ")
		given[name] = true
	}
	for _, line := range Patient {
		if name, _, _ := strings.Cut(line, " "); !given[name] {
			lines = append(lines[:len(lines):len(lines)], line)
		}
	}
	return "rate_limit {\n\t\tstore redis {\n" + strings.Join(lines, "\n") + "\n\t\t}\n\t}"
}

// ShardWith returns a shard with these lines.
func ShardWith(name string, lines ...string) string {
	return "shard " + name + " {\n" + strings.Join(lines, "\n") + "\n}"
}

// ShardOf returns a shard of given servers, with more lines.
func ShardOf(name string, shard *redistest.Shard, more ...string) string {
	lines := []string{"primary " + shard.Primary.Addr()}
	for _, replica := range shard.Replicas {
		lines = append(lines, "replica "+replica.Addr())
	}
	return ShardWith(name, append(lines, more...)...)
}
