package redis

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func block(zone, clientKey string, until time.Time) store.Override {
	return store.Override{Kind: store.OverrideBlock, Zone: zone, ClientKey: clientKey, Until: until.UnixMicro(), Reason: "too\nmuch", By: "127.0.0.1:1"}
}

// overridden returns the client keys of a store's overrides.
func overridden(t *testing.T, s *Store) (keys []string) {
	t.Helper()
	all, err := s.Overrides(t.Context())
	must(t, err)
	for _, o := range all {
		keys = append(keys, o.ClientKey)
	}
	slices.Sort(keys)
	return keys
}

func sameKeys(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// TestOverrides are seen by every store on the same shards, and end.
func TestOverrides(t *testing.T) {
	shards := []*redistest.Shard{redistest.StartShard(t, 1), redistest.StartShard(t, 0)}
	open := func(secret string) *Store {
		return New(Options{
			CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, KeySecret: []byte(secret),
			Members: []Member{{Name: "a", Shard: shardOf(t, shards[0])}, {Name: "b", Shard: shardOf(t, shards[1])}},
		})
	}
	for _, secret := range []string{"", "secret"} {
		one, other := open(secret), open(secret)
		kept := func(keys ...string) (all []string) {
			if secret == "" {
				return slices.Clone(keys)
			}
			for _, key := range keys {
				all = append(all, one.KeptKey(key))
			}
			return all
		}
		sameKeys(t, "none", overridden(t, other))
		var keys []string
		for i := range 10 {
			keys = append(keys, fmt.Sprintf("tag:%d-%s", i, strings.Repeat("x", 20*i)))
			must(t, one.SetOverride(t.Context(), block("api", keys[i], time.Now().Add(time.Hour))))
		}
		sameKeys(t, "all", overridden(t, other), kept(keys...)...)
		sameKeys(t, "all again", overridden(t, other), kept(keys...)...)
		if secret != "" && strings.Contains(fmt.Sprint(overridden(t, other)), "tag:") {
			t.Error("client keys are shown in spite of a secret")
		}
		must(t, one.SetOverride(t.Context(), block("api", keys[0], time.Now().Add(2*time.Hour))))
		must(t, one.SetOverride(t.Context(), block("another", keys[1], time.Now().Add(time.Hour))))
		sameKeys(t, "in another zone too", overridden(t, other), kept(append(keys, keys[1])...)...)
		removes(t, other, store.OverrideBlock, "another", keys[1], true)
		removes(t, other, store.OverrideBlock, "api", other.KeptKey(keys[2]), true)
		removes(t, other, store.OverrideGrant, "api", keys[3], false)
		sameKeys(t, "without one", overridden(t, one), kept(slices.Delete(slices.Clone(keys), 2, 3)...)...)

		// One that ends is not told, and is removed by the next change.
		must(t, one.SetOverride(t.Context(), block("api", "tag:short", time.Now().Add(50*time.Millisecond))))
		eventually(t, "it ends", func() error {
			if slices.Contains(overridden(t, open(secret)), kept("tag:short")[0]) {
				return fmt.Errorf("it is there")
			}
			return nil
		})
		for i, key := range keys {
			removes(t, one, store.OverrideBlock, "api", key, i != 2)
		}
		removes(t, one, store.OverrideBlock, "api", "tag:short", false)
		sameKeys(t, "in the end", overridden(t, other))
		for _, sh := range shards {
			if left, err := sh.Primary.Client().Keys(t.Context(), "*overrides*").Result(); err != nil || len(left) > 0 {
				t.Errorf("%v stays in Redis, %v", left, err)
			}
		}
	}
}

// TestOverridesAreBounded on each shard.
func TestOverridesAreBounded(t *testing.T) {
	t.Parallel()
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	for i := range store.MaxOverrides {
		must(t, s.SetOverride(t.Context(), block("api", fmt.Sprint("tag:", i), time.Now().Add(time.Hour))))
	}
	if err := s.SetOverride(t.Context(), block("api", "tag:more", time.Now().Add(time.Hour))); err == nil || !strings.Contains(err.Error(), "1000 overrides") {
		t.Errorf("one more: %v", err)
	}
	must(t, s.SetOverride(t.Context(), block("api", "tag:7", time.Now().Add(2*time.Hour))))
	if got := len(overridden(t, s)); got != store.MaxOverrides {
		t.Errorf("there are %d", got)
	}
}

// TestOverridesOutliveTheirPrimary: a replica answers while the primary is away, and what
// was read last counts while all servers are.
func TestOverridesOutliveTheirPrimary(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*redistest.Server) error{"killed": (*redistest.Server).Kill, "silent": (*redistest.Server).Pause} {
		t.Run(name, func(t *testing.T) { overridesOutlive(t, end) })
	}
}

