//go:build check

package operate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/internal/simstore"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// modelShard is a shard with a simulated server.
type modelShard struct {
	name   string
	server *simredis.Server
	client *simstore.Server
	skew   time.Duration
	// backup is a dump of the overrides, and mended is when somebody began to mend them.
	backup string
	mended time.Time
	mu     sync.Mutex
}

// modelCaddy is a process: an operator, whose clock may be wrong, and its connections.
type modelCaddy struct {
	*Operator
	skew   time.Duration
	shards map[*modelShard]*Shard
	at     map[*Shard]*modelShard
	// cut are those that it does not reach.
	cut map[*modelShard]bool
}

// modelTime is the time in a bubble of synctest, in which no instants before 2001 are believed.
func modelTime() time.Time { return time.Now().AddDate(27, 0, 0) }

// model is a history of a store's overrides.
type model struct {
	*testing.T
	rng    *rand.Rand
	any    *wire.Shard
	shards []*modelShard
	out    []*modelShard
	caddys []*modelCaddy
	truth  map[string]*modelTruth
	// isOneRight is set if the clock of the first process is right within an hour: a process months ahead cannot
	// record when a shard was in touch.
	isOneRight bool
}

// modelTruth is the last acknowledged version of a name.
type modelTruth struct {
	version *overrideVersion
	// until is when it ends, if it is not an end itself, and horizon when no version before could last any longer.
	until, horizon time.Time
	// holders are the shards that got it when it was made, and the Caddys that know it, as long as they live.
	holders map[any]bool
	isAlive bool
	// isEverywhere is set once all had it.
	isEverywhere bool
}

const day = 24 * time.Hour

// noEnd stands for the end of what has none.
var noEnd = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)

func (t *modelTruth) isLive() bool { return t.version.content != "" && t.until.After(modelTime()) }

func (m *model) addShard() {
	skews := []time.Duration{0, 0, time.Duration(m.rng.IntN(90)-45) * day, time.Duration(m.rng.IntN(2)) * 2000 * day}
	s := &modelShard{name: fmt.Sprint("shard-", len(m.shards), len(m.out)), skew: skews[m.rng.IntN(len(skews))]}
	s.wipe()
	m.shards = append(m.shards, s)
}

func (s *modelShard) now() time.Time { return modelTime().Add(s.skew) }

func (s *modelShard) wipe() {
	s.server = simredis.New(s.now, simredis.NewInterpreter())
	s.client = simstore.New(s.server.Do)
	scriptOverride.Load(context.Background(), s.client.Pipe())
}

func (s *modelShard) keep() {
	dumped, _ := s.server.Do("DUMP", keysOfModel.Overrides())
	s.backup, _ = dumped.(string)
}

// restore brings the backup back, unless all of it has expired.
func (s *modelShard) restore() {
	s.wipe()
	_, _ = s.server.Do("RESTORE", keysOfModel.Overrides(), "0", s.backup)
}

var keysOfModel = ask.Keys{Prefix: "rl"}

// run runs a command on the simulated server, which has no lock of menders: run keeps that itself.
func (s *modelShard) run(cmd *wire.Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if set, ok := cmd.Cmder.(*goredis.Cmd); ok && cmd.Args()[0] == "set" {
		if modelTime().Sub(s.mended) >= mendPeriod {
			s.mended = modelTime()
			set.SetVal("OK")
		}
		return
	}
	s.client.Execute([]*wire.Command{cmd})
}

// anyCaddy returns a process in a place among them.
func (m *model) anyCaddy(i int) *modelCaddy {
	skews := []time.Duration{0, 0, 0, time.Hour, -time.Hour, 60 * day, 85 * day, 100 * day}
	if !m.isOneRight {
		skews = skews[5:]
	} else if i == 0 {
		skews = skews[:5]
	}
	return m.newCaddy(skews[m.rng.IntN(len(skews))])
}

