package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestRecords by the contract, with the server's clock.
func TestRecords(t *testing.T) {
	server, other := redistest.Start(t), redistest.Start(t)
	cluster := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
	for name, members := range map[string]func(t *testing.T) []Member{
		"Two": func(t *testing.T) []Member {
			return []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}, {Name: "b", Shard: newShard(t, ShardOptions{Primary: other.Addr()})}}
		},
		"Plain": func(t *testing.T) []Member {
			return []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: true})}}
		},
		"Cluster": func(t *testing.T) []Member {
			return []Member{{Name: "c", Shard: newShard(t, ShardOptions{Cluster: cluster.Addrs()})}}
		},
	} {
		for _, secret := range []string{"", "secret"} {
			t.Run(name+secret, func(t *testing.T) {
				storetest.RunRecords(t, func(t *testing.T, _ *storetest.Clock) store.Records {
					return New(Options{Members: members(t), KeyPrefix: "rl" + secret, KeySecret: []byte(secret), CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
				})
			})
		}
	}
}

// record returns one of that ID, which lasts.
func record(id, value string) store.Record {
	return store.Record{ID: id, Value: value, Left: time.Hour}
}

// TestRecordsAreBoundedAndExpire: their bytes are counted, and the keys go if nobody deals with them.
func TestRecordsAreBoundedAndExpire(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	hash, due := s.asker.Keys.Records(), s.asker.Keys.RecordsDue()
	client := server.Client()
	bytes := func() (n int64) {
		n, _ = client.HGet(t.Context(), hash, "").Int64()
		return n
	}
	one, err := s.PutRecord(t.Context(), record("one", "value"))
	must(t, err)
	if n := bytes(); n != int64(len("one")+len("value")+150) {
		t.Errorf("one takes %d bytes", n)
	}
	one, err = s.PutRecord(t.Context(), store.Record{ID: "one", Value: "longer value", Version: one.Version})
	must(t, err)
	_, err = s.PutRecord(t.Context(), record("two", "value"))
	must(t, err)
	if n := bytes(); n != int64(len("one")+len("longer value")+len("two")+len("value")+300) {
		t.Errorf("two take %d bytes", n)
	}
	for _, key := range []string{hash, due} {
		if ttl := client.PTTL(t.Context(), key).Val(); ttl < store.MaxRecordLeft || ttl > 2*time.Hour {
			t.Errorf("%s lasts %s", key, ttl)
		}
	}
	must(t, client.HIncrBy(t.Context(), hash, "", store.MaxRecords-bytes()-200).Err())
	if _, err := s.PutRecord(t.Context(), record("three", strings.Repeat("x", 100))); !errors.Is(err, store.ErrRecordsFull) || !strings.Contains(fmt.Sprint(err), "shard a") {
		t.Errorf("a third: %v", err)
	}
	if _, err = s.PutRecord(t.Context(), store.Record{ID: "one", Version: one.Version}); err != nil {
		t.Errorf("a removal: %v", err)
	}
	if _, err := s.PutRecord(t.Context(), record("three", strings.Repeat("x", 100))); err != nil {
		t.Errorf("a third after a removal: %v", err)
	}
	// The server's clock was ahead when it was put.
	name := s.asker.Keys.Client("three")
	must(t, client.ZAdd(t.Context(), due, goredis.Z{Member: name, Score: float64(time.Now().Add(3 * time.Hour).UnixMilli())}).Err())
	if r, err := s.Record(t.Context(), "three"); err != nil || r.Left > store.MaxRecordLeft {
		t.Errorf("it is due in %s, %v", r.Left, err)
	}
	if all, err := s.DueRecords(t.Context(), 10); err != nil || len(all) != 1 || all[0].ID != name {
		t.Errorf("due are %+v, %v", all, err)
	}
	// The server may evict one key by itself.
	must(t, client.Del(t.Context(), due).Err())
	if _, err := s.PutRecord(t.Context(), record("two", "again")); err != nil {
		t.Errorf("after the eviction of the set: %v", err)
	}
	if n := bytes(); n != int64(len("two")+len("again")+150) {
		t.Errorf("after the eviction they take %d bytes", n)
	}
	must(t, client.Del(t.Context(), hash).Err())
	if r, err := s.Record(t.Context(), "two"); err != nil || r.Version != "" {
		t.Errorf("after the eviction of the hash: %+v, %v", r, err)
	}
	must(t, client.ZAdd(t.Context(), due, goredis.Z{Member: "two"}).Err())
	if all, err := s.DueRecords(t.Context(), 10); err != nil || len(all) > 0 {
		t.Errorf("due are %+v, %v", all, err)
	}
	if n := client.ZCard(t.Context(), due).Val(); n != 0 {
		t.Errorf("%d names stay", n)
	}
}

// TestRecordsLeaveRoom: those with a common first line take at most three times the room that is left, whatever programs
// that know no such shares have removed.
func TestRecordsLeaveRoom(t *testing.T) {
	for _, secret := range []string{"", "secret"} {
		server := redistest.Start(t)
		s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.KeySecret = []byte(secret) })
		hash, client := s.asker.Keys.Records(), server.Client()
		bytes := func(field string) (n int64) {
			n, _ = client.HGet(t.Context(), hash, field).Int64()
			return n
		}
		put := func(id, version, value string) (store.Record, error) {
			r := record(id, value)
			r.Version = version
			return s.PutRecord(t.Context(), r)
		}
		value := strings.Repeat("x", 1000)
		one, err := put("a\none", "", value)
		must(t, err)
		_, err = put("b\none", "", value)
		must(t, err)
		if all, own := bytes(""), bytes("\na"); own == 0 || own != bytes("\nb") || all != 2*own {
			t.Errorf("all take %d, a %d", all, own)
		}
		size := bytes("\na")
		// Once another one is there, there is room for two more.
		must(t, client.HIncrBy(t.Context(), hash, "", store.MaxRecords-3*size-bytes("")).Err())
		must(t, client.HSet(t.Context(), hash, "\na", 5*size+1).Err())
		must(t, client.HSet(t.Context(), hash, "\nb", 5*size).Err())
		for id, isFull := range map[string]bool{"a\ntwo": true, "b\ntwo": false, "c\ntwo": false, "alone": false} {
			r, err := put(id, "", value)
			if errors.Is(err, store.ErrRecordsFull) != isFull {
				t.Errorf("%q: %v", id, err)
			}
			if err == nil {
				_, err = put(id, r.Version, "")
				must(t, err)
			}
		}
		must(t, client.HSet(t.Context(), hash, "", 2*size).Err())
		must(t, client.HSet(t.Context(), hash, "\na", 9*size).Err())
		if one, err = put("a\none", one.Version, value+"y"); err != nil || bytes("\na") > bytes("") {
			t.Errorf("a takes %d of %d, %v", bytes("\na"), bytes(""), err)
		}
		due, err := put("a\ndue", "", value)
		must(t, err)
		_, err = s.PutRecord(t.Context(), store.Record{ID: due.ID, Version: due.Version, Value: value + "z"})
		must(t, err)
		all, err := s.DueRecords(t.Context(), 10)
		must(t, err)
		if len(all) != 1 || all[0].Value != value+"z" {
			t.Fatalf("due are %+v", all)
		}
		before := bytes("\na")
		all[0].Value = ""
		_, err = s.PutRecord(t.Context(), all[0])
		must(t, err)
		if bytes("\na") >= before {
			t.Errorf("a takes %d, and before %d", bytes("\na"), before)
		}
		must(t, client.HSet(t.Context(), hash, "\na", 1).Err())
		if _, err := put("a\none", one.Version, ""); err != nil || client.HExists(t.Context(), hash, "\na").Val() {
			t.Errorf("a share of nothing stays: %v", err)
		}
	}
}

