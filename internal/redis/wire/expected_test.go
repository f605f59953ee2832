package wire

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// newFinding returns a shard of sentinels, and a function that moves its clock.
func newFinding(t *testing.T, opts Options) (s *Shard, pass func(time.Duration)) {
	s = newShard(t, opts)
	now := time.Now()
	s.now = func() time.Time { return now }
	return s, func(d time.Duration) { now = now.Add(d) }
}

// lastingly adopts roles for as long as it takes until an absence is said.
func lastingly(s *Shard, pass func(time.Duration), found ...Roles) (absent []string) {
	s.adopt(found)
	pass(absentAfter)
	s.adopt(found)
	for _, a := range s.Absent() {
		absent = append(absent, a.Addr)
	}
	return absent
}

var bySentinel = Options{Sentinel: &SentinelOptions{Master: "m", Addrs: []string{"127.0.0.1:1"}}}

// TestExpectedServers are missed until they are back, as many are in use as with them, or no source has named them for an
// hour.
func TestExpectedServers(t *testing.T) {
	const a, b, c, d = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"
	type step struct {
		after   time.Duration
		found   Roles
		absent  []string
		because string
	}
	whole, less := Roles{Primary: a, Replicas: []string{b, c}}, Roles{Primary: a, Replicas: []string{b}}
	other := Roles{Primary: a, Replicas: []string{b, d}}
	down := func(r Roles, addrs ...string) Roles {
		r.Down = addrs
		return r
	}
	for name, steps := range map[string][]step{
		"down, and back":              {{0, whole, nil, ""}, {0, down(less, c), []string{c}, "SENTINEL RESET m"}, {0, whole, nil, ""}},
		"down before this life":       {{0, Roles{Primary: a, Down: []string{b}}, []string{b}, "cannot reach it"}},
		"down for days":               {{0, Roles{Primary: a, Down: []string{b}}, []string{b}, ""}, {48 * time.Hour, Roles{Primary: a, Down: []string{b}}, []string{b}, ""}},
		"no longer named":             {{0, whole, nil, ""}, {time.Minute, less, []string{c}, "add a server in its place, or wait: it is expected for an hour"}},
		"not named for an hour":       {{0, whole, nil, ""}, {forgetAfter - 2*absentAfter, less, []string{c}, ""}, {absentAfter, less, nil, ""}},
		"named in between":            {{0, whole, nil, ""}, {forgetAfter, whole, nil, ""}, {forgetAfter - 2*absentAfter, less, []string{c}, ""}},
		"at another address":          {{0, whole, nil, ""}, {0, other, nil, ""}},
		"replaced later":              {{0, whole, nil, ""}, {0, less, []string{c}, ""}, {0, other, nil, ""}},
		"replaced by a dead one":      {{0, whole, nil, ""}, {0, down(less, d), []string{c, d}, ""}, {0, other, nil, ""}},
		"replaced, and then reset":    {{0, whole, nil, ""}, {0, down(less, c), []string{c}, "restart it, or replace it and run"}, {0, down(other, c), []string{c}, ""}, {0, other, nil, ""}},
		"the one in its place leaves": {{0, whole, nil, ""}, {0, less, []string{c}, ""}, {0, other, nil, ""}, {0, less, []string{d}, ""}},
		"two of three are replaced":   {{0, whole, nil, ""}, {0, Roles{Primary: a}, []string{b, c}, ""}, {0, Roles{Primary: a, Replicas: []string{d}}, []string{b}, ""}},
		"never up, and reset":         {{0, Roles{Primary: a, Down: []string{b}}, []string{b}, ""}, {0, Roles{Primary: a}, nil, ""}},
		"down, and reset":             {{0, whole, nil, ""}, {0, down(less, c), []string{c}, ""}, {0, less, []string{c}, "named it last"}},
		"a failover":                  {{0, whole, nil, ""}, {0, Roles{Primary: b, Replicas: []string{c}, Down: []string{a}}, []string{a}, ""}, {0, Roles{Primary: b, Replicas: []string{a, c}}, nil, ""}},
		"up and down":                 {{0, whole, nil, ""}, {0, down(whole, c), nil, ""}},
		"new, and known to others":    {{0, less, nil, ""}, {0, Roles{Primary: a, Replicas: []string{b}, Elsewhere: []string{d}}, nil, ""}},
		"known to others still":       {{0, whole, nil, ""}, {forgetAfter, Roles{Primary: a, Replicas: []string{b}, Elsewhere: []string{c}}, []string{c}, "named it last"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, pass := newFinding(t, bySentinel)
			for i, step := range steps {
				pass(step.after)
				if got := lastingly(s, pass, step.found); fmt.Sprint(got) != fmt.Sprint(step.absent) {
					t.Errorf("step %d: %q are absent, want %q", i, got, step.absent)
				}
				for _, absent := range s.Absent() {
					if !strings.Contains(absent.Fault.Error(), step.because) {
						t.Errorf("step %d: %v, want %q", i, absent.Fault, step.because)
					}
				}
			}
		})
	}
}

