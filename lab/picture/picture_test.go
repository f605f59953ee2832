package picture

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
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
	p.Cross(1, 2, 3, Green)
	p.Line([]Point{{1, 2}, {3, 4}}, Blue, true)
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
	if elements != 3+9 {
		t.Errorf("%d elements:\n%s", elements, p)
	}
}

// texts are those of an SVG file, which has to be well-formed.
func texts(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all strings.Builder
	d := xml.NewDecoder(f)
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return all.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		if text, ok := token.(xml.CharData); ok {
			all.Write(text)
			all.WriteByte('\n')
		}
	}
}

// shows requires texts of a picture.
func shows(t *testing.T, p *Picture, want ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "picture.svg")
	if err := p.Write(file); err != nil {
		t.Fatal(err)
	}
	got := texts(t, file)
	for _, text := range want {
		if !strings.Contains(got, text+"\n") {
			t.Errorf("no %q among\n%s", text, got)
		}
	}
}

func TestLines(t *testing.T) {
	one, another := Series{Name: "one"}, Series{Name: "another"}
	for i, x := range []float64{1, 16, 64, 256, 1024} {
		one.Append(x, 9+20*float64(i))
		another.X, another.Y = append(another.X, x), append(another.Y, report.Spread{Median: 50, Least: 40, Most: 60})
	}
	shows(t, Lines("Decisions per second", "goroutines", "decisions/s", one, another),
		"Decisions per second", "goroutines", "decisions/s", "one", "another", "1024", "80")
}

func TestBars(t *testing.T) {
	shows(t, Bars("CPU time per request", "µs",
		Bar{"memory store", report.Spread{Median: 50, Least: 48, Most: 55}},
		Bar{"redis store, charge after", report.Spread{Median: 60, Least: 58, Most: 70}}),
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

func TestNoFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "missing", "bars.svg")
	if err := Bars("title", "µs", Bar{"one", report.Spread{Median: 1, Least: 1, Most: 1}}).Write(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error is %v", err)
	}
}

// TestTicksAreRound requires few enough to be read, and the last not below the
// most.
func TestTicksAreRound(t *testing.T) {
	for most, want := range map[float64][]float64{
		4: {0, 1, 2, 3, 4}, 70: {0, 10, 20, 30, 40, 50, 60, 70}, 1.3: {0, 0.25, 0.5, 0.75, 1, 1.25, 1.5},
		250_000: {0, 50_000, 100_000, 150_000, 200_000, 250_000}, 0: {0, 1},
	} {
		if got := linear("", most).Ticks; !slices.Equal(got, want) {
			t.Errorf("up to %v the ticks are %v, want %v", most, got, want)
		}
	}
}
