package operate

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

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
	if n := len(present); n != store.MaxPresent || len(members) != 2*n || present[0].ID != "1" || present[n-2].ID != "5" || present[n-1].ID != "last" {
		t.Errorf("there are %d, from %s to %s, and %d texts", n, present[0].ID, present[n-1].ID, len(members))
	}
}

// TestLargePresences: those stay that told of themselves last, within a number of bytes, and a process with
// too many zones tells the rest.
func TestLargePresences(t *testing.T) {
	zones := map[string]string{}
	for i := range 1000 {
		zones[fmt.Sprint(i)] = "a digest of this zone"
	}
	var members []string
	var present []member
	const told = 30
	for i := range told {
		b := beatAfter(members, &store.Presence{ID: fmt.Sprint(i), Zones: zones}, nil)
		members, present = b.after(members), b.kept
		bytes := 0
		for pair := range slices.Chunk(members, 2) {
			bytes += len(pair[0])
		}
		if bytes > maxPresenceBytes {
			t.Fatalf("there are %d bytes", bytes)
		}
	}
	if n := len(present); n < 5 || present[n-1].ID != fmt.Sprint(told-1) || len(present[n-1].Zones) != 1000 {
		t.Errorf("there are %d, the last is %s", n, present[n-1].ID)
	}
	for i := range 10000 {
		zones[fmt.Sprint(i)] = "a digest of this zone"
	}
	members = nil
	for i := range int64(2) {
		b := beatAfter(members, &store.Presence{ID: "large", Zones: zones, Beat: i}, nil)
		if members, present = b.after(members), b.kept; len(present) != 1 || present[0].Zones != nil || present[0].ID != "large" {
			t.Errorf("there are %d", len(present))
		}
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
		met, err := p.Announce(ctx, store.Presence{ID: id, Beat: n}, gone)
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
	gone := []store.Met{{Presence: store.Presence{ID: "b", Shard: "a", Beat: 1}}, {Presence: store.Presence{ID: "c", Shard: "a", Beat: 1}}}
	must(t, p.tell(ctx, shard, beatAfter(read, &store.Presence{ID: "a", Shard: "a", Beat: 3}, gone)))
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
		if _, err := p.Announce(t.Context(), store.Presence{ID: "a"}, nil); !errors.Is(err, wire.ErrFraming) {
			t.Fatalf("the error is %v", err)
		}
	}
	if l := p.members[0].Shard.Owner(0).Checks; !l.IsUp() {
		t.Errorf("checks are not made: %v", l.Down())
	}
}
