package stores

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// sharedStore remembers processes as a shard does.
type sharedStore struct {
	*memory.Store
	secret  string
	met     []store.Met
	forgets []store.Met
	away    error
	panics  atomic.Bool
}

func (s *sharedStore) Announce(_ context.Context, p store.Presence, gone []store.Met) ([]store.Met, error) {
	if s.panics.Load() {
		panic("broken on purpose")
	}
	s.forgets = append(s.forgets, gone...)
	if s.away != nil {
		return nil, s.away
	}
	p.Shard, p.Secret = "a", s.secret
	return append(slices.Clone(s.met), store.Met{Presence: p, Here: "a"}), nil
}

// TestDisagreements are told of processes that are there, and end with them. Names of shards that
// were swapped are told of those that may have gone too.
func TestDisagreements(t *testing.T) {
	other := func(change func(p *store.Presence)) store.Met {
		p := store.Presence{ID: "other", Process: "host", Shard: "a", Zones: map[string]string{"api": "1", "theirs": "1"}}
		change(&p)
		return store.Met{Presence: p, Here: "a"}
	}
	for name, c := range map[string]struct {
		met         store.Met
		first, then string
	}{
		"the same":           {other(func(*store.Presence) {}), "", ""},
		"another definition": {other(func(p *store.Presence) { p.Zones["api"] = "2" }), "", "zone api is defined otherwise for the Caddy on host"},
		"another secret":     {other(func(p *store.Presence) { p.Secret = "s" }), "", "the Caddy on host has another key_secret"},
		"another name":       {other(func(p *store.Presence) { p.Shard = "b" }), "shard a is shard b for the Caddy on host", "shard a is shard b for the Caddy on host"},
		"its own names": {
			other(func(p *store.Presence) {
				p.ID, p.Shard, p.Zones, p.Beat = ProcessID, "b", map[string]string{"api": "2"}, math.MinInt32
			}),
			"shard a is shard b for this Caddy's config before", "shard a is shard b for this Caddy's config before",
		},
	} {
		t.Run(name, func(t *testing.T) {
			kept := &sharedStore{Store: memory.New(memory.NewBuckets(), memory.Options{}), met: []store.Met{c.met}}
			p := newPresence(kept)
			p.zones["api"], p.zones["mine"] = "1", "1"
			requires := func(when, want string) {
				t.Helper()
				if n := len(p.disagreements); (n == 1) != (want != "") || n > 1 || want != "" && !strings.Contains(p.disagreements[0], want) {
					t.Errorf("%s: %q, want %q", when, p.disagreements, want)
				}
			}
			now := time.Unix(0, 0)
			tell := func(after time.Duration) {
				t.Helper()
				now = now.Add(after)
				if err := p.tell(t.Context(), now); !errors.Is(err, kept.away) {
					t.Fatal(err)
				}
			}
			tell(0)
			requires("at first", c.first)
			for range 3 {
				kept.met[0].Beat++
				tell(time.Millisecond)
			}
			requires("once it has told again", c.then)
			kept.away = errors.New("the shard is away")
			for range 10 * missedBeats {
				tell(presencePeriod)
			}
			requires("while the shard is away", c.then)
			kept.away = nil
			tell(time.Hour)
			for range missedBeats - 2 {
				tell(presencePeriod)
			}
			tell(0)
			requires("while it may be slow", c.then)
			if len(kept.forgets) != 0 {
				t.Errorf("forgotten too early are %+v", kept.forgets)
			}
			tell(presencePeriod)
			kept.met = nil
			tell(time.Millisecond)
			requires("in the end", "")
			if len(kept.forgets) != 1 || kept.forgets[0].ID != c.met.ID {
				t.Errorf("forgotten are %+v", kept.forgets)
			}
		})
	}
}

// TestTwinShardsAreNoDisagreement: where two shards are one server, a process finds itself, and others that have
// ended, under the name of the other shard.
func TestTwinShardsAreNoDisagreement(t *testing.T) {
	ended := store.Met{Presence: store.Presence{ID: "other", Process: "host", Shard: "b"}, Here: "a"}
	kept := &sharedStore{Store: memory.New(memory.NewBuckets(), memory.Options{}), met: []store.Met{ended}}
	p := newPresence(kept)
	for range 2 {
		if err := p.tell(t.Context(), time.Now()); err != nil {
			t.Fatal(err)
		}
		if n := len(p.disagreements); n != 1 {
			t.Errorf("%q, want what is said of the one that has ended", p.disagreements)
		}
	}
	kept.met = append(kept.met, store.Met{Presence: store.Presence{ID: ProcessID, Shard: "a", Beat: beats.Load()}, Here: "b"})
	if err := p.tell(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if len(p.disagreements) != 0 {
		t.Errorf("%q of twins", p.disagreements)
	}
}

// TestConfigThatHasEndedTellsNothing: others do not disagree with a config by which only some requests still go.
func TestConfigThatHasEndedTellsNothing(t *testing.T) {
	h, _ := newRemoteHandle(t)
	open, err := h.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Leave()
	if h.Unload(); open.presence.life.Err() == nil {
		t.Error("others are told of it for as long as a request runs")
	}
}
