package guarantees

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
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
		seen += fmt.Sprintf(" %v: %v;", lag, lagged[lag].Round(time.Millisecond))
	}
	return fmt.Sprintf("%s. `make guarantees` took %v, each cell %v: %d requests of clients, and %d of others, of which %d were not admitted. The longest lag that was seen, by what was set:%s the longest arrival: %v. The bounds of a cell reckon with its own.\n\n",
		report.Machine(), took.Round(time.Second), set.lasts, sent, others, disturbed, seen, arrived)
}

// limitTable has a row for each limit, number of Caddys and lag.
func limitTable(outcomes []*outcome) string {
	of := map[cell]*outcome{}
	for _, o := range outcomes {
		of[o.cell] = o
	}
	columns := []string{"algorithm, charge", "Caddys", "replica lag"}
	for _, what := range []string{"admitted beyond the limit", "refused though there was room"} {
		for _, connections := range crowds {
			columns = append(columns, fmt.Sprintf("%s: %d at a time", what, connections))
		}
	}
	t := report.NewTable(columns...)
	for _, l := range limits() {
		for _, caddys := range caddyCounts {
			for _, lag := range lags {
				beyond, room := make([]string, len(crowds)), make([]string, len(crowds))
				for i, connections := range crowds {
					if o := of[cell{limit: l, caddys: caddys, lag: lag, connections: connections}]; o != nil {
						beyond[i], room[i] = mark(o.beyond, o.mayBeyond), mark(o.room, o.mayRoom)
					}
				}
				t.Row(slices.Concat([]string{l.String(), strconv.Itoa(caddys), lag.String()}, beyond, room)...)
			}
		}
	}
	return t.String()
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
				row := []string{l.String(), strconv.Itoa(caddys), lag.String()}
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

// resetTable has a row for each limit whose windows have a reset, and number of Caddys.
func resetTable(outcomes []*outcome) string {
	t := report.NewTable("algorithm, charge", "Caddys", "responses", "windows", "resets in one window")
	for _, l := range traffic.Those(limits(), limit.hasReset) {
		for _, caddys := range caddyCounts {
			var responses, windows, resets int64
			for _, o := range outcomes {
				if o.limit == l && o.caddys == caddys {
					responses, windows, resets = responses+o.served+o.refused, windows+o.windows, max(resets, o.resets)
				}
			}
			t.Rowf("%s | %d | %d | %d | %s", l, caddys, responses, windows, mark(resets, 1))
		}
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
		measured.Bars = append(measured.Bars, picture.Exactly(e.name(), float64(e.beyond)))
		bound.Bars = append(bound.Bars, picture.Exactly(e.name(), float64(e.mayBe)))
	}
	return picture.Sets("Largest excess of charge after, and its bound", "requests beyond a limit of 100 (gcra: 25)", measured, bound)
}
