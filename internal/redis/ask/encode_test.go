package ask

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestBucketKey(t *testing.T) {
	long := string(store.Shortened([]byte(strings.Repeat("x", 10_000))))
	keys := Keys{Prefix: "rl"}
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
		{limit("api", time.Hour), "x7Q:203.0.113.7", "rl:3:api:fw3600s:x7Q:203.0.113.7"},
		{limit("api", 1500*time.Millisecond), "k", "rl:3:api:fw1500ms:k"},
		{limit("api", time.Millisecond+time.Microsecond), "k", "rl:3:api:fw1001us:k"},
		{limit("api", time.Second), "", "rl:3:api:fw1s:#47DEQpj8HBSa-_TImW-5JCeuQeRkm5NM"},
		{limit("api", time.Second), "a b", "rl:3:api:fw1s:#"},
		{limit("api", time.Second), "{tag}", "rl:3:api:fw1s:#"},
		{limit("api", time.Second), "#x", "rl:3:api:fw1s:#"},
		{limit("api", time.Second), "$x", "rl:3:api:fw1s:#"},
		{limit("api", time.Second), "\x00\xff", "rl:3:api:fw1s:#"},
		{limit("api", time.Second), long, "rl:3:api:fw1s:" + long},
		{calendar(store.Calendar{Unit: store.Day}), "k", "rl:3:api:fwday:k"},
		{calendar(store.Calendar{Unit: store.Week, SundayFirst: true}), "k", "rl:3:api:fwweeks:k"},
		{calendar(store.Calendar{Unit: store.Month, TimeZone: "America/Port-au-Prince"}), "k", "rl:3:api:fwmonth@America/Port-au-Prince:k"},
	} {
		got := keys.Key(c.limit, c.clientKey)
		if got != c.want && (!strings.HasSuffix(c.want, "#") || !strings.HasPrefix(got, c.want) || len(got) != len(c.want)+32) {
			t.Errorf("key of %.20q is %s, want %s", c.clientKey, got, c.want)
		}
	}
	secret := Keys{Prefix: "rl", Secret: []byte("s")}
	if got := secret.Key(limit("api", time.Second), "203.0.113.7"); strings.Contains(got, "203") || !strings.HasPrefix(got, "rl:3:api:fw1s:$") {
		t.Errorf("key with a secret is %s", got)
	}
	other := Keys{Prefix: "rl", Secret: []byte("t")}
	if secret.Key(hourly, "k") == other.Key(hourly, "k") {
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
	keys, secret := Keys{Prefix: "rl"}, Keys{Prefix: "rl", Secret: []byte("secret")}
	f.Fuzz(func(t *testing.T, zone1 string, window1 int64, key1, zone2 string, window2 int64, key2 string) {
		if !isZoneName(zone1) || !isZoneName(zone2) || window1 < 1 || window2 < 1 || window1 > 1<<50 || window2 > 1<<50 {
			return
		}
		one := &store.Limit{Zone: zone1, Algorithm: store.FixedWindow, Window: time.Duration(window1) * time.Microsecond}
		two := &store.Limit{Zone: zone2, Algorithm: store.FixedWindow, Window: time.Duration(window2) * time.Microsecond}
		same := *one == *two && key1 == key2
		key1, key2 = string(store.Shortened([]byte(key1))), string(store.Shortened([]byte(key2)))
		for _, k := range []Keys{keys, secret} {
			a, b := k.Key(one, key1), k.Key(two, key2)
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
	for _, keys := range []Keys{
		{Prefix: "rl", Tagged: true},
		{Prefix: "rl", Secret: []byte("secret"), Tagged: true},
	} {
		for i, client := range []string{"10.0.0.1", "a{b}c", "", fmt.Sprintf("%064d", 1), "2001:db8::/64"} {
			key := keys.Key(hourly, client)
			want, err := server.Client().ClusterKeySlot(t.Context(), key).Result()
			redistest.Must(t, err)
			if got := keys.slot(client); int64(got) != want {
				t.Errorf("slot of %s is %d, want %d", key, got, want)
			}
			other := store.Limit{Zone: fmt.Sprint("zone", i), Algorithm: store.GCRA, Window: hourly.Window}
			if second, err := server.Client().ClusterKeySlot(t.Context(), keys.Key(&other, client)).Result(); err != nil || second != want {
				t.Errorf("the buckets of %q are in slots %d and %d, %v", client, want, second, err)
			}
		}
	}
}

// TestEndOfAHoldMayRunTwice: it is repeated if its reply is lost, and a refund is not, which would give back twice.
func TestEndOfAHoldMayRunTwice(t *testing.T) {
	for cost, want := range map[int64]bool{0: true, 1: false} {
		call, r := new(wire.ScriptCall), store.Request{Limit: hourly, ClientKey: "k", Events: 10, Cost: cost, Hold: 7}
		if (Op{Operation: algorithm.Refund}).Command(Keys{Prefix: "rl"}, &r, call); call.Reads != want {
			t.Errorf("a refund of %d may run twice: %t", cost, call.Reads)
		}
	}
}

// TestEndThatIsGivenNeedsAScript: without one the window would end later than that of the client's other owner.
func TestEndThatIsGivenNeedsAScript(t *testing.T) {
	r := store.Request{Limit: hourly, ClientKey: "k", Events: 10, Cost: 1}
	if !CanOpen(&r, time.Second) {
		t.Error("a window that begins when it is opened needs a script")
	}
	if r.Ends = -time.Minute.Microseconds(); CanOpen(&r, time.Second) {
		t.Error("a window whose end is given needs none")
	}
}
