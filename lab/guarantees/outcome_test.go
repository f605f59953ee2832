package guarantees

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestTablesHaveAllRows requires that every cell, way and limit is in the tables.
func TestTablesHaveAllRows(t *testing.T) {
	requireRows := func(text string, limits []limit, counts []int, lags []time.Duration) {
		t.Helper()
		for _, l := range limits {
			for _, caddys := range counts {
				for _, lag := range lags {
					if row := fmt.Sprintf("\n| %s | %d | %v |", l, caddys, lag); strings.Count(text, row) != 1 {
						t.Errorf("not one row %q in\n%s", row, text)
					}
				}
			}
		}
		if strings.Contains(text, "|  |") {
			t.Errorf("figures are missing in\n%s", text)
		}
	}
	var outcomes, roamed []*outcome
	for _, group := range groups(limits()) {
		for _, c := range group {
			outcomes = append(outcomes, &outcome{cell: c})
		}
	}
	for _, group := range roamGroups(roamLimits()) {
		for _, c := range group {
			roamed = append(roamed, &outcome{cell: c})
		}
	}
	requireRows(limitTable(outcomes), limits(), caddyCounts, lags)
	requireRows(roamTable(roamed), roamLimits(), roamCounts, roamLags)
	for _, l := range limits() {
		if n := strings.Count(resetTable(outcomes), "\n| "+l.String()+" | "); l.hasReset() && n != len(caddyCounts) || !l.hasReset() && n > 0 {
			t.Errorf("%d rows of the resets of %s", n, l)
		}
	}
}

func TestTables(t *testing.T) {
	l := limits()[0]
	outcomes := []*outcome{
		{cell: cell{limit: l, caddys: 2, lag: time.Second, connections: 1}, served: 5, refused: 5, beyond: 1, mayBeyond: 2, windows: 3, resets: 1},
		{cell: cell{limit: l, caddys: 2, lag: time.Second, connections: 16}, served: 6, refused: 4, beyond: 3, mayBeyond: 2, room: 1, windows: 3, resets: 2},
	}
	way := cell{limit: roamLimits()[0], caddys: 4, lag: time.Second, connections: roamConnections, roam: seldom}
	roamed := []*outcome{
		{cell: way, served: 5, refused: 5, beyond: 2, mayBeyond: 3, unchecked: 7},
		{cell: way, served: 5, refused: 5, beyond: 4, mayBeyond: 3, unchecked: 7},
	}
	for _, want := range []string{
		"| algorithm, charge | Caddys | replica lag | seldom: admitted without a check | beyond the limit | often: admitted without a check | beyond the limit |\n",
		"| fixed_window, after | 4 | 1s | 7 | **4 of 3** |  |  |\n",
		"A client that came back to 3 Caddys that knew it by older answers alone got 4, where the bound is 3.",
		"| fixed_window, after | 2 | 1s | 1 of 2 | **3 of 2** |  | 0 of 0 | **1 of 0** |  |\n",
		"| fixed_window, after | 2 | 20 | 6 | **2 of 1** |\n",
		"Bounds were exceeded 4 times",
		"The largest excess was 3 requests, where the bound is 2: `fixed_window` of `charge after`, 2 Caddys, 16 requests at a time, a limit of 100.",
		"| cut | fixed_window, after | 5 | 0 | 4 | 1 | 0 | 0 of 0 | 1 of 1 |\n",
	} {
		sections := document(settings{}, time.Minute, outcomes, roamed, []*loss{{fault: "cut", limit: l, served: 5, counted: 4, uncertain: 1}})
		text, err := report.Fill(template, sections)
		redistest.Must(t, err)
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

// TestRoamsAreRelevant requires that the answers on which the clients that come seldom pass
// are older than ledger_trust and young enough, also where the first charge at a Caddy shows
// others, and that half of the limit is left.
func TestRoamsAreRelevant(t *testing.T) {
	for _, group := range roamGroups(roamLimits()) {
		for _, c := range group {
			way := roams[slices.IndexFunc(roams, func(r roam) bool { return r.name == c.roam })]
			visits := way.visits[len(way.visits)-c.caddys+1:]
			all := int64(0)
			age := way.rest + c.lag
			for i, n := range slices.Backward(visits) {
				if quiet := min(time.Duration(n-2)*way.pace, c.limit.window/trustShare); c.roam == seldom && (age <= ledger.DefaultTrust || age >= quiet) {
					t.Errorf("%s: the answer at Caddy %d is %v old when the client is back, and is relied on for %v", c, i, age, quiet)
				}
				age += time.Duration(n) * way.pace
				all += int64(n)
			}
			if 2*all >= c.limit.capacity() || c.limit.onOlderAnswers(c.caddys) != int64(c.caddys-1) {
				t.Errorf("%s: after %d visits, half of the limit is not left", c, all)
			}
		}
	}
}

func TestBreaches(t *testing.T) {
	well := outcome{cell: cell{limit: limits()[0], caddys: 2, connections: 1}, sent: 10, served: 5, refused: 5, resets: 1}
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
		"all checked":    func(o *outcome) { o.roam = seldom },
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