// TestRecordsUnderASecret: the server sees neither IDs nor values, and another secret reads nothing.
func TestRecordsUnderASecret(t *testing.T) {
	server := redistest.Start(t)
	open := func(secret string) *Store {
		return newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.KeySecret = []byte(secret) })
	}
	s := open("secret")
	r := record("alice's request", `{"key": "alice"}`)
	r.Left = 0
	_, err := s.PutRecord(t.Context(), r)
	must(t, err)
	all := server.Client().HGetAll(t.Context(), s.asker.Keys.Records()).Val()
	if len(all) != 2 || strings.Contains(fmt.Sprint(all), "alice") {
		t.Errorf("the server has %q", all)
	}
	if due, err := open("other").DueRecords(t.Context(), 10); err != nil || len(due) != 1 || due[0].Value != "" || due[0].Version == "" {
		t.Errorf("under another secret: %+v, %v", due, err)
	}
	if r, err := s.Record(t.Context(), r.ID); err != nil || r.Value != `{"key": "alice"}` {
		t.Errorf("it is %+v, %v", r, err)
	}
	// Whoever has another one can remove it, as can who has none, and who has one what was put without.
	for _, secrets := range [][2]string{{"secret", "other"}, {"secret", ""}, {"", "secret"}} {
		must(t, server.Client().FlushAll(t.Context()).Err())
		_, err := open(secrets[0]).PutRecord(t.Context(), r)
		must(t, err)
		with := open(secrets[1])
		due, err := with.DueRecords(t.Context(), 10)
		must(t, err)
		due[0].Value = ""
		if _, err := with.PutRecord(t.Context(), due[0]); err != nil {
			t.Errorf("%q: %v", secrets, err)
		}
		if n := server.Client().ZCard(t.Context(), s.asker.Keys.RecordsDue()).Val(); n != 0 {
			t.Errorf("%q: %d stay", secrets, n)
		}
	}
}

