package endtoend

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// latencies are those of one case in one round, in milliseconds, and of the
// floor at the same rate.
type latencies struct {
	rate           float64
	floor, limiter quantiles
}

// quantiles are how long requests took.
type quantiles struct {
	p50, p99, p999 float64
	// sent99 is p99 from when they were sent, and lag99 how long after it was due
	// that was.
	sent99, lag99 float64
}

func quantilesOf(r *loadgen.Result) quantiles {
	of := func(sorted []time.Duration, part float64) float64 {
		return milliseconds(loadgen.Quantile(sorted, part))
	}
	return quantiles{
		p50: of(r.Latencies, 0.5), p99: of(r.Latencies, 0.99), p999: of(r.Latencies, 0.999),
		sent99: of(r.Times, 0.99), lag99: of(r.Lags, 0.99),
	}
}

func (q quantiles) ofP50() float64    { return q.p50 }
func (q quantiles) ofP99() float64    { return q.p99 }
func (q quantiles) ofP999() float64   { return q.p999 }
func (q quantiles) ofSent99() float64 { return q.sent99 }

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1e3 }

// rounds are those of a case.
type rounds []latencies

// added is the spread of what a case adds to a quantile of the floor.
func (r rounds) added(of func(quantiles) float64) spread.Spread {
	return r.spread(func(l latencies) float64 { return of(l.limiter) - of(l.floor) })
}

func (r rounds) spread(of func(latencies) float64) spread.Spread {
	values := make([]float64, 0, len(r))
	for _, l := range r {
		values = append(values, of(l))
	}
	return spread.Of(values)
}

// latencyCases are those whose latency is measured on loopback.
var latencyCases = []string{memoryStore, ChargeAfter, ChargeBefore, BatchAuto, refusedHot}

// measureLatencies runs each case at half of what it reached before, after its
// floor at the same rate. The floor of those at a distance is shared.
func (l *lab) measureLatencies(ctx context.Context, r *Result, isCounted bool) error {
	byName := map[string]*site{}
	for _, c := range l.cases {
		byName[c.name] = c
	}
	for _, name := range latencyCases {
		c := byName[name]
		rate := r.cases.spread(name, sample.requests).Median / 2
		floor, err := l.paced(ctx, byName[c.floor], rate)
		if err != nil {
			return err
		}
		if err := l.against(ctx, c, rate, floor, r.latency, isCounted); err != nil {
			return err
		}
	}

	rate := r.distanceRate()
	floor, err := l.paced(ctx, byName[floor], rate)
	if err != nil {
		return err
	}
	for i, roundTrip := range roundTrips {
		for _, c := range l.sweep {
			if c.name != distanceName(roundTrip) {
				continue
			}
			if err := l.against(ctx, c, rate, floor, r.latency, isCounted); err != nil {
				return err
			}
		}
		if err := l.against(ctx, l.distances[i], rate, floor, r.latency, isCounted); err != nil {
			return err
		}
	}
	return nil
}

// distanceRate is half of what all cases at a distance can serve. Those with
// charge before are taken to serve what it serves on loopback.
func (r *Result) distanceRate() float64 {
	least := r.cases.spread(ChargeBefore, sample.requests).Median
	for _, roundTrip := range roundTrips {
		least = math.Min(least, r.sweep.spread(distanceName(roundTrip), sample.requests).Median)
	}
	return least / 2
}

// against measures a case after its floor.
func (l *lab) against(ctx context.Context, c *site, rate float64, floor quantiles, into map[string]rounds, isCounted bool) error {
	q, err := l.paced(ctx, c, rate)
	if err != nil {
		return err
	}
	if isCounted {
		into[c.name] = append(into[c.name], latencies{rate: rate, floor: floor, limiter: q})
	}
	return nil
}

// paced sends requests at a rate.
func (l *lab) paced(ctx context.Context, c *site, rate float64) (q quantiles, err error) {
	length := l.opts.Length / time.Duration(l.opts.slices())
	// The first requests of connections are others'.
	lead := leadIn(length)
	result, err := c.send(ctx, loadgen.Options{
		Connections: l.opts.Connections, Rate: rate, Duration: lead + length, Skip: int64(rate * lead.Seconds()),
	})
	if err != nil {
		return q, fmt.Errorf("%s: %w", c.name, err)
	}
	return quantilesOf(&result), nil
}