func overridesOutlive(t *testing.T, end func(*redistest.Server) error) {
	t.Helper()
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, s.SetOverride(t.Context(), block("api", "tag:alice", time.Now().Add(time.Hour))))
	must(t, sh.WaitReplicated(t.Context()))
	must(t, end(sh.Primary))
	fresh := newStore(t, shardOf(t, sh), nil)
	eventually(t, "a replica answers", func() error {
		if all, err := fresh.Overrides(t.Context()); err != nil || len(all) != 1 {
			return fmt.Errorf("%v, %w", all, err)
		}
		return nil
	})
	must(t, sh.Replicas[0].Kill())
	if all, err := fresh.Overrides(t.Context()); err == nil || len(all) != 1 {
		t.Errorf("while all are away: %v, %v", all, err)
	}
}

// TestOverridesOfARetiredShard go to another one, and are ended in both.
func TestOverridesOfARetiredShard(t *testing.T) {
	old, kept := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	withShards := func(members, previous []Member) *Store {
		return New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: members, Previous: previous})
	}
	before := withShards([]Member{{Name: "old", Shard: old}}, nil)
	for _, key := range []string{"tag:alice", "tag:bob"} {
		must(t, before.SetOverride(t.Context(), block("api", key, time.Now().Add(time.Hour))))
	}
	// A reload keeps what was read of the shard's connections.
	sameKeys(t, "before", overridden(t, before), "tag:alice", "tag:bob")
	members := []Member{{Name: "kept", Shard: kept}}
	during, after := withShards(members, []Member{{Name: "old", Shard: old}}), withShards(members, nil)
	for _, key := range overridden(t, during) {
		if !slices.Contains([]string{"tag:alice", "tag:bob"}, key) {
			t.Errorf("there is %q", key)
		}
	}
	sameKeys(t, "without the old shard", overridden(t, after), "tag:alice", "tag:bob")
	// A later one of the same client counts, and stays whatever the old shard has.
	longer := block("api", "tag:alice", time.Now().Add(time.Hour*24))
	longer.Since = time.Now().UnixMicro()
	must(t, during.SetOverride(t.Context(), longer))
	must(t, before.SetOverride(t.Context(), block("api", "tag:alice", time.Now().Add(time.Hour))))
	for range 3 {
		all, err := withShards(members, []Member{{Name: "old", Shard: old}}).Overrides(t.Context())
		must(t, err)
		for _, o := range all {
			if o.ClientKey == "tag:alice" && o.Until != longer.Until {
				t.Errorf("the block ends at %d, want %d", o.Until, longer.Until)
			}
		}
	}
	removes(t, during, store.OverrideBlock, "api", "tag:bob", true)
	sameKeys(t, "after the end of one", overridden(t, after), "tag:alice")
	removes(t, before, store.OverrideBlock, "api", "tag:alice", true)
	removes(t, after, store.OverrideBlock, "api", "tag:alice", true)
	sameKeys(t, "in the end", overridden(t, during))
}

// TestOverrideOfABinaryKey is found by the key of the client's requests, and ended by the listed one.
func TestOverrideOfABinaryKey(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	const key = "tag:\xff\xfe<>&\u2028"
	must(t, s.SetOverride(t.Context(), block("api", key, time.Now().Add(time.Hour))))
	listed := overridden(t, s)
	if len(listed) != 1 || s.KeptKey(listed[0]) != s.KeptKey(key) {
		t.Errorf("it is listed as %q, and known as %q", listed, s.KeptKey(key))
	}
	removes(t, s, store.OverrideBlock, "api", listed[0], true)
	sameKeys(t, "in the end", overridden(t, s))
}

// TestOverrideDuringAResharding is seen by a Caddy that has the shards before it.
func TestOverrideDuringAResharding(t *testing.T) {
	a, b := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	old := []Member{{Name: "a", Shard: a}}
	all := append(slices.Clone(old), Member{Name: "b", Shard: b})
	before := New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: old})
	during := New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: all, Previous: old})
	client := moving(before, during, 1)[0]
	must(t, before.SetOverride(t.Context(), block("api", client, time.Now().Add(time.Hour))))
	longer := block("api", client, time.Now().Add(24*time.Hour))
	longer.Since = time.Now().UnixMicro()
	must(t, during.SetOverride(t.Context(), longer))
	for name, s := range map[string]*Store{"before": before, "during": during} {
		found, err := s.Overrides(t.Context())
		must(t, err)
		if len(found) != 1 || found[0].Until != longer.Until {
			t.Errorf("%s: %v", name, found)
		}
	}
	removes(t, during, store.OverrideBlock, "api", client, true)
	sameKeys(t, "before, after its end", overridden(t, before))
}

