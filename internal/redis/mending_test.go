package redis

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func limitOf(client string, events int64) store.Override {
	return store.Override{Kind: store.OverrideLimit, Zone: "api", ClientKey: "tag:" + client, Until: store.NoEnd, Events: events, Since: time.Now().UnixMicro(), By: "me"}
}

// looked reads the overrides, and waits for the mending that this starts.
func looked(t *testing.T, s *Store) (*store.OverrideSet, error) {
	t.Helper()
	set, err := s.Overrides(t.Context())
	mending := hidden[sync.Mutex](s, "operator", "overrides", "mending")
	mending.Lock()
	defer mending.Unlock()
	return set, err
}

// eventsOf returns the limit that a store has for a client, or 0.
func eventsOf(t *testing.T, s *Store, client string) int64 {
	t.Helper()
	set, err := looked(t, s)
	must(t, err)
	o := limitOf(client, 1)
	if found := set.Of(o.ID(), 0); found != nil {
		return found.Events
	}
	return 0
}

// mendsEach sets the time between two mendings of a shard by a process.
func mendsEach(s *Store, period time.Duration) {
	*hidden[time.Duration](s, "operator", "mendPeriod") = period
	*hidden[time.Duration](s, "operator", "followPeriod") = 0
}

// caddysOf returns stores of so many processes on the same shards, which mend at each look.
func caddysOf(t *testing.T, n int, servers ...*redistest.Server) (all []*Store) {
	t.Helper()
	for range n {
		var members []Member
		for i, server := range servers {
			members = append(members, Member{Name: string(rune('a' + i)), Shard: newShard(t, ShardOptions{Primary: server.Addr()})})
		}
		s := New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: members})
		mendsEach(s, 0)
		all = append(all, s)
	}
	return all
}

// mends looks until a server has overrides of the names, each in force or not.
func mends(t *testing.T, s *Store, server *redistest.Server, names ...string) {
	t.Helper()
	eventually(t, fmt.Sprint(server.Addr(), " has ", names), func() error {
		if _, err := looked(t, s); err != nil {
			return err
		}
		got := server.Client().HKeys(t.Context(), s.asker.Keys.Overrides()).Val()
		for _, name := range names {
			if !slices.Contains(got, "limit:api:tag:"+name) {
				return fmt.Errorf("it has %q", got)
			}
		}
		return nil
	})
}

// TestLostOverridesAreWrittenBack, and what was ended stays so, after a shard has lost all, or was restored from a
// backup.
func TestLostOverridesAreWrittenBack(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(ctx context.Context, server *redistest.Server, hash string) error{
		"flushed": func(ctx context.Context, server *redistest.Server, _ string) error {
			return server.Client().FlushAll(ctx).Err()
		},
		"evicted": func(ctx context.Context, server *redistest.Server, hash string) error {
			return server.Client().Del(ctx, hash).Err()
		},
		"restarted": func(context.Context, *redistest.Server, string) error { return nil },
		"restored":  nil,
	} {
		for shards := 1; shards <= 2; shards++ {
			t.Run(fmt.Sprint(name, " of ", shards), func(t *testing.T) {
				t.Parallel()
				var servers []*redistest.Server
				for range shards {
					servers = append(servers, redistest.Start(t))
				}
				server, caddys := servers[0], caddysOf(t, 2, servers...)
				hash, log := caddys[0].asker.Keys.Overrides(), caddys[0].asker.Keys.OverrideLog()
				must(t, setOverride(t, caddys[0], limitOf("ended", 1)))
				must(t, setOverride(t, caddys[0], limitOf("kept", 2)))
				dumped := []string{server.Client().Dump(t.Context(), hash).Val(), server.Client().Dump(t.Context(), log).Val()}
				must(t, removal(t, caddys[0], limitOf("ended", 1)))
				must(t, setOverride(t, caddys[0], limitOf("later", 3)))
				for client, want := range map[string]int64{"ended": 0, "kept": 2, "later": 3} {
					if n := eventsOf(t, caddys[1], client); n != want {
						t.Errorf("before, %s has %d events", client, n)
					}
				}
				switch {
				case lose == nil:
					for i, key := range []string{hash, log} {
						must(t, server.Client().RestoreReplace(t.Context(), key, time.Hour, dumped[i]).Err())
					}
				case name == "restarted":
					must(t, server.Kill())
					must(t, server.Restart())
				default:
					must(t, lose(t.Context(), server, hash))
				}
				mends(t, caddys[1], server, "ended", "kept", "later")
				fresh := caddysOf(t, 1, servers...)[0]
				for what, s := range map[string]*Store{"who knew": caddys[1], "another": fresh} {
					for client, want := range map[string]int64{"ended": 0, "kept": 2, "later": 3} {
						if n := eventsOf(t, s, client); n != want {
							t.Errorf("%s: %s has %d events, want %d", what, client, n, want)
						}
					}
				}
				if all, err := fresh.Audit(t.Context()); err != nil || len(all) != 4 {
					t.Errorf("the audit has %d changes, %v", len(all), err)
				}
			})
		}
	}
}

