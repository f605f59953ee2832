package redis

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func block(zone, clientKey string, until time.Time) store.Override {
	return store.Override{Kind: store.OverrideBlock, Zone: zone, ClientKey: clientKey, Until: until.UnixMicro(), Reason: "too\nmuch", By: "127.0.0.1:1"}
}

func setOverride(t *testing.T, s *Store, o store.Override) error {
	t.Helper()
	return s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Expected: store.AnyVersion}})[0].Err
}

// listed returns a store's overrides that are in force by this machine's clock.
func listed(t *testing.T, s *Store) (all []store.Override, err error) {
	t.Helper()
	set, err := s.Overrides(t.Context())
	set.All(func(o *store.Override) bool {
		if o.Until > time.Now().UnixMicro() {
			all = append(all, *o)
		}
		return true
	})
	return all, errors.Join(err, set.Damaged())
}

// overridden returns the client keys of a store's overrides.
func overridden(t *testing.T, s *Store) (keys []string) {
	t.Helper()
	all, err := listed(t, s)
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
			must(t, setOverride(t, one, block("api", keys[i], time.Now().Add(time.Hour))))
		}
		sameKeys(t, "all", overridden(t, other), kept(keys...)...)
		sameKeys(t, "all again", overridden(t, other), kept(keys...)...)
		if secret != "" && strings.Contains(fmt.Sprint(overridden(t, other)), "tag:") {
			t.Error("client keys are shown in spite of a secret")
		}
		must(t, setOverride(t, one, block("api", keys[0], time.Now().Add(2*time.Hour))))
		must(t, setOverride(t, one, block("another", keys[1], time.Now().Add(time.Hour))))
		sameKeys(t, "in another zone too", overridden(t, other), kept(append(keys, keys[1])...)...)
		removes(t, other, store.OverrideBlock, "another", keys[1], true)
		removes(t, other, store.OverrideBlock, "api", other.KeptKey(keys[2]), true)
		removes(t, other, store.OverrideGrant, "api", keys[3], false)
		sameKeys(t, "without one", overridden(t, one), kept(slices.Delete(slices.Clone(keys), 2, 3)...)...)

		// One that ends is not told.
		must(t, setOverride(t, one, block("api", "tag:short", time.Now().Add(50*time.Millisecond))))
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
	}
}

// TestOverridesAfterTheClockWasSet end when they do by the server's clock, though they have not changed.
func TestOverridesAfterTheClockWasSet(t *testing.T) {
	t.Parallel()
	var step atomic.Int64
	s := New(Options{
		CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout,
		Members: []Member{{Name: "a", Shard: shardOf(t, redistest.StartShard(t, 0))}},
		Now:     func() time.Time { return time.Now().Add(time.Duration(step.Load())) },
	})
	must(t, setOverride(t, s, block("api", "k", time.Now().Add(time.Minute))))
	for _, by := range []time.Duration{0, time.Hour, -time.Hour, 0} {
		step.Store(int64(by))
		all, err := s.Overrides(t.Context())
		must(t, err)
		o := all.Of(store.OverrideID{Kind: store.OverrideBlock, Zone: "api", ClientKey: "k"}, 0)
		if o == nil {
			t.Fatalf("after a step by %v there is no block", by)
		}
		if left := time.UnixMicro(o.Until).Sub(time.Now().Add(by)); left <= 0 || left > time.Minute+time.Second {
			t.Errorf("after a step by %v the block has %v left", by, left)
		}
	}
}

