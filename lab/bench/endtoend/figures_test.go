package endtoend

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestComparisonsAreOfTheSameRound: a round in which everything was slow changes
// no ratio and no difference.
func TestComparisonsAreOfTheSameRound(t *testing.T) {
	s := samples{
		Floor:       {{caddy: 10}, {caddy: 100}, {caddy: 20}},
		memoryStore: {{caddy: 11}, {caddy: 110}, {caddy: 22}},
	}
	if got := s.ratio(memoryStore, Floor, sample.ofCaddy); got.Text("%.2f") != "1.10" {
		t.Errorf("the ratios are %v", got)
	}
	r := rounds{
		{floor: 1, limiter: 3},
		{floor: 50, limiter: 52},
	}
	if got, want := r.added(), (report.Spread{Median: 2, Least: 2, Most: 2}); got != want {
		t.Errorf("what is added is %v, want %v", got, want)
	}
}

// TestWhatGoalsCompareIsLong: all cases with goals take part in all pieces, together with what
// they are compared with; not so those that fill Caddy's memory, and those without goals.
func TestWhatGoalsCompareIsLong(t *testing.T) {
	l := &lab{cases: baseCases(new(stores)), returning: &endpoint{name: ManyClients}}
	wanted := map[string]bool{}
	for _, g := range (&Result{cases: samples{}, returning: samples{}}).goals() {
		for _, name := range g.cases {
			wanted[name] = name != NewClients
		}
	}
	counting := func(keys int64) *endpoint {
		return &endpoint{name: countingName(keys), direct: new(goredis.Client)}
	}
	for _, c := range append(slices.Clone(l.cases), l.returning, counting(clients), counting(manyClients)) {
		if got := l.isLong(c); got != wanted[c.name] {
			t.Errorf("%s: long is %t", c.name, got)
		}
		delete(wanted, c.name)
	}
	if len(wanted) > 0 {
		t.Errorf("there are no cases %v", wanted)
	}
}

// TestUndecidedCases: both sides of a comparison are measured again if the rounds do not
// decide it, with what keeps the pace of either, and no other case.
func TestUndecidedCases(t *testing.T) {
	const rounds = 9
	of := func(figures ...float64) (all []sample) {
		for i := range rounds {
			f := figures[i%len(figures)]
			all = append(all, sample{caddy: f, primary: f / 100})
		}
		return all
	}
	floor := of(10)
	r := &Result{
		cases: samples{
			Floor: floor, refusedFloor: floor, countingName(clients): of(2),
			memoryStore: of(10, 12), // the goal is 1.08
			ChargeAfter: of(11), NewClients: of(20), BatchAuto: of(10), refusedHot: of(11),
		},
		returning: samples{Floor: floor, countingName(manyClients): of(2), ManyClients: of(1, 5)}, // the goal is 1.3
	}
	cases := append(baseCases(new(stores)), &endpoint{name: countingName(clients)})
	many := &endpoint{name: ManyClients}
	returning := []*endpoint{called(cases, Floor), many, {name: countingName(manyClients)}, {name: pacingName(manyClients), paceOf: many}}
	names := func(those []*endpoint) (all []string) {
		for _, c := range those {
			all = append(all, c.name)
		}
		return all
	}
	if got, want := names(r.undecided(cases)), []string{Floor, memoryStore}; !slices.Equal(got, want) {
		t.Errorf("cases %q, want %q", got, want)
	}
	if got, want := names(r.undecided(returning)), []string{ManyClients, countingName(manyClients), pacingName(manyClients)}; !slices.Equal(got, want) {
		t.Errorf("returning clients %q, want %q", got, want)
	}
	// The floor has more rounds from then on than cases that were decided.
	r.cases[Floor] = append(r.cases[Floor], sample{caddy: 1})
	r.cases[memoryStore] = append(of(10), sample{caddy: 1})
	if got := names(r.undecided(cases)); len(got) > 0 {
		t.Errorf("cases %q are not decided", got)
	}
	if g := r.goals(); len(g[0].Rounds) != rounds+1 || len(g[1].Rounds) != rounds {
		t.Errorf("%d and %d rounds", len(g[0].Rounds), len(g[1].Rounds))
	}
}

