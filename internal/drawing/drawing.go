// Package drawing writes the pictures of the documents, as SVG.
package drawing

import (
	"fmt"
	"strings"
)

// The colours. Blue, Orange and Green can be told apart by the colour-blind.
const (
	Blue   = "#0072b2"
	Orange = "#d55e00"
	Green  = "#009e73"
	Ink    = "#24292f"
	Gray   = "#8c959f"
	light  = "#d0d7de"
	muted  = "#57606a"
)

// Picture is one that is being drawn.
type Picture struct{ b strings.Builder }

// New begins a picture. The description is for those who cannot see it.
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

// Text writes a text that begins at x.
func (p *Picture) Text(x int64, y int, text string) {
	p.add(`<text x="%d" y="%d">%s</text>`, x, y, text)
}

// Number writes what a scale says, around x.
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

// Span draws a pale line to the right.
func (p *Picture) Span(x int64, y int, length int64, colour string) {
	p.add(`<path d="M%d %dh%d" stroke="%s" stroke-width="2" opacity="0.5"/>`, x, y, length, colour)
}

// Disc draws a filled circle.
func (p *Picture) Disc(x int64, y, radius int, colour string) {
	p.add(`<circle cx="%d" cy="%d" r="%d" fill="%s"/>`, x, y, radius, colour)
}

// Cross draws one of twice that size.
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
