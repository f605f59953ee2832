package wire

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

// machine is a server in a random history.
type machine struct {
	answer
	isOurs bool
}

// machines makes servers, with IDs and addresses that no other one has.
type machines struct{ made int }

func (m *machines) id() string {
	m.made++
	return fmt.Sprint("id", m.made)
}

func (m *machines) start(isOurs bool, lineage ...string) *machine {
	return &machine{answer{marks: append([]string{m.id()}, lineage...), servers: []string{m.id()}}, isOurs}
}

// outcome is what came of a random history of ten minutes: for how many seconds foreign servers were followed, and a
// right one that answers was not, the longest time in a row last.
type outcome struct{ foreign, missed, longest int }

// live judges ten minutes of failovers, restarts, replaced servers, a source that leads elsewhere, and one that is silent.
func live(seed uint64, sources int) (o outcome) {
	r, made := rand.New(rand.NewPCG(seed, 0)), &machines{} //nolint:gosec // histories repeat
	ours, theirs := made.start(true, made.id()), made.start(false, made.id())
	var b belief
	var followed *machine
	now, misled, missed := time.Unix(1_800_000_000, 0), 0, 0
	for range 600 {
		now = now.Add(time.Second)
		switch e := r.Float64(); {
		case e < .004: // failover
			ours = made.start(true, append(ours.marks[1:], made.id())...)
		case e < .006: // restart, half of them without the data
			marks := append([]string{made.id()}, ours.marks[1:]...)
			if r.IntN(2) == 0 {
				marks = []string{made.id(), made.id()}
			}
			ours = &machine{answer{marks: marks, servers: ours.servers}, true}
		case e < .008: // replaced by another machine
			ours = made.start(true, made.id())
		case e < .012 && misled == 0:
			misled = 5 + r.IntN(196)
		}
		misled = max(misled-1, 0)
		var answers []answer
		var named []*machine
		for source := range sources {
			if source == sources-1 && sources > 1 && r.Float64() < .02 {
				continue
			}
			m := ours
			if source == 0 && misled > 0 {
				m = theirs
			}
			a := m.answer
			a.source = source
			answers, named = append(answers, a), append(named, m)
		}
		if d := b.judge(answers, sources, now); len(d.group) > 0 {
			followed = named[d.group[0]]
			b.follow(&answers[d.group[0]], &d)
		}
		switch {
		case !followed.isOurs:
			o.foreign++
			missed = 0
		case followed != ours:
			o.missed++
			missed++
		default:
			missed = 0
		}
		o.longest = max(o.longest, missed)
	}
	return o
}

// TestBeliefInRandomHistories never follows a lone foreign source of three, and soon a server that was replaced; with
// one source it cannot tell them apart, and follows.
func TestBeliefInRandomHistories(t *testing.T) {
	const histories = 300
	for sources, most := range map[int]outcome{1: {histories * 180, histories * 10, 30}, 3: {0, histories * 12, 22}} {
		var sum outcome
		for seed := range uint64(histories) {
			o := live(seed, sources)
			sum = outcome{sum.foreign + o.foreign, sum.missed + o.missed, max(sum.longest, o.longest)}
		}
		t.Logf("%d sources: foreign servers followed %.1f s a history, a right one missed %.1f s, for %d s at most",
			sources, float64(sum.foreign)/histories, float64(sum.missed)/histories, sum.longest)
		if sum.foreign > most.foreign || sum.missed > most.missed || sum.longest > most.longest {
			t.Errorf("%d sources: %+v, more than %+v", sources, sum, most)
		}
	}
}

