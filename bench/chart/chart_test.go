package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

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

func TestLines(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lines.svg")
	x := []float64{1, 16, 64, 256, 1024}
	err := Lines(file, Axes{Title: "Decisions per second", X: "goroutines", Y: "decisions/s", LogX: true},
		Series{Name: "one", X: x, Y: []float64{9, 20, 50, 70, 80}, Low: []float64{8, 18, 40, 60, 70}, High: []float64{10, 22, 60, 90, 100}},
		Series{Name: "another", X: x, Y: []float64{5, 15, 40, 50, 50}, Low: []float64{4, 12, 30, 40, 40}, High: []float64{6, 20, 50, 60, 60}})
	if err != nil {
		t.Fatal(err)
	}
	got := texts(t, file)
	for _, want := range []string{"Decisions per second", "goroutines", "decisions/s", "one", "another", "1024"} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %q among\n%s", want, got)
		}
	}
}

func TestBars(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bars.svg")
	err := Bars(file, "CPU time per request", "µs",
		Bar{Name: "memory store", Spread: spread.Spread{Median: 50, Least: 48, Most: 55}}, Bar{Name: "redis store, charge after", Spread: spread.Spread{Median: 60, Least: 58, Most: 70}})
	if err != nil {
		t.Fatal(err)
	}
	got := texts(t, file)
	for _, want := range []string{"CPU time per request", "µs", "memory store", "redis store, charge after"} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %q among\n%s", want, got)
		}
	}
}

func TestNoFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "missing", "bars.svg")
	if err := Bars(file, "title", "µs", Bar{Name: "one", Spread: spread.Spread{Median: 1, Least: 1, Most: 1}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error is %v", err)
	}
}
