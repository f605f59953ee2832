package wire

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestExpectedServers are missed until they are back, another one has taken their place, or no source has named them for an
// hour.
func TestExpectedServers(t *testing.T) {
	const a, b, c, d = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"
	type step struct {
		after   time.Duration
		found   Roles
		absent  []string
		because string
	}
	whole := Roles{Primary: a, Replicas: []string{b, c}}
	for name, steps := range map[string][]step{
		"down, and back":         {{0, whole, nil, ""}, {0, Roles{Primary: a, Replicas: []string{b}, Down: []string{c}}, []string{c}, "SENTINEL RESET m"}, {0, whole, nil, ""}},
		"down before this life":  {{0, Roles{Primary: a, Down: []string{b}}, []string{b}, "cannot reach it"}},
		"down for days":          {{0, Roles{Primary: a, Down: []string{b}}, []string{b}, ""}, {48 * time.Hour, Roles{Primary: a, Down: []string{b}}, []string{b}, ""}},
		"no longer named":        {{0, whole, nil, ""}, {time.Minute, Roles{Primary: a, Replicas: []string{b}}, []string{c}, "named it last"}},
		"not named for an hour":  {{0, whole, nil, ""}, {forgetAfter - 1, Roles{Primary: a, Replicas: []string{b}}, []string{c}, ""}, {1, Roles{Primary: a, Replicas: []string{b}}, nil, ""}},
		"named in between":       {{0, whole, nil, ""}, {forgetAfter - 1, whole, nil, ""}, {forgetAfter - 1, Roles{Primary: a, Replicas: []string{b}}, []string{c}, ""}},
		"at another address":     {{0, whole, nil, ""}, {time.Second, Roles{Primary: a, Replicas: []string{b, d}}, nil, ""}},
		"replaced later":         {{0, whole, nil, ""}, {time.Second, Roles{Primary: a, Replicas: []string{b}}, []string{c}, ""}, {time.Second, Roles{Primary: a, Replicas: []string{b, d}}, nil, ""}},
		"replaced by a dead one": {{0, whole, nil, ""}, {time.Second, Roles{Primary: a, Replicas: []string{b}, Down: []string{d}}, []string{c, d}, ""}},
		"never up, and reset":    {{0, Roles{Primary: a, Down: []string{b}}, []string{b}, ""}, {1, Roles{Primary: a}, nil, ""}},
		"down, and reset":        {{0, whole, nil, ""}, {1, Roles{Primary: a, Replicas: []string{b}, Down: []string{c}}, []string{c}, ""}, {1, Roles{Primary: a, Replicas: []string{b}}, []string{c}, "named it last"}},
		"a failover":             {{0, whole, nil, ""}, {time.Second, Roles{Primary: b, Replicas: []string{c}, Down: []string{a}}, []string{a}, ""}, {time.Second, Roles{Primary: b, Replicas: []string{a, c}}, nil, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShard(t, Options{Sentinel: &SentinelOptions{Master: "m", Addrs: []string{"127.0.0.1:1"}}})
			now := time.Now()
			s.now = func() time.Time { return now }
			for i, step := range steps {
				now = now.Add(step.after)
				s.adopt([]Roles{step.found})
				var got []string
				for _, absent := range s.Absent() {
					if got = append(got, absent.Addr); !strings.Contains(absent.Fault.Error(), step.because) {
						t.Errorf("step %d: %v, want %q", i, absent.Fault, step.because)
					}
				}
				if fmt.Sprint(got) != fmt.Sprint(step.absent) {
					t.Errorf("step %d: %q are absent, want %q", i, got, step.absent)
				}
			}
		})
	}
}

// TestExpectedPrimary: a node whose slots nobody has taken is a primary that is gone.
func TestExpectedPrimary(t *testing.T) {
	s := newShard(t, Options{Cluster: []string{"127.0.0.1:1"}})
	half, rest := []SlotRange{{0, 8191}}, []SlotRange{{8192, SlotCount - 1}}
	s.adopt([]Roles{{Primary: "a:1", Slots: half}, {Primary: "b:1", Slots: rest}})
	s.adopt([]Roles{{Primary: "a:1", Slots: half}, {Down: []string{"b:1"}, Slots: rest}})
	if absent := s.Absent(); len(absent) != 1 || absent[0].Addr != "b:1" || !absent[0].HasSlots || s.Unowned() != 8192 {
		t.Errorf("absent are %+v, and %d slots have no owner", absent, s.Unowned())
	}
}

// TestQuorum needs more than half of the given sources, and is no matter while none of these is silent.
func TestQuorum(t *testing.T) {
	up, silent, away := Source{Addr: "u:1"}, Source{Addr: "s:1", Err: errors.New("refused"), IsSilent: true}, Source{Addr: "f:1", IsForeign: true, Leads: "x:1"}
	late := Source{Addr: "l:1", Err: errors.New("refused")}
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
	} {
		if err := QuorumFault(c.sources, false); (err == nil) != (c.lost == "") || err != nil && !strings.Contains(err.Error(), c.lost) {
			t.Errorf("%+v: %v, want %q", c.sources, err, c.lost)
		}
	}
}

// TestServersOfOtherSentinels: a sentinel that was reset lists no replica, although others do.
func TestServersOfOtherSentinels(t *testing.T) {
	reset := SentinelReply{Roles: Roles{Primary: "a:1", Replicas: []string{"b:1"}}}
	reset.lists([]SentinelReply{reset, {Roles: Roles{Primary: "a:1", Replicas: []string{"b:1", "c:1"}, Down: []string{"d:1"}}}})
	if fmt.Sprint(reset.Down) != "[c:1 d:1]" || len(reset.Replicas) != 1 {
		t.Errorf("the servers are %+v", reset.Roles)
	}
}
