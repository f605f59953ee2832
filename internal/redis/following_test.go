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

// TestConfigOnTrialMendsNothing, also where no other one runs, and what it has read is mended once it runs.
func TestConfigOnTrialMendsNothing(t *testing.T) {
	t.Parallel()
	own, empty := redistest.Start(t), redistest.Start(t)
	var members []Member
	for name, server := range map[string]*redistest.Server{"a": own, "b": empty} {
		members = append(members, Member{Name: name, Shard: newShard(t, ShardOptions{Primary: server.Addr()})})
	}
	must(t, setOverride(t, newStore(t, newShard(t, ShardOptions{Primary: own.Addr()}), nil), block("api", "tag:x", time.Now().Add(time.Hour))))
	s := newStore(t, nil, func(o *Options) { o.Members, o.Overrides = members, new(Overrides) })
	mendsEach(s, 0)
	isMended := func() bool {
		for range 3 {
			set, err := looked(t, s)
			must(t, err)
			if set.Len() != 1 {
				t.Fatalf("the config has %d overrides, want 1", set.Len())
			}
		}
		return empty.Client().Exists(t.Context(), s.asker.Keys.Overrides()).Val() > 0
	}
	if isMended() {
		t.Error("the empty shard is mended before the config runs")
	}
	defer s.Follow()()
	if !isMended() {
		t.Error("the empty shard is not mended once the config runs")
	}
}
