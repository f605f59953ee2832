// Package libraries compares the stores with other limiters for Go, the peers: those that
// count in Redis with a Take of the Redis store, those that count in memory with a Take
// of the memory store. All take turns, several rounds; the figure is the ratio, round by
// round, to the peer that was fastest in the first rounds. A limiter is an open implementation of some kind, a
// comparison holds the measurements of several in a scene, and a Result all comparisons.
package libraries

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// Options say how much is measured.
type Options struct {
	Rounds int // of each limiter; 0 means 5
	More   int // most rounds that are added where these do not decide a goal
	// Length is how long each limiter in Redis runs in a round; 0 means 300 ms. A limiter
	// in memory makes a hundred times as many decisions, and runs half as long.
	Length     time.Duration
	Goroutines []int // all is measured with each of these numbers; nil means 1 to 1024
}

// memoryShare is the length of a round in Redis divided by that in memory.
const memoryShare = 2

// refusedWith are the numbers of goroutines with which refusals are measured.
var refusedWith = []int{64, 256}

// Result holds the measurements: of limiters in Redis in shared, of those in memory in
// apart, each in the order of goroutines.
type Result struct {
	opts          Options
	shared, apart []*comparison
}

// Run measures everything, with a redis-server of its own. It writes its progress to
// progress.
func Run(ctx context.Context, opts Options, progress io.Writer) (_ *Result, err error) {
	opts.Rounds, opts.Length = cmp.Or(opts.Rounds, 5), cmp.Or(opts.Length, 300*time.Millisecond)
	if len(opts.Goroutines) == 0 {
		opts.Goroutines = []int{1, 16, 64, 256, 1024}
	}
	if opts.Rounds < 1 || opts.More < 0 || opts.Length < 0 || slices.Min(opts.Goroutines) < 1 {
		return nil, errors.New("rounds, length and goroutines must be positive")
	}
	opts.Goroutines = slices.Compact(slices.Sorted(slices.Values(opts.Goroutines)))
	server, err := redistest.Launch()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	r, inMemory := &Result{opts: opts}, opts
	inMemory.Length /= memoryShare
	for _, part := range []struct {
		where  string
		kinds  []*kind
		trials trials
		stride int
		into   *[]*comparison
	}{
		{"Redis", redisKinds, trials{server: server, opts: opts}, 1, &r.shared},
		{"memory", memoryKinds, trials{opts: inMemory}, memoryStride, &r.apart},
	} {
		for _, goroutines := range opts.Goroutines {
			fmt.Fprintf(progress, "limiters in %s, %s\n", part.where, scene{goroutines: goroutines}.crowd())
			t := part.trials
			t.load = newLoad(goroutines, part.stride, t.opts.Length)
			comparisons, err := t.compare(ctx, part.kinds)
			if err != nil {
				return nil, err
			}
			*part.into = append(*part.into, comparisons...)
		}
	}
	return r, nil
}

// trials are the measurements with one number of goroutines.
type trials struct {
	server *redistest.Server // nil for limiters that count in memory
	opts   Options
	load   *load
}

// compare measures the implementations. They take turns, also in being the first.
func (t *trials) compare(ctx context.Context, kinds []*kind) (comparisons []*comparison, err error) {
	var limiters []*limiter
	defer func() {
		for _, l := range limiters {
			l.close()
		}
	}()
	goroutines := t.load.goroutines()
	for _, k := range with(kinds, goroutines) {
		l, err := t.openBest(ctx, k)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k.name, err)
		}
		limiters = append(limiters, l)
	}
	scenes := []scene{{goroutines: goroutines}}
	if slices.Contains(refusedWith, goroutines) {
		scenes = append(scenes, scene{goroutines: goroutines, refused: true})
	}
	for _, s := range scenes {
		c := &comparison{scene: s, limiters: limiters, samples: make([][]sample, len(limiters))}
		for round := range t.opts.Rounds {
			if err := t.round(ctx, c, c.all(), round); err != nil {
				return nil, err
			}
		}
		if err := report.AddRounds(t.opts.More, c.undecided, func(round int, again []int) error {
			return t.round(ctx, c, again, round)
		}); err != nil {
			return nil, err
		}
		comparisons = append(comparisons, c)
	}
	return comparisons, nil
}

// round measures each of those limiters once.
func (t *trials) round(ctx context.Context, c *comparison, those []int, round int) error {
	for turn := range those {
		i := those[(round+turn)%len(those)]
		if err := ctx.Err(); err != nil {
			return err
		}
		k := c.limiters[i].kind
		s, err := measure(c.limiters[i], c.scene, t.load, t.server, t.opts.Length)
		if err != nil {
			return fmt.Errorf("%s, %v: %w", k.name, c.scene, err)
		}
		c.samples[i] = append(c.samples[i], s)
	}
	return nil
}

