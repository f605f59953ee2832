package operate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// newChanging returns a call of an operator on two shards, which are the previous and the present ones of all
// clients, that makes changes.
func newChanging(t *testing.T, changes []store.OverrideChange) (c *changing, was, now *redistest.Server) {
	t.Helper()
	was, now = redistest.Start(t), redistest.Start(t)
	p := newOperator(t, wire.Options{Primary: now.Addr()}, nil)
	p.previous = []Member{{Name: "old", Shard: newShard(t, wire.Options{Primary: was.Addr()})}}
	return p.newChanging(changes, func(string) (now, before *Shard) { return p.members[0].Shard, p.previous[0].Shard }), was, now
}

// TestRefusalsAtTheSameTime by several shards do not meet what chooses the calls, which the race detector sees.
func TestRefusalsAtTheSameTime(t *testing.T) {
	t.Parallel()
	changes := limitsOf("", 20)
	c, _, _ := newChanging(t, changes)
	c.read, _ = c.p.readAll(t.Context())
	items := map[*Shard][]*planned{}
	for _, m := range append(c.p.members, c.p.previous...) {
		for i := range changes {
			items[m.Shard] = append(items[m.Shard], &planned{place: i, role: copied, item: item{name: c.p.nameOf(changes[i].ID()), expected: "another"}})
		}
	}
	c.carryOut(t.Context(), items, func(it *planned) bool { return c.refused[it.place] })
	for i, outcome := range c.outcomes {
		if n := strings.Count(fmt.Sprint(outcome.Err), store.ErrChanged.Error()); n != 2 {
			t.Errorf("change %d was refused %d times", i, n)
		}
	}
}

// TestRefusedChangeIsUndone: the previous shard gets back the bytes that were there, whatever they are, with
// what was left of their time. If it does not answer then, the outcome says that the change may hold.
func TestRefusedChangeIsUndone(t *testing.T) {
	t.Parallel()
	name := "limit:api:tag:0"
	refused := func(t *testing.T, value string, meanwhile func(was *redistest.Server)) (c *changing, was *redistest.Server) {
		t.Helper()
		c, was, now := newChanging(t, limitsOf("", 1))
		ctx, key := t.Context(), c.p.asker.Keys.Overrides()
		if value != "" {
			must(t, was.Client().HSet(ctx, key, name, value, "v", "1").Err())
		}
		c.read, _ = c.p.readAll(ctx)
		c.changes[0].Expected = store.AnyVersion
		must(t, c.plan(0))
		never := func(*planned) bool { return false }
		c.carryOut(ctx, c.steps[decide], never)
		for _, it := range c.steps[follow][c.p.members[0].Shard] {
			it.expected = "another"
		}
		must(t, now.Client().HSet(ctx, key, "v", "1").Err())
		c.carryOut(ctx, c.steps[follow], never)
		meanwhile(was)
		c.carryOut(ctx, c.undone, never)
		return c, was
	}
	ends := func(at time.Time) string {
		return string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(float64(at.UnixMilli()))))
	}
	endOf := func(value string) time.Time {
		return time.UnixMilli(int64(math.Float64frombits(binary.LittleEndian.Uint64([]byte(value)))))
	}
	day := time.Now().Add(24 * time.Hour)
	for what, value := range map[string]string{
		"nothing": "", "damaged": ends(day) + "{not json",
		"another key_secret": ends(day) + `{"kind":"limit","zone":"api","client_key":"#x","events":3,"since":1,"until":2,"secret":"other"}`,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, was := refused(t, value, func(*redistest.Server) {})
			got := was.Client().HGet(t.Context(), c.p.asker.Keys.Overrides(), name).Val()
			if (got == "") != (value == "") || got != "" && got[8:] != value[8:] {
				t.Errorf("there is %q, want %q", got, value)
			}
			if got != "" && endOf(got).Sub(day).Abs() > time.Hour {
				t.Errorf("it ends at %v, want %v", endOf(got), day)
			}
			if err := c.outcomes[0].Err; !errors.Is(err, store.ErrChanged) || strings.Contains(err.Error(), "undone") {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("no answer", func(t *testing.T) {
		t.Parallel()
		c, _ := refused(t, "", func(was *redistest.Server) { must(t, was.Kill()) })
		if err := c.outcomes[0].Err; !errors.Is(err, store.ErrChanged) || !strings.Contains(err.Error(), "shard old has taken it") {
			t.Errorf("got %v", err)
		}
	})
}

// TestChangeWhileAShardIsAway during a resharding is made by the other one, which checks the version, and
// names the shard that lacks it.
func TestChangeWhileAShardIsAway(t *testing.T) {
	t.Parallel()
	for name, i := range map[string]int{"old": 0, "a": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			changes := limitsOf("", 1)
			c, was, now := newChanging(t, changes)
			change := func(expected string, events int64, removes bool) store.OverrideOutcome {
				t.Helper()
				changes[0].Expected, changes[0].Events, changes[0].Removes = expected, events, removes
				changes[0].Since = time.Now().UnixMicro()
				return c.p.ChangeOverrides(t.Context(), changes, c.owners)[0]
			}
			first := change("", 1, false)
			if must(t, first.Err); first.Warning != nil {
				t.Errorf("while both are there: %v", first.Warning)
			}
			must(t, []*redistest.Server{was, now}[i].Kill())
			second := change(first.Version, 2, false)
			if second.Err != nil || second.Before == nil || second.Before.Events != 1 || !strings.Contains(fmt.Sprint(second.Warning), "shard "+name) {
				t.Errorf("a change: %+v", second)
			}
			if o := change(first.Version, 3, false); !errors.Is(o.Err, store.ErrChanged) || o.Warning != nil {
				t.Errorf("one that expects what was before: %+v", o)
			}
			set, _ := c.p.Overrides(t.Context())
			if o := set.Of(changes[0].ID(), 0); o == nil || o.Events != 2 {
				t.Errorf("there is %+v", o)
			}
			if o := change(store.AnyVersion, 0, true); o.Err != nil || o.Before == nil || o.Warning == nil {
				t.Errorf("a removal: %+v", o)
			}
		})
	}
}