// newCaddy returns a process whose clock is ahead, and whose calls run on the simulated servers that it reaches.
func (m *model) newCaddy(skew time.Duration) *modelCaddy {
	c := &modelCaddy{
		Operator: NewOperator(nil, nil, &ask.Asker{Keys: keysOfModel}, func() time.Time { return modelTime().Add(skew) }, &Overrides{}),
		skew:     skew, shards: map[*modelShard]*Shard{}, at: map[*Shard]*modelShard{}, cut: map[*modelShard]bool{},
	}
	// The shard was made outside of the model's time.
	c.followPeriod = math.MinInt64
	c.Follow()
	c.ask = func(_ context.Context, shard *Shard, _ string, _ bool, about func(isReplica bool) *wire.Command) (*wire.Command, error) {
		s := c.at[shard]
		if c.cut[s] {
			return nil, store.NotExecuted(errors.New("cut off"))
		}
		cmd := about(false)
		if s.run(cmd); cmd.IsScript() {
			if _, err := cmd.Result(); err != nil {
				m.Errorf("the script: %v", err)
			}
		}
		return cmd, nil
	}
	return c
}

// config makes all processes have the present shards.
func (m *model) config() {
	for _, c := range m.caddys {
		c.members = nil
		for _, s := range m.shards {
			if c.shards[s] == nil {
				shard := &Shard{Shard: m.any}
				c.shards[s], c.at[shard] = shard, s
			}
			c.members = append(c.members, Member{Name: s.name, Shard: c.shards[s]})
		}
	}
}

func (m *model) operate(p *modelCaddy, name string, removes bool) {
	o := store.Override{Kind: store.OverrideLimit, Zone: "z", ClientKey: "tag:" + name, Events: 1 + m.rng.Int64N(1000), Since: p.now().UnixMicro(), Until: store.NoEnd}
	until := noEnd
	if m.rng.IntN(5) > 1 {
		until = modelTime().Add(time.Duration(m.rng.Int64N(int64(900 * day)))).Add(time.Hour)
		o.Until = until.Add(p.skew).UnixMicro()
	}
	key := p.nameOf(o.ID())
	before := p.learn(&learned{}).all[key]
	outcome := p.ChangeOverrides(m.Context(), []store.OverrideChange{{Override: o, Removes: removes, Expected: store.AnyVersion}})[0]
	made := p.overrides.state.all[key]
	if outcome.Err != nil || made == nil || removes && (outcome.Before == nil || made.content != "") {
		return
	}
	truth := &modelTruth{version: made, until: until, holders: map[any]bool{p: true}, isAlive: true}
	if was := m.truth[key]; was != nil && was.horizon.After(modelTime()) {
		if !made.isLater(was.version) {
			if before != nil && before.id == was.version.id && made.id != before.id {
				m.Errorf("a change of %s is not later than one that was known", key)
			}
			return
		}
		truth.horizon = was.horizon
	}
	last := until
	if removes {
		last = modelTime()
	}
	if was := m.truth[key]; last.Equal(noEnd) || was != nil && was.isLive() && was.until.Equal(noEnd) {
		last = modelTime().Add(90 * day)
	}
	if last.After(truth.horizon) {
		truth.horizon = last
	}
	for _, s := range m.shards {
		if s.has(p.Operator, key, made) {
			truth.holders[s] = true
		}
	}
	m.truth[key] = truth
}

func (s *modelShard) has(p *Operator, name string, version *overrideVersion) bool {
	value, _ := s.server.Do("HGET", p.asker.Keys.Overrides(), name)
	text, _ := value.(string)
	there := p.versionIn(name, text, s.now().UnixMilli(), modelTime())
	return there != nil && there.id == version.id
}

func (m *model) look(p *modelCaddy) {
	_, _ = p.Overrides(m.Context())
	synctest.Wait() // for what is mended
	for name, v := range p.overrides.state.all {
		if t := m.truth[name]; t != nil && t.version.id == v.id {
			t.holders[p] = true
		}
	}
}

