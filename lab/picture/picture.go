// Package picture draws the pictures of the documents, as SVG: a Picture of single
// shapes, a Plot with scales and lines, and charts of bars. Apart from the spreads of
// package report, it is independent of the laboratory.
package picture

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// The colours. Colour-blind readers can distinguish Blue, Orange and Green.
const (
	Blue   = "#0072b2"
	Orange = "#d55e00"
	Green  = "#009e73"
	Ink    = "#24292f"
	Gray   = "#8c959f"
	light  = "#d0d7de"
	muted  = "#57606a"
)

var palette = []string{Blue, Orange, Green, "#cc79a7", "#e69f00", "#56b4e9"}

// Picture is a picture that is being drawn.
type Picture struct{ b strings.Builder }

// New begins a picture. The description is its alternative text.
func New(width, height int, description, title string) *Picture {
	p := new(Picture)
	p.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="13" fill="%s" role="img" aria-label="%s">`,
		width, height, width, height, Ink, description)
	p.add(`<rect width="%d" height="%d" rx="6" fill="#ffffff" stroke="%s"/>`, width, height, light)
	p.add(`<text x="16" y="26" font-size="15" font-weight="bold">%s</text>`, title)
	return p
}

func (p *Picture) add(format string, args ...any) { fmt.Fprintf(&p.b, format+"\n", args...) }

// String ends the picture.
func (p *Picture) String() string { return p.b.String() + "</svg>\n" }

// Write ends the picture, and writes it to a file.
func (p *Picture) Write(file string) error {
	if err := os.WriteFile(file, []byte(p.String()), 0o644); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return nil
}

// Text writes a text that begins at x.
func (p *Picture) Text(x int64, y int, text string) {
	p.add(`<text x="%d" y="%d">%s</text>`, x, y, text)
}

// Number writes a number of a scale, centred at x.
func (p *Picture) Number(x int64, y int, text string) {
	p.add(`<text x="%d" y="%d" font-size="10" text-anchor="middle" fill="%s">%s</text>`, x, y, muted, text)
}

// Axis draws a faint line to the right.
func (p *Picture) Axis(x int64, y int, length int64) {
	p.add(`<path d="M%d %dh%d" stroke="%s"/>`, x, y, length, light)
}

// Border draws a dashed line downwards.
func (p *Picture) Border(x int64, y, length int) {
	p.add(`<path d="M%d %dv%d" stroke="%s" stroke-dasharray="3 3"/>`, x, y, length, Gray)
}

// Tick draws a short line downwards.
func (p *Picture) Tick(x int64, y, length int) {
	p.add(`<path d="M%d %dv%d" stroke="%s" stroke-width="2"/>`, x, y, length, Ink)
}

// whisker draws a thin line to the right or downwards.
func (p *Picture) whisker(x int64, y int, length int64, height int) {
	p.add(`<path d="M%d %dl%d %d" stroke="%s"/>`, x, y, length, height, Ink)
}

// Span draws a pale line to the right.
func (p *Picture) Span(x int64, y int, length int64, colour string) {
	p.add(`<path d="M%d %dh%d" stroke="%s" stroke-width="2" opacity="0.5"/>`, x, y, length, colour)
}

// Disc draws a filled circle.
func (p *Picture) Disc(x int64, y, radius int, colour string) {
	p.add(`<circle cx="%d" cy="%d" r="%d" fill="%s"/>`, x, y, radius, colour)
}

// Cross draws a diagonal cross that is twice the size wide.
func (p *Picture) Cross(x int64, y, size int, colour string) {
	p.add(`<path d="M%d %dl%d %dm0 -%dl-%d %d" stroke="%s" stroke-width="2"/>`,
		x-int64(size), y-size, 2*size, 2*size, 2*size, 2*size, 2*size, colour)
}

// Point is a place in a picture.
type Point struct {
	X int64
	Y int
}

// Line draws a line through points, dashed or not.
func (p *Picture) Line(points []Point, colour string, dashed bool) {
	var path strings.Builder
	for _, at := range points {
		fmt.Fprintf(&path, " %d,%d", at.X, at.Y)
	}
	dashes := ""
	if dashed {
		dashes = ` stroke-dasharray="5 4"`
	}
	p.add(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>`, strings.TrimSpace(path.String()), colour, dashes)
}

// The sizes of plots, and of charts of bars.
const (
	left, right = 84, 330
	top, bottom = 64, 56
	plotWidth   = 420
	plotHeight  = 300
	legendPitch = 22
	legendWidth = 28
	barPitch    = 26
	barNames    = 330
)

// Scale maps values to a side of a plot, from its first tick to its last.
type Scale struct {
	Name  string
	Ticks []float64
	Log   bool
}

// Powers returns the scale of the powers of a base, from one to another.
func Powers(name string, base, least, most float64) Scale {
	s := Scale{Name: name, Log: true}
	for power := least; power <= most; power++ {
		s.Ticks = append(s.Ticks, math.Pow(base, power))
	}
	return s
}

func linear(name string, most float64) Scale {
	s := Scale{Name: name, Ticks: []float64{0, 1}}
	if most > 0 {
		step := math.Pow10(int(math.Floor(math.Log10(most))))
		switch {
		case most < 2*step:
			step /= 4
		case most < 4*step:
			step /= 2
		}
		s.Ticks[1] = step
	}
	for n := len(s.Ticks); s.Ticks[n-1] < most; n++ {
		s.Ticks = append(s.Ticks, s.Ticks[1]*float64(n))
	}
	return s
}

