package main

import (
	"fmt"
	"math"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// trials are as many rounds as are spent on the choice of a pool.
const trials = 7

// openBest connects the implementation with that of its pools which admits
// most, so that every one is at its best.
func openBest(k *kind, load *load, server *redistest.Server, length time.Duration) (best *limiter, err error) {
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
		if pool > load.goroutines() && len(candidates) > 0 {
			continue
		}
		l, err := openLimiter(k, server.Addr(), pool)
		if err != nil {
			return nil, err
		}
		candidates = append(candidates, l)
		if err := checkCount(l, server); err != nil {
			return nil, fmt.Errorf("%s: %w", k.name, err)
		}
	}
	if len(candidates) == 1 {
		return candidates[0], nil
	}
	rates := make([][]float64, len(candidates))
	for range trials {
		for i, l := range candidates {
			s, err := measure(l, scene{goroutines: load.goroutines()}, load, server, length)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k.name, err)
			}
			rates[i] = append(rates[i], s.rate)
		}
	}
	top := math.Inf(-1)
	for i, l := range candidates {
		if rate := median(rates[i]); rate > top {
			top, best = rate, l
		}
	}
	return best, nil
}
