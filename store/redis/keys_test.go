package redis

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestBucketKey(t *testing.T) {
	long := string(store.Shortened([]byte(strings.Repeat("x", 10_000))))
	keys := bucketKeys{prefix: "rl"}
	limit := func(zone string, window time.Duration) *store.Limit {
		return &store.Limit{Zone: zone, Algorithm: store.FixedWindow, Window: window}
	}
	calendar := func(c store.Calendar) *store.Limit {
		return &store.Limit{Zone: "api", Algorithm: store.FixedWindow, Window: c.Window(), Align: true, Calendar: c}
	}
	for _, c := range []struct {
		limit     *store.Limit
		clientKey string
		want      string
	}{
		{limit("api", time.Hour), "x7Q:203.0.113.7", "rl:2:api:fw3600s:x7Q:203.0.113.7"},
		{limit("api", 1500*time.Millisecond), "k", "rl:2:api:fw1500ms:k"},
		{limit("api", time.Millisecond+time.Microsecond), "k", "rl:2:api:fw1001us:k"},
		{limit("api", time.Second), "", "rl:2:api:fw1s:#47DEQpj8HBSa-_TImW-5JCeuQeRkm5NM"},
		{limit("api", time.Second), "a b", "rl:2:api:fw1s:#"},
		{limit("api", time.Second), "{tag}", "rl:2:api:fw1s:#"},
		{limit("api", time.Second), "#x", "rl:2:api:fw1s:#"},
		{limit("api", time.Second), "$x", "rl:2:api:fw1s:#"},
		{limit("api", time.Second), "\x00\xff", "rl:2:api:fw1s:#"},
		{limit("api", time.Second), long, "rl:2:api:fw1s:" + long},
		{calendar(store.Calendar{Unit: store.Day}), "k", "rl:2:api:fwday:k"},
		{calendar(store.Calendar{Unit: store.Week, SundayFirst: true}), "k", "rl:2:api:fwweeks:k"},
		{calendar(store.Calendar{Unit: store.Month, TimeZone: "America/Port-au-Prince"}), "k", "rl:2:api:fwmonth@America/Port-au-Prince:k"},
	} {
		got := keys.key(c.limit, c.clientKey)
		if got != c.want && (!strings.HasSuffix(c.want, "#") || !strings.HasPrefix(got, c.want) || len(got) != len(c.want)+32) {
			t.Errorf("key of %.20q is %s, want %s", c.clientKey, got, c.want)
		}
	}
	secret := bucketKeys{prefix: "rl", secret: []byte("s")}
	if got := secret.key(limit("api", time.Second), "203.0.113.7"); strings.Contains(got, "203") || !strings.HasPrefix(got, "rl:2:api:fw1s:$") {
		t.Errorf("key with a secret is %s", got)
	}
	other := bucketKeys{prefix: "rl", secret: []byte("t")}
	if secret.key(hourly, "k") == other.key(hourly, "k") {
		t.Error("two secrets give one key")
	}
}

// FuzzBucketKey looks for two different buckets with the same key, and for keys in
// which Redis Cluster would find a hash tag.
func FuzzBucketKey(f *testing.F) {
	f.Add("api", int64(1e6), "k", "login", int64(2e6), "k")
	f.Add("a.b", int64(1000), "{x}", "a", int64(1000), "b:{x}")
	f.Add("a", int64(1000), "\x00", "a", int64(1000), "")
	f.Add("a", int64(60e6), "#x", "a", int64(60e6), strings.Repeat("y", 10_000))
	f.Add("a", int64(60e6), "\xff\xfe", "a", int64(60e6), "\xff")
	f.Add("a", int64(60e6), "b:fw60s:c", "a:b", int64(60e6), "c")
	keys, secret := bucketKeys{prefix: "rl"}, bucketKeys{prefix: "rl", secret: []byte("secret")}
	f.Fuzz(func(t *testing.T, zone1 string, window1 int64, key1, zone2 string, window2 int64, key2 string) {
		if !isZoneName(zone1) || !isZoneName(zone2) || window1 < 1 || window2 < 1 || window1 > 1<<50 || window2 > 1<<50 {
			return
		}
		one := &store.Limit{Zone: zone1, Algorithm: store.FixedWindow, Window: time.Duration(window1) * time.Microsecond}
		two := &store.Limit{Zone: zone2, Algorithm: store.FixedWindow, Window: time.Duration(window2) * time.Microsecond}
		same := *one == *two && key1 == key2
		key1, key2 = string(store.Shortened([]byte(key1))), string(store.Shortened([]byte(key2)))
		for _, k := range []bucketKeys{keys, secret} {
			a, b := k.key(one, key1), k.key(two, key2)
			if (a == b) != same {
				t.Fatalf("buckets %v %q and %v %q have keys %q and %q", *one, key1, *two, key2, a, b)
			}
			if strings.ContainsAny(a, "{}\x00\n ") || len(a) > 200+len(zone1) {
				t.Fatalf("key %q of %q is not plain", a, key1)
			}
		}
	})
}