// openBest opens the implementation with the pool that admits most.
func (t *trials) openBest(ctx context.Context, k *kind) (best *limiter, err error) {
	var candidates []*limiter
	defer func() {
		for _, l := range candidates {
			if l != best {
				l.close()
			}
		}
	}()
	for _, pool := range k.pools {
		// More connections than goroutines are never used.
		if pool > t.load.goroutines() && len(candidates) > 0 {
			continue
		}
		addr := ""
		if t.server != nil {
			addr = t.server.Addr()
		}
		l, err := openLimiter(k, addr, pool)
		if err != nil {
			return nil, err
		}
		candidates = append(candidates, l)
		if err := checkCount(l, t.server); err != nil {
			return nil, err
		}
	}
	if len(candidates) == 1 {
		return candidates[0], nil
	}
	rates := make([][]float64, len(candidates))
	for range min(3, t.opts.Rounds) {
		for i, l := range candidates {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			s, err := measure(l, scene{goroutines: t.load.goroutines()}, t.load, t.server, t.opts.Length)
			if err != nil {
				return nil, err
			}
			rates[i] = append(rates[i], s.rate)
		}
	}
	top := math.Inf(-1)
	for i, l := range candidates {
		if rate := report.SpreadOf(rates[i]).Median; rate > top {
			top, best = rate, l
		}
	}
	return best, nil
}

// scene is the circumstances of a comparison.
type scene struct {
	goroutines int
	refused    bool // set if nothing is admitted; otherwise everything is
}

// plenty is the limit of the scenes in which everything is admitted, in events an hour.
const plenty = 1_000_000

func (s scene) events() int {
	if s.refused {
		return 1 // the first event uses it up
	}
	return plenty
}

func (s scene) String() string {
	what := "admitted"
	if s.refused {
		what = "refused"
	}
	return fmt.Sprintf("%d, %s", s.goroutines, what)
}

// crowd is the number of goroutines, in words.
func (s scene) crowd() string {
	words := fmt.Sprintf("%d goroutines", s.goroutines)
	if s.goroutines == 1 {
		words = "1 goroutine"
	}
	if s.refused {
		words += ", refused"
	}
	return words
}

// comparison is the measurements of the limiters in one scene.
type comparison struct {
	scene    scene
	limiters []*limiter
	samples  [][]sample // of each limiter, by round
}

// all are the limiters, by their place.
func (c *comparison) all() (all []int) {
	for i := range c.limiters {
		all = append(all, i)
	}
	return all
}

// undecided are the limiters, by their place, of the goals that the rounds do not decide.
func (c *comparison) undecided() []int {
	first, extra := c.goals()
	var those []int
	for _, g := range slices.Concat(first, extra) {
		if g.Verdict() == report.Undecided {
			those = append(those, g.limiters...)
		}
	}
	slices.Sort(those)
	return slices.Compact(those)
}

// ratios are the rates of a limiter relative to the rate of the fastest peer in the same
// round.
func (c *comparison) ratios(limiter int) []float64 {
	return report.RatiosBy(c.samples[limiter], c.samples[c.fastest()], rate)
}

// fastest is the place of the peer with the highest median: on a busy machine, the luckiest
// peer of each round would be faster. It counts the rounds that all limiters have, so that
// those which are added do not exchange it for a peer that does not have them.
func (c *comparison) fastest() (fastest int) {
	rounds := len(c.samples[0])
	for _, s := range c.samples {
		rounds = min(rounds, len(s))
	}
	most := 0.0
	for i, l := range c.limiters {
		if median := report.SpreadBy(c.samples[i][:rounds], rate).Median; !l.kind.ours && median > most {
			fastest, most = i, median
		}
	}
	return fastest
}

func (c *comparison) ratio(limiter int) report.Spread { return report.SpreadOf(c.ratios(limiter)) }

func (c *comparison) spread(limiter int, of func(sample) float64) report.Spread {
	return report.SpreadBy(c.samples[limiter], of)
}

func rate(s sample) float64         { return s.rate }
func millions(s sample) float64     { return s.rate / 1e6 }
func clientMicros(s sample) float64 { return s.client }
func serverMicros(s sample) float64 { return s.server }
func allocations(s sample) float64  { return s.allocations }
func allocated(s sample) float64    { return s.bytes }
func calls(s sample) float64        { return s.calls }
func latency(s sample) float64      { return s.latency }

