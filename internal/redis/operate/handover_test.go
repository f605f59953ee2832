package operate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// limitsOf returns changes that set limits of so many clients of that name.
func limitsOf(name string, n int) []store.OverrideChange {
	changes := make([]store.OverrideChange, n)
	for i := range changes {
		changes[i] = store.OverrideChange{Expected: store.AnyVersion, Override: store.Override{
			Kind: store.OverrideLimit, Zone: "api", ClientKey: fmt.Sprint("tag:", name, i), Events: 5, Since: time.Now().UnixMicro(), Until: store.NoEnd,
		}}
	}
	return changes
}

// changed makes changes on the first shard.
func changed(t *testing.T, p *Operator, changes []store.OverrideChange) []store.OverrideOutcome {
	t.Helper()
	return p.ChangeOverrides(t.Context(), changes, func(string) (now, before *Shard) { return p.members[0].Shard, nil })
}

func mustChange(t *testing.T, p *Operator, changes []store.OverrideChange) {
	t.Helper()
	for _, outcome := range changed(t, p, changes) {
		must(t, outcome.Err)
	}
}

// TestFullShardIsCountedOnceInACall, however many overrides it has no room for.
func TestFullShardIsCountedOnceInACall(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := newOperator(t, wire.Options{Primary: server.Addr()}, func(p *Operator) { p.most = 2500 })
	mustChange(t, p, limitsOf("", p.most))
	scans := func(n int) int64 {
		before, err := server.Calls()
		must(t, err)
		for _, outcome := range changed(t, p, limitsOf("more-", n)) {
			if outcome.Err == nil || !strings.Contains(outcome.Err.Error(), "2500 overrides") {
				t.Fatalf("got %v", outcome.Err)
			}
		}
		after, err := server.Calls()
		must(t, err)
		return after["hscan"] - before["hscan"]
	}
	_, err := p.Overrides(t.Context())
	must(t, err)
	if one, many := scans(1), scans(changesInCall); one < 2 || one != many {
		t.Errorf("it takes %d scans for a change, and %d for as many as are in a call", one, many)
	}
}

// TestHandOverToFullShards is told, loses nothing, repeats no log, and goes on once there is room.
func TestHandOverToFullShards(t *testing.T) {
	t.Parallel()
	var shards [3]*Shard
	var servers [3]*redistest.Server
	for i := range shards {
		servers[i] = redistest.Start(t)
		shards[i] = newShard(t, wire.Options{Primary: servers[i].Addr()})
	}
	with := func(previous []Member, members ...Member) *Operator {
		p := newOperator(t, wire.Options{Primary: "127.0.0.1:1"}, nil)
		p.members, p.previous, p.most = members, previous, 5
		return p
	}
	old, a, b := Member{Name: "old", Shard: shards[0]}, Member{Name: "a", Shard: shards[1]}, Member{Name: "b", Shard: shards[2]}
	before, during, after := with(nil, old), with([]Member{old}, a, b), with(nil, a, b)
	mustChange(t, before, limitsOf("old-", 5))
	mustChange(t, with(nil, a), limitsOf("a-", 4))
	mustChange(t, with(nil, b), limitsOf("b-", 4))
	logsRead := func() int64 {
		calls, err := servers[0].Calls()
		must(t, err)
		return calls["zrange"]
	}
	read := logsRead()
	for range 3 {
		if _, err := during.Overrides(t.Context()); !errors.Is(err, store.ErrFinal) || !strings.Contains(err.Error(), "3 overrides of shard old") {
			t.Errorf("got %v", err)
		}
	}
	if n := logsRead() - read; n != 1 {
		t.Errorf("the log was read %d times", n)
	}
	count := func(p *Operator, want int) {
		t.Helper()
		set, err := p.Overrides(t.Context())
		if must(t, err); set.Len() != want {
			t.Errorf("there are %d, want %d", set.Len(), want)
		}
	}
	count(before, 5)
	count(after, 10)
	ended := limitsOf("a-", 3)
	for i := range ended {
		ended[i].Removes = true
	}
	mustChange(t, after, ended)
	count(during, 10)
	count(after, 10)
}