// TestBelief covers each event that changes the answers of sources.
func TestBelief(t *testing.T) {
	type names = []string
	// of returns the answers of the given sources, in their order; one of nil is silent.
	of := func(words ...*answer) (all []answer) {
		for source, w := range words {
			if w != nil {
				a := *w
				a.source = source
				all = append(all, a)
			}
		}
		return all
	}
	a := &answer{marks: names{"runA", "lineA"}, servers: names{"a:1", "b:1"}}
	promoted := &answer{marks: names{"runB", "lineB", "lineA"}, servers: names{"b:1", "a:1"}}
	restarted := &answer{marks: names{"runA2", "lineA2"}, servers: names{"a:1", "b:1"}}
	silent := &answer{servers: names{"b:1", "a:1"}}
	other := &answer{marks: names{"runX", "lineX"}, servers: names{"x:1"}}
	another := &answer{marks: names{"runY"}, servers: names{"y:1"}}
	reused := &answer{marks: names{"runX", "lineX"}, servers: names{"a:1"}}
	denied, deniedAfter, deniedElse := &answer{servers: names{"a:1", "b:1"}}, &answer{servers: names{"b:1", "a:1"}}, &answer{servers: names{"x:1"}}
	cluster, grown, clusterX := &answer{marks: names{"n1", "n2", "n3"}}, &answer{marks: names{"n3", "n4"}}, &answer{marks: names{"m1", "m2"}}
	type step struct {
		after    time.Duration
		answers  []answer
		group    []int
		foreign  []int
		replaces bool
	}
	for name, steps := range map[string][]step{
		"a failover":                             {{0, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(a, promoted, promoted), []int{0, 1, 2}, nil, false}},
		"a promoted server that does not answer": {{0, of(a, a), []int{0, 1}, nil, false}, {1, of(silent, silent), []int{0, 1}, nil, false}},
		"a restart":                              {{0, of(a, a), []int{0, 1}, nil, false}, {1, of(restarted, restarted), []int{0, 1}, nil, false}},
		"a lone foreign source":                  {{0, of(other, a, a), []int{1, 2}, []int{0}, false}, {time.Hour, of(other, a, a), []int{1, 2}, []int{0}, false}},
		"most are silent":                        {{0, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(other, nil, nil), nil, []int{0}, false}, {time.Hour, of(other, nil, nil), nil, []int{0}, false}},
		"replaced": {
			{0, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(a, other, other), []int{0}, []int{1, 2}, false},
			{FollowAfter - 1, of(nil, other, other), nil, []int{0, 1}, false}, {1, of(a, other, other), []int{1, 2}, []int{0}, true}, {1, of(a, other, other), []int{1, 2}, []int{0}, false},
		},
		"replaced by one and then another": {
			{0, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(other, other, other), nil, []int{0, 1, 2}, false},
			{FollowAfter, of(another, another, another), nil, []int{0, 1, 2}, false}, {FollowAfter, of(another, another, another), []int{0, 1, 2}, nil, true},
		},
		"a majority that came back": {
			{0, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(other, other, a), []int{2}, []int{0, 1}, false},
			{FollowAfter, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(other, other, a), []int{2}, []int{0, 1}, false},
		},
		"one source":                     {{0, of(a), []int{0}, nil, false}, {1, of(other), nil, []int{0}, false}, {FollowAfter, of(other), []int{0}, nil, true}},
		"a tie at the start":             {{0, of(other, a), []int{0}, []int{1}, false}},
		"an address that others use now": {{0, of(a, a, a), []int{0, 1, 2}, nil, false}, {1, of(reused, promoted, promoted), []int{1, 2}, []int{0}, false}},
		"INFO is denied": {
			{0, of(denied, denied, denied), []int{0, 1, 2}, nil, false}, {1, of(deniedAfter, deniedAfter, denied), []int{0, 1, 2}, nil, false},
			{1, of(deniedElse, deniedAfter, denied), []int{1, 2}, []int{0}, false},
		},
		"nodes replaced one by one": {{0, of(cluster, cluster), []int{0, 1}, nil, false}, {1, of(grown, grown), []int{0, 1}, nil, false}, {1, of(&answer{marks: names{"n4"}}), []int{0}, nil, false}},
		"a foreign node":            {{0, of(cluster, cluster, clusterX), []int{0, 1}, []int{2}, false}, {time.Hour, of(nil, cluster, clusterX), []int{0}, []int{1}, false}},
	} {
		var b belief
		now := time.Unix(1_800_000_000, 0)
		for i, s := range steps {
			now = now.Add(s.after)
			sources := 3
			if len(steps[0].answers) < 3 {
				sources = len(steps[0].answers)
			}
			d := b.judge(s.answers, sources, now)
			if want := (decision{s.group, s.foreign, s.replaces}); !reflect.DeepEqual(d, want) {
				t.Errorf("%s, step %d: %+v, want %+v", name, i, d, want)
			}
			if len(d.group) > 0 {
				b.follow(&s.answers[d.group[len(d.group)-1]], &d)
			}
		}
	}
}

// TestNodesWithoutAVote answer for their cluster, and do not count among the sources.
func TestNodesWithoutAVote(t *testing.T) {
	var b belief
	answers := []answer{{source: 0, marks: []string{"m1"}}, {source: -1, marks: []string{"n1"}}, {source: -1, marks: []string{"n1"}}}
	if d := b.judge(answers, 1, time.Time{}); !reflect.DeepEqual(d.group, []int{0}) {
		t.Errorf("%+v", d)
	}
}
