package guarantees

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// document returns the sections of the document.
func document(set settings, took time.Duration, outcomes, roamed []*outcome, losses []*loss) map[string]string {
	return map[string]string{
		report.Result: resultText(outcomes, roamed, losses),
		report.Tables: head(set, took, slices.Concat(outcomes, roamed)) + limitTable(outcomes) + "\n" + roamTable(roamed) + "\n" +
			resetTable(outcomes) + "\n" + lossTable(losses),
	}
}

// resultText is the summary of the document.
func resultText(outcomes, roamed []*outcome, losses []*loss) string {
	broken := 0
	for _, o := range slices.Concat(outcomes, roamed) {
		broken += len(o.breaches())
	}
	for _, l := range losses {
		broken += len(l.breaches())
	}
	text := "**Result.** No bound was exceeded. "
	if broken > 0 {
		text = fmt.Sprintf("**Result.** Bounds were exceeded %d times; the tables show where. ", broken)
	}
	worst := worstOf(outcomes)
	if worst == nil {
		return text + "\n"
	}
	alone := slices.ContainsFunc(outcomes, func(o *outcome) bool { return o.beyond > 0 && (o.caddys == 1 || o.limit.charge == before) })
	if !alone {
		text += "One Caddy alone, and any number of them with `charge before`, admitted nothing beyond a limit. "
	}
	text += fmt.Sprintf("The largest excess was %d requests, where the bound is %d: `%s` of `charge %s`, %d Caddys, %d requests at a time, a limit of %d.",
		worst.beyond, worst.mayBeyond, worst.limit.algorithm, worst.limit.charge, worst.caddys, worst.connections, worst.limit.capacity())
	if worst := worstOf(traffic.Those(roamed, func(o *outcome) bool { return o.roam == seldom })); worst != nil {
		text += fmt.Sprintf(" A client that came back to %d Caddys that knew it by older answers alone got %d, where the bound is %d.",
			worst.caddys-1, worst.beyond, worst.mayBeyond)
	}
	return text + "\n"
}

// worstOf returns the outcome with the largest excess, or nil.
func worstOf(outcomes []*outcome) (worst *outcome) {
	for _, o := range outcomes {
		if worst == nil || o.beyond > worst.beyond {
			worst = o
		}
	}
	return worst
}

func head(set settings, took time.Duration, outcomes []*outcome) string {
	lagged := map[time.Duration]time.Duration{}
	var arrived time.Duration
	var sent, others, disturbed int64
	for _, o := range outcomes {
		lagged[o.lag] = max(lagged[o.lag], o.lagged)
		sent, others, disturbed, arrived = sent+o.sent, others+o.others, disturbed+o.disturbed, max(arrived, o.arrived)
	}
	seen := ""
	for _, lag := range lags {
		seen += fmt.Sprintf(" %s: %v;", lagName(lag), lagged[lag].Round(time.Millisecond))
	}
	return fmt.Sprintf("%s. `make guarantees` took %v, each cell %v: %d requests of clients, and %d of others, of which %d were not admitted. The longest lag that was seen, by what was set:%s the longest arrival: %v. The bounds of a cell reckon with its own.\n\n",
		report.Machine(), took.Round(time.Second), set.lasts, sent, others, disturbed, seen, arrived)
}

func lagName(lag time.Duration) string {
	if lag == 0 {
		return "none"
	}
	number := strings.TrimRight(lag.String(), "ms")
	return number + " " + strings.TrimPrefix(lag.String(), number)
}

// limitRow is the observations about one limit, number of Caddys and lag.
type limitRow struct {
	limit  limit
	caddys int
	lag    time.Duration
	cells  []string
}

func limitRows(outcomes []*outcome) (rows []limitRow) {
	of := map[cell]*outcome{}
	for _, o := range outcomes {
		of[o.cell] = o
	}
	for _, l := range limits() {
		for _, caddys := range caddyCounts {
			for _, lag := range lags {
				found, beyond, room := false, make([]string, len(crowds)), make([]string, len(crowds))
				for i, connections := range crowds {
					if o := of[cell{limit: l, caddys: caddys, lag: lag, connections: connections}]; o != nil {
						found, beyond[i], room[i] = true, mark(o.beyond, o.mayBeyond), mark(o.room, o.mayRoom)
					}
				}
				if found {
					rows = append(rows, limitRow{l, caddys, lag, slices.Concat(beyond, room)})
				}
			}
		}
	}
	return rows
}