// TestAbsenceThatLasts is said, once, and its end: after a failover, sentinels are not connected to replicas for a moment.
func TestAbsenceThatLasts(t *testing.T) {
	s, pass := newFinding(t, bySentinel)
	whole, torn := Roles{Primary: "a:1", Replicas: []string{"b:1"}}, Roles{Primary: "a:1", Down: []string{"b:1"}}
	for _, found := range []Roles{whole, torn, whole, torn} {
		s.adopt([]Roles{found})
		if pass(absentAfter / 2); len(s.Absent())+len(s.events) > 0 {
			t.Fatalf("absent are %+v, with %d events", s.Absent(), len(s.events))
		}
	}
	lastingly(s, pass, torn)
	lastingly(s, pass, torn, Roles{Primary: "b:1"})
	var kinds []EventKind
	for len(s.events) > 0 {
		kinds = append(kinds, (<-s.events).Kind)
	}
	if want := []EventKind{ServerDown, PrimaryChanged, ServerUp}; fmt.Sprint(kinds) != fmt.Sprint(want) {
		t.Errorf("the events are %v, want %v", kinds, want)
	}
}

// TestAbsenceOfAServerThatWasOut is said at once: it was a problem until then.
func TestAbsenceOfAServerThatWasOut(t *testing.T) {
	s, pass := newFinding(t, bySentinel)
	s.adopt([]Roles{{Primary: "a:1", Replicas: []string{"b:1"}}})
	err := errors.New("no answer")
	s.lanes[laneKey{"b:1", false}].unfit.Store(&err)
	for range 3 {
		s.adopt([]Roles{{Primary: "a:1", Down: []string{"b:1"}}})
		if absent := s.Absent(); len(absent) != 1 || absent[0].Addr != "b:1" {
			t.Errorf("absent are %+v", absent)
		}
		pass(absentAfter / 4)
	}
}

// TestExpectedServersAreBounded: a source may name ever new ones.
func TestExpectedServersAreBounded(t *testing.T) {
	s, pass := newFinding(t, bySentinel)
	for round := range 5 {
		found := Roles{Primary: "a:1"}
		for n := range 400 {
			found.Replicas = append(found.Replicas, fmt.Sprintf("r%d.%d:1", round, n))
			for i := range 3 {
				found.Down = append(found.Down, fmt.Sprintf("d%d.%d.%d:1", round, n, i))
			}
		}
		s.mu.Lock()
		s.expect([]Roles{found})
		n := len(s.expected)
		s.mu.Unlock()
		if pass(time.Second); n > 401+mostExpected {
			t.Fatalf("%d servers are expected", n)
		}
	}
}

// TestExpectedPrimary: a node whose slots nobody has taken is a primary that is gone.
func TestExpectedPrimary(t *testing.T) {
	s, pass := newFinding(t, Options{Cluster: []string{"127.0.0.1:1"}})
	half, rest := []SlotRange{{0, 8191}}, []SlotRange{{8192, SlotCount - 1}}
	s.adopt([]Roles{{Primary: "a:1", Slots: half}, {Primary: "b:1", Slots: rest}})
	lastingly(s, pass, Roles{Primary: "a:1", Slots: half}, Roles{Down: []string{"b:1", "c:1"}, Slots: rest})
	if absent := s.Absent(); len(absent) != 2 || absent[0].Addr != "b:1" || !absent[0].HasSlots || absent[1].HasSlots || s.Unowned() != 8192 {
		t.Errorf("absent are %+v, and %d slots have no owner", absent, s.Unowned())
	}
}

// TestQuorum needs more than half of the given sources, and is no matter while none of these is silent.
func TestQuorum(t *testing.T) {
	up, silent, away := Source{Addr: "u:1"}, Source{Addr: "s:1", Err: errors.New("refused"), IsSilent: true}, Source{Addr: "f:1", IsForeign: true, Leads: "x:1"}
	late := Source{Addr: "l:1", Err: errors.New("refused")}
	shut := Source{Addr: "p:1", Err: reply("NOAUTH Authentication required."), IsSilent: true}
	for _, c := range []struct {
		sources []Source
		lost    string
	}{
		{nil, ""},
		{[]Source{up, up, silent}, ""},
		{[]Source{up, silent, silent}, "only 1 of the 3"},
		{[]Source{up, silent}, "only 1 of the 2"},
		{[]Source{silent}, "only 0 of the 1"},
		{[]Source{up, away}, ""},
		{[]Source{up, away, silent}, "s:1: refused"},
		{[]Source{up, late, late}, ""},
		{[]Source{up, shut}, "p:1 refuses: NOAUTH Authentication required.): correct sentinel_username, sentinel_password or the name of the master"},
		{[]Source{silent, shut}, "restart the silent ones, or correct the list and reload; correct sentinel_username"},
	} {
		if err := QuorumFault(c.sources, false); (err == nil) != (c.lost == "") || err != nil && !strings.Contains(err.Error(), c.lost) {
			t.Errorf("%+v: %v, want %q", c.sources, err, c.lost)
		}
	}
	if err := QuorumFault([]Source{shut}, true); !strings.HasSuffix(fmt.Sprint(err), "correct username or password") {
		t.Errorf("in a cluster: %v", err)
	}
}