// TestShardThatWasLeftOut: it gets what it missed when it is back, and what was ended meanwhile does not come back.
// So a shard that replaces another one takes all.
func TestShardThatWasLeftOut(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	both := caddysOf(t, 1, servers...)[0]
	must(t, setOverride(t, both, limitOf("ended", 1)))
	without := caddysOf(t, 1, servers[0])[0]
	must(t, removal(t, without, limitOf("ended", 1)))
	must(t, setOverride(t, without, limitOf("new", 2)))
	fresh := caddysOf(t, 1, servers...)[0]
	mends(t, fresh, servers[1], "ended", "new")
	other := caddysOf(t, 1, servers[1])[0]
	if ended, set := eventsOf(t, other, "ended"), eventsOf(t, other, "new"); ended != 0 || set != 2 {
		t.Errorf("the shard that was left out has %d and %d events", ended, set)
	}
}

// TestShardOutOfTouch: of one that is 90 days behind another nothing is believed, because tombstones may be gone.
func TestShardOutOfTouch(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	must(t, setOverride(t, caddysOf(t, 1, servers[0])[0], limitOf("kept", 1)))
	must(t, setOverride(t, caddysOf(t, 1, servers[1])[0], limitOf("long ended", 1)))
	s := caddysOf(t, 1, servers...)[0]
	now := time.Now()
	for i, seen := range []time.Time{now, now.Add(-91 * 24 * time.Hour)} {
		must(t, servers[i].Client().HSet(t.Context(), s.asker.Keys.Overrides(), "s", seen.UnixMilli()).Err())
	}
	// It decides about nothing.
	o := limitOf("long ended", 1)
	outcome := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}, {Override: limitOf("new", 1), Expected: store.AnyVersion}})
	if outcome[0].Before != nil || outcome[1].Err != nil || !strings.Contains(fmt.Sprint(outcome[1].Warning), "shard b") {
		t.Errorf("changes: %+v", outcome)
	}
	mends(t, s, servers[1], "kept", "new")
	for _, s := range []*Store{s, caddysOf(t, 1, servers...)[0], caddysOf(t, 1, servers[1])[0]} {
		if kept, ended := eventsOf(t, s, "kept"), eventsOf(t, s, "long ended"); kept != 1 || ended != 0 {
			t.Errorf("there are %d and %d events", kept, ended)
		}
	}
}

