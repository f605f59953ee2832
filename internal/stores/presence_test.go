package stores

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// sharedStore remembers processes as a shard does.
type sharedStore struct {
	secret  string
	weights store.Details
	kept    map[string]store.Details
	// apart is the share of the clients that other weights count elsewhere, and names those by which it was asked last.
	apart   float64
	names   map[string]string
	asked   int
	prefix  string
	full    bool
	shards  []store.ShardFigures
	met     []store.Met
	forgets []store.Met
	left    []store.Presence
	reads   int
	away    error
	panics  atomic.Bool
}

func (s *sharedStore) Announce(_ context.Context, p store.Presence, text func(store.Part) []byte, gone []store.Met) ([]store.Met, error) {
	if s.panics.Load() {
		panic("broken on purpose")
	}
	s.forgets = append(s.forgets, gone...)
	if s.away != nil {
		return nil, s.away
	}
	for part, digest := range p.Digests {
		if got := store.DigestOf(text(part)); got != digest {
			return nil, fmt.Errorf("the digest of %s is %s, told is %s", part, got, digest)
		}
	}
	p.Shard, p.Secret, p.Layout = "a", s.secret, "3"
	return append(slices.Clone(s.met), store.Met{Presence: p, Here: "a", Full: s.full}), nil
}

func (s *sharedStore) Withdraw(_ context.Context, p store.Presence) { s.left = append(s.left, p) }

func (s *sharedStore) Details(_ context.Context, _, digest string) (store.Details, error) {
	s.reads++
	return maps.Clone(s.kept[digest]), s.away
}

func (s *sharedStore) Weights() store.Details {
	if s.weights == nil {
		return store.Details{"a": "1", "b": "1"}
	}
	return s.weights
}

func (s *sharedStore) Apart(weights store.Details, names map[string]string) (float64, bool) {
	s.names = names
	s.asked++
	isSame := maps.Equal(weights, s.Weights())
	for name, here := range names {
		isSame = isSame && name == here
	}
	if isSame {
		return 0, true
	}
	return s.apart, weights["a"] != "junk"
}

func (s *sharedStore) KeyPrefix() string { return s.prefix }

func (s *sharedStore) Shards() []store.ShardFigures { return s.shards }

func newSharedStore() *sharedStore {
	return &sharedStore{kept: map[string]store.Details{}, apart: 0.331}
}

// other returns another process at the shard a, with these parts of its config.
func (s *sharedStore) other(zones, shards store.Details) store.Met {
	zonesDigest, shardsDigest := store.DigestOf(zones.Text()), store.DigestOf(shards.Text())
	s.kept[zonesDigest], s.kept[shardsDigest] = zones, shards
	p := store.Presence{ID: "other", Process: "host", Shard: "a", Layout: "3", Digests: map[store.Part]string{store.PartZones: zonesDigest, store.PartShards: shardsDigest}}
	return store.Met{Presence: p, Here: "a"}
}

func (p *presence) mustTell(t *testing.T, now time.Time) {
	t.Helper()
	if err := p.tell(t.Context(), now); err != nil {
		t.Fatal(err)
	}
}