// TestSourceThatIsSilent has had its time, and not answered for a while.
func TestSourceThatIsSilent(t *testing.T) {
	now, refused := time.Now(), errors.New("refused")
	source := Source{Addr: "s:1"}
	for i, step := range []struct {
		after    time.Duration
		hadTime  bool
		isSilent bool
	}{{0, true, false}, {silentAfter - 1, true, false}, {1, false, false}, {1, true, true}, {1, false, true}} {
		now = now.Add(step.after)
		if source = source.miss(refused, now, step.hadTime); source.IsSilent != step.isSilent {
			t.Errorf("step %d: %+v", i, source)
		}
	}
}

// TestServersOfOtherSentinels: a sentinel that was reset lists no replica, although others do.
func TestServersOfOtherSentinels(t *testing.T) {
	reset := Roles{Primary: "a:1", Replicas: []string{"b:1"}}
	reset.addOthers([]SentinelReply{
		{Roles: reset},
		{Roles: Roles{Primary: "a:1", Replicas: []string{"b:1"}, Down: []string{"c:1", "d:1"}}},
		{Roles: Roles{Primary: "a:1", Replicas: []string{"c:1"}, Down: []string{"b:1"}}},
	})
	if fmt.Sprint(reset.Elsewhere, reset.Down) != "[c:1] [d:1]" || len(reset.Replicas) != 1 {
		t.Errorf("the servers are %+v", reset)
	}
}

// TestServerThatAnswersPings is not left out because INFO fails, and connections are cut at once.
func TestServerThatAnswersPings(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	filter := redistest.StartFilter(t, server.Addr(), redistest.Refusing(redistest.Cut, "info"))
	for name, c := range map[string]struct {
		addr   string
		least  time.Duration
		isMute bool
	}{
		"INFO ends the connection": {filter.Addr(), time.Second, false},
		"INFO is late":             {server.Addr(), 1, true},
	} {
		s := newShard(t, Options{Primary: c.addr})
		s.Await(t.Context())
		l := s.Servers()[0].Checks
		for range mostMute {
			if _, err := l.Info(t.Context(), c.least); err == nil {
				t.Fatalf("%s: it has INFO", name)
			}
		}
		if isMute := l.mute.Load() >= mostMute; isMute != c.isMute {
			t.Errorf("%s: mute is %v", name, isMute)
		}
		for range s.Options.PoolSize {
			reported, err := l.breaker.Allow()
			redistest.Must(t, err)
			reported(io.EOF)
		}
		if !l.IsUp() {
			t.Errorf("%s: it is left out", name)
		}
	}
}

// TestSentinelThatIsFarAway has the full time, soon after it missed a search.
func TestSentinelThatIsFarAway(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 0)
	nodes := redistest.StartSentinels(t, "m", sh.Primary, 3, redistest.SentinelOptions{})
	proxy := redistest.StartProxy(t, nodes.Addrs()[2])
	redistest.Must(t, proxy.Delay(findTimeout*3/2))
	s := newShard(t, Options{Sentinel: &SentinelOptions{Master: "m", Addrs: []string{nodes.Addrs()[0], nodes.Addrs()[1], proxy.Addr()}}})
	t.Cleanup(s.Use(redistest.WaitTimeout))
	f := NewSentinel(&s.Options)
	t.Cleanup(f.Close)
	redistest.Eventually(t, "it is late", func() error {
		if found := mustFind(t, f).Sources; found[2].Err == nil {
			return errors.New("it is not")
		}
		return nil
	})
	redistest.Eventually(t, "it is waited for", func() error {
		f.patient = time.Time{}
		return mustFind(t, f).Sources[2].Err
	})
	f.sources[2] = Source{Addr: proxy.Addr(), Err: errors.New("late"), IsSilent: true, missing: time.Now()}
	f.patient, f.hope = time.Now(), 0
	if found := mustFind(t, f).Sources; !found[2].IsSilent {
		t.Errorf("it is waited for each time: %+v", found)
	}
}

// TestNodeThatIsFarAway has the full time, in the census after the one that it missed.
func TestNodeThatIsFarAway(t *testing.T) {
	t.Parallel()
	addrs := redistest.StartCluster(t, 1, 1).Addrs()
	proxy := redistest.StartProxy(t, addrs[1])
	redistest.Must(t, proxy.Delay(3*findTimeout))
	_, f := patientCluster(t, append(addrs, proxy.Addr())...)
	redistest.Eventually(t, "it is late", func() error {
		f.census, f.hope = time.Time{}, 0
		if found := mustFind(t, f).Sources; found[2].Err == nil {
			return errors.New("it is not")
		}
		return nil
	})
	f.census, f.patient, f.hope = time.Time{}, time.Time{}, 0
	if found := mustFind(t, f).Sources; found[2].Err != nil {
		t.Errorf("it is not waited for: %+v", found)
	}
}