// TestOneMenderAMinute: a second process writes nothing, nor does the first one if the server has evicted the lock;
// and an override that is on its way is no loss.
func TestOneMenderAMinute(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	caddys := caddysOf(t, 2, server)
	for _, s := range caddys {
		mendsEach(s, time.Hour)
	}
	must(t, setOverride(t, caddys[0], limitOf("x", 1)))
	if eventsOf(t, caddys[1], "x") != 1 {
		t.Fatal("the other one does not know it")
	}
	lose := func(keys ...string) {
		t.Helper()
		must(t, server.Client().Del(t.Context(), append(keys, caddys[0].asker.Keys.Overrides())...).Err())
	}
	isThere := func() bool {
		t.Helper()
		return server.Client().Exists(t.Context(), caddys[0].asker.Keys.Overrides()).Val() != 0
	}
	lose()
	if _ = eventsOf(t, caddys[0], "x"); isThere() {
		t.Error("the first look mends")
	}
	if _ = eventsOf(t, caddys[0], "x"); !isThere() {
		t.Error("the second look does not mend")
	}
	lose()
	for range 3 {
		for _, s := range caddys {
			if n := eventsOf(t, s, "x"); n != 1 || isThere() {
				t.Errorf("there are %d events; mended: %v", n, isThere())
			}
		}
	}
	lose(caddys[0].asker.Keys.OverrideMender())
	for range 3 {
		if _ = eventsOf(t, caddys[0], "x"); isThere() {
			t.Error("it mends again at once")
		}
	}
	if _ = eventsOf(t, caddys[1], "x"); !isThere() {
		t.Error("the other one does not mend")
	}
}

// TestWrittenBackOverridesReachOthers who have looked before, and need not mend for that.
func TestWrittenBackOverridesReachOthers(t *testing.T) {
	t.Parallel()
	for name, has := range map[string]bool{"the shard is empty": false, "the shard has another one": true} {
		server := redistest.Start(t)
		caddys := caddysOf(t, 2, server)
		knows, other := caddys[0], caddys[1]
		mendsEach(other, time.Hour)
		must(t, setOverride(t, knows, limitOf("x", 1)))
		must(t, server.Client().Del(t.Context(), knows.asker.Keys.Overrides()).Err())
		if has {
			must(t, setOverride(t, caddysOf(t, 1, server)[0], limitOf("y", 2)))
		}
		if n := eventsOf(t, other, "x"); n != 0 {
			t.Fatalf("%s: there are %d events", name, n)
		}
		mends(t, knows, server, "x")
		if n := eventsOf(t, other, "x"); n != 1 {
			t.Errorf("%s: the other one has %d events", name, n)
		}
		must(t, removal(t, other, limitOf("x", 1)))
		if n := eventsOf(t, knows, "x"); n != 0 {
			t.Errorf("%s: after its end there are %d events", name, n)
		}
	}
}

// TestMendingUnderChanges: an override that is lost while others are changed is written back.
func TestMendingUnderChanges(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := caddysOf(t, 1, server)[0]
	must(t, setOverride(t, s, limitOf("x", 1)))
	must(t, server.Client().Del(t.Context(), s.asker.Keys.Overrides()).Err())
	other := caddysOf(t, 1, server)[0]
	for i := range 3 {
		must(t, setOverride(t, other, limitOf(fmt.Sprint(i), 1)))
		_ = eventsOf(t, s, "x")
	}
	if n := eventsOf(t, other, "x"); n != 1 {
		t.Errorf("there are %d events", n)
	}
}

// TestHorizonIsThatOfAllVersions, also of one that another shard alone has: a backup of it would come back.
func TestHorizonIsThatOfAllVersions(t *testing.T) {
	t.Parallel()
	for name, until := range map[string]int64{"a year": time.Now().AddDate(1, 0, 0).UnixMicro(), "no end": store.NoEnd} {
		servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
		long, short := limitOf("x", 1), limitOf("x", 2)
		long.Until, short.Until = until, time.Now().Add(time.Hour).UnixMicro()
		must(t, setOverride(t, caddysOf(t, 1, servers[0])[0], long))
		must(t, setOverride(t, caddysOf(t, 1, servers[1])[0], short))
		both := caddysOf(t, 1, servers...)[0]
		eventually(t, "the later one is on both", func() error {
			_ = eventsOf(t, both, "x")
			if n := eventsOf(t, caddysOf(t, 1, servers[0])[0], "x"); n != 2 {
				return fmt.Errorf("the first one has %d events", n)
			}
			return nil
		})
		key, field := both.asker.Keys.Overrides(), "limit:api:tag:x"
		for i, server := range servers {
			eventually(t, fmt.Sprint(name, " is remembered by ", i), func() error {
				_ = eventsOf(t, both, "x")
				numbers, err := wire.Unpack(nil, server.Client().HGet(t.Context(), key, field).Val()[:24])
				if kept := time.Until(time.UnixMilli(numbers[2])); err == nil && kept < 90*24*time.Hour {
					err = fmt.Errorf("for %v", kept)
				}
				return err
			})
		}
	}
}

