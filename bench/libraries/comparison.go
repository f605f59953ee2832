package libraries

import (
	"slices"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// comparison is what the limiters did in one scene.
type comparison struct {
	scene    scene
	limiters []*limiter
	// samples are those of each limiter, by round.
	samples [][]sample
	// ceiling is by round too; nil where it was not measured.
	ceiling []ceiling
}

// ratios are the rates of a limiter relative to that of the fastest peer in the
// same round. The fastest is the one that is it by the median: of several that
// are measured on a busy machine, the luckiest of each round would be faster.
func (c *comparison) ratios(limiter int) spread.Spread {
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
	return spread.Of(ratios)
}

// parts are the rates of a limiter as parts of the ceiling of the same round.
func (c *comparison) parts(limiter int) spread.Spread {
	var parts []float64
	for round, s := range c.samples[limiter] {
		parts = append(parts, s.rate/c.ceiling[round].rate)
	}
	return spread.Of(parts)
}

// spread is that of a figure of a limiter's samples.
func (c *comparison) spread(limiter int, of func(*sample) float64) spread.Spread {
	var values []float64
	for i := range c.samples[limiter] {
		values = append(values, of(&c.samples[limiter][i]))
	}
	return spread.Of(values)
}

// ceilings is the spread of a figure of the ceiling.
func (c *comparison) ceilings(of func(ceiling) float64) spread.Spread {
	var values []float64
	for _, s := range c.ceiling {
		values = append(values, of(s))
	}
	return spread.Of(values)
}

// place is where among the limiters one is, or -1.
func (c *comparison) place(k *kind) int {
	return slices.IndexFunc(c.limiters, func(l *limiter) bool { return l.kind == k })
}

// The figures of which there are spreads.
func rate(s *sample) float64         { return s.rate }
func millions(s *sample) float64     { return s.rate / 1e6 }
func clientMicros(s *sample) float64 { return s.client }
func serverMicros(s *sample) float64 { return s.server }
func bothMicros(s *sample) float64   { return s.client + s.server }
func allocations(s *sample) float64  { return s.allocations }
func allocated(s *sample) float64    { return s.bytes }
func calls(s *sample) float64        { return s.calls }
func p50(s *sample) float64          { return s.p50 }
func p99(s *sample) float64          { return s.p99 }

func ceilingRate(s ceiling) float64   { return s.rate }
func ceilingMicros(s ceiling) float64 { return s.server }
