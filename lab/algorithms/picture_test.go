package algorithms

import (
	"encoding/xml"
	"os"
	"testing"
)

// TestPictureIsWhatIsDrawn requires that the picture of the documents is that
// of the algorithms as they are.
func TestPictureIsWhatIsDrawn(t *testing.T) {
	got, err := os.ReadFile("../../docs/img/algorithms.svg")
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != draw().String() {
		t.Error("docs/img/algorithms.svg is another picture; to draw it: make algorithms")
	}
}

func TestPictureIsXML(t *testing.T) {
	if err := xml.Unmarshal([]byte(draw().String()), new(struct{})); err != nil {
		t.Error(err)
	}
}

// TestPictureShowsTheBounds requires that the picture shows what the document
// says of it: the most that each algorithm lets through in one window.
func TestPictureShowsTheBounds(t *testing.T) {
	const n = shownEvents
	want := map[string]int{
		"fixed_window": 2*n - 1, "fixed_window, align": 2 * n, "sliding_window": n + 1, "sliding_log": n, "gcra": 2*n - 1,
	}
	for _, l := range lanes() {
		if got := most(l.taken, shownWindow.Milliseconds()/100); l.ends == nil && got != want[l.name] {
			t.Errorf("%s lets %d through in a window, want %d", l.name, got, want[l.name])
		}
		for i, slot := range l.slots {
			if l.allowed[i] && slot >= n {
				t.Errorf("%s: request %d has slot %d of %d", l.name, i, slot, n)
			}
		}
		refused := len(arrivals) - len(l.taken)
		if refused == 0 {
			t.Errorf("%s refuses nothing", l.name)
		}
	}
}
