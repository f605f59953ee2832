package admin

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// jumper is a store whose clock was set.
type jumper struct {
	*memory.Store
	by time.Duration
	at time.Time
}

// LastJump implements [store.Operable].
func (j jumper) LastJump() (by time.Duration, at time.Time) { return j.by, j.at }

// Shards implements [store.Operable].
func (j jumper) Shards() []store.ShardFigures {
	return []store.ShardFigures{{Name: "a", Found: true, Servers: []store.ServerFigures{{
		Address: "h:1", Role: store.RolePrimary, State: store.ServerUp, Jump: j.by, JumpedAt: j.at,
	}}}}
}

// TestJumpOfAClockIsAProblem for a while.
func TestJumpOfAClockIsAProblem(t *testing.T) {
	for _, c := range []struct {
		by, ago time.Duration
		want    int
	}{{0, 0, 0}, {720 * time.Hour, time.Minute, 2}, {-time.Minute, time.Minute, 2}, {time.Hour, 2 * time.Hour, 0}} {
		base := jumper{by: c.by, at: time.Now().Add(-c.ago)}
		all := problemsOf(&stores.Opened{Name: "s", Operable: base, Accounts: ledger.NewLocal(ledger.NewFlights(), base)}, time.Now(), nil)
		if len(all) != c.want {
			t.Errorf("a jump by %v, %v ago: %d problems, want %d", c.by, c.ago, len(all), c.want)
		}
		for _, p := range all {
			if !strings.Contains(p.Text, "has jumped by "+c.by.String()) || p.Store != "s" {
				t.Errorf("problem %+v", p)
			}
		}
	}
}

// sharded is a store with these shards, for one of which charges wait.
type sharded struct {
	*memory.Store
	shards []store.ShardFigures
}

// Shards implements [store.Operable].
func (s sharded) Shards() []store.ShardFigures { return s.shards }

// waiting are accounts with charges that wait because of an error.
type waiting struct {
	*ledger.Local
	why error
}

// Delays implements [stores.Accounts].
func (w waiting) Delays(string) error { return w.why }