// TestShardThatWasInTouch within 90 days by its own clock is not emptied, however far it is behind a shard that a wrong
// clock has told.
func TestShardThatWasInTouch(t *testing.T) {
	t.Parallel()
	for days, want := range map[int]int64{-20: 2, -89: 2, -91: 0} {
		servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
		must(t, setOverride(t, caddysOf(t, 1, servers[0])[0], limitOf("x", 1)))
		must(t, setOverride(t, caddysOf(t, 1, servers[1])[0], limitOf("alone", 2)))
		both := caddysOf(t, 1, servers...)[0]
		now, hash := time.Now(), both.asker.Keys.Overrides()
		must(t, servers[0].Client().HSet(t.Context(), hash, "s", now.AddDate(0, 0, 80).UnixMilli(), "o", now.UnixMilli()).Err())
		must(t, servers[1].Client().HSet(t.Context(), hash, "s", now.AddDate(0, 0, -20).UnixMilli(), "o", now.AddDate(0, 0, days).UnixMilli()).Err())
		if n := eventsOf(t, both, "alone"); n != 0 {
			t.Errorf("it is believed at once: %d events", n)
		}
		mends(t, both, servers[1], "x")
		if x, alone := eventsOf(t, both, "x"), eventsOf(t, both, "alone"); x != 1 || alone != want {
			t.Errorf("in touch %d days ago: %d and %d events, want %d", days, x, alone, want)
		}
	}
}

// TestShardThatHasAll is in touch, however long it was away.
func TestShardThatHasAll(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	s := caddysOf(t, 1, servers...)[0]
	must(t, setOverride(t, s, limitOf("x", 1)))
	for i, days := range []int{0, -91} {
		must(t, servers[i].Client().HSet(t.Context(), s.asker.Keys.Overrides(), "s", time.Now().AddDate(0, 0, days).UnixMilli()).Err())
	}
	_ = eventsOf(t, s, "x")
	if o := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: limitOf("y", 1)}})[0]; o.Err != nil || o.Copies.Shards != 2 {
		t.Errorf("a change: %+v", o)
	}
}

// TestOverridesWhileAShardIsSilent checks that the first look reads the other shards.
func TestOverridesWhileAShardIsSilent(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	must(t, setOverride(t, caddysOf(t, 1, servers...)[0], limitOf("x", 1)))
	must(t, servers[1].Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	set, err := caddysOf(t, 1, servers...)[0].Overrides(ctx)
	if o := limitOf("x", 1); set.Of(o.ID(), 0) == nil || err == nil {
		t.Errorf("there are %d, %v", set.Len(), err)
	}
}

// TestShardLacksRoom for what it has lost: that is an error, until it has room.
func TestShardLacksRoom(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := caddysOf(t, 1, server)[0]
	for i := range 8 {
		must(t, setOverride(t, s, limitOf(fmt.Sprint(i), 1)))
	}
	most := hidden[int](s, "operator", "most")
	for _, room := range []int{2, 100} {
		*most = room
		must(t, server.Client().Del(t.Context(), s.asker.Keys.Overrides()).Err())
		eventually(t, fmt.Sprint("there is room for ", 2*room), func() error {
			if _, err := looked(t, s); errors.Is(err, store.ErrFinal) != (room < 8) || server.Client().HLen(t.Context(), s.asker.Keys.Overrides()).Val() == 0 {
				return fmt.Errorf("the error is %w", err)
			}
			return nil
		})
	}
}

// TestLostAuditIsWrittenBack within an hour, if the changes alone were lost.
func TestLostAuditIsWrittenBack(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := caddysOf(t, 1, server)[0]
	must(t, setOverride(t, s, limitOf("x", 1)))
	hash, log := s.asker.Keys.Overrides(), s.asker.Keys.OverrideLog()
	must(t, server.Client().Del(t.Context(), log).Err())
	must(t, server.Client().HSet(t.Context(), hash, "s", time.Now().Add(-2*time.Hour).UnixMilli()).Err())
	_ = eventsOf(t, s, "x")
	if all, err := caddysOf(t, 1, server)[0].Audit(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("there are %d changes, %v", len(all), err)
	}
}

// TestOneShardRefusesScripts: overrides are read from the others.
func TestOneShardRefusesScripts(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t), redistest.Start(t)}
	must(t, setOverride(t, caddysOf(t, 1, servers...)[0], limitOf("x", 1)))
	for _, server := range servers[:2] {
		must(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "default", "-evalsha", "-evalsha_ro").Err())
	}
	s := caddysOf(t, 1, servers...)[0]
	set, err := s.Overrides(t.Context())
	if o := limitOf("x", 1); set.Of(o.ID(), 0) == nil || err == nil {
		t.Errorf("there are %d, %v", set.Len(), err)
	}
}