// observe updates the truth: which versions have holders left.
func (m *model) observe() {
	for name, t := range m.truth {
		maps.DeleteFunc(t.holders, func(h any, _ bool) bool {
			switch h := h.(type) {
			case *modelShard:
				return !slices.Contains(m.shards, h)
			case *modelCaddy:
				return !slices.Contains(m.caddys, h)
			}
			return true
		})
		t.isAlive = t.isAlive && len(t.holders) > 0
		isEverywhere := true
		for _, s := range m.shards {
			isEverywhere = isEverywhere && s.has(m.caddys[0].Operator, name, t.version)
		}
		for _, p := range m.caddys {
			isEverywhere = isEverywhere && p.overrides.state != nil && p.overrides.state.all[name] != nil && p.overrides.state.all[name].id == t.version.id
		}
		t.isEverywhere = t.isEverywhere || isEverywhere
	}
}

func (m *model) forget(s *modelShard) {
	for _, t := range m.truth {
		delete(t.holders, s)
	}
}

// elapse lets time pass, in which Caddys stay in touch with the shards that they reach.
func (m *model) elapse(d time.Duration) {
	time.Sleep(d)
	for _, c := range m.caddys {
		l, _ := c.look(m.Context())
		for shard, h := range l.heads {
			if h.number > 0 && l.failed[shard] == nil {
				_, _ = c.touch(m.Context(), shard, l.seen, -1)
			}
		}
	}
}

func (m *model) step() {
	const tick = 65 * time.Minute
	pauses := []time.Duration{10 * time.Second, 40 * time.Second, tick, tick, 5 * tick, 50 * tick, 300 * tick, 1500 * tick}
	if len(m.out) > 0 {
		pauses = []time.Duration{time.Second, tick, 50 * tick, 1500 * tick}
	}
	m.elapse(pauses[m.rng.IntN(len(pauses))])
	s, p := m.shards[m.rng.IntN(len(m.shards))], m.caddys[m.rng.IntN(len(m.caddys))]
	name := string(rune('a' + m.rng.IntN(5)))
	switch k := m.rng.IntN(100); {
	case k < 30:
		m.operate(p, name, m.rng.IntN(5) < 2)
	case k < 36:
		m.operate(p, name, false)
		m.operate(m.caddys[m.rng.IntN(len(m.caddys))], name, m.rng.IntN(2) < 1)
	case k < 40:
		s.wipe()
		m.forget(s)
	case k < 44:
		s.keep()
	case k < 47 && s.backup != "":
		m.forget(s)
		s.restore()
	case k < 50 && len(m.shards) < 5:
		m.addShard()
	case k < 53 && len(m.shards) > 1 && len(m.out) == 0:
		m.out = append(m.out, s)
		m.shards = slices.DeleteFunc(m.shards, func(other *modelShard) bool { return other == s })
	case k < 57 && len(m.out) > 0:
		m.shards, m.out = append(m.shards, m.out...), nil
	case k < 61:
		i := slices.Index(m.caddys, p)
		m.caddys[i] = m.anyCaddy(i)
	case k < 67:
		p.cut[s] = true
	case k < 75:
		for _, c := range m.caddys {
			clear(c.cut)
		}
	}
	m.config()
	m.observe()
	for _, p := range m.caddys {
		if m.rng.IntN(2) == 0 {
			m.look(p)
		}
	}
	m.observe()
}