// TestDisagreements are told at the first look, and end with the process that does not agree. A part that does not
// differ is not read, and one that does once.
func TestDisagreements(t *testing.T) {
	type details = store.Details
	agreed, shards := details{"api": "1", "theirs": "1"}, details{"a": "1", "b": "1"}
	many := details{}
	for i := range mostNamed + 3 {
		many[fmt.Sprint("zone-", i)] = "2"
	}
	same := func(*store.Presence) {}
	const onOthers = " of the clients are counted on different servers: give all Caddys the same shards"
	for name, c := range map[string]struct {
		zones, shards details
		change        func(p *store.Presence)
		apart         float64
		reads         int
		want          []string
	}{
		"the same":               {details{"api": "1", "mine": "1"}, shards, same, 0.331, 0, nil},
		"other zones":            {agreed, shards, same, 0.331, 1, nil},
		"another definition":     {details{"api": "2"}, shards, same, 0.331, 1, []string{"zone api is defined otherwise for the Caddy on host, so"}},
		"many definitions":       {many, shards, same, 0.331, 1, append(slices.Repeat([]string{" is defined otherwise for the Caddy on host, so"}, mostNamed), "3 more zones are defined otherwise for the Caddy on host")},
		"another secret":         {agreed, shards, func(p *store.Presence) { p.Secret = "s" }, 0.331, 1, []string{"the Caddy on host has another key_secret"}},
		"another layout":         {agreed, shards, func(p *store.Presence) { p.Layout = "2" }, 0.331, 1, []string{"the Caddy on host is of a version with layout 2 of its buckets, not 3"}},
		"another name":           {agreed, shards, func(p *store.Presence) { p.Shard = "b" }, 1, 1, []string{"the Caddy on host calls shard a by the name b, lacks shard b, so 100 %" + onOthers}},
		"a shard less":           {agreed, details{"a": "1"}, same, 0.331, 2, []string{"the Caddy on host lacks shard b, so 33 %" + onOthers}},
		"other shards":           {agreed, details{"a": "2 was 1", "c": "1"}, same, 0.001, 2, []string{"the Caddy on host has the weight 2 was 1 for shard a, not 1, also has shard c, lacks shard b, so 1 %" + onOthers}},
		"a step of a resharding": {agreed, details{"a": "1", "b": "1", "c": "1 was 0"}, same, 0, 2, nil},
		"foreign weights":        {agreed, details{"a": "junk"}, same, 0.331, 2, []string{"has other shards or weights, so clients are counted on different servers"}},
		"an older version":       {agreed, shards, func(p *store.Presence) { p.Digests, p.Layout = nil, "" }, 0.331, 0, []string{"the Caddy on host is of another version, whose zones and weights are not compared"}},
		"parts that are gone": {agreed, shards, func(p *store.Presence) {
			p.Digests = map[store.Part]string{store.PartZones: "gone", store.PartShards: "gone too"}
		}, 0.331, 4, []string{"the Caddy on host has other shards or weights, so clients are counted on different servers"}},
		"its config before": {details{"api": "2"}, details{"a": "1"}, func(p *store.Presence) { p.ID, p.Beat = ProcessID, math.MinInt32 }, 0.331, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			kept := newSharedStore()
			kept.met, kept.apart = []store.Met{kept.other(c.zones, c.shards)}, c.apart
			c.change(&kept.met[0].Presence)
			p := newPresence(t.Name(), kept)
			p.parts[store.PartZones]["api"], p.parts[store.PartZones]["mine"] = "1", "1"
			if len(c.zones) > mostNamed {
				for zone := range c.zones {
					p.parts[store.PartZones][zone] = "1"
				}
			}
			requires := func(when string, want ...string) {
				t.Helper()
				all := strings.Join(p.disagreements, "\n")
				for _, text := range want {
					if !strings.Contains(all, text) {
						t.Errorf("%s: %q, want %q", when, p.disagreements, text)
					}
				}
				if len(p.disagreements) != len(want) {
					t.Errorf("%s: %q, want %d", when, p.disagreements, len(want))
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
			requires("at first", c.want...)
			kept.met[0].Beat++
			tell(time.Millisecond)
			requires("once it has told again", c.want...)
			if kept.reads != c.reads {
				t.Errorf("%d parts were read, want %d", kept.reads, c.reads)
			}
			kept.away = errors.New("the shard is away")
			for range 10 * missedBeats {
				tell(presencePeriod)
			}
			requires("while the shard is away", c.want...)
			kept.away = nil
			tell(time.Hour)
			for range missedBeats - 2 {
				tell(presencePeriod)
			}
			tell(0)
			requires("while it may be slow", c.want...)
			if len(kept.forgets) != 0 {
				t.Errorf("forgotten too early are %+v", kept.forgets)
			}
			tell(presencePeriod)
			kept.met = nil
			tell(time.Millisecond)
			requires("in the end")
			if len(kept.forgets) != 1 || len(p.details) != 0 {
				t.Errorf("forgotten are %+v, kept %v", kept.forgets, p.details)
			}
		})
	}
}

// TestShardAtAnotherServer: a process that tells of itself at a shard of a name that is known here, and is not met
// there, means another server by it. Whether it is not there yet is known from its next beat.
func TestShardAtAnotherServer(t *testing.T) {
	kept := newSharedStore()
	at := kept.other(store.Details{}, kept.Weights())
	at.Here, at.Shard, at.At = "b", "b", []string{"a", "b"}
	kept.met = []store.Met{at}
	p, now := newPresence(t.Name(), kept), time.Unix(0, 0)
	p.mustTell(t, now)
	if len(p.disagreements) != 0 {
		t.Errorf("%q before its next beat", p.disagreements)
	}
	kept.met[0].Beat++
	p.mustTell(t, now.Add(presencePeriod))
	if got := fmt.Sprint(p.disagreements); !strings.HasPrefix(got, "[the Caddy on host has shard a at another server, so 33 % of the clients") || !maps.Equal(kept.names, map[string]string{"a": "", "b": "b"}) {
		t.Errorf("%s by %v", got, kept.names)
	}
	met := at
	met.Here, met.Shard = "a", "a"
	kept.met = append(kept.met, met)
	p.mustTell(t, now.Add(2*presencePeriod))
	if len(p.disagreements) != 0 {
		t.Errorf("%q of one that is met there", p.disagreements)
	}
}

// TestProcessThatWasKilled has the host and the number of its successor in a container: it counts from its next beat.
func TestProcessThatWasKilled(t *testing.T) {
	kept := newSharedStore()
	kept.met = []store.Met{kept.other(store.Details{}, store.Details{"c": "1"})}
	kept.met[0].Process = processName()
	p, now := newPresence(t.Name(), kept), time.Unix(0, 0)
	p.mustTell(t, now)
	if len(p.disagreements) != 0 {
		t.Errorf("%q with one that may be dead", p.disagreements)
	}
	kept.met[0].Beat++
	if p.mustTell(t, now.Add(time.Second)); len(p.disagreements) != 1 {
		t.Errorf("%q with one that lives", p.disagreements)
	}
}

// TestTwinShardsAreNoDisagreement: where two shards are one server, a process finds itself, and others, under the name
// of the other shard.
func TestTwinShardsAreNoDisagreement(t *testing.T) {
	kept := newSharedStore()
	another := kept.other(store.Details{}, kept.Weights())
	another.Shard = "b"
	kept.met = []store.Met{another}
	p := newPresence(t.Name(), kept)
	for range 2 {
		p.mustTell(t, time.Now())
		if n := len(p.disagreements); n != 1 {
			t.Errorf("%q, want the name", p.disagreements)
		}
	}
	kept.met = append(kept.met, store.Met{Presence: store.Presence{ID: ProcessID, Shard: "a", Beat: beats.Load()}, Here: "b"})
	p.mustTell(t, time.Now())
	if len(p.disagreements) != 0 {
		t.Errorf("%q of twins", p.disagreements)
	}
}

// TestLossByAReload is said from the start of the config that does not find the counts of the one before it.
func TestLossByAReload(t *testing.T) {
	at := func(shards ...string) (all []store.ShardFigures) {
		for i := 0; i < len(shards); i += 2 {
			all = append(all, store.ShardFigures{Name: shards[i], Servers: []store.ServerFigures{{Address: shards[i+1]}}})
		}
		return all
	}
	for name, c := range map[string]struct {
		before, now []store.ShardFigures
		want        map[string]string
	}{
		"nothing":                   {at("a", "1", "b", "2"), at("a", "1", "b", "2"), map[string]string{"a": "a", "b": "b"}},
		"a new name":                {at("a", "1", "b", "2"), at("a", "1", "bb", "2"), map[string]string{"a": "a", "b": "bb"}},
		"swapped servers":           {at("a", "1", "b", "2"), at("a", "2", "b", "1"), map[string]string{"a": "b", "b": "a"}},
		"a new server":              {at("a", "1", "b", "2"), at("a", "1", "b", "3"), map[string]string{"a": "a"}},
		"a name that another takes": {at("b", "2", "c", "3"), at("b", "3"), map[string]string{"b": "", "c": "b"}},
		"twins":                     {at("a", "1", "b", "1"), at("a", "1", "b", "1"), map[string]string{"a": "a", "b": "b"}},
		"a twin less":               {at("a", "1", "b", "1"), at("b", "1"), map[string]string{"b": "b"}},
		"a twin more":               {at("c", "1"), at("a", "1", "b", "1"), map[string]string{}},
	} {
		if got := renamed(c.before, c.now); !maps.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		after := func() *sharedStore {
			s := newSharedStore()
			s.weights = store.Details{"a": "1", "b": "1", "c": "1"}
			return s
		}
		first, elsewhere := newPresence("s", newSharedStore()), newPresence("other", after())
		first.start()
		elsewhere.start()
		second, third := newPresence("s", after()), newPresence("s", after())
		// A config may have ended when the next one runs.
		first.stop()
		synctest.Wait()
		second.start()
		lost := func(p *presence) string { return fmt.Sprint((&Opened{presence: p}).Disagreements()) }
		const want = "[this Caddy's config before the last reload lacks shard c, so 33 % of the clients begin anew: to find former counts again, write weight 1 was 0 in shard c]"
		if got := lost(second); got != want || lost(first) != "[]" || lost(elsewhere) != "[]" {
			t.Errorf("%q, %q, %q", got, lost(first), lost(elsewhere))
		}
		time.Sleep(lossListed - time.Second)
		if lost(second) == "[]" {
			t.Error("it is over too early")
		}
		if time.Sleep(time.Second); lost(second) != "[]" {
			t.Errorf("an hour later: %s", lost(second))
		}
		third.start()
		if lost(third) != "[]" {
			t.Errorf("after a reload without a change: %s", lost(third))
		}
		for _, p := range []*presence{second, third, elsewhere} {
			p.stop()
			<-p.ended
		}
		if n := len(running.all); n != 0 {
			t.Errorf("%d are running in the end", n)
		}
	})
}

