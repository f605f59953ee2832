package endtoend

import (
	"math"
	"path/filepath"
	"time"

	"github.com/shardlimit/caddy-shardlimit/bench/chart"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// The files that Draw makes.
const (
	caddyPicture   = "bench-caddy.svg"
	sweepPicture   = "bench-sweep.svg"
	latencyPicture = "bench-latency.svg"
)

// Draw draws what was measured, into files in a folder.
func (r *Result) Draw(dir string) error {
	var bars []chart.Bar
	for _, c := range r.baseCases {
		if c.floor != "" {
			bars = append(bars, bar(c.name, r.cases.ratio(c.name, c.floor)))
		}
	}
	if err := chart.Bars(filepath.Join(dir, caddyPicture), "CPU of Caddy per request", "÷ floor of the same round", bars...); err != nil {
		return err
	}
	bars = bars[:0]
	for _, row := range sweepRows(&r.opts) {
		bars = append(bars, bar(row.title(), r.sweep.spread(row.name, func(s sample) float64 { return s.caddy + s.redis() })))
	}
	if err := chart.Bars(filepath.Join(dir, sweepPicture), "CPU of Caddy and Redis per request", "µs", bars...); err != nil {
		return err
	}
	return chart.Lines(filepath.Join(dir, latencyPicture), chart.Axes{
		Title: "Latency that the limiter adds, at one rate", X: "round trip to Redis, ms", Y: "ms", LogX: true,
	}, r.byDistance()...)
}

func bar(name string, s spread.Spread) chart.Bar {
	return chart.Bar{Name: name, Spread: s}
}

// byDistance are the latencies that are added with Redis at the distances.
func (r *Result) byDistance() (all []chart.Series) {
	for _, kind := range []struct {
		name string
		of   func(time.Duration) string
	}{{"charge after", distanceName}, {"charge before", beforeName}} {
		for _, part := range []struct {
			name string
			of   func(quantiles) float64
		}{{"p50", quantiles.ofP50}, {"p99", quantiles.ofP99}} {
			s := chart.Series{Name: kind.name + ", " + part.name}
			for at, roundTrip := range roundTrips {
				added := r.latency[kind.of(roundTrip)].added(part.of)
				s.X = append(s.X, math.Max(math.Round(r.pings[at+1].Median*100)/100, 0.01))
				// A difference of two figures that wander may be less than nothing.
				s.Y = append(s.Y, max(added.Median, 0))
			}
			// The least and the most, which the table has, would leave no room for the
			// medians.
			s.Low, s.High = s.Y, s.Y
			all = append(all, s)
		}
	}
	return all
}