// TestDamagedSumIsMended, so that hashes are not read again and again.
func TestDamagedSumIsMended(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := caddysOf(t, 1, server)[0]
	must(t, setOverride(t, s, limitOf("x", 1)))
	hash := s.asker.Keys.Overrides()
	sum := server.Client().HGet(t.Context(), hash, "d").Val()
	for _, damage := range []string{"junk", "5", "", "9007199254740993"} {
		must(t, server.Client().HSet(t.Context(), hash, "d", damage).Err())
		eventually(t, "it is mended", func() error {
			_ = eventsOf(t, s, "x")
			if got := server.Client().HGet(t.Context(), hash, "d").Val(); got != sum {
				return fmt.Errorf("%q became %q, want %q", damage, got, sum)
			}
			return nil
		})
	}
}

// opens returns a store with what a process knows, which reaches a server in its own way.
func opens(t *testing.T, known *Overrides, server *redistest.Server) *Store {
	t.Helper()
	s := New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Overrides: known, Members: []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}}})
	mendsEach(s, 0)
	s.Follow()
	return s
}

// TestReloadToEmptyShards checks that the overrides in a process outlive its connections.
func TestReloadToEmptyShards(t *testing.T) {
	t.Parallel()
	var known Overrides
	must(t, setOverride(t, opens(t, &known, redistest.Start(t)), limitOf("x", 1)))
	server := redistest.Start(t)
	s := opens(t, &known, server)
	if n := eventsOf(t, s, "x"); n != 1 {
		t.Errorf("there are %d events", n)
	}
	mends(t, s, server, "x")
}

// TestReloadToAnotherInstallation, which was off for long: what is known of the servers before does not judge it.
func TestReloadToAnotherInstallation(t *testing.T) {
	t.Parallel()
	var known Overrides
	before := opens(t, &known, redistest.Start(t))
	must(t, setOverride(t, before, limitOf("x", 1)))
	_ = eventsOf(t, before, "x") // says that it is in touch
	_ = eventsOf(t, before, "x")
	server := redistest.Start(t)
	must(t, setOverride(t, caddysOf(t, 1, server)[0], limitOf("y", 2)))
	must(t, server.Client().HSet(t.Context(), before.asker.Keys.Overrides(), "s", time.Now().AddDate(0, 0, -91).UnixMilli()).Err())
	s := opens(t, &known, server)
	mends(t, s, server, "x", "y")
	if n := eventsOf(t, s, "y"); n != 2 {
		t.Errorf("there are %d events", n)
	}
}

