// Package picture draws the pictures of the documents, as SVG: a Picture of single
// shapes, and charts of bars. Apart from the spreads of package report, it is
// independent of the laboratory.
package picture

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// The colours. Colour-blind readers can distinguish Blue and Orange.
const (
	Blue   = "#0072b2"
	Orange = "#d55e00"
	ink    = "#24292f"
	gray   = "#8c959f"
	light  = "#d0d7de"
	muted  = "#57606a"
)

// Picture is a picture that is being drawn.
type Picture struct{ b strings.Builder }

// New begins a picture. The description is its alternative text.
func New(width, height int, description, title string) *Picture {
	p := new(Picture)
	p.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="13" fill="%s" role="img" aria-label="%s">`,
		width, height, width, height, ink, description)
	p.add(`<rect width="%d" height="%d" rx="6" fill="#ffffff" stroke="%s"/>`, width, height, light)
	p.add(`<text x="16" y="26" font-size="15" font-weight="bold">%s</text>`, title)
	return p
}

func (p *Picture) add(format string, args ...any) { fmt.Fprintf(&p.b, format+"\n", args...) }

// String is the picture, as SVG.
func (p *Picture) String() string { return p.b.String() + "</svg>\n" }

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
	p.add(`<path d="M%d %dv%d" stroke="%s" stroke-dasharray="3 3"/>`, x, y, length, gray)
}

// Tick draws a short line downwards.
func (p *Picture) Tick(x int64, y, length int) {
	p.add(`<path d="M%d %dv%d" stroke="%s" stroke-width="2"/>`, x, y, length, ink)
}

// whisker draws a thin line to the right.
func (p *Picture) whisker(x int64, y int, length int64) {
	p.add(`<path d="M%d %dh%d" stroke="%s"/>`, x, y, length, ink)
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

// The sizes of charts of bars.
const (
	barNames  = 330
	barLength = 420
	barPitch  = 26
	right     = 84
	top       = 64
	bottom    = 56
)

// ticks are round numbers from 0 to the most or more.
func ticks(most float64) []float64 {
	step := 1.0
	if most > 0 {
		step = math.Pow10(int(math.Floor(math.Log10(most))))
		switch {
		case most < 2*step:
			step /= 4
		case most < 4*step:
			step /= 2
		}
	}
	all := []float64{0, step}
	for n := 2; all[n-1] < most; n++ {
		all = append(all, step*float64(n))
	}
	return all
}

// Bar is a median, with the least and the most.
type Bar struct {
	Name string
	report.Spread
}

// Exactly is a bar of a figure without rounds.
func Exactly(name string, v float64) Bar {
	return Bar{name, report.Spread{Median: v, Least: v, Most: v}}
}

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
	scale, end := ticks(most), top+barPitch*len(sets[0].Bars)
	x := func(v float64) int64 {
		return barNames + int64(math.Round(barLength*min(max(v/scale[len(scale)-1], 0), 1)))
	}
	p := New(barNames+barLength+right, end+bottom, title, title)
	for _, v := range scale {
		p.Border(x(v), top, end-top)
		p.Number(x(v), end+18, strconv.FormatFloat(v, 'g', 6, 64))
	}
	p.Text(barNames+barLength/2, end+42, unit)
	height := (barPitch - 10) / len(sets)
	for n, s := range sets {
		colour := [...]string{Blue, Orange}[n%2]
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
			p.whisker(x(b.Least), y+height/2, x(b.Most)-x(b.Least))
		}
	}
	return p
}

func (p *Picture) rectangle(x int64, y int, width int64, height int, colour string) {
	p.add(`<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`, x, y, width, height, colour)
}