// TestLossByAStoreOfAnotherName is said of one that takes the place of another at the same servers.
func TestLossByAStoreOfAnotherName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var started []*presence
		newAt := func(name, prefix, address string, weights store.Details) *presence {
			kept := newSharedStore()
			kept.prefix, kept.weights = prefix, weights
			kept.shards = []store.ShardFigures{{Name: "a", Servers: []store.ServerFigures{{Address: address}}}}
			return newPresence(name, kept)
		}
		load := func(all ...*presence) {
			for _, p := range all {
				p.start()
			}
			for _, p := range started {
				p.stop()
			}
			synctest.Wait()
			started = all
		}
		lost := func(p *presence) bool { return p.loss != "" }
		two, three := store.Details{"a": "1", "b": "1"}, store.Details{"a": "1", "b": "1", "c": "1"}
		first, second := newAt("first", "rl", "1", two), newAt("second", "rl", "1", three)
		load(first, second)
		if lost(first) || lost(second) {
			t.Error("stores of one config lose counts")
		}
		first, third := newAt("first", "rl", "1", two), newAt("third", "rl", "1", store.Details{"a": "1"})
		load(third, first)
		if lost(first) || !lost(third) {
			t.Errorf("lost by the same store: %v, by another one in place of the second: %v", lost(first), lost(third))
		}
		fourth, elsewhere, prefixed, beside := newAt("fourth", "rl", "1", two), newAt("elsewhere", "rl", "2", three), newAt("prefixed", "other", "1", three), newAt("beside", "rl", "1", three)
		load(fourth, elsewhere, prefixed, beside)
		if lost(fourth) || lost(elsewhere) || lost(prefixed) || !lost(beside) {
			t.Error("lost are", lost(fourth), lost(elsewhere), lost(prefixed), lost(beside))
		}
		if load(); len(running.all) != 0 || running.names["first"] != 0 || running.names["beside"] != 0 {
			t.Errorf("in the end there are %d, %v", len(running.all), running.names)
		}
	})
}

