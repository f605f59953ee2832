package main

import (
	"fmt"
	"math"

	"github.com/shardlimit/caddy-shardlimit/internal/drawing"
)

// The sizes of the picture.
const (
	left, right  = 84, 270
	top, bottom  = 64, 56
	plotWidth    = 420
	plotHeight   = 300
	pointRadius  = 3
	legendPitch  = 22
	legendTop    = 130
	legendLength = 28
)

// The scales, in powers of ten: of calls for each request upwards, of the limit
// to the right.
const (
	leastCalls, mostCalls = -4, 1
	leastLimit, mostLimit = 3, 6
)

var lineColours = []string{drawing.Blue, drawing.Orange, drawing.Green}

// line is the cases that differ in their limit alone.
type line struct {
	batchCase
	points []drawing.Point
}

// draw returns the picture, an SVG: calls for each request of steady traffic.
func draw(list []*batched) string {
	p := drawing.New(left+plotWidth+right, top+plotHeight+bottom, "Calls to Redis for each request, by the limit",
		"Calls to Redis per request, of one client at 80 % of its limit")
	for power := leastCalls; power <= mostCalls; power++ {
		y := yOf(math.Pow10(power))
		p.Axis(left, y, plotWidth)
		p.Number(left-28, y+4, fmt.Sprint(math.Pow10(power)))
	}
	for power := leastLimit; power <= mostLimit; power++ {
		p.Number(xOf(math.Pow10(power)), top+plotHeight+18, fmt.Sprintf("%.0f", math.Pow10(power)))
	}
	p.Text(left+plotWidth/2-60, top+plotHeight+42, "limit, in a window")
	// What it is without a batch does not depend on the limit.
	for _, without := range []struct {
		calls float64
		name  string
	}{{1, "charge before, no batch"}, {2, "charge after"}} {
		y := yOf(without.calls)
		p.Span(left, y, plotWidth, drawing.Gray)
		p.Text(left+plotWidth+12, y+4, without.name)
	}
	colours := map[int]string{}
	y := top + legendTop
	for _, l := range lines(list) {
		colour, ok := colours[l.processes]
		if !ok {
			colour = lineColours[len(colours)%len(lineColours)]
			colours[l.processes] = colour
		}
		drawLine(p, l.points, colour, !l.auto)
		drawLine(p, []drawing.Point{{X: left + plotWidth + 12, Y: y}, {X: left + plotWidth + 12 + legendLength, Y: y}}, colour, !l.auto)
		p.Text(left+plotWidth+20+legendLength, y+4, l.name())
		y += legendPitch
	}
	return p.String()
}

func (l *line) name() string {
	batch := "batch auto"
	if !l.auto {
		batch = fmt.Sprintf("batch limit/%d", fixedPart)
	}
	if l.processes == 1 {
		return batch + ", 1 process"
	}
	return fmt.Sprintf("%s, %d processes", batch, l.processes)
}

// lines groups what could be measured.
func lines(list []*batched) (all []*line) {
	byCase := map[batchCase]*line{}
	for _, b := range list {
		c := b.batchCase
		c.limit = 0
		l, ok := byCase[c]
		if !ok {
			l = &line{batchCase: c}
			byCase[c] = l
			all = append(all, l)
		}
		if b.isSteady(b.steady) {
			l.points = append(l.points, drawing.Point{X: xOf(float64(b.limit)), Y: yOf(b.steady.perRequest())})
		}
	}
	return all
}

func drawLine(p *drawing.Picture, points []drawing.Point, colour string, dashed bool) {
	p.Line(points, colour, dashed)
	for _, at := range points {
		p.Disc(at.X, at.Y, pointRadius, colour)
	}
}

func xOf(limit float64) int64 {
	return left + int64(math.Round(plotWidth*(math.Log10(limit)-leastLimit)/(mostLimit-leastLimit)))
}

func yOf(calls float64) int {
	power := min(max(math.Log10(calls), leastCalls), mostCalls)
	return top + int(math.Round(plotHeight*(mostCalls-power)/(mostCalls-leastCalls)))
}
