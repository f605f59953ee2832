package libraries

import (
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestRun runs one short round of everything.
func TestRun(t *testing.T) {
	r, err := Run(t.Context(), Options{Rounds: 1, More: 1, Length: 20 * time.Millisecond, Goroutines: []int{64, 1}}, io.Discard)
	redistest.Must(t, err)
	for _, c := range slices.Concat(r.shared, r.apart) {
		compared := c.undecided() // two rounds decide no goal either
		for i, samples := range c.samples {
			want := 1
			if slices.Contains(compared, i) {
				want = 2
			}
			if len(samples) != want {
				t.Errorf("%s, %v: %d rounds, want %d", c.limiters[i].kind.name, c.scene, len(samples), want)
			}
		}
	}
	for _, c := range r.shared {
		if want := len(with(redisKinds, c.scene.goroutines)); len(c.limiters) != want {
			t.Errorf("%v: %d limiters in Redis, want %d", c.scene, len(c.limiters), want)
		}
		for i, l := range c.limiters {
			requireSane(t, c, i)
			s := c.samples[i][0]
			if s.calls < leastCalls(l, c.scene) || s.server <= 0 || s.latency <= 0 {
				t.Errorf("%s, %v: %+v", l.kind.name, c.scene, s)
			}
		}
	}
	for _, c := range r.apart {
		if len(c.limiters) != len(memoryKinds) {
			t.Errorf("%v: %d limiters in memory, want %d", c.scene, len(c.limiters), len(memoryKinds))
		}
		for i := range c.limiters {
			requireSane(t, c, i)
			if s := c.samples[i][0]; s.calls != 0 || s.server != 0 {
				t.Errorf("%s, %v: %+v", c.limiters[i].kind.name, c.scene, s)
			}
		}
	}
	c := r.shared[slices.IndexFunc(r.shared, func(c *comparison) bool { return c.scene == scene{goroutines: 64} })]
	take := slices.IndexFunc(c.limiters, func(l *limiter) bool { return l.kind == takeFixedWindow })
	if compared := c.undecided(); !slices.Contains(compared, take) || !slices.Contains(compared, c.fastest()) {
		t.Errorf("a Take is not compared with the fastest peer: %v", compared)
	}
	text := ""
	template, err := os.ReadFile("../benchmarks.md")
	redistest.Must(t, errors.Join(err, report.CheckPlaces(string(template), r.Sections())))
	for _, section := range r.Sections() {
		text += section
	}
	requireTables(t, text)
	requireGoals(t, r)
}

// leastCalls is how many commands a decision takes at least. Those of the Redis
// store that leave together are one, of up to 100 decisions.
func leastCalls(l *limiter, at scene) float64 {
	switch {
	case l.kind.ours && at.goroutines > 1:
		return 0.01
	case l.kind == checkAndCharge:
		return 2
	default:
		return 1
	}
}

// requireSane requires figures that can be.
func requireSane(t *testing.T, c *comparison, limiter int) {
	t.Helper()
	s, l := c.samples[limiter][0], c.limiters[limiter]
	// In memory some do without.
	few := l.pool > 0 && s.allocations < 1
	if s.rate <= 0 || s.client <= 0 || few || s.allocations > 200 || s.bytes > 100_000 {
		t.Errorf("%s, %v: %+v", l.kind.name, c.scene, s)
	}
}

func requireTables(t *testing.T, text string) {
	t.Helper()
	for _, want := range []string{
		"| 1, admitted | pool |", "| 64, admitted | pool |", "| 64, refused | pool |",
	} {
		if strings.Count(text, want) != 1 {
			t.Errorf("not one %q in\n%s", want, text)
		}
	}
	lines := map[string]int{}
	for _, k := range redisKinds {
		lines[k.name] += 3
	}
	lines[takePlain.name] = 1
	// Those in memory stand in a table of rates and in one of other figures.
	for _, k := range memoryKinds {
		lines[k.name] += 2
	}
	for name, want := range lines {
		if n := strings.Count(text, "| "+name+" |"); n != want {
			t.Errorf("%d lines about %s, want %d, in\n%s", n, name, want, text)
		}
	}
}

// requireGoals requires those for 1 and 64 goroutines.
func requireGoals(t *testing.T, r *Result) {
	t.Helper()
	var got []string
	for _, g := range r.Goals() {
		if !g.AtLeast || g.Bound <= 0 || len(g.Rounds) != 2 || slices.Min(g.Rounds) <= 0 {
			t.Errorf("goal %+v", g)
		}
		got = append(got, g.What)
	}
	want := []string{
		"Take, fixed window, pipelining off, 1 goroutine ÷ fastest peer",
		"Take, fixed window, 64 goroutines ÷ fastest peer",
		"check + charge, fixed window, 64 goroutines ÷ fastest peer",
		"check + detached charge, fixed window, 64 goroutines ÷ fastest peer",
		"Take, GCRA, 64 goroutines ÷ fastest peer",
		"Take, fixed window, 64 goroutines, refused ÷ fastest peer",
		"Take, GCRA, 64 goroutines, refused ÷ fastest peer",
		"Take, fixed window, in memory, 64 goroutines ÷ ulule/limiter",
		"Take, fixed window, in memory, 64 goroutines ÷ throttled",
	}
	if !slices.Equal(got, want) {
		t.Errorf("goals %q, want %q", got, want)
	}
}

func TestRunRefusesNonsense(t *testing.T) {
	for _, opts := range []Options{{Rounds: -1}, {More: -1}, {Length: -1}, {Goroutines: []int{0}}} {
		if _, err := Run(t.Context(), opts, io.Discard); err == nil {
			t.Errorf("%+v was taken", opts)
		}
	}
}
