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
// floor at the same rate. Those of the sweep share a rate and a floor, the ones of
// other factors and the ones at a distance apart.
func (l *lab) measureLatencies(ctx context.Context, r *Result, isCounted bool) error {
	for _, name := range latencyCases {
		c := called(l.cases, name)
		rate := r.cases.spread(name, sample.requests).Median / 2
		if err := l.against(ctx, c.floor, rate, r.latency, isCounted, c); err != nil {
			return err
		}
	}
	for _, group := range [][]*site{l.factorCases(), l.farCases()} {
		if err := l.against(ctx, floor, r.sharedRate(group), r.latency, isCounted, group...); err != nil {
			return err
		}
	}
	return nil
}

// factorCases are those of the sweep that differ in another factor than distance.
func (l *lab) factorCases() (cases []*site) {
	for _, row := range factorRows(&l.opts) {
		cases = append(cases, called(l.sweep, row.name))
	}
	return cases
}

// farCases are those of the sweep at a distance, and the same with charge before.
func (l *lab) farCases() (cases []*site) {
	for i, roundTrip := range roundTrips {
		cases = append(cases, called(l.sweep, distanceName(roundTrip)), l.distances[i])
	}
	return cases
}

// sharedRate is half of what each of the cases can serve. Those with charge
// before, of which the sweep has none, are taken to serve what it serves on
// loopback.
func (r *Result) sharedRate(cases []*site) float64 {
	least := math.Inf(1)
	for _, c := range cases {
		reached := r.sweep.spread(c.name, sample.requests)
		if len(r.sweep[c.name]) == 0 {
			reached = r.cases.spread(ChargeBefore, sample.requests)
		}
		least = math.Min(least, reached.Median)
	}
	return least / 2
}

// against measures a floor, and then cases at the same rate.
func (l *lab) against(ctx context.Context, floor string, rate float64, into map[string]rounds, isCounted bool, cases ...*site) error {
	without, err := l.paced(ctx, called(l.cases, floor), rate)
	if err != nil {
		return err
	}
	for _, c := range cases {
		q, err := l.paced(ctx, c, rate)
		if err != nil {
			return err
		}
		if isCounted {
			into[c.name] = append(into[c.name], latencies{rate: rate, floor: without, limiter: q})
		}
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