// Goals returns the goals for the goroutines that were measured: first those by which a
// Take is judged, then those for other scenes and algorithms, and those in memory.
func (r *Result) Goals() []report.Goal {
	var first, extra []goal
	for _, c := range slices.Concat(r.shared, r.apart) {
		those, others := c.goals()
		first, extra = append(first, those...), append(extra, others...)
	}
	var all []report.Goal
	for _, g := range slices.Concat(first, extra) {
		all = append(all, g.Goal)
	}
	return all
}

// goal is a goal, and the places of the limiters of which more rounds can decide it.
type goal struct {
	report.Goal
	limiters []int
}

func (c *comparison) goals() (first, extra []goal) {
	for i, l := range c.limiters {
		bound, ok := l.kind.bounds[c.scene.goroutines]
		if ok && c.scene.refused {
			bound, ok = refusedBounds[c.scene.goroutines]
		}
		list := &first
		if l.kind.extra || c.scene.refused {
			list = &extra
		}
		// A refused request is not charged.
		isUncharged := c.scene.refused && (l.kind == checkAndCharge || l.kind == checkAndDetach)
		if ok && !isUncharged {
			*list = append(*list, goal{report.Goal{What: l.kind.name + ", " + c.scene.crowd() + " ÷ fastest peer",
				AtLeast: true, Bound: bound, Rounds: c.ratios(i)}, []int{i, c.fastest()}})
		}
	}
	return first, append(extra, c.memoryGoals()...)
}

// memoryGoals returns the goals of the memory store: as fast as those limiters that keep
// what headers need as well.
func (c *comparison) memoryGoals() (goals []goal) {
	if c.scene != (scene{goroutines: detailedWith}) {
		return nil
	}
	take := slices.IndexFunc(c.limiters, func(l *limiter) bool { return l.kind.ours })
	for i, l := range c.limiters {
		if l.kind.like {
			goals = append(goals, goal{report.Goal{What: c.limiters[take].kind.name + ", in memory, " + c.scene.crowd() + " ÷ " + l.kind.name,
				AtLeast: true, Bound: 1, Rounds: report.RatiosBy(c.samples[take], c.samples[i], rate)}, []int{take, i}})
		}
	}
	return goals
}

// Sections are the tables of the measurements, by their places in the document.
func (r *Result) Sections() map[string]string {
	var tables []string
	for _, c := range r.shared {
		tables = append(tables, c.table())
	}
	setup := fmt.Sprintf("Each limiter in Redis had %v in each of %d rounds, each in memory %v, and %d clients in turn. Where these rounds do not decide a goal, the limiters that it compares have up to %d more.\n",
		r.opts.Length, r.opts.Rounds, r.opts.Length/memoryShare, len(clientKeys), r.opts.More)
	return map[string]string{"limiters": setup, "in Redis": strings.Join(tables, "\n"), "in memory": r.memoryTables()}
}

func (c *comparison) table() string {
	t := report.NewTable(c.scene.String(), "pool", "decisions/s", "÷ fastest peer", "client µs", "server µs", "calls", "allocations", "bytes", "latency ms")
	for i, l := range c.limiters {
		cell := func(format string, of func(sample) float64) string { return c.spread(i, of).Text(format) }
		t.Row(l.kind.name, strconv.Itoa(l.pool), cell("%.0f", rate), c.ratio(i).Text("%.2f"),
			cell("%.1f", clientMicros), cell("%.1f", serverMicros), cell("%.2f", calls),
			cell("%.1f", allocations), cell("%.0f", allocated), cell("%.2f", latency))
	}
	return t.String()
}

// detailedWith is the number of goroutines for which the document has more than the rate.
const detailedWith = 64

// memoryTables are the rates in all scenes, and more figures of one scene.
func (r *Result) memoryTables() string {
	columns := []string{"million decisions/s"}
	for _, c := range r.apart {
		columns = append(columns, c.scene.String())
	}
	t := report.NewTable(columns...)
	for i, l := range r.apart[0].limiters {
		row := []string{l.kind.name}
		for _, c := range r.apart {
			row = append(row, c.spread(i, millions).Text("%.2f"))
		}
		t.Row(row...)
	}
	text := t.String()
	for _, c := range traffic.Those(r.apart, func(c *comparison) bool { return c.scene == scene{goroutines: detailedWith} }) {
		more := report.NewTable(c.scene.String(), "÷ fastest peer", "CPU µs", "allocations", "bytes")
		for i, l := range c.limiters {
			more.Row(l.kind.name, c.ratio(i).Text("%.2f"), c.spread(i, clientMicros).Text("%.2f"),
				c.spread(i, allocations).Text("%.1f"), c.spread(i, allocated).Text("%.0f"))
		}
		text += "\n" + more.String()
	}
	return text
}