// TestTwoConfigs of a process reach a server in two ways, and read it once each.
func TestTwoConfigs(t *testing.T) {
	t.Parallel()
	var known Overrides
	server := redistest.Start(t)
	configs := []*Store{opens(t, &known, server), opens(t, &known, server)}
	must(t, setOverride(t, configs[0], limitOf("x", 1)))
	scripts := func() (n int) {
		t.Helper()
		for i := range 6 {
			if got := eventsOf(t, configs[i%2], "x"); got != 1 {
				t.Errorf("there are %d events", got)
			}
		}
		for line := range strings.Lines(server.Client().Info(t.Context(), "commandstats").Val()) {
			var calls int
			if _, err := fmt.Sscanf(line, "cmdstat_evalsha:calls=%d", &calls); err == nil {
				n += calls
			}
		}
		return n
	}
	before := scripts()
	if after := scripts(); after != before {
		t.Errorf("%d scripts were run after %d", after, before)
	}
	configs[1].opts.Members[0].Shard.Close(t.Context())
	_ = eventsOf(t, opens(t, &known, server), "x")
	if n := reflect.ValueOf(&known).Elem().FieldByName("of").Len(); n != 2 {
		t.Errorf("%d shards are known", n)
	}
}

// TestEndedOverridesAreBounded by the server, which says so.
func TestEndedOverridesAreBounded(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := caddysOf(t, 1, server)[0]
	const most = 10
	*hidden[int](s, "operator", "most") = most
	var err error
	for i := range 3 * most {
		if err = setOverride(t, s, limitOf(fmt.Sprint(i), 1)); err != nil {
			break
		}
		must(t, removal(t, s, limitOf(fmt.Sprint(i), 1)))
	}
	if n := server.Client().HLen(t.Context(), s.asker.Keys.Overrides()).Val(); err == nil || !strings.Contains(err.Error(), "remembers") || n > 2*most+5 {
		t.Errorf("there are %d fields, %v", n, err)
	}
	must(t, setOverride(t, s, limitOf("0", 1)))
}

// TestCopiesOfAChange are counted: shards, and replicas that have it.
func TestCopiesOfAChange(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	outcome := func(client string) store.OverrideOutcome {
		t.Helper()
		return s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: limitOf(client, 1), Expected: store.AnyVersion}})[0]
	}
	eventually(t, "a change is on the replica", func() error {
		if o := outcome("first"); o.Err != nil || o.Copies != (store.Copies{Shards: 1, OfShards: 1, Replicas: 1, OfReplicas: 1}) {
			return fmt.Errorf("%+v", o)
		}
		return nil
	})
	must(t, sh.Replicas[0].Pause())
	if o := outcome("last"); o.Err != nil || o.Copies != (store.Copies{Shards: 1, OfShards: 1, OfReplicas: 1}) {
		t.Errorf("while the replica is silent: %+v", o)
	}
}

// TestChangeWhileAShardIsAway is made by another one, and names the shard that lacks it; while all are, it is an error.
func TestChangeWhileAShardIsAway(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	for away, server := range servers {
		s := caddysOf(t, 1, servers...)[0]
		version := ""
		change := func(expected string, events int64, removes bool) store.OverrideOutcome {
			t.Helper()
			return s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: limitOf(fmt.Sprint(away), events), Expected: expected, Removes: removes}})[0]
		}
		if o := change("", 1, false); o.Err != nil || o.Warning != nil || o.Copies.Shards != 2 || o.Copies.OfShards != 2 {
			t.Errorf("while both are there: %+v", o)
		} else {
			version = o.Version
		}
		must(t, server.Kill())
		name := "shard " + string(rune('a'+away))
		second := change(version, 2, false)
		if second.Err != nil || second.Before == nil || second.Before.Events != 1 || !strings.Contains(fmt.Sprint(second.Warning), name) || second.Copies.Shards != 1 {
			t.Errorf("a change: %+v", second)
		}
		if o := change(version, 3, false); !errors.Is(o.Err, store.ErrChanged) || o.Warning != nil {
			t.Errorf("one that expects what was before: %+v", o)
		}
		if o := change(store.AnyVersion, 0, true); o.Err != nil || o.Before == nil || o.Warning == nil {
			t.Errorf("a removal: %+v", o)
		}
		must(t, server.Restart())
	}
	s := caddysOf(t, 1, servers...)[0]
	for _, server := range servers {
		must(t, server.Kill())
	}
	if err := setOverride(t, s, limitOf("x", 1)); err == nil || !strings.Contains(err.Error(), "shard a") || !strings.Contains(err.Error(), "shard b") {
		t.Errorf("while both are away: %v", err)
	}
}

