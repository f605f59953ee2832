package libraries

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// trials are what is measured with one number of goroutines.
type trials struct {
	// server is nil for limiters that count in memory.
	server *redistest.Server
	opts   Options
	load   *load
	// ceiling is set if the ceiling is measured as well.
	ceiling bool
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
		if rate := spread.Of(rates[i]).Median; rate > top {
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