// TestHandOverUndoesNoLaterChange: what was ended at the shard that is given up comes back nowhere, unless
// somebody has set it anew where it went.
func TestHandOverUndoesNoLaterChange(t *testing.T) {
	t.Parallel()
	old, kept := newShard(t, wire.Options{Primary: redistest.Start(t).Addr()}), newShard(t, wire.Options{Primary: redistest.Start(t).Addr()})
	before := newOperator(t, wire.Options{Primary: "127.0.0.1:1"}, func(p *Operator) { p.members = []Member{{Name: "old", Shard: old}} })
	after := newOperator(t, wire.Options{Primary: "127.0.0.1:1"}, func(p *Operator) { p.members = []Member{{Name: "kept", Shard: kept}} })
	mustChange(t, before, limitsOf("", 2))
	read, err := before.readAll(t.Context())
	must(t, err)
	h := handing{p: after, there: map[*Shard]*readOverrides{kept: {}}, room: map[*Shard]int{kept: 5}, items: map[*Shard][]item{}}
	for name, o := range read[old].all {
		must(t, h.place(name, o))
	}
	must(t, h.send(t.Context()))
	ended := limitsOf("", 2)
	for i := range ended {
		ended[i].Removes = true
	}
	mustChange(t, before, ended)
	mustChange(t, after, limitsOf("", 1))
	must(t, h.end(t.Context(), old, read[old]))
	set, err := after.Overrides(t.Context())
	must(t, err)
	if o := set.Of(limitsOf("", 1)[0].ID(), 0); o == nil || set.Len() != 1 {
		t.Errorf("there are %d, and %+v", set.Len(), o)
	}
}

// TestEndAfterHandOver sticks, although who ends it knows nothing of the shard that was given up: where that is
// known it ends too, a later hand-over brings nothing back, and what was set anew meanwhile stays.
func TestEndAfterHandOver(t *testing.T) {
	t.Parallel()
	old, a, b := newShard(t, wire.Options{Primary: redistest.Start(t).Addr()}), newShard(t, wire.Options{Primary: redistest.Start(t).Addr()}), newShard(t, wire.Options{Primary: redistest.Start(t).Addr()})
	with := func(previous *Shard, members ...*Shard) *Operator {
		p := newOperator(t, wire.Options{Primary: "127.0.0.1:1"}, nil)
		if p.members = nil; previous != nil {
			p.previous = []Member{{Name: "old", Shard: previous}}
		}
		for _, shard := range members {
			p.members = append(p.members, Member{Name: fmt.Sprint(len(p.members)), Shard: shard})
		}
		return p
	}
	before, during, after := with(nil, old), with(old, a, b), with(nil, a, b)
	want := func(what string, p *Operator, n int) {
		t.Helper()
		eventually(t, what, func() error {
			set, err := p.Overrides(t.Context())
			if must(t, err); set.Len() != n {
				return fmt.Errorf("there are %d, want %d", set.Len(), n)
			}
			return nil
		})
	}
	mustChange(t, before, limitsOf("", 2))
	want("those of the old shard", during, 2)
	want("those that were handed over", after, 2)
	ended := limitsOf("", 1)
	ended[0].Removes = true
	if outcome := changed(t, after, ended)[0]; outcome.Err != nil || outcome.Before == nil {
		t.Fatalf("the end: %+v", outcome)
	}
	want("after the end", after, 1)
	want("where the old shard is known", during, 1)
	want("on the old shard", before, 1)
	// A Caddy that has just begun hands everything over.
	old.overrides.mu.Lock()
	old.overrides.read = nil
	old.overrides.mu.Unlock()
	want("to begin with", with(old, a, b), 1)
	want("after another hand-over", after, 1)
	mustChange(t, before, limitsOf("", 1))
	want("one that was set anew", during, 2)
	want("one that was set anew, handed over", after, 2)
}
