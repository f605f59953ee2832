package guarantees

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestDocumentHasItsTables requires that make guarantees finds its place, and
// that every cell, window and fault has its row.
func TestDocumentHasItsTables(t *testing.T) {
	b, err := os.ReadFile("../../docs/guarantees.md")
	redistest.Must(t, err)
	text := string(b)
	has := func(row string, times int) {
		t.Helper()
		if n := strings.Count(text, row); n != times {
			t.Errorf("docs/guarantees.md has %q %d times, want %d", row, n, times)
		}
	}
	has(report.Mark("guarantees"), 1)
	for _, l := range limits() {
		for _, caddys := range caddyCounts {
			for _, lag := range lags {
				has(fmt.Sprintf("\n| %s | %d | %s |", l, caddys, lagName(lag)), 1)
			}
		}
	}
	for _, f := range faults() {
		for _, l := range faultLimits() {
			has(fmt.Sprintf("\n| %s | %s |", f.name, l), 1)
		}
	}
}

func TestTables(t *testing.T) {
	l := limits()[0]
	outcomes := []*outcome{
		{cell: cell{l, 2, time.Second, 1}, served: 5, refused: 5, beyond: 1, mayBeyond: 2, windows: 3, resets: 1},
		{cell: cell{l, 2, time.Second, 16}, served: 6, refused: 4, beyond: 3, mayBeyond: 2, room: 1, windows: 3, resets: 2},
	}
	for _, want := range []string{
		"| fixed_window, after | 2 | 1 s | 1 of 2 | **3 of 2** |  | 0 of 0 | **1 of 0** |  |\n",
		"| fixed_window, after | 2 | 20 | 6 | **2 of 1** |\n",
		"| cut | fixed_window, after | 5 | 0 | 4 | 1 | 0 | 0 of 0 | 1 of 1 |\n",
	} {
		text := document(settings{}, time.Minute, outcomes, []*loss{{fault: "cut", limit: l, served: 5, counted: 4, uncertain: 1}})
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestGroupsAreAllCells(t *testing.T) {
	cells := map[cell]int{}
	for _, group := range groups(limits()) {
		for _, c := range group {
			cells[c]++
			if first := group[0]; c.caddys != first.caddys || c.lag != first.lag || c.connections != first.connections {
				t.Errorf("%s is tried together with %s", c, first)
			}
		}
		if group[0].connections >= flood && len(group) > floodsAtOnce {
			t.Errorf("%d floods at once", len(group))
		}
	}
	if want := len(limits()) * len(caddyCounts) * len(lags) * len(crowds); len(cells) != want {
		t.Errorf("%d cells, want %d", len(cells), want)
	}
	for c, n := range cells {
		if n != 1 {
			t.Errorf("%s is tried %d times", c, n)
		}
	}
}

func TestBreaches(t *testing.T) {
	well := outcome{cell: cell{limits()[0], 2, 0, 1}, sent: 10, served: 5, refused: 5, resets: 1}
	if got := well.breaches(); len(got) > 0 {
		t.Errorf("what is within its bounds: %q", got)
	}
	for name, spoil := range map[string]func(*outcome){
		"beyond":         func(o *outcome) { o.beyond = 1 },
		"room":           func(o *outcome) { o.room = 1 },
		"resets":         func(o *outcome) { o.resets = 2 },
		"another client": func(o *outcome) { o.disturbed = 1 },
		"no answer":      func(o *outcome) { o.failed = 1 },
		"nothing tried":  func(o *outcome) { o.refused = 0 },
	} {
		o := well
		spoil(&o)
		if got := o.breaches(); len(got) != 1 {
			t.Errorf("%s: %q, want one", name, got)
		}
	}
}

func TestLongest(t *testing.T) {
	earlier, err := caddyproc.ParseMetrics("")
	redistest.Must(t, err)
	text := func(quick, slow, more int) string {
		bucket := func(operation, end string, n int) string {
			return fmt.Sprintf("caddy_rate_limit_store_duration_seconds_bucket{operation=%q,role=\"primary\",shard=\"a\",store=\"default\",le=%q} %d\n", operation, end, n)
		}
		return "# HELP x\ngo_threads 5\n" + bucket("charge", "0.001", quick) + bucket("charge", "0.01", slow) + bucket("charge", "+Inf", more) +
			bucket("check", "0.001", 0) + bucket("check", "+Inf", 9) + `caddy_rate_limit_undelivered_total{outcome="uncertain",store="default"} 3`
	}
	for _, test := range []struct {
		quick, slow, more int
		want              time.Duration
	}{
		{0, 0, 0, 0}, {3, 3, 3, time.Millisecond}, {3, 4, 4, 10 * time.Millisecond}, {4, 5, 5, 10 * time.Millisecond}, {5, 6, 6, 10 * time.Millisecond}, {5, 6, 7, 5 * time.Second},
	} {
		m, err := caddyproc.ParseMetrics(text(test.quick, test.slow, test.more))
		redistest.Must(t, err)
		if got := longestCall(m, earlier); got != test.want {
			t.Errorf("%v: longest is %v", test, got)
		}
		if n := m.Sum("caddy_rate_limit_undelivered_total", `outcome="uncertain"`); n != 3 {
			t.Errorf("%v are uncertain, want 3", n)
		}
	}
	m, _ := caddyproc.ParseMetrics(text(3, 4, 4))
	later, _ := caddyproc.ParseMetrics(text(5, 6, 6))
	if got := longestCall(later, m); got != time.Millisecond {
		t.Errorf("the longest since then is %v, want 1ms", got)
	}
}
