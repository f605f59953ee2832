// Package libraries compares the stores with other limiters for Go: those that
// count in Redis with a Take of the Redis store, those that count in memory with
// one of the memory store. They take turns, several rounds; what counts is the
// ratio to the fastest of the others, the peers, in the same round. A limiter is
// what is compared, of some kind; a comparison is what several did in a scene, and
// a Result all of them.
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
	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// Options say how much is measured. What is zero is as it is by default.
type Options struct {
	Rounds int // how often each limiter is measured
	// Length is how long each limiter in Redis runs in a round, and twice as long
	// as each in memory.
	Length time.Duration
	// Goroutines are how many ask at the same time: for each number everything
	// is measured.
	Goroutines []int
}

// The default options.
const (
	defaultRounds = 5
	defaultLength = 300 * time.Millisecond
)

// defaultGoroutines are the default numbers of goroutines.
var defaultGoroutines = []int{1, 16, 64, 256, 1024}

// memoryShare is the part of the time, one in so many, that those in memory
// have: they make a hundred times as many decisions in it.
const memoryShare = 2

// What is refused is measured with these numbers of goroutines alone.
var refusedWith = []int{64, 256}

// ceilingWith is the number of goroutines with which a Take is compared with
// the ceiling; if nothing is measured with it, the largest is in its place.
const ceilingWith = 256

// Result is what was measured.
type Result struct {
	opts Options
	// shared are of limiters in Redis, apart of those in memory; each in the
	// order of goroutines.
	shared, apart []*comparison
}

// Run measures everything, with a redis-server of its own. It writes its progress to
// progress.
func Run(ctx context.Context, opts Options, progress io.Writer) (_ *Result, err error) {
	opts.Rounds, opts.Length = cmp.Or(opts.Rounds, defaultRounds), cmp.Or(opts.Length, defaultLength)
	if len(opts.Goroutines) == 0 {
		opts.Goroutines = defaultGoroutines
	}
	if opts.Rounds < 1 || opts.Length < 0 || slices.Min(opts.Goroutines) < 1 {
		return nil, errors.New("rounds, length and goroutines must be positive")
	}
	opts.Goroutines = slices.Compact(slices.Sorted(slices.Values(opts.Goroutines)))
	server, err := redistest.Launch()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	r := &Result{opts: opts}
	for _, goroutines := range opts.Goroutines {
		fmt.Fprintf(progress, "limiters in Redis, %s\n", scene{goroutines: goroutines}.crowd())
		t := &trials{
			server: server, opts: opts, load: newLoad(goroutines, 1, opts.Length),
			ceiling: goroutines == nearest(opts.Goroutines, ceilingWith),
		}
		comparisons, err := t.compare(ctx, redisKinds)
		if err != nil {
			return nil, err
		}
		r.shared = append(r.shared, comparisons...)
	}
	inMemory := opts
	inMemory.Length /= memoryShare
	for _, goroutines := range opts.Goroutines {
		fmt.Fprintf(progress, "limiters in memory, %s\n", scene{goroutines: goroutines}.crowd())
		t := &trials{opts: inMemory, load: newLoad(goroutines, memoryStride, inMemory.Length)}
		comparisons, err := t.compare(ctx, memoryKinds)
		if err != nil {
			return nil, err
		}
		r.apart = append(r.apart, comparisons...)
	}
	return r, nil
}

// nearest returns wanted if it is among the numbers, or else the largest.
func nearest(numbers []int, wanted int) int {
	if slices.Contains(numbers, wanted) {
		return wanted
	}
	return slices.Max(numbers)
}

// admitted is the comparison of those in Redis in which all is admitted, with
// so many goroutines or, if nothing was measured with those, the most.
func (r *Result) admitted(goroutines int) *comparison {
	return find(r.shared, scene{goroutines: nearest(r.opts.Goroutines, goroutines)})
}

func find(comparisons []*comparison, s scene) *comparison {
	return comparisons[slices.IndexFunc(comparisons, func(c *comparison) bool { return c.scene == s })]
}

