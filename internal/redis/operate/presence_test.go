package operate

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// after returns the members once a beat was added.
func (b *beat) after(members []string) (now []string) {
	for pair := range slices.Chunk(members, 2) {
		if !slices.Contains(b.removed, any(pair[0])) {
			now = append(now, pair...)
		}
	}
	return append(now, b.kept[len(b.kept)-1].text, strconv.FormatInt(b.number, 10))
}

// TestTooManyProcesses: those stay that told of themselves last, whatever their beats.
func TestTooManyProcesses(t *testing.T) {
	var members []string
	tell := func(id string, n int64) []member {
		b := beatAfter(members, &store.Presence{ID: id, Beat: n}, nil)
		members = b.after(members)
		return b.kept
	}
	tell("ahead", 1<<50)
	for i := range store.MaxPresent {
		tell(fmt.Sprint(i), int64(store.MaxPresent-i))
	}
	tell("5", 1000)
	present := tell("last", 1)
	if b := beatAfter(members, &store.Presence{ID: "last", Beat: 2}, nil); !b.isFull() || (&beat{kept: b.kept[:2]}).isFull() {
		t.Error("a shard is full otherwise")
	}
	if n := len(present); n != store.MaxPresent || len(members) != 2*n || present[0].ID != "1" || present[n-2].ID != "5" || present[n-1].ID != "last" {
		t.Errorf("there are %d, from %s to %s, and %d texts", n, present[0].ID, present[n-1].ID, len(members))
	}
}

// TestLargePresences: those stay that told of themselves last, within a number of bytes.
func TestLargePresences(t *testing.T) {
	var members []string
	var present []member
	const told = 30
	for i := range told {
		b := beatAfter(members, &store.Presence{ID: fmt.Sprint(i), Process: strings.Repeat("x", maxPresenceBytes/20)}, nil)
		members, present = b.after(members), b.kept
		bytes := 0
		for pair := range slices.Chunk(members, 2) {
			bytes += len(pair[0])
		}
		if bytes > maxPresenceBytes {
			t.Fatalf("there are %d bytes", bytes)
		}
	}
	if !(&beat{kept: present}).isFull() {
		t.Error("a shard without room is not full")
	}
	if n := len(present); n < 5 || present[n-1].ID != fmt.Sprint(told-1) {
		t.Errorf("there are %d, the last is %s", n, present[n-1].ID)
	}
	b := beatAfter(members, &store.Presence{ID: "large", Process: strings.Repeat("x", maxPresenceBytes)}, nil)
	if len(b.kept) != 1 || b.kept[0].ID != "large" {
		t.Errorf("there are %d beside a large one", len(b.kept)-1)
	}
}

// TestPartsOfConfigs are kept once for each content, as long as a process has it, and are none where another program
// has written there. They may be those of ten thousand zones.
func TestPartsOfConfigs(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := newOperator(t, wire.Options{Primary: server.Addr()}, nil)
	ctx, client := t.Context(), server.Client()
	zones := store.Details{}
	for i := range 10000 {
		zones[fmt.Sprint("zone-", i)] = "a digest of a zone"
	}
	digest, texts := store.DigestOf(zones.Text()), 0
	text := func(store.Part) []byte { texts++; return zones.Text() }
	mine := store.Presence{ID: "a", Digests: map[store.Part]string{store.PartZones: digest}}
	details := func() store.Details {
		t.Helper()
		found, err := p.Details(ctx, "a", digest)
		must(t, err)
		return found
	}
	if details() != nil {
		t.Error("there are some before any process has told of itself")
	}
	announce := func(wantTexts int) {
		t.Helper()
		mine.Beat++
		met, err := p.Announce(ctx, mine, text, nil)
		must(t, err)
		if len(met) != 1 || met[0].Digests[store.PartZones] != digest || len(details()) != len(zones) || texts != wantTexts {
			t.Errorf("there are %d processes, %d zones of %d, after %d texts", len(met), len(details()), len(zones), texts)
		}
	}
	announce(1)
	announce(1)
	key := p.asker.Keys.Details(digest)
	if left, err := client.PTTL(ctx, key).Result(); err != nil || left <= 0 || left > detailsLast {
		t.Errorf("it is kept for %v, %v", left, err)
	}
	must(t, client.Del(ctx, key).Err())
	announce(2)
	for _, other := range []string{`{"zone-1": "other"}`, strings.Repeat("x", 20<<20)} {
		must(t, client.Set(ctx, key, other, 0).Err())
		if found := details(); found == nil || len(found) != 0 {
			t.Errorf("%d of %d bytes that another program wrote are believed", len(found), len(other))
		}
	}
	// A zone may have been added since the digest was made, and there may be more zones than others read.
	large := store.Details{"zone": strings.Repeat("x", maxDetails)}
	for digest, zones := range map[string]store.Details{digest: {"zone": "another"}, store.DigestOf(large.Text()): large} {
		mine.Digests[store.PartZones] = digest
		must(t, client.Del(ctx, key).Err())
		_, err := p.Announce(ctx, mine, func(store.Part) []byte { return zones.Text() }, nil)
		must(t, err)
		if n, err := client.Exists(ctx, p.asker.Keys.Details(digest)).Result(); err != nil || n != 0 {
			t.Errorf("zones with %d bytes are kept: %v", len(zones["zone"]), err)
		}
	}
}

