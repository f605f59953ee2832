package algorithms

import (
	"encoding/xml"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// small is the simulation at a size that takes a second.
var small = simulate(100_000)

func TestSimulationIsRepeatable(t *testing.T) {
	if !reflect.DeepEqual(simulate(10_000), simulate(10_000)) {
		t.Error("two simulations differ")
	}
}

// TestSimulationIsOverTheLimit requires that enough is over the limit for the
// shares of wrong decisions to mean something.
func TestSimulationIsOverTheLimit(t *testing.T) {
	for i, s := range small.of(store.SlidingLog) {
		if share := float64(s.over) / float64(s.requests); share < 0.05 || share > 0.3 {
			t.Errorf("traffic %d: %.3f of the requests are over the limit", i, share)
		}
	}
	if all := small.of(store.SlidingLog)[len(traffics)]; all.requests != 100_000 {
		t.Errorf("%d requests in all", all.requests)
	}
}

// TestExactAlgorithmsAreExact requires that the log, and the leases where they
// are renewed, decide as they should.
func TestExactAlgorithmsAreExact(t *testing.T) {
	for _, a := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		for _, s := range small.of(a) {
			if s.refused != 0 || s.admitted != 0 || s.differ != 0 {
				t.Errorf("%s: %+v", a, s)
			}
		}
	}
}

// TestBoundsHoldAndAreNearlyReached requires the bounds of the document.
func TestBoundsHoldAndAreNearlyReached(t *testing.T) {
	bounds := map[string]int{
		"fixed_window": 2*events - 1, "fixed_window, align": 2 * events, "sliding_window": 2*events - 1,
		"sliding_log": events, "gcra": 2*events - 1, "gcra, burst 2": 2 + events - 1, "concurrency": slots,
	}
	for i, w := range ways {
		got := small[i][len(traffics)].most
		if bound := bounds[w.name]; got > bound || got < bound*3/4 {
			t.Errorf("%s: %d admitted in one window, bound %d", w.name, got, bound)
		}
	}
}

// TestSlidingWindowIsTheMoreEvenCounter requires what the document says of the
// three that count with two numbers or fewer: in even traffic the sliding
// window lets through much less at once than windows that follow each other,
// and errs as often towards refusing as towards admitting, while the others
// rather admit; and it decides like the log more often than aligned windows,
// but not than windows that a request opens.
func TestSlidingWindowIsTheMoreEvenCounter(t *testing.T) {
	all := len(traffics)
	fixed, aligned, sliding, gcra := small[0], small[1], small.of(store.SlidingWindow), small.of(store.GCRA)
	for i, even := range []bool{true, false, true, false} {
		if even && (sliding[i].most*5 > fixed[i].most*4 || sliding[i].most*5 > aligned[i].most*4) {
			t.Errorf("traffic %d: the sliding window admits %d, the fixed %d and %d", i, sliding[i].most, fixed[i].most, aligned[i].most)
		}
	}
	if s := sliding[all].differ; s >= aligned[all].differ || s <= fixed[all].differ {
		t.Errorf("the sliding window differs %d times, aligned windows %d, others %d", s, aligned[all].differ, fixed[all].differ)
	}
	for _, s := range [][]score{fixed, aligned, gcra} {
		if s[all].admitted <= s[all].refused {
			t.Errorf("%d wrongly admitted and %d wrongly refused", s[all].admitted, s[all].refused)
		}
	}
	if s := sliding[all]; s.admitted*5 > s.refused*6 || s.refused*5 > s.admitted*6 {
		t.Errorf("the sliding window: %d wrongly admitted, %d wrongly refused", s.admitted, s.refused)
	}
}

// TestTablesAreWhole requires a row of every way, and as many cells in each row as there
// are in the head.
func TestTablesAreWhole(t *testing.T) {
	costs := map[string]*cost{}
	for _, w := range apart() {
		costs[w.name] = &cost{bytes: make([]int64, len(sizes)), micros: [][]float64{{1}, {2}, {3}}}
	}
	for text, of := range map[string][]way{accuracyTable(small): ways, costTable(costs): apart()} {
		for _, w := range of {
			if strings.Count(text, "\n| "+w.name+" |") != 1 {
				t.Errorf("not one row of %s in\n%s", w.name, text)
			}
		}
		cells := 0
		for line := range strings.Lines(text) {
			if n := strings.Count(line, "|"); n > 0 {
				if cells == 0 {
					cells = n
				}
				if n != cells {
					t.Errorf("%d cells, want %d: %s", n-1, cells-1, line)
				}
			}
		}
	}
}

// TestPictureIsWhatIsDrawn requires that the picture of the documents is that
// of the algorithms as they are.
func TestPictureIsWhatIsDrawn(t *testing.T) {
	got, err := os.ReadFile("../../docs/img/algorithms.svg")
	redistest.Must(t, err)
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
