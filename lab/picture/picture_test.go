package picture

import (
	"encoding/xml"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

func TestPictureIsXML(t *testing.T) {
	p := New(200, 100, "a description", "a title")
	p.Text(1, 2, "text")
	p.Number(1, 2, "1")
	p.Axis(1, 2, 3)
	p.Border(1, 2, 3)
	p.Tick(1, 2, 3)
	p.Span(1, 2, 3, Blue)
	p.Disc(1, 2, 3, Orange)
	p.Cross(1, 2, 3, Orange)
	d := xml.NewDecoder(strings.NewReader(p.String()))
	elements := 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := token.(xml.StartElement); ok {
			elements++
		}
	}
	if elements != 3+8 {
		t.Errorf("%d elements:\n%s", elements, p)
	}
}

// shows requires texts of a picture, which has to be well-formed.
func shows(t *testing.T, p *Picture, want ...string) {
	t.Helper()
	var got strings.Builder
	for d := xml.NewDecoder(strings.NewReader(p.String())); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if text, ok := token.(xml.CharData); ok {
			got.WriteString(string(text) + "\n")
		}
	}
	for _, text := range want {
		if !strings.Contains(got.String(), text+"\n") {
			t.Errorf("no %q among\n%s", text, &got)
		}
	}
}

func TestBars(t *testing.T) {
	shows(t, Sets("CPU time per request", "µs", Set{Bars: []Bar{
		{"memory store", report.Spread{Median: 50, Least: 48, Most: 55}},
		{"redis store, charge after", report.Spread{Median: 60, Least: 58, Most: 70}},
	}}),
		"CPU time per request", "µs", "memory store", "redis store, charge after", "60")
}

func TestSets(t *testing.T) {
	one := report.Spread{Median: 1, Least: 1, Most: 1}
	p := Sets("Excess", "requests", Set{"measured", []Bar{{"a", one}, {"b", one}}}, Set{"bound", []Bar{{"a", one}, {"b", one}}})
	shows(t, p, "Excess", "requests", "measured", "bound", "a", "b")
	// The background, two marks of the legend, and four bars.
	if n := strings.Count(p.String(), "<rect "); n != 7 {
		t.Errorf("%d rectangles", n)
	}
}

// TestTicksAreRound requires few enough to be read, and the last not below the
// most.
func TestTicksAreRound(t *testing.T) {
	for most, want := range map[float64][]float64{
		4: {0, 1, 2, 3, 4}, 70: {0, 10, 20, 30, 40, 50, 60, 70}, 1.3: {0, 0.25, 0.5, 0.75, 1, 1.25, 1.5},
		250_000: {0, 50_000, 100_000, 150_000, 200_000, 250_000}, 0: {0, 1},
	} {
		if got := ticks(most); !slices.Equal(got, want) {
			t.Errorf("up to %v the ticks are %v, want %v", most, got, want)
		}
	}
}
