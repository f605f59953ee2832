package redis

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// retiring is a resharding that gives a shard up: stores with the configs before, during and after it.
type retiring struct {
	before, during, after *Store
}

func newRetiring(t *testing.T) *retiring {
	t.Helper()
	old, kept := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	with := func(members, previous []Member) *Store {
		return New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: members, Previous: steps(previous)})
	}
	was, now := []Member{{Name: "old", Shard: old}}, []Member{{Name: "kept", Shard: kept}}
	return &retiring{with(was, nil), with(now, was), with(now, nil)}
}

func limitOf(client string, events int64) store.Override {
	return store.Override{Kind: store.OverrideLimit, Zone: "api", ClientKey: "tag:" + client, Until: store.NoEnd, Events: events, Since: time.Now().UnixMicro(), By: "me"}
}

// eventsOf returns the limit that a store has for a client, or 0.
func eventsOf(t *testing.T, s *Store, client string) int64 {
	t.Helper()
	set, err := s.Overrides(t.Context())
	must(t, err)
	o := limitOf(client, 1)
	if found := set.Of(o.ID(), 0); found != nil {
		return found.Events
	}
	return 0
}

func removal(t *testing.T, s *Store, o store.Override) error {
	t.Helper()
	return s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}})[0].Err
}

// TestHandOverKeepsTheLater of two.
func TestHandOverKeepsTheLater(t *testing.T) {
	t.Parallel()
	r := newRetiring(t)
	must(t, setOverride(t, r.after, limitOf("alice", 1)))
	must(t, setOverride(t, r.before, limitOf("bob", 1)))
	must(t, setOverride(t, r.before, limitOf("alice", 2)))
	must(t, setOverride(t, r.after, limitOf("bob", 2)))
	_, err := r.during.Overrides(t.Context())
	must(t, err)
	for _, client := range []string{"alice", "bob"} {
		if n := eventsOf(t, r.after, client); n != 2 {
			t.Errorf("%s has %d events", client, n)
		}
	}
}

// TestAuditOutlivesItsShard, and what a shard gives up pushes nothing out of the audit of another.
func TestAuditOutlivesItsShard(t *testing.T) {
	t.Parallel()
	r := newRetiring(t)
	const others = 900
	change := func(s *Store, n int, name string) {
		changes := make([]store.OverrideChange, n)
		for i := range changes {
			changes[i] = store.OverrideChange{Override: limitOf(fmt.Sprint(name, i), 5), Expected: store.AnyVersion}
		}
		for _, outcome := range s.ChangeOverrides(t.Context(), changes) {
			must(t, outcome.Err)
		}
	}
	change(r.before, 90, "first-")
	change(r.after, others, "other-")
	must(t, removal(t, r.before, limitOf("first-0", 5)))
	told := func(s *Store) (texts []string) {
		all, err := s.Audit(t.Context())
		must(t, err)
		for _, a := range all {
			texts = append(texts, fmt.Sprint(a.At, a.ID, a.Before != nil, a.After != nil))
		}
		slices.Sort(texts)
		return texts
	}
	want := slices.Sorted(slices.Values(slices.Concat(told(r.before), told(r.after))))
	_, err := r.during.Overrides(t.Context())
	must(t, err)
	if got := told(r.after); !slices.Equal(got, want) || len(want) != others+91 {
		t.Errorf("there are %d changes, want %d", len(got), len(want))
	}
	// What the shard that is given up was given since goes over too, and what was there is shown once.
	must(t, setOverride(t, r.before, limitOf("last", 5)))
	_, err = r.during.Overrides(t.Context())
	must(t, err)
	want = slices.Compact(slices.Sorted(slices.Values(slices.Concat(want, told(r.before)))))
	for _, s := range []*Store{r.during, r.after} {
		if got := told(s); !slices.Equal(got, want) {
			t.Errorf("later there are %d changes, want %d", len(got), len(want))
		}
	}
	// Readers see what is left out of the log.
	if n := eventsOf(t, r.after, "first-1"); n != 5 {
		t.Errorf("a client of the shard that is given up has %d events", n)
	}
}

// TestChangesThatAreNotLogged reach a reader that knows what was before.
func TestChangesThatAreNotLogged(t *testing.T) {
	t.Parallel()
	r := newRetiring(t)
	must(t, setOverride(t, r.after, limitOf("kept", 1)))
	if n := eventsOf(t, r.after, "kept"); n != 1 {
		t.Fatalf("there are %d events", n)
	}
	must(t, setOverride(t, r.before, limitOf("alice", 2)))
	_, err := r.during.Overrides(t.Context())
	must(t, err)
	must(t, setOverride(t, r.during, limitOf("bob", 3)))
	for client, want := range map[string]int64{"kept": 1, "alice": 2, "bob": 3} {
		if n := eventsOf(t, r.after, client); n != want {
			t.Errorf("%s has %d events, want %d", client, n, want)
		}
	}
}

// TestWritersDuringAResharding: of two that expect the same version one wins, whatever shards their configs
// have, and all read what it has written.
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
	for name, pair := range map[string][2]*Store{"before and during": {before, during}, "during twice": {during, with(all, old)}, "during and after": {during, after}} {
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
				if won > 0 && won < 10 && (o == nil || o.Events != int64(won)) {
					t.Errorf("%s: writer %d has won, and there is %+v", name, won, o)
				}
			}
		}
		moved = moved[20:]
	}
}

// TestDamagedOverridesAreReplacedAndRemoved by those who expect none, and are told; a shard that is away is
// another error.
func TestDamagedOverridesAreReplacedAndRemoved(t *testing.T) {
	t.Parallel()
	server, other := redistest.Start(t), redistest.Start(t)
	s := New(Options{CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout, Members: []Member{
		{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}, {Name: "b", Shard: newShard(t, ShardOptions{Primary: other.Addr()})},
	}})
	rule := store.Override{Kind: store.OverrideZone, Zone: "api", Until: store.NoEnd, Events: 5, By: "me"}
	owner := server
	if s.Owner("") == "b" {
		owner = other
	}
	damage := func(value string) {
		t.Helper()
		must(t, owner.Client().HSet(t.Context(), s.asker.Keys.Overrides(), "zone:api:", value, "v", value).Err())
	}
	for _, value := range []string{"x", strings.Repeat("\x00", 6) + "\xf0\x7f{}", "\xff\xff\xff\xff\xff\xff\x3f\x43{}"} {
		for _, removes := range []bool{false, true} {
			rule.Since = time.Now().UnixMicro()
			damage(value)
			set, err := s.Overrides(t.Context())
			if !set.IsDamaged(rule.ID()) || err != nil {
				t.Fatalf("%q: it is not named, %v", value, err)
			}
			outcome := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: rule, Removes: removes}})[0]
			if outcome.Err != nil || !outcome.WasDamaged || outcome.Before == nil {
				t.Errorf("%q, removed %v: %+v", value, removes, outcome)
			}
			set, err = s.Overrides(t.Context())
			must(t, errors.Join(err, set.Damaged()))
			if there := set.Of(rule.ID(), 0); (there == nil) != removes {
				t.Errorf("%q, removed %v: there is %+v", value, removes, there)
			}
			must(t, removal(t, s, rule))
		}
	}
	damage("x")
	must(t, map[bool]*redistest.Server{true: other, false: server}[owner == server].Kill())
	set, err := s.Overrides(t.Context())
	if err == nil || errors.Is(err, store.ErrDamaged) || !errors.Is(set.Damaged(), store.ErrDamaged) {
		t.Errorf("a shard is away: %v, %v", err, set.Damaged())
	}
}