// judge lets all processes reach all shards, and returns the faults that remain.
func (m *model) judge() (faults []string) {
	for _, c := range m.caddys {
		clear(c.cut)
	}
	for range 8 {
		time.Sleep(mendPeriod + time.Second)
		for _, c := range m.caddys {
			m.look(c)
		}
	}
	m.observe()
	live := func(c *modelCaddy) map[string]string {
		all := map[string]string{}
		for name, v := range c.overrides.state.all {
			if v.isLive(c.now().UnixMicro()) {
				all[name] = v.id
			}
		}
		return all
	}
	for name, t := range m.truth {
		for i, c := range m.caddys {
			_, isThere := live(c)[name]
			switch {
			case t.isAlive && t.isLive() && !isThere:
				faults = append(faults, fmt.Sprintf("lost: %s at Caddy %d", name, i))
			case m.isOneRight && t.isAlive && t.isEverywhere && !t.isLive() && isThere:
				faults = append(faults, fmt.Sprintf("back: %s at Caddy %d", name, i))
			}
		}
	}
	for i, c := range m.caddys[1:] {
		if !maps.Equal(live(c), live(m.caddys[0])) {
			faults = append(faults, fmt.Sprintf("Caddys 0 and %d differ", i+1))
		}
	}
	return faults
}

// newModelShard returns a shard that is open, and calls nobody. What it runs in the background is in no bubble.
func newModelShard(t *testing.T) *wire.Shard {
	t.Helper()
	shard := wire.NewShard(wire.Options{Primary: "127.0.0.1:1"}, nil)
	shard.Listen(func(e wire.Event) {
		if e.Kind == wire.Panicked {
			t.Error(e.Err)
		}
	})
	shard.Owner(0) // starts it
	redistest.CloseAtEnd(t, shard)
	return shard
}

// inModel runs a test with a Caddy and shards whose clocks are ahead.
func inModel(t *testing.T, test func(m *model, p *modelCaddy), ahead ...time.Duration) {
	t.Helper()
	shard := newModelShard(t)
	synctest.Test(t, func(t *testing.T) {
		m := &model{T: t, rng: rand.New(rand.NewPCG(1, 0)), any: shard, truth: map[string]*modelTruth{}} //nolint:gosec // repeatable on purpose
		for i, skew := range ahead {
			m.shards = append(m.shards, &modelShard{name: string(rune('a' + i)), skew: skew})
			m.shards[i].wipe()
		}
		m.caddys = []*modelCaddy{m.newCaddy(0)}
		m.config()
		test(m, m.caddys[0])
	})
}

// TestServerBeforeItsClockIsSet changes nothing, and loses nothing.
func TestServerBeforeItsClockIsSet(t *testing.T) {
	inModel(t, func(m *model, p *modelCaddy) {
		mustChange(m.T, p.Operator, limitsOf("x", 1))
		s := m.shards[0]
		before, _ := s.server.Do("HGETALL", keysOfModel.Overrides())
		s.skew = -40 * 365 * day
		cmd := wire.NewEval(scriptOverride, false, []any{keysOfModel.Overrides(), keysOfModel.OverrideLog()}, opChange, 10, "limit:api:tag:x0", "", "", "", wire.AppendPacked(nil, 0), "", "", "{}")
		s.run(cmd)
		if _, err := cmd.Result(); err == nil {
			t.Error("it has changed something")
		}
		if after, _ := s.server.Do("HGETALL", keysOfModel.Overrides()); !reflect.DeepEqual(after, before) {
			t.Errorf("there is %q, and was %q", after, before)
		}
	}, 0)
}

// TestCaddyWhoseClockIsAhead by months empties no shard that was away for days, whatever the clock of another shard says.
func TestCaddyWhoseClockIsAhead(t *testing.T) {
	for _, ahead := range []time.Duration{60 * day, 85 * day, 100 * day} {
		for _, server := range []time.Duration{0, 45 * day, 2000 * day} {
			inModel(t, func(m *model, p *modelCaddy) {
				p.cut[m.shards[0]] = true
				mustChange(m.T, p.Operator, limitsOf("alone", 1))
				m.look(p)
				m.look(p)
				wrong := m.newCaddy(ahead)
				wrong.cut[m.shards[1]] = true
				m.caddys = []*modelCaddy{wrong}
				m.config()
				mustChange(m.T, wrong.Operator, limitsOf("x", 1))
				for range 10 * 24 {
					m.look(wrong)
					time.Sleep(time.Hour)
				}
				clear(wrong.cut)
				m.caddys = append(m.caddys, m.newCaddy(0))
				m.config()
				for range 5 {
					m.look(wrong)
					m.look(m.caddys[1])
					time.Sleep(2 * mendPeriod)
				}
				if n := len(m.caddys[1].overrides.state.all); n != 2 {
					t.Errorf("%v and %v ahead: %d overrides are known", ahead, server, n)
				}
				s, _ := m.shards[1].server.Do("HGET", keysOfModel.Overrides(), "s")
				if server == 0 && believed(fmt.Sprint(s)) > modelTime().Add(3*day).UnixMilli() {
					t.Errorf("%v ahead is believed", ahead)
				}
			}, server, 0)
		}
	}
}