// TestProblemsOfShards: what a shard looks like, and what is listed of it.
func TestProblemsOfShards(t *testing.T) {
	replaced := time.Now()
	at := func(address, id string) []store.ServerFigures {
		return []store.ServerFigures{{Address: address, ID: id, Role: store.RolePrimary, State: store.ServerUp}}
	}
	for name, c := range map[string]struct {
		shards []store.ShardFigures
		waits  error
		want   []string
	}{
		"before the first search": {[]store.ShardFigures{{Name: "a"}}, nil, nil},
		"a search that failed": {
			[]store.ShardFigures{{Name: "a", SearchFault: errors.New("no sentinel answers")}}, nil,
			[]string{"the servers of shard a are not found: no sentinel answers; so and so"},
		},
		"slots without a primary": {
			[]store.ShardFigures{{Name: "a", Found: true, Unowned: 2000, Servers: at("h:1", "1")}}, nil,
			[]string{"2000 slots of shard a have no primary (see CLUSTER SLOTS); so and so"},
		},
		"two shards at one server": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: at("h:1", "1")}, {Name: "b", Found: true, Servers: at("i:1", "1")}, {Name: "c", Found: true, Servers: at("j:1", "2")}}, nil,
			[]string{"shards a (h:1) and b (i:1) are the same server: give each its own, or remove one of the shards"},
		},
		"a shard that hands over": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: at("h:1", "1")}, {Name: "b", Found: true, Retired: true, Servers: at("h:1", "1")}}, nil, nil,
		},
		"a source of others": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: at("h:1", "1"), Sources: []store.ServerFigures{{Address: "s:1", Role: store.RoleSentinel, State: store.ServerForeign, Fault: errors.New("it leads to x:1: remove it")}}}}, nil,
			[]string{"s:1, which shard a was given, is left out: it leads to x:1: remove it"},
		},
		"most sentinels are silent": {
			[]store.ShardFigures{{Name: "a", Found: true, NoQuorum: errors.New("only 1 of the 3: restart"), Servers: at("h:1", "1"), Sources: []store.ServerFigures{{Address: "s:1", Role: store.RoleSentinel, State: store.ServerLeftOut}}}}, nil,
			[]string{"shard a: only 1 of the 3: restart"},
		},
		"a replica that is gone": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: append(at("h:1", "1"), store.ServerFigures{Address: "r:1", Role: store.RoleReplica, State: store.ServerLeftOut, Fault: errors.New("the sentinels cannot reach it: restart it")})}}, nil,
			[]string{"the replica r:1 of shard a is left out: the sentinels cannot reach it: restart it"},
		},
		"a replica whose calls fail": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: append(at("h:1", "1"), store.ServerFigures{
				Address: "r:1", Role: store.RoleReplica, State: store.ServerLeftOut, Lanes: []store.LaneFigures{{Purpose: store.PurposeChecks, Breaker: "open", Fault: store.WithKind(store.KindConnection, errors.New("refused"))}},
			})}}, nil,
			[]string{"the replica r:1 of shard a is left out of checks, because calls of it fail: refused: see that the server runs"},
		},
		"servers that were replaced": {
			[]store.ShardFigures{{Name: "a", Found: true, ReplacedAt: time.Now().Add(-jumpListed), Servers: at("h:1", "1")}}, nil, nil,
		},
		"servers that were just replaced": {
			[]store.ShardFigures{{Name: "a", Found: true, ReplacedAt: replaced, Servers: at("h:1", "1")}}, nil,
			[]string{"other servers, which have nothing in common with those before, took the place of shard a's at " + replaced.UTC().Format(time.RFC3339) + ", so clients have the counts there: if they are not the shard's, correct its addresses, or where these lead"},
		},
		"a server that is not identified": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: []store.ServerFigures{{Address: "h:1", Role: store.RolePrimary, State: store.ServerUp, Unidentified: "no ID: name it"}}}}, nil,
			[]string{"the primary h:1 of shard a is not identified: no ID: name it"},
		},
		"charges that wait": {
			[]store.ShardFigures{{Name: "a", Found: true, Servers: at("h:1", "1")}}, errOverload,
			[]string{"charges wait for shard a: too many calls are waiting: add shards; meanwhile only this Caddy counts them"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			base := sharded{memory.New(memory.NewBuckets(), memory.Options{}), c.shards}
			open := &stores.Opened{Name: t.Name(), Operable: base, Accounts: waiting{ledger.NewLocal(ledger.NewFlights(), base), c.waits}}
			var got []string
			for _, p := range problemsOf(open, time.Now(), func() string { return "so and so" }) {
				got = append(got, p.Text)
			}
			if !slices.EqualFunc(got, c.want, strings.HasPrefix) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// TestErrorsOfShards are listed for a while; of those that a primary causes that is away, only what is lost.
func TestErrorsOfShards(t *testing.T) {
	base := sharded{memory.New(memory.NewBuckets(), memory.Options{}), []store.ShardFigures{{Name: "", Found: true}}}
	open := &stores.Opened{Name: t.Name(), Operable: base, Accounts: waiting{ledger.NewLocal(ledger.NewFlights(), base), nil}}
	handle, now := &stores.Handle{Name: t.Name(), Module: &watchedModule{}, Logger: zap.NewNop()}, time.Now()
	if _, err := handle.Enter(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(handle.Unload)
	handle.ReportError(now, "api", "k", errOverload) // of a config that may be rejected
	requires := func(after time.Duration, want ...string) {
		t.Helper()
		all := problemsOf(open, now.Add(after), func() string { return "so and so" })
		for i, p := range all {
			if p.of.kind != adminapi.ProblemNoPrimary && (i >= len(want) || !strings.Contains(p.Text, want[i])) {
				t.Errorf("after %v: got %q, want %q", after, p.Text, want)
			}
		}
		if len(all) < len(want) {
			t.Errorf("after %v: got %v, want %q", after, all, want)
		}
	}
	requires(0)
	handle.Run()
	handle.ReportError(now, "api", "k", errOverload)
	requires(0, "too many calls are waiting: add shards; so and so")
	stores.NoteLost(t.Name(), "", new(store.Limit), algorithm.Charge, 1, store.ErrUncertain)
	requires(0, "does not answer all checks and takes")
	stores.NoteLost(t.Name(), "", new(store.Limit), algorithm.Charge, 1, store.ErrFinal)
	requires(0, "does not answer all checks and takes", "are lost")
	requires(2 * errorListed)
	base.shards[0].Unowned = 1
	requires(0, "have no primary", "are lost")
}

var errOverload = store.WithKind(store.KindOverload, errors.New("too many calls are waiting"))

// TestRemedyOfOverrides is that of the cause.
func TestRemedyOfOverrides(t *testing.T) {
	for err, want := range map[error]string{
		store.ErrDamaged: "unblock",
		store.WithKind(store.KindForeignData, errors.New("no bucket")): "delete it",
		store.WithKind(store.KindConnection, io.EOF):                   "client-output-buffer-limit",
		store.WithKind(store.KindUnfound, errors.New("no primary")):    "",
	} {
		if got := overridesRemedy(fmt.Errorf("shard a: %w", err)); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("of %v: %q", err, got)
		}
	}
}