// trials are what is measured with one number of goroutines.
type trials struct {
	server  *redistest.Server // nil for limiters that count in memory
	opts    Options
	load    *load
	ceiling bool // set if the ceiling is measured as well
}

// choices are as many rounds as are spent on the choice of a pool at most.
const choices = 3

// compare measures the implementations. They take turns, and no one is first
// more often than the others.
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
			if err := t.round(ctx, c, round); err != nil {
				return nil, err
			}
		}
		comparisons = append(comparisons, c)
	}
	return comparisons, nil
}

// round measures each of the limiters once, and the ceiling next to the Take
// that is compared with it.
func (t *trials) round(ctx context.Context, c *comparison, round int) error {
	for turn := range c.limiters {
		i := (round + turn) % len(c.limiters)
		if err := ctx.Err(); err != nil {
			return err
		}
		k := c.limiters[i].kind
		s, err := measure(c.limiters[i], c.scene, t.load, t.server, t.opts.Length)
		if err != nil {
			return fmt.Errorf("%s, %v: %w", k.name, c.scene, err)
		}
		c.samples[i] = append(c.samples[i], s)
		if !t.ceiling || c.scene.refused || k != takeFixedWindow {
			continue
		}
		top, err := measureCeiling(ctx, t.server, t.opts.Length)
		if err != nil {
			return fmt.Errorf("measure the ceiling: %w", err)
		}
		c.ceiling = append(c.ceiling, top)
	}
	return nil
}