// TestChangeOfWhatEnds, by the server's clock or that of the Caddy that has read it, is one of what was there or
// of none, also if the server has removed it.
func TestChangeOfWhatEnds(t *testing.T) {
	t.Parallel()
	const name = "limit:api:tag:0"
	for what, c := range map[string]struct {
		ahead                       time.Duration
		endsBefore, isGone, isThere bool
	}{
		"it has ended":                         {0, true, false, false},
		"it is gone":                           {0, true, true, false},
		"it lasts by the server's clock":       {4 * time.Second, false, false, false},
		"it lasts by the Caddy's clock":        {-4 * time.Second, true, false, true},
		"it lasts by the Caddy's, and is gone": {-4 * time.Second, true, true, true},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			server, began := redistest.Start(t), time.Now()
			p := newOperator(t, wire.Options{Primary: server.Addr()}, func(p *Operator) {
				p.now = func() time.Time { return began.Add(c.ahead) }
			})
			changes := limitsOf("", 1)
			changes[0].Until = began.Add(time.Hour).UnixMicro()
			mustChange(t, p, changes)
			read, err := p.readAll(t.Context())
			must(t, err)
			there := read[p.members[0].Shard].all[name]
			// Another Caddy has given it this end.
			there.Until = began.Add(3 * time.Second).UnixMicro()
			if c.endsBefore {
				there.Until = began.UnixMicro()
			}
			if hash := p.asker.Keys.Overrides(); c.isGone {
				must(t, server.Client().HDel(t.Context(), hash, name).Err())
			} else if c.endsBefore {
				value := server.Client().HGet(t.Context(), hash, name).Val()
				ended := binary.LittleEndian.AppendUint64(nil, math.Float64bits(float64(began.UnixMilli())))
				must(t, server.Client().HSet(t.Context(), hash, name, string(ended)+value[8:]).Err())
			}
			if changes[0].Expected = ""; c.isThere {
				changes[0].Expected = there.Version
			}
			changes[0].Until = store.NoEnd
			// The operator's clock stands, which is no step of it if little time has passed.
			read[p.members[0].Shard].since = time.Now()
			if o := changed(t, p, changes)[0]; o.Err != nil || o.Version == "" {
				t.Errorf("got %+v", o)
			}
		})
	}
}
