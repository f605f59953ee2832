package main

import (
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

// report is what the document says of outcomes.
func report(set settings, took time.Duration, outcomes []*outcome, losses []*loss) string {
	return head(set, took, outcomes) + limitTable(outcomes) + "\n" + resetTable(outcomes) + "\n" + lossTable(losses)
}

// head says on what it was measured, and how.
func head(set settings, took time.Duration, outcomes []*outcome) string {
	lagged := map[time.Duration]time.Duration{}
	var arrived time.Duration
	var sent, others int64
	for _, o := range outcomes {
		lagged[o.lag] = max(lagged[o.lag], o.lagged)
		sent, others, arrived = sent+o.sent, others+o.others, max(arrived, o.arrived)
	}
	seen := ""
	for _, lag := range lags {
		seen += fmt.Sprintf(" %s: %v;", lagName(lag), lagged[lag].Round(time.Millisecond))
	}
	return fmt.Sprintf("%s, %d processors, %s, %s, %s. `make guarantees` took %v, each cell %v: %d requests of clients, and %d of others, of which %d were not admitted. The longest lag that was seen, by what was set:%s the longest arrival: %v. The bounds of a cell reckon with its own.\n\n",
		machine.Processor(), runtime.NumCPU(), runtime.Version(), machine.Redis(), time.Now().UTC().Format(time.DateOnly),
		took.Round(time.Second), set.lasts, sent, others, sum(outcomes, func(o *outcome) int64 { return o.disturbed }), seen, arrived)
}

func lagName(lag time.Duration) string {
	if lag == 0 {
		return "none"
	}
	number := strings.TrimRight(lag.String(), "ms")
	return number + " " + strings.TrimPrefix(lag.String(), number)
}

func sum(outcomes []*outcome, of func(*outcome) int64) (n int64) {
	for _, o := range outcomes {
		n += of(o)
	}
	return n
}

// row is a row of the table: all numbers of requests at a time.
type row struct {
	limit  limit
	caddys int
	lag    time.Duration
}

// rows are the outcomes by row, in the order of limits, Caddys and lags.
func rows(outcomes []*outcome) (order []row, of map[row][]*outcome) {
	of = map[row][]*outcome{}
	for _, o := range outcomes {
		r := row{o.limit, o.caddys, o.lag}
		of[r] = append(of[r], o)
	}
	for _, l := range limits() {
		for _, caddys := range caddyCounts {
			for _, lag := range lags {
				if r := (row{l, caddys, lag}); of[r] != nil {
					order = append(order, r)
				}
			}
		}
	}
	return order, of
}

// limitTable is what clients got.
func limitTable(outcomes []*outcome) string {
	var b strings.Builder
	b.WriteString("| algorithm, charge | Caddys | replica lag | admitted beyond the limit: 1 | 16 | 256 at a time | refused though there was room for: 1 | 16 | 256 at a time |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	order, of := rows(outcomes)
	for _, r := range order {
		fmt.Fprintf(&b, "| %s | %d | %s |", r.limit, r.caddys, lagName(r.lag))
		for _, figure := range []func(*outcome) (int64, int64){
			func(o *outcome) (int64, int64) { return o.beyond, o.mayBeyond },
			func(o *outcome) (int64, int64) { return o.room, o.mayRoom },
		} {
			for _, connections := range crowds {
				b.WriteString(" " + atATime(of[r], connections, figure) + " |")
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// atATime is a figure and its bound for a number of requests at a time.
func atATime(outcomes []*outcome, connections int, figure func(*outcome) (int64, int64)) string {
	for _, o := range outcomes {
		if o.connections == connections {
			n, most := figure(o)
			return mark(n, most)
		}
	}
	return ""
}

// mark writes what was seen and what may be, and makes an excess stand out.
func mark(n, most int64) string {
	if n > most {
		return fmt.Sprintf("**%d of %d**", n, most)
	}
	return fmt.Sprintf("%d of %d", n, most)
}

// resetTable is what windows told of their end.
func resetTable(outcomes []*outcome) string {
	var b strings.Builder
	b.WriteString("| algorithm, charge | Caddys | responses | windows | resets in one window |\n|---|---|---|---|---|\n")
	for _, l := range limits() {
		if !l.hasReset() {
			continue
		}
		for _, caddys := range caddyCounts {
			var responses, windows, resets int64
			for _, o := range outcomes {
				if o.limit == l && o.caddys == caddys {
					responses, windows, resets = responses+o.served+o.refused, windows+o.windows, max(resets, o.resets)
				}
			}
			if responses > 0 {
				fmt.Fprintf(&b, "| %s | %d | %d | %d | %s |\n", l, caddys, responses, windows, mark(resets, 1))
			}
		}
	}
	return b.String()
}

// lossTable is what faults did to counts.
func lossTable(losses []*loss) string {
	var b strings.Builder
	b.WriteString("| fault | algorithm, charge | served | denied | counted in Redis | charges and refunds without a reply | takes without a reply | counted beyond what was served | served and not counted |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, l := range losses {
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %d | %d | %d | %s | %s |\n", l.fault, l.limit, l.served, l.unanswered,
			l.counted, l.uncertain, l.untold, mark(l.double(), l.mayBeDouble()), mark(l.lost(), l.mayBeLost()))
	}
	return b.String()
}