// TestRecordsWhileShardsAreAdded stay where Caddys with the config before look for them.
func TestRecordsWhileShardsAreAdded(t *testing.T) {
	shards := []*Shard{newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})}
	one, two := []Member{{Name: "a", Shard: shards[0]}}, []Member{{Name: "a", Shard: shards[0]}, {Name: "b", Shard: shards[1]}}
	before := New(Options{Members: one, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
	now := New(Options{Members: two, Previous: steps(one), CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
	for i := range 20 {
		id := fmt.Sprint("request", i)
		r, err := before.PutRecord(t.Context(), record(id, "first"))
		must(t, err)
		r, err = now.PutRecord(t.Context(), store.Record{ID: id, Version: r.Version, Value: "second", Left: time.Hour})
		must(t, err)
		if again, err := before.Record(t.Context(), id); err != nil || again.Version != r.Version || again.Value != "second" {
			t.Errorf("%s is %+v, %v", id, again, err)
		}
	}
	// Later they are made where Caddys with the config after look, and found by all that have both.
	later := New(Options{
		Members: two, Previous: steps(one), CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout,
		Now: sometime(time.Now(), time.Now().Add(recordsStay)),
	})
	for i := range 20 {
		id := fmt.Sprint("late request", i)
		r, err := later.PutRecord(t.Context(), record(id, "first"))
		must(t, err)
		if again, err := now.PutRecord(t.Context(), record(id, "another")); !errors.Is(err, store.ErrChanged) || again.Version != r.Version {
			t.Errorf("%s is made again: %+v, %v", id, again, err)
		}
		there, err := now.Record(t.Context(), id)
		must(t, err)
		there.Value = "second"
		_, err = now.PutRecord(t.Context(), there)
		must(t, err)
		if is, err := New(Options{Members: two, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout}).Record(t.Context(), id); err != nil || is.Value != "second" {
			t.Errorf("%s in the end: %+v, %v", id, is, err)
		}
		early, err := later.Record(t.Context(), fmt.Sprint("request", i))
		must(t, err)
		early.Value = "third"
		_, err = later.PutRecord(t.Context(), early)
		must(t, err)
		if is, err := before.Record(t.Context(), fmt.Sprint("request", i)); err != nil || is.Value != "third" {
			t.Errorf("an early one is %+v, %v", is, err)
		}
	}
	// Those of a shard that owns an ID no more are found and dealt with there.
	after := New(Options{Members: two, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
	r := record("last", "last")
	for i := 0; after.Owner(r.ID) == "a"; i++ {
		r.ID = fmt.Sprint("last", i)
	}
	r.Left = 0
	_, err := before.PutRecord(t.Context(), r)
	must(t, err)
	due, err := after.DueRecords(t.Context(), 10)
	must(t, err)
	if len(due) != 1 || due[0].Shard != "a" {
		t.Fatalf("due are %+v", due)
	}
	due[0].Value = ""
	if _, err = after.PutRecord(t.Context(), due[0]); err != nil {
		t.Error(err)
	}
	if r, err := before.Record(t.Context(), r.ID); err != nil || r.Version != "" {
		t.Errorf("it is %+v, %v", r, err)
	}
	due[0].Shard = "gone"
	if _, err = after.PutRecord(t.Context(), due[0]); !errors.Is(err, store.ErrFinal) {
		t.Errorf("at a shard that is gone: %v", err)
	}
}

// TestRecordsOverSeveralSteps are found wherever one has left them, and not made again.
func TestRecordsOverSeveralSteps(t *testing.T) {
	r := newResharding(t)
	before := r.store(r.members[:1], nil)
	now := New(Options{
		Members: r.members[2:], Previous: [][]Member{r.members[1:2], r.members[:1]}, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout,
	})
	made, err := before.PutRecord(t.Context(), record("one", "first"))
	must(t, err)
	if again, err := now.PutRecord(t.Context(), record("one", "another")); !errors.Is(err, store.ErrChanged) || again.Version != made.Version {
		t.Errorf("it is made again: %+v, %v", again, err)
	}
	is, err := now.Record(t.Context(), "one")
	must(t, err)
	is.Value = "second"
	_, err = now.PutRecord(t.Context(), is)
	must(t, err)
	if is, err = before.Record(t.Context(), "one"); err != nil || is.Value != "second" {
		t.Errorf("it is %+v, %v", is, err)
	}
}

// sometime returns a clock that shows one time first, and then another.
func sometime(first, then time.Time) func() time.Time {
	return func() time.Time {
		now := first
		first = then
		return now
	}
}

// TestRightsForRecords are the documented ones. Without the further one a record stays as it is.
func TestRightsForRecords(t *testing.T) {
	server := undone(t, redistest.Start(t))
	set := func(words ...any) {
		t.Helper()
		must(t, server.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, words...)...).Err())
	}
	set("reset", "on", ">secret")
	for _, word := range documentedRule(t) {
		set(word)
	}
	set("-hdel")
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("limiter", "secret")}), nil)
	r, err := s.PutRecord(t.Context(), store.Record{ID: "one", Value: "value"})
	must(t, err)
	due, err := s.DueRecords(t.Context(), 1)
	must(t, err)
	if len(due) != 1 {
		t.Errorf("due are %+v", due)
	}
	if _, err := s.PutRecord(t.Context(), store.Record{ID: "one", Version: r.Version}); !errors.Is(err, store.ErrFinal) {
		t.Errorf("a removal without the right: %v", err)
	}
	if r, err := s.Record(t.Context(), "one"); err != nil || r.Value != "value" || r.Left <= 0 {
		t.Errorf("it is %+v, %v", r, err)
	}
	set("+hdel")
	_, err = s.PutRecord(t.Context(), store.Record{ID: "one", Version: r.Version})
	must(t, err)
}
