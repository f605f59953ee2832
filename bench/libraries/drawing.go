package libraries

import (
	"fmt"
	"path/filepath"

	"github.com/shardlimit/caddy-shardlimit/bench/chart"
)

// The pictures.
const (
	decisionsFile = "bench-decisions.svg"
	cpuFile       = "bench-cpu.svg"
)

// Draw draws the limiters in Redis into files in dir: how many decisions they
// make, and what CPU time those take.
func (r *Result) Draw(dir string) error {
	axes := chart.Axes{Title: "Admitted by one Redis", X: "goroutines", Y: "decisions/s", LogX: true}
	if err := chart.Lines(filepath.Join(dir, decisionsFile), axes, r.series()...); err != nil {
		return err
	}
	c := r.admitted(detailedWith)
	title := fmt.Sprintf("CPU time of client and server per decision, %s", c.scene.crowd())
	return chart.Bars(filepath.Join(dir, cpuFile), title, "µs", c.bars(bothMicros)...)
}

// series are the rates by goroutines of what is admitted, of the limiters that
// were measured with all numbers of goroutines.
func (r *Result) series() (all []chart.Series) {
	for _, k := range redisKinds {
		if k.goroutines != nil {
			continue
		}
		one := chart.Series{Name: k.name}
		for _, goroutines := range r.opts.Goroutines {
			c := r.admitted(goroutines)
			s := c.spread(c.place(k), rate)
			one.X, one.Y = append(one.X, float64(goroutines)), append(one.Y, s.Median)
			one.Low, one.High = append(one.Low, s.Least), append(one.High, s.Most)
		}
		all = append(all, one)
	}
	return all
}

// bars are those of a figure, of all limiters.
func (c *comparison) bars(of func(*sample) float64) (all []chart.Bar) {
	for i, l := range c.limiters {
		s := c.spread(i, of)
		all = append(all, chart.Bar{Name: l.kind.name, Spread: s})
	}
	return all
}
