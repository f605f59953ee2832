package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/machine"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// accuracyTable is what a simulation found, as Markdown.
func accuracyTable(found scores) string {
	var b strings.Builder
	over := func(s score) string { return percent(s.over, s.requests) }
	log, running := found.of(store.SlidingLog), found.of(store.Concurrency)
	all := log[len(log)-1].requests
	fmt.Fprintf(&b, "%d requests of %d clients in a day, a third of the clients with each traffic, seed %d; %d events in %s.",
		all, all/requestsPerClient, seed, events, span(window))
	fmt.Fprintf(&b, " By the log %s %% are over the limit.", cells(log, over))
	fmt.Fprintf(&b, " concurrency: %d at a time that take %s each on average, leases of %s renewed every %s, against a count of what runs, by which %s %% are over the limit.",
		slots, span(duration), span(lease), span(renewal), cells(running, over))
	names := make([]string, 0, len(traffics)+1)
	for _, t := range traffics {
		names = append(names, t.name)
	}
	fmt.Fprintf(&b, " Always in this order: %s, **all together**.\n\n", strings.Join(names, ", "))
	b.WriteString("| algorithm | % wrongly refused | % wrongly admitted | % that differ on the log's history | most admitted in one window ÷ events |\n|---|---|---|---|---|\n")
	for i, w := range ways {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", w.name,
			cells(found[i], func(s score) string { return percent(s.refused, s.requests) }),
			cells(found[i], func(s score) string { return percent(s.admitted, s.requests) }),
			cells(found[i], func(s score) string { return percent(s.differ, s.requests) }),
			cells(found[i], func(s score) string { return fmt.Sprintf("%.2f", s.worst(w)) }))
	}
	return b.String()
}

func cells(list []score, text func(score) string) string {
	texts := make([]string, len(list))
	for i, s := range list {
		texts[i] = text(s)
	}
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + ", **" + texts[last] + "**"
}

// span is a duration without the units that are zero.
func span(d time.Duration) string {
	text := d.String()
	if cut, ok := strings.CutSuffix(text, "m0s"); ok {
		text = cut + "m"
	}
	if cut, ok := strings.CutSuffix(text, "h0m"); ok {
		text = cut + "h"
	}
	return text
}

func percent(n, of int) string { return fmt.Sprintf("%.2f", 100*float64(n)/float64(of)) }

// costTable is what Redis needs, as Markdown.
func costTable(costs map[string]*cost) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, %s. Bytes: MEMORY USAGE of a bucket that has had so many events. Microseconds: CPU time of redis-server, the median of %d rounds of %d calls by %d callers with pipelining, on %d buckets of 5 to %d events; in parentheses the ratio to fixed_window.\n\n",
		machine.Processor(), machine.Redis(), time.Now().UTC().Format(time.DateOnly),
		measuredRounds, measuredCalls, measuredCallers, measuredClients, measuredTimes*len(measured))
	b.WriteString("| algorithm |")
	for _, size := range sizes {
		fmt.Fprintf(&b, " bytes, events: %d |", size)
	}
	for _, op := range measured {
		fmt.Fprintf(&b, " µs per %s |", op)
	}
	b.WriteString("\n|" + strings.Repeat("---|", 1+len(sizes)+len(measured)) + "\n")
	base := costs[ways[0].name]
	for _, w := range apart() {
		c := costs[w.name]
		fmt.Fprintf(&b, "| %s |", w.name)
		for _, n := range c.bytes {
			fmt.Fprintf(&b, " %d |", n)
		}
		for i := range measured {
			m := median(c.micros[i])
			fmt.Fprintf(&b, " %.1f (%.1f) |", m, m/median(base.micros[i]))
		}
		b.WriteString("\n")
	}
	return b.String()
}
