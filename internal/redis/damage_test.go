package redis

import (
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// instant is one as the hash has it.
func instant(millis float64) string {
	return string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(millis)))
}

func inAnHour() float64 { return float64(time.Now().Add(time.Hour).UnixMilli()) }

// TestDamagedOverrides are skipped one by one, named, and removed like others.
func TestDamagedOverrides(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	must(t, setOverride(t, s, block("api", "tag:good", time.Now().Add(time.Hour))))
	key := s.asker.Keys.Overrides()
	// value has a version, an end, and an instant until which it is remembered.
	value := func(version, ends, keep float64, content string) string {
		return instant(version) + instant(ends) + instant(keep) + content
	}
	hour := inAnHour()
	sound := func(content string) string { return value(7, hour, hour, content) }
	const forged = `block:api:tag:else{"kind":"block","zone":"api","client_key":"tag:else","since":1,"until":9007199254740991}`
	grant := func(events string) string {
		return sound(`{"kind":"grant","zone":"api","client_key":"tag:x","since":1,"until":2,"events":` + events + `}`)
	}
	damaged := map[string]string{
		"block:api:tag:short": "x", "block:api:tag:bare": `{"kind":"block","zone":"api","client_key":"tag:bare","since":1,"until":2}`,
		"block:api:tag:small": value(7, hour, 999_999_999_999, "{}"), "block:api:tag:part": value(7.5, hour, hour, "{}"), "block:api:tag:below": value(0, hour, hour, "{}"), "block:api:tag:above": value(1<<52+1, hour, hour, "{}"),
		"block:api:tag:lines": sound("{\"kind\":\"block\",\n5 -3 x"), "block:api:tag:alias": sound(strings.TrimPrefix(forged, "block:api:tag:else")), "block:api:tag:forged": sound("\n3599000 18 93 " + forged),
		"block:api:tag:nan": value(7, math.NaN(), hour, "{}"), "block:api:tag:inf": value(7, hour, math.Inf(1), "{}"), "block:api:tag:far": value(7, 1e19, hour, "{}"), "block:api:tag:junk": sound("{not json"), "block:api:tag:other": sound(`{"kind":"bless"}`),
		"grant:api:tag:-6": grant("-6"), "grant:api:tag:0": grant("0"), "grant:api:tag:most": grant("9223372036854775807"), "grant:api:tag:huge": grant("1e30"),
	}
	for name, value := range damaged {
		must(t, server.Client().HSet(t.Context(), key, name, value).Err())
	}
	reader := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	all, err := listed(t, reader)
	if len(all) != 1 || all[0].ClientKey != "tag:good" || !errors.Is(err, store.ErrDamaged) || strings.Count(err.Error(), "damaged") != len(damaged) {
		t.Errorf("got %+v, %v", all, err)
	}
	// Others can still be written.
	must(t, setOverride(t, s, block("api", "tag:later", time.Now().Add(time.Hour))))
	removes(t, s, store.OverrideBlock, "api", "tag:later", true)
	for name := range damaged {
		kind, clientKey, _ := strings.Cut(name, ":api:")
		removes(t, reader, store.OverrideKind(kind), "api", clientKey, true)
	}
	sameKeys(t, "mended", overridden(t, reader), "tag:good")
	if shown, err := s.Audit(t.Context()); err != nil || len(shown) != len(damaged)+3 {
		t.Errorf("the audit has %d changes, want %d, %v", len(shown), len(damaged)+3, err)
	}
	removes(t, reader, store.OverrideBlock, "api", "tag:good", true)
	sameKeys(t, "in the end", overridden(t, reader))
}

// TestOverridesWithDamagedNumbers hold for all who read them, others can be set and ended, and none ends
// because the hash expires.
func TestOverridesWithDamagedNumbers(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client()
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	s := newStore(t, shard, nil)
	hash, log := s.asker.Keys.Overrides(), s.asker.Keys.OverrideLog()
	field := func(name, value string) func() error {
		return func() error { return client.HSet(t.Context(), hash, name, value).Err() }
	}
	without := func(names ...string) func() error {
		return func() error { return client.HDel(t.Context(), hash, names...).Err() }
	}
	change := func(score float64, text string) func() error {
		return func() error {
			return client.ZAdd(t.Context(), log, goredis.Z{Score: score, Member: text}).Err()
		}
	}
	for name, damage := range map[string]func() error{
		"no version":                   without("v"),
		"no sum":                       without("d"),
		"a sum that is none":           field("d", "x"),
		"another sum":                  field("d", "5"),
		"nothing of its own but a sum": without("v", "x", "s"),
		"a version that is huge":       field("v", "99999999999999999999"),
		"the largest version":          field("v", "9007199254740991"),
		"a version beyond all numbers": field("v", "inf"),
		"a version that is no number":  field("v", "nan"),
		"a version of lines":           field("v", "5\n- 12 0 block:api:tag"),
		"a change with such a number":  change(math.Inf(1), "99"),
		"the largest change":           change(1<<53-1, "largest"),
		"the largest believed one":     change(1<<52, "believed"),
		"two that are next":            func() error { return errors.Join(change(1<<52, "believed")(), change(1<<52+1, "largest")()) },
		"a change that is none":        change(float64(time.Now().Add(time.Hour).UnixMicro()), "junk"),
		"an end that is huge":          field("x", "1e300"),
		"an end that is no number":     field("x", "nan"),
		"an end before all":            field("x", "-1e300"),
		"no end":                       without("x"),
		"an instant that is none":      field("s", "junk"),
		"an instant beyond all":        field("s", "9007199254740993"),
	} {
		must(t, client.FlushAll(t.Context()).Err())
		// Another Caddy has read them before.
		other := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
		must(t, setOverride(t, s, block("api", "tag:good", time.Now().Add(time.Hour))))
		sameKeys(t, name+", before", overridden(t, other), "tag:good")
		must(t, damage())
		for _, reader := range []*Store{s, other, newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)} {
			sameKeys(t, name, overridden(t, reader), "tag:good")
		}
		for range 2 {
			must(t, setOverride(t, s, block("api", "tag:later", time.Now().Add(time.Minute))))
			sameKeys(t, name+", with another", overridden(t, other), "tag:good", "tag:later")
			removes(t, s, store.OverrideBlock, "api", "tag:later", true)
			sameKeys(t, name+", after its end", overridden(t, other), "tag:good")
		}
		if left := client.PTTL(t.Context(), hash).Val(); left < 59*time.Minute {
			t.Errorf("%s: the hash expires in %v", name, left)
		}
		removes(t, other, store.OverrideBlock, "api", "tag:good", true)
		sameKeys(t, name+", in the end", overridden(t, s))
	}
}