// removes requires that there was, or was not, an override to remove.
func removes(t *testing.T, s *Store, kind store.OverrideKind, zone, clientKey string, want bool) {
	t.Helper()
	removed, err := s.RemoveOverride(t.Context(), kind, zone, clientKey)
	must(t, err)
	if removed != want {
		t.Errorf("%s of %q in zone %s: removed %v, want %v", kind, clientKey, zone, removed, want)
	}
}

// TestDamagedOverrides are skipped one by one, named, and removed like others.
func TestDamagedOverrides(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	must(t, s.SetOverride(t.Context(), block("api", "tag:good", time.Now().Add(time.Hour))))
	key := s.asker.Keys.Overrides()
	ends := string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(float64(time.Now().Add(time.Hour).UnixMilli()))))
	never := string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(math.Inf(1))))
	far := string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(1e19)))
	noNumber := string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(math.NaN())))
	grant := func(events string) string {
		return ends + `{"kind":"grant","zone":"api","client_key":"tag:x","since":1,"until":2,"events":` + events + `}`
	}
	damaged := map[string]string{
		"block:api:tag:short": "x", "block:api:tag:nan": noNumber + "{}", "block:api:tag:inf": never + "{}", "block:api:tag:far": far + "{}", "block:api:tag:junk": ends + "{not json", "block:api:tag:other": ends + `{"kind":"bless"}`,
		"grant:api:tag:-6": grant("-6"), "grant:api:tag:0": grant("0"), "grant:api:tag:most": grant("9223372036854775807"), "grant:api:tag:huge": grant("1e30"),
	}
	for name, value := range damaged {
		must(t, server.Client().HSet(t.Context(), key, name, value).Err())
	}
	must(t, server.Client().HSet(t.Context(), key, "v", "another").Err())
	all, err := s.Overrides(t.Context())
	if len(all) != 1 || all[0].ClientKey != "tag:good" || !errors.Is(err, store.ErrDamaged) || strings.Count(err.Error(), "damaged") != len(damaged) {
		t.Errorf("got %+v, %v", all, err)
	}
	// Others can still be written.
	must(t, s.SetOverride(t.Context(), block("api", "tag:later", time.Now().Add(time.Hour))))
	removes(t, s, store.OverrideBlock, "api", "tag:later", true)
	for name := range damaged {
		kind, clientKey, _ := strings.Cut(name, ":api:")
		removes(t, s, store.OverrideKind(kind), "api", clientKey, true)
	}
	sameKeys(t, "mended", overridden(t, s), "tag:good")
	removes(t, s, store.OverrideBlock, "api", "tag:good", true)
	if n := server.Client().Exists(t.Context(), key).Val(); n != 0 {
		t.Error("the hash is left")
	}
}

// TestOverridesOfAnotherSecret: those from before there was a key_secret hold and end; those under
// another one are named, and end by the form that is listed.
func TestOverridesOfAnotherSecret(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	under := func(secret string) *Store {
		return newStore(t, shard, func(o *Options) { o.KeySecret = []byte(secret) })
	}
	plain, first, second := under(""), under("the first secret"), under("the second secret")
	until := time.Now().Add(time.Hour)
	must(t, plain.SetOverride(t.Context(), block("api", "tag:plain", until)))
	must(t, first.SetOverride(t.Context(), block("api", "tag:first", until)))
	kept := first.KeptKey("tag:first")
	for _, s := range []*Store{plain, second} {
		all, err := s.Overrides(t.Context())
		if len(all) != 1 || s.KeptKey(all[0].ClientKey) != s.KeptKey("tag:plain") || !errors.Is(err, store.ErrDamaged) || !strings.Contains(fmt.Sprint(err), kept) {
			t.Errorf("got %+v, %v", all, err)
		}
	}
	all, err := first.Overrides(t.Context())
	if len(all) != 2 || err != nil {
		t.Errorf("under its own secret: %+v, %v", all, err)
	}
	removes(t, second, store.OverrideBlock, "api", "tag:plain", true)
	removes(t, second, store.OverrideBlock, "api", kept, true)
	for _, s := range []*Store{plain, first, second} {
		if all, err := s.Overrides(t.Context()); len(all) != 0 || err != nil {
			t.Errorf("after the end: %+v, %v", all, err)
		}
	}
}
