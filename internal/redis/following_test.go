package redis

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestRejectedConfigMovesNoOverrides: while a config runs, another one has its overrides, and neither reads nor
// writes any at shards of its own.
func TestRejectedConfigMovesNoOverrides(t *testing.T) {
	t.Parallel()
	var shared Overrides
	on := func(server *redistest.Server) *Store {
		return newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.Overrides = &shared })
	}
	own, other := redistest.Start(t), redistest.Start(t)
	running, rejected := on(own), on(other)
	// Somebody else's, at the shard of the rejected config.
	theirs := newStore(t, newShard(t, ShardOptions{Primary: other.Addr()}), nil)
	must(t, setOverride(t, theirs, block("api", "tag:theirs", time.Now().Add(time.Hour))))
	stop := running.Follow()
	must(t, setOverride(t, running, block("api", "tag:ours", time.Now().Add(time.Hour))))
	var before, found *store.OverrideSet
	before, err := looked(t, running)
	must(t, err)
	if n := scripts(t, other, func() {
		for range 3 {
			found, err = looked(t, rejected)
			must(t, err)
		}
	}); n != 0 || found != before {
		t.Errorf("the other config runs %d scripts at its shard, and has %d overrides", n, found.Len())
	}
	sameKeys(t, "the running config", overridden(t, running), "tag:ours")
	sameKeys(t, "the other shard", overridden(t, theirs), "tag:theirs")
	// Once it runs, they are added up.
	defer rejected.Follow()()
	stop()
	sameKeys(t, "afterwards", overridden(t, rejected), "tag:ours", "tag:theirs")
}