// TestPartsOfConfigsInACluster are at the nodes that have their slots.
func TestPartsOfConfigsInACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 0)
	p := newOperator(t, wire.Options{Cluster: cluster.Addrs()[:1]}, nil)
	digests, parts := map[store.Part]string{}, map[store.Part]store.Details{}
	for i := range 4 {
		part := store.Part(fmt.Sprint(i))
		parts[part] = store.Details{"a": fmt.Sprint(i)}
		digests[part] = store.DigestOf(parts[part].Text())
	}
	text := func(part store.Part) []byte { return parts[part].Text() }
	met, err := p.Announce(t.Context(), store.Presence{ID: "a", Digests: digests, Beat: 1}, text, nil)
	must(t, err)
	for part, digest := range met[0].Digests {
		details, err := p.Details(t.Context(), "a", digest)
		must(t, err)
		if !maps.Equal(details, parts[part]) {
			t.Errorf("part %s is %v", part, details)
		}
	}
	met[0].At = []string{"a"}
	p.Withdraw(t.Context(), met[0].Presence)
	if met, err = p.Announce(t.Context(), store.Presence{ID: "b", Beat: 2}, text, nil); err != nil || len(met) != 1 {
		t.Errorf("there are %d, %v", len(met), err)
	}
}

// TestWithdrawnProcesses are forgotten, unless they have told of themselves since, or have another config.
func TestWithdrawnProcesses(t *testing.T) {
	t.Parallel()
	p := newOperator(t, wire.Options{Primary: redistest.Start(t).Addr()}, nil)
	ctx := t.Context()
	noText := func(store.Part) []byte { return nil }
	announce := func(shards string, beat int64) (own store.Presence, all []string) {
		t.Helper()
		met, err := p.Announce(ctx, store.Presence{ID: "a", Digests: map[store.Part]string{store.PartShards: shards}, Beat: beat}, noText, nil)
		must(t, err)
		for _, m := range met {
			all = append(all, fmt.Sprint(m.Digests[store.PartShards], m.Beat))
		}
		own = met[len(met)-1].Presence
		own.At = []string{"a"}
		return own, all
	}
	old, _ := announce("one", 1)
	_, _ = announce("one", 2)
	p.Withdraw(ctx, old)
	another, all := announce("other", 3)
	if fmt.Sprint(all) != "[one2 other3]" {
		t.Errorf("after the withdrawal of a beat before there are %v", all)
	}
	old.Beat = 2
	p.Withdraw(ctx, old)
	another.At = nil
	p.Withdraw(ctx, another)
	if _, all := announce("third", 4); fmt.Sprint(all) != "[other3 third4]" {
		t.Errorf("after the withdrawals there are %v", all)
	}
}

// TestBeatsAtTheSameTime lose nobody: neither a process that tells of itself while another does, nor one that
// was taken to be gone.
func TestBeatsAtTheSameTime(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := newOperator(t, wire.Options{Primary: server.Addr()}, nil)
	shard, ctx := p.members[0].Shard, t.Context()
	announce := func(id string, n int64, gone ...store.Met) []string {
		t.Helper()
		met, err := p.Announce(ctx, store.Presence{ID: id, Beat: n}, nil, gone)
		must(t, err)
		var names []string
		for _, m := range met {
			names = append(names, fmt.Sprint(m.ID, m.Beat))
		}
		return names
	}
	want := func(got []string, names ...string) {
		t.Helper()
		// Those that told of themselves at the same time are in no order.
		slices.Sort(got)
		if slices.Sort(names); !slices.Equal(got, names) {
			t.Errorf("there are %v, want %v", got, names)
		}
	}
	want(announce("a", 1), "a1")
	read, err := p.presentAt(ctx, shard)
	must(t, err)
	want(announce("b", 1), "a1", "b1")
	// It has read before b told of itself.
	must(t, p.tell(ctx, shard, beatAfter(read, &store.Presence{ID: "c", Shard: "a", Beat: 1}, nil)))
	want(announce("a", 2), "b1", "c1", "a2")
	read, err = p.presentAt(ctx, shard)
	must(t, err)
	want(announce("b", 2), "c1", "a2", "b2")
	gone := []store.Met{{Presence: store.Presence{ID: "b", Shard: "a", Layout: ask.LayoutVersion, Beat: 1}}, {Presence: store.Presence{ID: "c", Shard: "a", Beat: 1}}}
	must(t, p.tell(ctx, shard, beatAfter(read, &store.Presence{ID: "a", Shard: "a", Layout: ask.LayoutVersion, Beat: 3}, gone)))
	want(announce("d", 1), "b2", "a3", "d1")
	if left, err := server.Client().PTTL(ctx, p.asker.Keys.Presence()).Result(); err != nil || left <= 0 || left > presenceLasts {
		t.Errorf("it is kept for %v, %v", left, err)
	}
}

// TestLargeRepliesToOperatorsLeaveNoServerOut: what they read is not bounded, and says nothing of the server.
func TestLargeRepliesToOperatorsLeaveNoServerOut(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := newOperator(t, wire.Options{Primary: server.Addr(), PoolSize: 1}, nil)
	for i := range 17 {
		must(t, server.Client().ZAdd(t.Context(), p.asker.Keys.Presence(), goredis.Z{Score: float64(i), Member: fmt.Sprint(i) + strings.Repeat("x", 1<<20)}).Err())
	}
	for range 6 {
		if _, err := p.Announce(t.Context(), store.Presence{ID: "a"}, nil, nil); !errors.Is(err, wire.ErrFraming) {
			t.Fatalf("the error is %v", err)
		}
	}
	if l := p.members[0].Shard.Owner(0).Checks; !l.IsUp() {
		t.Errorf("checks are not made: %v", l.Down())
	}
}