// share is the place of a value on the scale, from 0 to 1.
func (s *Scale) share(v float64) float64 {
	first, last := s.Ticks[0], s.Ticks[len(s.Ticks)-1]
	if s.Log {
		v, first, last = math.Log(v), math.Log(first), math.Log(last)
	}
	return min(max((v-first)/(last-first), 0), 1)
}

func (s *Scale) label(v float64) string {
	if s.Log {
		return strconv.FormatFloat(v, 'g', 3, 64)
	}
	return strconv.FormatFloat(v, 'g', 6, 64)
}

// Plot is a picture with two scales. Its lines are named beside it.
type Plot struct {
	*Picture
	x, y  Scale
	lines int
}

// NewPlot draws the scales.
func NewPlot(x, y Scale, description, title string) *Plot {
	p := &Plot{Picture: New(left+plotWidth+right, top+plotHeight+bottom, description, title), x: x, y: y}
	for _, v := range y.Ticks {
		at := p.at(x.Ticks[0], v)
		p.Axis(left, at.Y, plotWidth)
		p.Number(left-28, at.Y+4, y.label(v))
	}
	for _, v := range x.Ticks {
		p.Number(p.at(v, y.Ticks[0]).X, top+plotHeight+18, strconv.FormatFloat(v, 'f', -1, 64))
	}
	p.Text(left+plotWidth/2-100, top+plotHeight+42, x.Name)
	if y.Name != "" {
		p.Text(16, top-14, y.Name)
	}
	return p
}

// at is the place of a value, or the nearest place on the scales.
func (p *Plot) at(x, y float64) Point {
	return Point{
		X: left + int64(math.Round(plotWidth*p.x.share(x))),
		Y: top + int(math.Round(plotHeight*(1-p.y.share(y)))),
	}
}

// Series is a line of medians. If it is marked, its points and their ranges are shown.
type Series struct {
	Name           string
	Colour         string
	Dashed, Marked bool
	X              []float64
	Y              []report.Spread
}

// Append appends a value that is the same in all rounds.
func (s *Series) Append(x, y float64) {
	s.X, s.Y = append(s.X, x), append(s.Y, report.Spread{Median: y, Least: y, Most: y})
}

// Draw draws a line, and its name beside the plot.
func (p *Plot) Draw(s Series) {
	var points []Point
	for i, x := range s.X {
		at := p.at(x, s.Y[i].Median)
		points = append(points, at)
		if s.Marked {
			p.Disc(at.X, at.Y, 3, s.Colour)
			high := p.at(x, s.Y[i].Most).Y
			p.whisker(at.X, high, 0, p.at(x, s.Y[i].Least).Y-high)
		}
	}
	p.Line(points, s.Colour, s.Dashed)
	y, at := top+30+legendPitch*p.lines, int64(left+plotWidth+12)
	p.lines++
	p.Line([]Point{{at, y}, {at + legendWidth, y}}, s.Colour, s.Dashed)
	p.Text(at+legendWidth+8, y+4, s.Name)
}

// Lines draws marked lines over a logarithmic scale of the first line's values of x, and a
// scale from 0 upwards.
func Lines(title, x, y string, series ...Series) *Picture {
	most := 0.0
	for _, s := range series {
		for _, v := range s.Y {
			most = max(most, v.Most)
		}
	}
	p := NewPlot(Scale{Name: x, Ticks: series[0].X, Log: true}, linear(y, most), title, title)
	for i, s := range series {
		s.Colour, s.Dashed, s.Marked = palette[i%len(palette)], i >= len(palette), true
		p.Draw(s)
	}
	return p.Picture
}

// Bar is a median, with the least and the most.
type Bar struct {
	Name string
	report.Spread
}

// Bars draws bars to the right, the first on top.
func Bars(title, unit string, bars ...Bar) *Picture { return Sets(title, unit, Set{Bars: bars}) }

// Set is bars of one kind.
type Set struct {
	Name string
	Bars []Bar
}

// Sets draws bars to the right, those with the same place in their sets below each other.
// It names the sets at the bottom if there are several. All have as many bars.
func Sets(title, unit string, sets ...Set) *Picture {
	most := 0.0
	for _, s := range sets {
		for _, b := range s.Bars {
			most = max(most, b.Most)
		}
	}
	scale, end := linear(unit, most), top+barPitch*len(sets[0].Bars)
	x := func(v float64) int64 { return barNames + int64(math.Round(plotWidth*scale.share(v))) }
	p := New(barNames+plotWidth+left, end+bottom, title, title)
	for _, v := range scale.Ticks {
		p.Border(x(v), top, end-top)
		p.Number(x(v), end+18, scale.label(v))
	}
	p.Text(barNames+plotWidth/2, end+42, unit)
	height := (barPitch - 10) / len(sets)
	for n, s := range sets {
		colour := palette[n%len(palette)]
		if len(sets) > 1 {
			p.rectangle(int64(16+90*n), end+31, 12, 12, colour)
			p.Text(int64(34+90*n), end+42, s.Name)
		}
		for i, b := range s.Bars {
			y := top + barPitch*i
			if n == 0 {
				p.Text(16, y+16, b.Name)
			}
			y += 5 + height*n
			p.rectangle(barNames, y, x(b.Median)-barNames, height, colour)
			p.whisker(x(b.Least), y+height/2, x(b.Most)-x(b.Least), 0)
		}
	}
	return p
}

func (p *Picture) rectangle(x int64, y int, width int64, height int, colour string) {
	p.add(`<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`, x, y, width, height, colour)
}
