package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// comparison is what the limiters did in one scene.
type comparison struct {
	scene    scene
	limiters []*limiter
	// samples are those of each limiter, by round.
	samples [][]sample
}

// compare measures the implementations with so many goroutines, in both scenes.
// They take turns, and no one is first more often than the others.
func compare(kinds []*kind, goroutines, rounds int, length time.Duration, server *redistest.Server) ([]*comparison, error) {
	load := newLoad(goroutines)
	var limiters []*limiter
	defer func() {
		for _, l := range limiters {
			l.close()
		}
	}()
	for _, k := range kinds {
		l, err := openBest(k, load, server, length)
		if err != nil {
			return nil, err
		}
		limiters = append(limiters, l)
	}
	var comparisons []*comparison
	for _, refused := range []bool{false, true} {
		c := &comparison{
			scene:    scene{goroutines: goroutines, refused: refused},
			limiters: limiters,
			samples:  make([][]sample, len(limiters)),
		}
		for round := range rounds {
			for turn := range limiters {
				i := (round + turn) % len(limiters)
				s, err := measure(limiters[i], c.scene, load, server, length)
				if err != nil {
					return nil, fmt.Errorf("%s, %v: %w", limiters[i].kind.name, c.scene, err)
				}
				c.samples[i] = append(c.samples[i], s)
			}
		}
		comparisons = append(comparisons, c)
	}
	return comparisons, nil
}

// ratios returns the rates of a limiter relative to that of the fastest peer of
// the same round, sorted.
func (c *comparison) ratios(limiter int) (ratios []float64) {
	for round, s := range c.samples[limiter] {
		fastest := 0.0
		for i, l := range c.limiters {
			if !l.kind.ours {
				fastest = max(fastest, c.samples[i][round].rate)
			}
		}
		ratios = append(ratios, s.rate/fastest)
	}
	slices.Sort(ratios)
	return ratios
}

// median returns the median of a figure of a limiter's samples.
func (c *comparison) median(limiter int, of func(sample) float64) float64 {
	var values []float64
	for _, s := range c.samples[limiter] {
		values = append(values, of(s))
	}
	return median(values)
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