// TestRemediesOfLosses name the weights before, and the shards whose counts cannot be found.
func TestRemediesOfLosses(t *testing.T) {
	type details = store.Details
	for name, c := range map[string]struct {
		before, now details
		state       store.ServerState
		want        string
	}{
		"added":    {details{"a": "1"}, details{"a": "1", "b": "2"}, store.ServerUp, "lacks shard b, so 33 % of the clients begin anew: to find former counts again, write weight 2 was 0 in shard b"},
		"removed":  {details{"a": "1", "b": "1 was 0"}, details{"a": "1"}, store.ServerUp, "also has shard b, so 33 % of the clients begin anew: to find former counts again, keep shard b with weight 0 was 1 0"},
		"dead":     {details{"a": "1", "b": "1"}, details{"a": "1"}, store.ServerLeftOut, "also has shard b, so 33 % of the clients begin anew: the counts of shard b are lost, because its servers do not answer"},
		"replaced": {details{"a": "1", "b": "1"}, details{"a": "1", "c": "1"}, store.ServerLeftOut, "also has shard b, lacks shard c, so 33 % of the clients begin anew: the counts of shard b are lost, because its servers do not answer: to find former counts again, write weight 1 was 0 in shard c"},
		"weights":  {details{"a": "1", "b": "1"}, details{"a": "3 was 2", "b": "1"}, store.ServerUp, "has the weight 1 for shard a, not 3 was 2, so 33 % of the clients begin anew: to find former counts again, write weight 3 was 1 in shard a"},
	} {
		kept := newSharedStore()
		kept.weights = c.now
		shards := []store.ShardFigures{{Name: "b", Found: true, Servers: []store.ServerFigures{{Address: "2", Role: store.RolePrimary, State: c.state}}}}
		if got := newPresence(t.Name(), kept).lossSince(&placed{c.before, shards}); got != "this Caddy's config before the last reload "+c.want {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// TestHostileConfigs cost little, whatever others write: weights are compared once, a few at a time, and no text is long.
func TestHostileConfigs(t *testing.T) {
	kept := newSharedStore()
	const processes = 3 * mostDetails
	long := strings.Repeat("x", 10000)
	for i := range processes {
		shards := store.Details{}
		for n := range 10 * mostNamed {
			shards[fmt.Sprint(i, n, long)] = "1"
		}
		met := kept.other(store.Details{}, shards)
		met.ID, met.Process = fmt.Sprint(i), fmt.Sprint(i, long)
		kept.met = append(kept.met, met)
		met = kept.other(store.Details{}, kept.Weights())
		met.ID, met.Process, met.Shard = fmt.Sprint("named", i), fmt.Sprint("named", i), fmt.Sprint("name", i)
		kept.met = append(kept.met, met)
	}
	unusable := kept.other(store.Details{}, store.Details{"a": "junk"})
	kept.kept[unusable.Digests[store.PartShards]] = store.Details{}
	kept.met = append(kept.met, unusable)
	p, now := newPresence(t.Name(), kept), time.Unix(0, 0)
	for range 10 {
		before := kept.asked
		if p.mustTell(t, now); kept.asked-before > mostDetails {
			t.Errorf("%d weights are compared at once", kept.asked-before)
		}
	}
	if kept.asked != 2*processes+1 || kept.reads != processes+1 {
		t.Errorf("%d of %d weights were compared, %d were read", kept.asked, 2*processes+1, kept.reads)
	}
	if n := len(strings.Join(p.disagreements, "")); len(p.disagreements) != 2*processes+1 || n > processes*mostNamed*300 {
		t.Errorf("there are %d disagreements of %d bytes", len(p.disagreements), n)
	}
}

// TestConfigsThatHaveEnded are forgotten at the next look, unless the shard lacks room; of those that stay, the last beat
// says what a name means.
func TestConfigsThatHaveEnded(t *testing.T) {
	for range 20 { // maps have no order
		kept := newSharedStore()
		old := kept.other(store.Details{}, kept.Weights())
		renamed := old
		old.Shard, old.Beat, renamed.Beat = "b", 1, 2
		old.Here, renamed.Shard, renamed.Here = "c", "b", "b"
		kept.met = []store.Met{old, renamed}
		p, now := newPresence(t.Name(), kept), time.Unix(0, 0)
		if p.mustTell(t, now); len(p.disagreements) != 0 {
			t.Fatalf("%q by a beat that is over", p.disagreements)
		}
	}
	kept := newSharedStore()
	kept.met = []store.Met{kept.other(store.Details{}, store.Details{"c": "1"})}
	p, now := newPresence(t.Name(), kept), time.Unix(0, 0)
	p.mustTell(t, now)
	gone := kept.met
	kept.met, kept.full = nil, true
	if p.mustTell(t, now.Add(time.Second)); len(p.disagreements) != 1 {
		t.Errorf("%q while the shard is full", p.disagreements)
	}
	kept.full, kept.away = false, errors.New("the shard is away")
	if err := p.tell(t.Context(), now.Add(2*time.Second)); !errors.Is(err, kept.away) || len(p.disagreements) != 1 {
		t.Errorf("%q while the shard is away: %v", p.disagreements, err)
	}
	kept.away = nil
	if p.mustTell(t, now.Add(3*time.Second)); len(p.disagreements) != 0 || len(gone) != 1 {
		t.Errorf("%q of a config that has ended", p.disagreements)
	}
}

// TestConfigThatHasEndedIsWithdrawn before its store is closed.
func TestConfigThatHasEndedIsWithdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kept := newSharedStore()
		p := newPresence(t.Name(), kept)
		p.withdraw(t.Context())
		p.start()
		synctest.Wait()
		p.stop()
		p.withdraw(t.Context())
		if len(kept.left) != 1 || kept.left[0].Shard != "a" || fmt.Sprint(kept.left[0].At) != "[a]" || kept.left[0].Beat == 0 {
			t.Errorf("withdrawn are %+v", kept.left)
		}
	})
}