// openBest makes the implementation ready with that of its pools which admits
// most, so that every one is at its best.
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
		l, err := openLimiter(k, t.addr(), pool)
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
	for range min(choices, t.opts.Rounds) {
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

func (t *trials) addr() string {
	if t.server == nil {
		return ""
	}
	return t.server.Addr()
}

// scene is the circumstances of a comparison.
type scene struct {
	goroutines int
	refused    bool // set if nothing is admitted; otherwise everything is
}

// The limits of the scenes, in events an hour: one that is used up by the first
// event, and one that is not used up.
const (
	scarce = 1
	plenty = 1_000_000
)

func (s scene) events() int {
	if s.refused {
		return scarce
	}
	return plenty
}

func (s scene) admitted(decisions int) int {
	if s.refused {
		return 0
	}
	return decisions
}

func (s scene) String() string {
	what := "admitted"
	if s.refused {
		what = "refused"
	}
	return fmt.Sprintf("%d, %s", s.goroutines, what)
}

// crowd is how many goroutines there are, in words.
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

// comparison is what the limiters did in one scene.
type comparison struct {
	scene    scene
	limiters []*limiter
	samples  [][]sample // those of each limiter, by round
	ceiling  []ceiling  // by round too; nil where it was not measured
}

// ratios are the rates of a limiter relative to that of the fastest peer in the
// same round. The fastest is the one that is it by the median: of several that
// are measured on a busy machine, the luckiest of each round would be faster.
func (c *comparison) ratios(limiter int) report.Spread {
	fastest, most := 0, 0.0
	for i, l := range c.limiters {
		if median := c.spread(i, rate).Median; !l.kind.ours && median > most {
			fastest, most = i, median
		}
	}
	var ratios []float64
	for round, s := range c.samples[limiter] {
		ratios = append(ratios, s.rate/c.samples[fastest][round].rate)
	}
	return report.SpreadOf(ratios)
}

func (c *comparison) parts(limiter int) report.Spread {
	var parts []float64
	for round, s := range c.samples[limiter] {
		parts = append(parts, s.rate/c.ceiling[round].rate)
	}
	return report.SpreadOf(parts)
}

func (c *comparison) spread(limiter int, of func(sample) float64) report.Spread {
	return report.SpreadBy(c.samples[limiter], of)
}

func (c *comparison) ceilings(of func(ceiling) float64) report.Spread {
	return report.SpreadBy(c.ceiling, of)
}

func (c *comparison) place(k *kind) int {
	return slices.IndexFunc(c.limiters, func(l *limiter) bool { return l.kind == k })
}

func rate(s sample) float64           { return s.rate }
func millions(s sample) float64       { return s.rate / 1e6 }
func clientMicros(s sample) float64   { return s.client }
func serverMicros(s sample) float64   { return s.server }
func bothMicros(s sample) float64     { return s.client + s.server }
func allocations(s sample) float64    { return s.allocations }
func allocated(s sample) float64      { return s.bytes }
func calls(s sample) float64          { return s.calls }
func p50(s sample) float64            { return s.p50 }
func p99(s sample) float64            { return s.p99 }
func ceilingRate(s ceiling) float64   { return s.rate }
func ceilingMicros(s ceiling) float64 { return s.server }

// Figures are medians that a text is about.
type Figures struct {
	Goroutines int // how many asked for a Take at the same time
	// TakeRate is decisions per second by a Take of a fixed window, of what is
	// admitted, and TakeServerMicros the server's CPU time for each.
	TakeRate, TakeServerMicros float64
	// CeilingRate is calls of the same script per second by redis-benchmark, and
	// CeilingServerMicros the server's CPU time for each.
	CeilingRate, CeilingServerMicros float64
	CeilingPart                      float64 // which part of the ceiling a Take reached in the same round
}

// Figures returns those with 256 goroutines or, if nothing was measured with
// those, with the most.
func (r *Result) Figures() Figures {
	c := r.admitted(ceilingWith)
	take := c.place(takeFixedWindow)
	return Figures{
		Goroutines:          c.scene.goroutines,
		TakeRate:            c.spread(take, rate).Median,
		TakeServerMicros:    c.spread(take, serverMicros).Median,
		CeilingPart:         c.parts(take).Median,
		CeilingRate:         c.ceilings(ceilingRate).Median,
		CeilingServerMicros: c.ceilings(ceilingMicros).Median,
	}
}

// ceilingBound is the part of the ceiling that a Take is to reach.
const ceilingBound = 0.75

// Goals returns what was to be reached with the goroutines that were measured:
// first that by which a Take is judged, then the same for other scenes and
// algorithms.
func (r *Result) Goals() []report.Goal {
	var first, extra []report.Goal
	for _, c := range r.shared {
		for i, l := range c.limiters {
			bound, ok := l.kind.bounds[c.scene.goroutines]
			list := &first
			if l.kind.extra || c.scene.refused {
				list = &extra
			}
			// What is refused is not charged.
			isUncharged := c.scene.refused && (l.kind == checkAndCharge || l.kind == checkAndDetach)
			if ok && !isUncharged {
				*list = append(*list, newGoal(l.kind.name+", "+c.scene.crowd()+" ÷ fastest peer", bound, c.ratios(i)))
			}
		}
		if c.ceiling != nil && c.scene.goroutines == ceilingWith {
			first = append(first, newGoal(takeFixedWindow.name+", "+c.scene.crowd()+" ÷ pipelined redis-benchmark",
				ceilingBound, c.parts(c.place(takeFixedWindow))))
		}
	}
	return append(first, extra...)
}

func newGoal(what string, atLeast float64, s report.Spread) report.Goal {
	return report.Goal{What: what, AtLeast: true, Bound: atLeast, Spread: s}
}

// Markdown returns the tables of all that was measured.
func (r *Result) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Each limiter in Redis had %v in each of %d rounds, each in memory %v, and %d clients in turn. "+
		"In every round all take turns. Calls are commands that were sent to Redis for a decision; one of the Redis store is for several, where they leave together.\n",
		r.opts.Length, r.opts.Rounds, r.opts.Length/memoryShare, len(clientKeys))
	b.WriteString("\n### In Redis\n\n")
	fmt.Fprintf(&b, "![decisions per second by goroutines](img/%s)\n\n![CPU time per decision](img/%s)\n",
		decisionsFile, cpuFile)
	for _, c := range r.shared {
		b.WriteString("\n")
		c.write(&b)
	}
	b.WriteString("\n### In memory\n\n")
	r.writeMemory(&b)
	b.WriteString("\n### The ceiling\n\n")
	r.writeCeiling(&b)
	return b.String()
}