func limitTable(outcomes []*outcome) string { return mergedTable(limitRows(outcomes)) }

// mergedTable writes rows with the same cells as one: those of a limit and a number of
// Caddys at several lags, then those at the same lags with several numbers of Caddys, then
// those of several limits.
func mergedTable(rows []limitRow) string {
	type group struct {
		limits []limit
		caddys []int
		lags   []time.Duration
		cells  []string
	}
	var groups []*group
	for _, r := range rows {
		groups = append(groups, &group{[]limit{r.limit}, []int{r.caddys}, []time.Duration{r.lag}, r.cells})
	}
	merge := func(alike func(a, b *group) bool, add func(a, b *group)) {
		var merged []*group
		for _, g := range groups {
			if i := slices.IndexFunc(merged, func(m *group) bool { return slices.Equal(m.cells, g.cells) && alike(m, g) }); i >= 0 {
				add(merged[i], g)
			} else {
				merged = append(merged, g)
			}
		}
		groups = merged
	}
	merge(func(a, b *group) bool { return slices.Equal(a.limits, b.limits) && slices.Equal(a.caddys, b.caddys) },
		func(a, b *group) { a.lags = append(a.lags, b.lags...) })
	merge(func(a, b *group) bool { return slices.Equal(a.limits, b.limits) && slices.Equal(a.lags, b.lags) },
		func(a, b *group) { a.caddys = append(a.caddys, b.caddys...) })
	merge(func(a, b *group) bool { return slices.Equal(a.caddys, b.caddys) && slices.Equal(a.lags, b.lags) },
		func(a, b *group) { a.limits = append(a.limits, b.limits...) })

	t := report.NewTable("algorithm, charge", "Caddys", "replica lag", "admitted beyond the limit: 1", "16", "256 at a time",
		"refused though there was room for: 1", "16", "256 at a time")
	for _, g := range groups {
		t.Row(slices.Concat([]string{limitNames(g.limits), listed(g.caddys, strconv.Itoa, ", "), lagNames(g.lags)}, g.cells)...)
	}
	return t.String()
}

// limitNames names some limits, or all of a charge in short.
func limitNames(some []limit) string {
	for _, charge := range []string{after, before} {
		of := traffic.Those(limits(), func(l limit) bool { return l.charge == charge && !l.batched })
		if slices.Equal(of, some) {
			return "all, " + charge
		}
	}
	return listed(some, limit.String, "; ")
}

func lagNames(some []time.Duration) string {
	if slices.Equal(some, lags) {
		return "any"
	}
	return listed(some, lagName, ", ")
}

func listed[T any](some []T, name func(T) string, separator string) string {
	names := make([]string, len(some))
	for i, one := range some {
		names[i] = name(one)
	}
	return strings.Join(names, separator)
}

// mark writes an observation and its bound, and emphasizes an excess.
func mark(n, most int64) string {
	if n > most {
		return fmt.Sprintf("**%d of %d**", n, most)
	}
	return fmt.Sprintf("%d of %d", n, most)
}

// roamTable has a row for each limit, number of Caddys and lag. Of several clients it shows
// the largest excess.
func roamTable(roamed []*outcome) string {
	head := []string{"algorithm, charge", "Caddys", "replica lag"}
	for _, way := range roams {
		head = append(head, way.name+": admitted without a check", "beyond the limit")
	}
	t := report.NewTable(head...)
	for _, l := range roamLimits() {
		for _, caddys := range roamCounts {
			for _, lag := range roamLags {
				row := []string{l.String(), strconv.Itoa(caddys), lagName(lag)}
				for _, way := range roams {
					c := cell{limit: l, caddys: caddys, lag: lag, connections: roamConnections, roam: way.name}
					if o := worstOf(traffic.Those(roamed, func(o *outcome) bool { return o.cell == c })); o != nil {
						row = append(row, fmt.Sprint(o.unchecked), mark(o.beyond, o.mayBeyond))
					} else {
						row = append(row, "", "")
					}
				}
				t.Row(row...)
			}
		}
	}
	return t.String()
}