// TestWritersDuringAResharding: of two that expect the same version one wins, if a shard is first in both configs'
// order, and all read what the later one has written.
func TestWritersDuringAResharding(t *testing.T) {
	t.Parallel()
	a, b := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	old := []Member{{Name: "a", Shard: a}}
	all := append(slices.Clone(old), Member{Name: "b", Shard: b})
	with := func(members, previous []Member) *Store {
		return New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: members, Previous: steps(previous)})
	}
	before, during, after := with(old, nil), with(all, old), with(all, nil)
	moved := moving(before, after, 60)
	for name, pair := range map[string][2]*Store{"before and during": {before, during}, "during twice": {during, with(all, old)}} {
		for _, client := range moved[:20] {
			var outcomes [2]store.OverrideOutcome
			var writers sync.WaitGroup
			start := make(chan bool)
			for i, s := range pair {
				o := limitOf("", int64(i+1))
				o.ClientKey = client
				writers.Go(func() {
					<-start
					outcomes[i] = s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o}})[0]
				})
			}
			close(start)
			writers.Wait()
			won := 0
			for i, outcome := range outcomes {
				switch {
				case outcome.Err == nil:
					won = won*10 + i + 1
				case !errors.Is(outcome.Err, store.ErrChanged):
					t.Fatalf("%s: %v", name, outcome.Err)
				}
			}
			if won > 10 {
				t.Errorf("%s: both win", name)
			}
			for _, s := range pair {
				set, err := s.Overrides(t.Context())
				must(t, err)
				o := set.Of(store.OverrideID{Kind: store.OverrideLimit, Zone: "api", ClientKey: client}, 0)
				if won > 0 && (o == nil || o.Events != int64(won)) {
					t.Errorf("%s: writer %d has won, and there is %+v", name, won, o)
				}
			}
		}
		moved = moved[20:]
	}
}

// TestDamagedOverridesAreReplacedAndRemoved by those who expect none; a shard that is away is another
// error.
func TestDamagedOverridesAreReplacedAndRemoved(t *testing.T) {
	t.Parallel()
	server, other := redistest.Start(t), redistest.Start(t)
	s := caddysOf(t, 1, server)[0]
	rule := store.Override{Kind: store.OverrideZone, Until: store.NoEnd, Events: 5, By: "me"}
	damage := func(value string) {
		t.Helper()
		// What is in force on no shard is not known from before.
		rule.Zone += "x"
		must(t, server.Client().HSet(t.Context(), s.asker.Keys.Overrides(), "zone:"+rule.Zone+":", value, "d", "5").Err())
		eventually(t, "it is named", func() error {
			set, err := s.Overrides(t.Context())
			if err == nil && !set.IsDamaged(rule.ID()) {
				err = errors.New("it is not")
			}
			return err
		})
	}
	for _, value := range []string{"x", strings.Repeat("\x00", 6) + "\xf0\x7f{}", strings.Repeat("\xff\xff\xff\xff\xff\xff\x3f\x43", 3) + "{}"} {
		for _, removes := range []bool{false, true} {
			rule.Since = time.Now().UnixMicro()
			damage(value)
			outcome := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: rule, Removes: removes}})[0]
			if outcome.Err != nil || outcome.WasDamaged != removes || (outcome.Before != nil) != removes {
				t.Errorf("%q, removed %v: %+v", value, removes, outcome)
			}
			set, err := s.Overrides(t.Context())
			must(t, errors.Join(err, set.Damaged()))
			if there := set.Of(rule.ID(), 0); (there == nil) != removes {
				t.Errorf("%q, removed %v: there is %+v", value, removes, there)
			}
			must(t, removal(t, s, rule))
		}
	}
	damage("x")
	s = caddysOf(t, 1, server, other)[0]
	must(t, other.Kill())
	set, err := s.Overrides(t.Context())
	if err == nil || errors.Is(err, store.ErrDamaged) || !errors.Is(set.Damaged(), store.ErrDamaged) {
		t.Errorf("a shard is away: %v, %v", err, set.Damaged())
	}
}