func (c *comparison) write(b *strings.Builder) {
	t := report.NewTable(c.scene.String(), "pool", "decisions/s", "÷ fastest peer", "client µs", "server µs", "calls", "allocations", "bytes", "p50 ms", "p99 ms")
	for i, l := range c.limiters {
		cell := func(format string, of func(sample) float64) string { return c.spread(i, of).Text(format) }
		t.Row(l.kind.name, strconv.Itoa(l.pool), cell("%.0f", rate), c.ratios(i).Text("%.2f"),
			cell("%.1f", clientMicros), cell("%.1f", serverMicros), cell("%.2f", calls),
			cell("%.1f", allocations), cell("%.0f", allocated), cell("%.2f", p50), cell("%.2f", p99))
	}
	b.WriteString(t.String())
}

// detailedWith is the number of goroutines for which the document has more figures than
// the rate.
const detailedWith = 64

// writeMemory writes the rates of all scenes, and more of one scene.
func (r *Result) writeMemory(b *strings.Builder) {
	var scenes []*comparison
	columns := []string{"million decisions/s"}
	for _, refused := range []bool{false, true} {
		for _, c := range r.apart {
			if c.scene.refused == refused {
				scenes, columns = append(scenes, c), append(columns, c.scene.String())
			}
		}
	}
	t := report.NewTable(columns...)
	detailed := find(r.apart, scene{goroutines: nearest(r.opts.Goroutines, detailedWith)})
	for i, l := range detailed.limiters {
		row := []string{l.kind.name}
		for _, c := range scenes {
			row = append(row, c.spread(i, millions).Text("%.2f"))
		}
		t.Row(row...)
	}
	more := report.NewTable(detailed.scene.String(), "÷ fastest peer", "CPU µs", "allocations", "bytes")
	for i, l := range detailed.limiters {
		more.Row(l.kind.name, detailed.ratios(i).Text("%.2f"), detailed.spread(i, clientMicros).Text("%.2f"),
			detailed.spread(i, allocations).Text("%.1f"), detailed.spread(i, allocated).Text("%.0f"))
	}
	b.WriteString(t.String() + "\n" + more.String())
}

func (r *Result) writeCeiling(b *strings.Builder) {
	c := r.admitted(ceilingWith)
	take := c.place(takeFixedWindow)
	t := report.NewTable(c.scene.crowd(), "calls/s", "÷ ceiling", "server µs")
	t.Row(fmt.Sprintf("redis-benchmark, %d connections, %d calls in a pipeline", ceilingConnections, ceilingPipeline),
		c.ceilings(ceilingRate).Text("%.0f"), "", c.ceilings(ceilingMicros).Text("%.1f"))
	t.Row(takeFixedWindow.name, c.spread(take, rate).Text("%.0f"), c.parts(take).Text("%.2f"), c.spread(take, serverMicros).Text("%.1f"))
	b.WriteString(t.String())
}

// The pictures.
const (
	decisionsFile = "bench-decisions.svg"
	cpuFile       = "bench-cpu.svg"
)

// Pictures draws the limiters in Redis, by the names of files: how many decisions
// they make, and what CPU time those take.
func (r *Result) Pictures() map[string]*picture.Picture {
	c := r.admitted(detailedWith)
	var bars []picture.Bar
	for i, l := range c.limiters {
		bars = append(bars, picture.Bar{Name: l.kind.name, Spread: c.spread(i, bothMicros)})
	}
	return map[string]*picture.Picture{
		decisionsFile: picture.Lines("Admitted by one Redis", "goroutines", "decisions/s", r.series()...),
		cpuFile:       picture.Bars("CPU time of client and server per decision, "+c.scene.crowd(), "µs", bars...),
	}
}

// series are the rates by goroutines of what is admitted, of the limiters that
// were measured with all numbers of goroutines.
func (r *Result) series() (all []picture.Series) {
	for _, k := range redisKinds {
		if k.goroutines != nil {
			continue
		}
		one := picture.Series{Name: k.name}
		for _, goroutines := range r.opts.Goroutines {
			c := r.admitted(goroutines)
			one.X, one.Y = append(one.X, float64(goroutines)), append(one.Y, c.spread(c.place(k), rate))
		}
		all = append(all, one)
	}
	return all
}