// TestOverridesAreBounded. Many, with SWEEP=all as many as there may be, are written and
// read in parts, and a change of one is read alone.
func TestOverridesAreBounded(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	s, other := newStore(t, shard, nil), newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	most := hidden[int](s, "operator", "most")
	if *most != store.MaxOverrides {
		t.Errorf("a store keeps %d", *most)
	}
	*most = sweep.Size(5_000, store.MaxOverrides)
	changes := make([]store.OverrideChange, *most)
	for i := range changes {
		changes[i].Override = store.Override{Kind: store.OverrideLimit, Zone: "api", ClientKey: fmt.Sprint("tag:", i), Until: store.NoEnd, Events: int64(i + 1)}
	}
	for i, outcome := range s.ChangeOverrides(t.Context(), changes) {
		if outcome.Err != nil {
			t.Fatalf("change %d: %v", i, outcome.Err)
		}
	}
	// A busy machine may take longer to count or to read them than a call may.
	eventually(t, "one more is refused", func() error {
		if err := setOverride(t, s, block("api", "tag:more", time.Now().Add(time.Hour))); err == nil || !strings.Contains(err.Error(), fmt.Sprint(*most, " overrides, which is the most: remove some")) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
	var before *store.OverrideSet
	eventually(t, "they are read", func() (err error) {
		before, err = looked(t, other)
		return err
	})
	if before.Len() != *most {
		t.Errorf("there are %d", before.Len())
	}
	changes[7].Events = 1000
	must(t, setOverride(t, s, changes[7].Override))
	var after *store.OverrideSet
	var err error
	pages := scripts(t, server, func() { after, err = other.Overrides(t.Context()) })
	must(t, err)
	if o := after.Of(changes[7].ID(), 0); pages != 1 || o == nil || o.Events != 1000 || after.Len() != *most {
		t.Errorf("a change took %d scripts, and shows %+v of %d", pages, o, after.Len())
	}
	if same, err := other.Overrides(t.Context()); err != nil || same != after {
		t.Errorf("nothing has changed, and the set is another one, %v", err)
	}
	removes(t, s, store.OverrideLimit, "api", "tag:0", true)
	must(t, setOverride(t, s, block("api", "tag:more", time.Now().Add(time.Hour))))
}

// TestChangesOfOverrides are made if the override is as expected; the later of two writers gets an error.
func TestChangesOfOverrides(t *testing.T) {
	t.Parallel()
	const client = "tag:ключ\n"
	shards := []*redistest.Shard{redistest.StartShard(t, 0), redistest.StartShard(t, 0)}
	open := func() *Store {
		return New(Options{
			CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout,
			Members: []Member{{Name: "a", Shard: shardOf(t, shards[0])}, {Name: "b", Shard: shardOf(t, shards[1])}},
		})
	}
	for name, s := range map[string]store.Operable{"redis": open(), "memory": memory.New(memory.NewBuckets(), memory.Options{})} {
		t.Run(name, func(t *testing.T) {
			change := func(expected string, removes bool, events int64) store.OverrideOutcome {
				o := store.Override{Kind: store.OverrideLimit, Zone: "api", ClientKey: client, Events: events, Since: time.Now().UnixMicro(), Until: store.NoEnd, By: "me", Reason: fmt.Sprint(events)}
				return s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Expected: expected, Removes: removes}})[0]
			}
			version := func() string {
				all, err := s.Overrides(t.Context())
				must(t, err)
				if o := all.Of(store.OverrideID{Kind: store.OverrideLimit, Zone: "api", ClientKey: s.KeptKey(client)}, 0); o != nil {
					return o.Version
				}
				return ""
			}
			if o := change("", false, 1); o.Err != nil || o.Before != nil || o.Version == "" || o.Version != version() {
				t.Errorf("the first: %+v", o)
			}
			first := version()
			if o := change("", false, 2); !errors.Is(o.Err, store.ErrChanged) || o.Before == nil || o.Before.Events != 1 {
				t.Errorf("one that expects none: %+v", o)
			}
			if o := change(first, false, 3); o.Err != nil || o.Before.Events != 1 {
				t.Errorf("one that expects the first: %+v", o)
			}
			if o := change(first, true, 0); !errors.Is(o.Err, store.ErrChanged) {
				t.Errorf("a removal of the first: %+v", o)
			}
			if o := change(version(), true, 0); o.Err != nil || o.Before.Events != 3 {
				t.Errorf("a removal: %+v", o)
			}
			if o := change(store.AnyVersion, true, 0); o.Err != nil || o.Before != nil || version() != "" {
				t.Errorf("a removal of nothing: %+v", o)
			}
			all, err := s.Audit(t.Context())
			must(t, err)
			var told []string
			for _, a := range all {
				events := func(o *store.Override) int64 {
					if o == nil {
						return 0
					}
					return o.Events
				}
				told = append(told, fmt.Sprint(events(a.Before), "→", events(a.After), " by ", a.By, " for ", a.Reason, " of ", a.ID.ClientKey))
			}
			want := []string{"3→0 by me for 0 of " + client, "1→3 by me for 3 of " + client, "0→1 by me for 1 of " + client}
			if !slices.Equal(told, want) {
				t.Errorf("the audit is %q, want %q", told, want)
			}
		})
	}
}

