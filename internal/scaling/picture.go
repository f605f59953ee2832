package main

import (
	"fmt"
	"math"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/internal/drawing"
)

// The sizes of the pictures.
const (
	left, right = 84, 330
	top, bottom = 64, 56
	plotWidth   = 420
	plotHeight  = 300
	legendPitch = 22
	legendWidth = 28
)

// plot is a picture with logarithmic scales.
type plot struct {
	*drawing.Picture
	// leastX to mostX is from the left to the right, leastY to mostY upwards, as
	// logarithms of base.
	leastX, mostX, leastY, mostY float64
	base                         float64
	// named is how many lines have a name beside the plot.
	named int
}

func (p *plot) x(v float64) int64 {
	share := (math.Log(v)/math.Log(p.base) - p.leastX) / (p.mostX - p.leastX)
	return left + int64(math.Round(plotWidth*min(max(share, 0), 1)))
}

func (p *plot) y(v float64) int {
	share := (math.Log(v)/math.Log(p.base) - p.leastY) / (p.mostY - p.leastY)
	return top + int(math.Round(plotHeight*(1-min(max(share, 0), 1))))
}

// newPlot draws the scales, of powers of the base.
func newPlot(base, leastX, mostX, leastY, mostY float64, description, title, along string) *plot {
	p := &plot{drawing.New(left+plotWidth+right, top+plotHeight+bottom, description, title), leastX, mostX, leastY, mostY, base, 0}
	for power := leastY; power <= mostY; power++ {
		v := math.Pow(base, power)
		p.Axis(left, p.y(v), plotWidth)
		p.Number(left-28, p.y(v)+4, strconv.FormatFloat(v, 'g', 3, 64))
	}
	for power := leastX; power <= mostX; power++ {
		v := math.Pow(base, power)
		p.Number(p.x(v), top+plotHeight+18, strconv.FormatFloat(v, 'f', -1, 64))
	}
	p.Text(left+plotWidth/2-100, top+plotHeight+42, along)
	return p
}

// name writes a line's name beside the plot.
func (p *plot) name(text, colour string, dashed bool) {
	y := top + 30 + legendPitch*p.named
	p.named++
	at := int64(left + plotWidth + 12)
	p.Line([]drawing.Point{{X: at, Y: y}, {X: at + legendWidth, Y: y}}, colour, dashed)
	p.Text(at+legendWidth+8, y+4, text)
}

// styles tell the settings apart.
var styles = []struct {
	setting
	colour string
	dashed bool
}{
	{afterAny, drawing.Blue, false}, {afterSticky, drawing.Blue, true},
	{beforeAny, drawing.Orange, false}, {beforeTight, drawing.Orange, true},
	{batchFixed, drawing.Green, false}, {batchAuto, drawing.Green, true},
}

// drawClient shows the calls of one client.
func drawClient(sc *scenario) string {
	p := newPlot(10, -2, 5, -2, 5, "Calls to Redis a second for one client, by the requests it makes",
		fmt.Sprintf("Calls to Redis a second for one client, %d Caddys", caddys), "the client's requests a second")
	for _, s := range styles {
		var points []drawing.Point
		for _, at := range sc.curve(s.setting).points {
			if at.rate >= 0.01 {
				points = append(points, drawing.Point{X: p.x(at.rate), Y: p.y(at.rate * at.sum())})
			}
		}
		p.Line(points, s.colour, s.dashed)
		p.name(s.name, s.colour, s.dashed)
	}
	return p.String()
}

// drawShard shows the busiest primary.
func drawShard(sc *scenario) string {
	const most = 6
	p := newPlot(2, 0, most, -6, 1, "How busy the busiest primary is, by the number of shards",
		fmt.Sprintf("The busiest primary, in processors; %s requests/s, s = %g", grouped(tableRate), exampleS), "shards")
	zipf := sc.zipf(exampleS)
	for _, s := range styles {
		var points []drawing.Point
		for i, n := range counts {
			median, _ := sc.hottest(i, zipf, sc.curve(s.setting), sc.busiest)
			points = append(points, drawing.Point{X: p.x(float64(n)), Y: p.y(median)})
		}
		p.Line(points, s.colour, s.dashed)
		p.name(s.name, s.colour, s.dashed)
	}
	// If all shards were alike, that would halve whenever they double.
	p.Line([]drawing.Point{{X: p.x(1), Y: p.y(2)}, {X: p.x(1 << most), Y: p.y(2.0 / (1 << most))}}, drawing.Gray, true)
	p.name("if shards were alike", drawing.Gray, true)
	return p.String()
}