func TestUsePerRequest(t *testing.T) {
	const ms = time.Millisecond
	before := use{caddy: 5 * ms, primary: 3 * ms, replica: ms, shards: []time.Duration{2 * ms, 2 * ms}, calls: 7}
	after := use{caddy: 25 * ms, primary: 8 * ms, replica: 3 * ms, shards: []time.Duration{3 * ms, 8 * ms}, calls: 207}
	// In two pieces, of which the second adds nothing but requests and time.
	var all part
	all.add(part{after.since(&before), 60, time.Second})
	all.add(part{after.since(&after), 40, time.Second})
	got := all.sample()
	want := sample{caddy: 200, primary: 50, replica: 20, busiest: 60, calls: 2, rate: 50}
	if got != want {
		t.Errorf("it is %+v, want %+v", got, want)
	}
	if got.redis() != 70 {
		t.Errorf("Redis takes %v µs, want 70", got.redis())
	}
}

// TestSharedRateIsHalfOfTheLeast of what the cases reached, and of what charge
// before did if one of them has that.
func TestSharedRateIsHalfOfTheLeast(t *testing.T) {
	r := &Result{
		cases: samples{ChargeBefore: {{rate: 600}}},
		sweep: samples{SweepBase: {{rate: 1000}}, TwoShards: {{rate: 700}, {rate: 900}}, FourShards: {{rate: 850}}, manyKeys: {{rate: 500}}},
	}
	cases := []*endpoint{{name: SweepBase}, {name: TwoShards}, {name: FourShards}}
	if got := r.sharedRate(cases); got != 400 {
		t.Errorf("the rate is %v, want 400", got)
	}
	if got := r.sharedRate(append(cases, &endpoint{name: beforeName(0)})); got != 300 {
		t.Errorf("with charge before the rate is %v, want 300", got)
	}
}

func TestNumbersAsText(t *testing.T) {
	for n, want := range map[int64]string{1: "1", 999: "999", 10_000: "10,000", 1_000_000: "1,000,000", 1_002_003: "1,002,003"} {
		if got := grouped(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

// TestTablesTellOfAllRounds: each figure has its least and most, and what is the
// same in all rounds stands alone.
func TestTablesTellOfAllRounds(t *testing.T) {
	s := samples{
		Floor:       {{caddy: 10, rate: 10}, {caddy: 20, rate: 10}},
		memoryStore: {{caddy: 20, primary: 1, replica: 3, calls: 0.001, rate: 4}, {caddy: 60, primary: 2, replica: 4, calls: 0.002, rate: 6}},
	}
	s[SweepBase], s[ManyClients], s[delayName(50, 50*time.Millisecond)] = s[memoryStore], s[memoryStore], s[memoryStore]
	s[countingName(50)] = []sample{{primary: 2}, {primary: 2}}
	r := &Result{
		baseCases: []*endpoint{{name: Floor}, {name: memoryStore, floor: Floor, limit: 2}},
		cases:     s, sweep: s, returning: s, delays: s,
		latency: map[string]rounds{SweepBase: {
			{rate: 7, floor: 1, limiter: 2},
			{rate: 7, floor: 1, limiter: 4},
		}},
	}
	for range len(roundTrips) + 1 {
		r.pings = append(r.pings, report.Spread{Median: 2, Least: 1, Most: 3})
	}
	text := strings.Join(slices.Collect(maps.Values(r.Sections())), "\n")
	lines := slices.Collect(strings.Lines(text))
	for _, want := range []string{
		"| respond, five headers | 15.0 (10.0 to 20.0) | 0.0 | 0.0 |  |  | 10 | 0 |\n",
		"| memory store | 40.0 (20.0 to 60.0) | 1.5 (1.0 to 2.0) | 3.5 (3.0 to 4.0) | 2.50 (2.00 to 3.00) | ≤ 2.00 | 5 (4 to 6) | 0.0015 (0.001 to 0.002) |\n",
		"| base | 1 shard, 1 replica, 1 zone, 30,000 keys | 2.00 (1.00 to 3.00) | 5 (4 to 6) | 40.0 (20.0 to 60.0) | 5.0 (4.0 to 6.0) | 0.0 | 0.0015 (0.001 to 0.002) | 2.50 (2.00 to 3.00) |\n",
		"| base | 7 | 1.00 | 2.00 (1.00 to 3.00) |\n",
		"| redis store, 50,000 clients | 40.0 (20.0 to 60.0) | 1.5 (1.0 to 2.0) | 3.5 (3.0 to 4.0) | 2.50 (2.00 to 3.00) | ≤ 1.50 | 5 (4 to 6) | 0.0015 (0.001 to 0.002) |\n",
		"| 50 | 50ms | 0.1 (0.08 to 0.12) | 40.0 (20.0 to 60.0) | 5.0 (4.0 to 6.0) | 2.50 (2.00 to 3.00) | 0.0015 (0.001 to 0.002) |\n",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in\n%s", want, text)
		}
	}
}
