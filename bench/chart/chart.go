// Package chart draws what was measured, as SVG.
package chart

import (
	"bytes"
	"fmt"
	"image/color"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// Series is a line of medians, with the least and the most of each.
type Series struct {
	Name      string
	X         []float64
	Y         []float64
	Low, High []float64
}

// Len is how many points it has.
func (s Series) Len() int { return len(s.X) }

// XY is a median.
func (s Series) XY(i int) (x, y float64) { return s.X[i], s.Y[i] }

// YError is how far the least and the most are from the median.
func (s Series) YError(i int) (low, high float64) { return s.Y[i] - s.Low[i], s.High[i] - s.Y[i] }

const (
	width  = 7 * vg.Inch
	height = 4 * vg.Inch
	// legendWidth is what names of lines take beside the drawing.
	legendWidth = 3 * vg.Inch
	// barStep is the height of a bar with the space around it.
	barStep = 0.32 * vg.Inch
)

// Axes says what a drawing is about.
type Axes struct {
	Title, X, Y string
	// LogX is set where each value of x is a multiple of the one before.
	LogX bool
}

// sans is the variant of the font.
const sans = "Sans"

func newPlot(title string) *plot.Plot {
	p := plot.New()
	for _, f := range []*font.Font{&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font, &p.X.Tick.Label.Font, &p.Y.Tick.Label.Font, &p.Legend.TextStyle.Font} {
		f.Variant = sans
	}
	p.Title.Text, p.Title.Padding = title, margin/4
	return p
}

// Lines draws series into a file.
func Lines(file string, axes Axes, series ...Series) error {
	p := newPlot(axes.Title)
	p.X.Label.Text, p.Y.Label.Text = axes.X, axes.Y
	p.Y.Min = 0
	legend := plot.NewLegend()
	legend.Top, legend.Left, legend.TextStyle.Font.Variant = true, true, sans
	p.Add(plotter.NewGrid())
	var ticks plot.ConstantTicks
	for i, s := range series {
		line, points, err := plotter.NewLinePoints(s)
		if err != nil {
			return fmt.Errorf("draw %s: %w", file, err)
		}
		spread, err := plotter.NewYErrorBars(s)
		if err != nil {
			return fmt.Errorf("draw %s: %w", file, err)
		}
		hue := plotutil.DarkColors[i%len(plotutil.DarkColors)]
		line.Color, points.Color, spread.Color = hue, hue, hue
		line.Dashes = plotutil.Dashes(i / len(plotutil.DarkColors))
		points.Shape = plotutil.Shape(i)
		p.Add(line, points, spread)
		legend.Add(s.Name, line, points)
		if i == 0 {
			for _, x := range s.X {
				ticks = append(ticks, plot.Tick{Value: x, Label: fmt.Sprint(x)})
			}
		}
	}
	p.X.Tick.Marker = ticks
	if axes.LogX {
		p.X.Scale = plot.LogScale{}
	}
	return save(file, width+legendWidth, height, func(c draw.Canvas) {
		p.Draw(draw.Crop(c, 0, -legendWidth, 0, 0))
		legend.Draw(draw.Crop(c, width-margin, 0, 0, -margin/2))
	})
}

// Bar is a median, with the least and the most.
type Bar struct {
	Name string
	spread.Spread
}

// Bars draws bars to the right, the first on top, into a file.
func Bars(file, title, unit string, bars ...Bar) error {
	p := newPlot(title)
	p.X.Label.Text = unit
	p.X.Min = 0
	values, names := make(plotter.Values, len(bars)), make([]string, len(bars))
	all := make(spreads, len(bars))
	for i, b := range bars {
		place := len(bars) - 1 - i
		values[place], names[place], all[place] = b.Median, b.Name, b
	}
	drawn, err := plotter.NewBarChart(values, barStep*0.6)
	if err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	drawn.Horizontal, drawn.Color, drawn.LineStyle.Width = true, color.RGBA{0x00, 0x72, 0xb2, 0xff}, 0
	lines, err := plotter.NewXErrorBars(all)
	if err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	p.Add(drawn, lines)
	p.NominalY(names...)
	// A wider font than the one that was measured does not reach the bars.
	p.Y.Padding = margin
	return save(file, width, vg.Length(len(bars))*barStep+1.2*vg.Inch, p.Draw)
}

// spreads are the lines from the least to the most.
type spreads []Bar

func (s spreads) Len() int                { return len(s) }
func (s spreads) XY(i int) (x, y float64) { return s[i].Median, float64(i) }
func (s spreads) XError(i int) (low, high float64) {
	return s[i].Median - s[i].Least, s[i].Most - s[i].Median
}

// margin keeps what a reader's font makes wider inside the drawing.
const margin = 0.45 * vg.Inch

// save draws into a file.
func save(file string, wide, tall vg.Length, drawOn func(draw.Canvas)) error {
	canvas := vgsvg.New(wide, tall)
	all := draw.New(canvas)
	all.SetColor(color.White)
	all.Fill(all.Path())
	drawOn(draw.Crop(all, margin, -margin, margin/2, -margin/2))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	// Few readers have gonum's font.
	text := bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	return nil
}