// resetRow is the observations about the resets of one limit and number of Caddys, or of
// several.
type resetRow struct {
	limits             []limit
	caddys             []int
	responses, windows int64
	resets             int64
}

func resetRows(outcomes []*outcome) (rows []resetRow) {
	for _, l := range limits() {
		if !l.hasReset() {
			continue
		}
		for _, caddys := range caddyCounts {
			r := resetRow{limits: []limit{l}, caddys: []int{caddys}}
			for _, o := range outcomes {
				if o.limit == l && o.caddys == caddys {
					r.responses, r.windows, r.resets = r.responses+o.served+o.refused, r.windows+o.windows, max(r.resets, o.resets)
				}
			}
			if r.responses > 0 {
				rows = append(rows, r)
			}
		}
	}
	return rows
}

func resetTable(outcomes []*outcome) string { return mergedResets(resetRows(outcomes)) }

// mergedResets adds up the rows of each limit, and those of limits, that had as many resets
// in a window.
func mergedResets(rows []resetRow) string {
	var merged []resetRow
	for _, r := range rows {
		i := slices.IndexFunc(merged, func(m resetRow) bool { return m.resets == r.resets })
		if i < 0 {
			merged = append(merged, r)
			continue
		}
		m := &merged[i]
		m.limits = slices.Compact(append(m.limits, r.limits...))
		m.caddys = slices.Compact(slices.Sorted(slices.Values(append(m.caddys, r.caddys...))))
		m.responses, m.windows = m.responses+r.responses, m.windows+r.windows
	}
	t := report.NewTable("algorithm, charge", "Caddys", "responses", "windows", "resets in one window")
	for _, m := range merged {
		t.Rowf("%s | %s | %d | %d | %s", listed(m.limits, limit.String, "; "),
			listed(m.caddys, strconv.Itoa, ", "), m.responses, m.windows, mark(m.resets, 1))
	}
	return t.String()
}

func lossTable(losses []*loss) string {
	t := report.NewTable("fault", "algorithm, charge", "served", "denied", "counted in Redis", "charges and refunds without a reply",
		"takes without a reply", "counted beyond what was served", "served and not counted")
	for _, l := range losses {
		t.Rowf("%s | %s | %d | %d | %d | %d | %d | %s | %s", l.fault, l.limit, l.served, l.unanswered,
			l.counted, l.uncertain, l.untold, mark(l.double(), l.mayBeDouble()), mark(l.lost(), l.mayBeLost()))
	}
	return t.String()
}

// excess is a measured excess and its bound.
type excess struct {
	limit         limit
	caddys        int
	beyond, mayBe int64
}

// excesses are the largest of each algorithm and number of Caddys that may exceed a limit.
func excesses(outcomes []*outcome) []excess {
	largest := map[string]excess{}
	for _, o := range outcomes {
		if o.caddys == 1 || o.limit.charge == before {
			continue
		}
		e := excess{o.limit, o.caddys, o.beyond, o.mayBeyond}
		if was, found := largest[e.name()]; !found || was.beyond < e.beyond {
			largest[e.name()] = e
		}
	}
	return slices.SortedFunc(maps.Values(largest), func(a, b excess) int {
		return cmp.Or(slices.Index(limits(), a.limit)-slices.Index(limits(), b.limit), a.caddys-b.caddys)
	})
}

func (e excess) name() string { return fmt.Sprintf("%s, %d Caddys", e.limit.algorithm, e.caddys) }

func draw(all []excess) *picture.Picture {
	measured, bound := picture.Set{Name: "measured"}, picture.Set{Name: "bound"}
	for _, e := range all {
		measured.Bars = append(measured.Bars, exactly(e.name(), e.beyond))
		bound.Bars = append(bound.Bars, exactly(e.name(), e.mayBe))
	}
	return picture.Sets("Largest excess of charge after, and its bound", "requests beyond a limit of 100 (gcra: 25)", measured, bound)
}

func exactly(name string, n int64) picture.Bar {
	v := float64(n)
	return picture.Bar{Name: name, Spread: report.Spread{Median: v, Least: v, Most: v}}
}