// sharedModule opens stores that other processes use too, and tells how many were withdrawn when one is closed.
type sharedModule struct {
	remoteModule
	kept   *sharedStore
	closed chan int
}

func newSharedModule() sharedModule {
	return sharedModule{kept: newSharedStore(), closed: make(chan int, 1)}
}

func (m sharedModule) OpenStore(string) (store.Store, error) {
	return struct {
		*remoteStore
		*sharedStore
	}{&remoteStore{Store: memory.New(memory.NewBuckets(), memory.Options{})}, m.kept}, nil
}

func (m sharedModule) CloseStore() { m.closed <- len(m.kept.left) }

// TestStoreIsClosedOnceItsConfigIsWithdrawn, after the last request that uses it.
func TestStoreIsClosedOnceItsConfigIsWithdrawn(t *testing.T) {
	m := newSharedModule()
	h := &Handle{Name: t.Name(), Module: m, Logger: zap.NewNop()}
	open, err := h.Enter()
	if err != nil {
		t.Fatal(err)
	}
	h.Run()
	for !open.presence.isTold() {
		time.Sleep(time.Millisecond) // it is told in the background
	}
	if h.Unload(); <-m.closed != 1 {
		t.Error("others are not told that it has ended")
	}
}

// TestConfigThatHasEndedTellsNothing: others do not disagree with a config by which only some requests still go.
func TestConfigThatHasEndedTellsNothing(t *testing.T) {
	h := &Handle{Name: t.Name(), Module: newSharedModule(), Logger: zap.NewNop()}
	open, err := h.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Leave()
	if h.Unload(); open.presence.life.Err() == nil {
		t.Error("others are told of it for as long as a request runs")
	}
}