func isZoneName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") == ""
}

// TestSlotMatchesRedis for all kinds of keys.
func TestSlotMatchesRedis(t *testing.T) {
	server := redistest.Start(t, redistest.Args("--cluster-enabled", "yes"))
	for _, keys := range []bucketKeys{
		{prefix: "rl", tagged: true},
		{prefix: "rl", secret: []byte("secret"), tagged: true},
	} {
		for i, client := range []string{"10.0.0.1", "a{b}c", "", fmt.Sprintf("%064d", 1), "2001:db8::/64"} {
			key := keys.key(hourly, client)
			want, err := server.Client().ClusterKeySlot(t.Context(), key).Result()
			must(t, err)
			if got := keys.slot(client); int64(got) != want {
				t.Errorf("slot of %s is %d, want %d", key, got, want)
			}
			other := store.Limit{Zone: fmt.Sprint("zone", i), Algorithm: store.GCRA, Window: hourly.Window}
			if second, err := server.Client().ClusterKeySlot(t.Context(), keys.key(&other, client)).Result(); err != nil || second != want {
				t.Errorf("the buckets of %q are in slots %d and %d, %v", client, want, second, err)
			}
		}
	}
}

func names(n int) (names []string, weights []int) {
	for i := range n {
		names = append(names, fmt.Sprintf("shard-%c", 'a'+i))
		weights = append(weights, 1)
	}
	return names, weights
}

func membersOf(names []string, weights []int) (members []Member) {
	for i, name := range names {
		members = append(members, Member{Name: name, Weight: weights[i]})
	}
	return members
}

func TestAddingAShardMovesOnlyItsShare(t *testing.T) {
	const keys = 100_000
	for n := 2; n <= 8; n++ {
		old := newRendezvous(membersOf(names(n - 1)))
		now := newRendezvous(membersOf(names(n)))
		moved := 0
		for i := range keys {
			key := fmt.Sprintf("x7Q:client-%d", i)
			was, is := old.owner(key), now.owner(key)
			if was != is {
				moved++
				if is != n-1 {
					t.Fatalf("%s moved from shard %d to shard %d, although both are old", key, was, is)
				}
			}
		}
		if share := float64(moved) / keys; share > 1/float64(n)+0.02 || share < 1/float64(n)-0.02 {
			t.Errorf("shard %d took %.3f of the keys, want %.3f", n, share, 1/float64(n))
		}
	}
}

func TestWeightsHold(t *testing.T) {
	const keys = 100_000
	weights := []int{1, 2, 5}
	shards, _ := names(len(weights))
	r := newRendezvous(membersOf(shards, weights))
	counts := make([]int, len(weights))
	for i := range keys {
		counts[r.owner(fmt.Sprintf("x7Q:client-%d", i))]++
	}
	for i, w := range weights {
		want, got := float64(w)/8, float64(counts[i])/keys
		if math.Abs(got-want) > 0.02 {
			t.Errorf("shard of weight %d has %.3f of the keys, want %.3f", w, got, want)
		}
	}
}

func TestOwnerDependsOnNamesOnly(t *testing.T) {
	shards, weights := names(4)
	r := newRendezvous(membersOf(shards, weights))
	reversed := slices.Clone(shards)
	slices.Reverse(reversed)
	other := newRendezvous(membersOf(reversed, weights))
	doubled := newRendezvous(membersOf(shards, []int{2, 2, 2, 2}))
	heavy := &rendezvous{seeds: r.seeds, weights: r.weights}
	for i := range 10_000 {
		key := fmt.Sprintf("client-%d", i)
		want := shards[r.owner(key)]
		if got := reversed[other.owner(key)]; got != want {
			t.Fatalf("%s belongs to %s, and to %s in another order", key, want, got)
		}
		if got := shards[doubled.owner(key)]; got != want {
			t.Fatalf("%s belongs to %s, and to %s with all weights doubled", key, want, got)
		}
		if got := shards[heavy.owner(key)]; got != want {
			t.Fatalf("%s belongs to %s, and to %s by the formula for unequal weights", key, want, got)
		}
	}
}
