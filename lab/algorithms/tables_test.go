package algorithms

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestDocumentHasTheMark requires that make algorithms finds its place.
func TestDocumentHasTheMark(t *testing.T) {
	text, err := os.ReadFile("../../docs/algorithms.md")
	if err != nil {
		t.Fatal(err)
	}
	if mark := report.Mark("algorithms"); strings.Count(string(text), mark) != 1 {
		t.Errorf("docs/algorithms.md has not one line %q", mark)
	}
	for _, w := range ways {
		if !strings.Contains(string(text), "\n| "+w.name+" |") {
			t.Errorf("docs/algorithms.md has no row of %s", w.name)
		}
	}
}

// TestTablesAreWhole requires as many cells in each row as there are in the
// head.
func TestTablesAreWhole(t *testing.T) {
	costs := map[string]*cost{}
	for _, w := range apart() {
		costs[w.name] = &cost{bytes: make([]int64, len(sizes)), micros: [][]float64{{1}, {2}, {3}}}
	}
	for _, text := range []string{accuracyTable(small), costTable(costs)} {
		rows, cells := 0, 0
		for line := range strings.Lines(text) {
			if n := strings.Count(line, "|"); n > 0 {
				if rows++; rows == 1 {
					cells = n
				}
				if n != cells {
					t.Errorf("%d cells, want %d: %s", n-1, cells-1, line)
				}
			}
		}
		if rows < 2+len(apart()) {
			t.Errorf("%d rows", rows)
		}
	}
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Hour: "1h", 2 * time.Minute: "2m", 30 * time.Second: "30s", 90 * time.Minute: "1h30m", 100 * time.Minute: "1h40m",
	} {
		if got := span(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}