// TestDeciderIsTold checks that a decider gets the caller's version: its clock may be behind the last decider's.
func TestDeciderIsTold(t *testing.T) {
	inModel(t, func(m *model, p *modelCaddy) {
		changes := limitsOf("x", 1)
		for i := range m.shards {
			clear(p.cut)
			p.cut[m.shards[1-i]] = true
			changes[0].Events = int64(i + 1)
			mustChange(m.T, p.Operator, changes)
		}
		clear(p.cut)
		set, err := p.Overrides(m.Context())
		must(t, err)
		if o := set.Of(changes[0].ID(), 0); o == nil || o.Events != 2 {
			t.Errorf("there is %+v", o)
		}
	}, time.Hour, 0)
}

// TestChangeOfWhatEnds, by the server's clock or that of the Caddy that has read it, is one of what was there or of
// none, if the clocks are nearly alike.
func TestChangeOfWhatEnds(t *testing.T) {
	for what, c := range map[string]struct {
		passes, ahead time.Duration
		isRefused     bool
	}{
		"it lasts by the Caddy's clock":           {passes: 5 * time.Second, ahead: 7 * time.Second},
		"it lasts by the server's clock":          {passes: 11 * time.Second, ahead: -4 * time.Second},
		"it lasts for long by the server's clock": {passes: 11 * time.Second, ahead: -time.Minute, isRefused: true},
	} {
		inModel(t, func(m *model, p *modelCaddy) {
			changes := limitsOf("x", 1)
			changes[0].Until = p.now().Add(10 * time.Second).UnixMicro()
			first := p.ChangeOverrides(m.Context(), changes)[0]
			_, err := p.Overrides(m.Context())
			must(t, errors.Join(first.Err, err))
			time.Sleep(c.passes)
			synctest.Wait() // for a mending
			m.shards[0].skew = c.ahead
			if changes[0].Expected, changes[0].Until = "", store.NoEnd; c.passes < 10*time.Second {
				changes[0].Expected = first.Version
			}
			if o := p.ChangeOverrides(m.Context(), changes)[0]; errors.Is(o.Err, store.ErrChanged) != c.isRefused {
				t.Errorf("%s: %+v", what, o)
			}
		}, 0)
	}
}

// TestOverridesInAnyHistory: while shards lose all, come back from backups or after months, processes end, and
// clocks and networks fail, no acknowledged override is lost that somebody knows, and none comes back that was ended
// if a process has a right clock.
func TestOverridesInAnyHistory(t *testing.T) {
	t.Parallel()
	shard := newModelShard(t)
	for seed := range sweep.Size(40, 400) {
		synctest.Test(t, func(t *testing.T) {
			m := &model{T: t, rng: rand.New(rand.NewPCG(uint64(seed), 0)), any: shard, truth: map[string]*modelTruth{}, isOneRight: seed%4 > 0} //nolint:gosec // repeatable on purpose
			for range 1 + m.rng.IntN(4) {
				m.addShard()
			}
			for i := range 1 + m.rng.IntN(4) {
				m.caddys = append(m.caddys, m.anyCaddy(i))
			}
			m.config()
			for range 120 {
				m.step()
			}
			if faults := m.judge(); len(faults) > 0 {
				t.Errorf("history %d: %q", seed, faults)
			}
		})
	}
}