// TestAuditIsBounded, and so is what it takes in Redis.
func TestAuditIsBounded(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for i := range store.MaxAudited/100 + 1 {
		changes := make([]store.OverrideChange, 100)
		for n := range changes {
			changes[n] = store.OverrideChange{Override: block("api", fmt.Sprint("tag:", n), time.Now().Add(time.Hour)), Expected: store.AnyVersion}
			changes[n].Since = int64(i)
		}
		s.ChangeOverrides(t.Context(), changes)
	}
	all, err := s.Audit(t.Context())
	must(t, err)
	if n := server.Client().ZCard(t.Context(), s.asker.Keys.OverrideLog()).Val(); len(all) != store.MaxAudited || n != store.MaxAudited {
		t.Errorf("there are %d changes, in Redis %d", len(all), n)
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
	must(t, setOverride(t, s, block("api", "tag:alice", time.Now().Add(time.Hour))))
	must(t, sh.WaitReplicated(t.Context()))
	must(t, end(sh.Primary))
	// What is silent is waited for that long.
	fresh := newStore(t, shardOf(t, sh), func(o *Options) { o.CheckTimeout = time.Second })
	eventually(t, "a replica answers", func() error {
		if all, err := listed(t, fresh); err != nil || len(all) != 1 {
			return fmt.Errorf("%v, %w", all, err)
		}
		return nil
	})
	must(t, sh.Replicas[0].Kill())
	if all, err := listed(t, fresh); err == nil || len(all) != 1 {
		t.Errorf("while all are away: %v, %v", all, err)
	}
}

// TestOverrideOfABinaryKey is found by the key of the client's requests, and ended by the listed one.
func TestOverrideOfABinaryKey(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	const key = "tag:\xff\xfe<>&\u2028"
	must(t, setOverride(t, s, block("api", key, time.Now().Add(time.Hour))))
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
	during := New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: all, Previous: steps(old)})
	client := moving(before, during, 1)[0]
	must(t, setOverride(t, before, block("api", client, time.Now().Add(time.Hour))))
	longer := block("api", client, time.Now().Add(24*time.Hour))
	longer.Since = time.Now().UnixMicro()
	must(t, setOverride(t, during, longer))
	for name, s := range map[string]*Store{"before": before, "during": during} {
		found, err := listed(t, s)
		must(t, err)
		if len(found) != 1 || found[0].Until != longer.Until {
			t.Errorf("%s: %v", name, found)
		}
	}
	removes(t, during, store.OverrideBlock, "api", client, true)
	sameKeys(t, "before, after its end", overridden(t, before))
}

// removal ends an override.
func removal(t *testing.T, s *Store, o store.Override) error {
	t.Helper()
	return s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}})[0].Err
}

// removes requires that there was, or was not, an override to remove.
func removes(t *testing.T, s *Store, kind store.OverrideKind, zone, clientKey string, want bool) {
	t.Helper()
	o := store.Override{Kind: kind, Zone: zone, ClientKey: clientKey}
	outcome := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}})[0]
	must(t, outcome.Err)
	if removed := outcome.Before != nil; removed != want {
		t.Errorf("%s of %q in zone %s: removed %v, want %v", kind, clientKey, zone, removed, want)
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
	must(t, setOverride(t, plain, block("api", "tag:plain", until)))
	must(t, setOverride(t, first, block("api", "tag:first", until)))
	kept := first.KeptKey("tag:first")
	for _, s := range []*Store{plain, second} {
		all, err := listed(t, s)
		if len(all) != 1 || s.KeptKey(all[0].ClientKey) != s.KeptKey("tag:plain") || !errors.Is(err, store.ErrDamaged) || !strings.Contains(fmt.Sprint(err), kept) {
			t.Errorf("got %+v, %v", all, err)
		}
	}
	all, err := listed(t, first)
	if len(all) != 2 || err != nil {
		t.Errorf("under its own secret: %+v, %v", all, err)
	}
	removes(t, second, store.OverrideBlock, "api", "tag:plain", true)
	removes(t, second, store.OverrideBlock, "api", kept, true)
	for _, s := range []*Store{plain, first, second} {
		if all, err := listed(t, s); len(all) != 0 || err != nil {
			t.Errorf("after the end: %+v, %v", all, err)
		}
	}
}
