package endtoend

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// Markdown is what was measured, as tables with what is to be known of them.
func (r *Result) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d requests at a time, %d clients, %d rounds of %v a case, all cases in turn. Everything here took %v.\n\n",
		r.opts.Connections, clients, r.opts.Rounds, r.opts.Length, r.took.Round(time.Second))
	r.writeCases(&b)
	r.writeSweep(&b)
	r.writeLatency(&b)
	r.writeWrk(&b)
	r.writeMemory(&b)
	return b.String()
}

func (r *Result) writeCases(b *strings.Builder) {
	b.WriteString("| case | Caddy µs | primary µs | replica µs | Caddy ÷ floor | goal | requests/s | calls per request |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|\n")
	for _, c := range r.baseCases {
		cell := func(format string, of func(sample) float64) string { return r.cases.spread(c.name, of).Text(format) }
		ratio, bound := "", ""
		if c.floor != "" {
			ratio = r.cases.ratio(c.name, c.floor).Text("%.2f")
		}
		if c.limit > 0 {
			bound = fmt.Sprintf("≤ %.2f", c.limit)
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", c.name, cell("%.1f", sample.ofCaddy),
			cell("%.1f", sample.ofPrimary), cell("%.1f", sample.ofReplica), ratio, bound,
			cell("%.0f", sample.requests), r.cases.spread(c.name, sample.ofCalls).As(short))
	}
	fmt.Fprintf(b, "\n![CPU of Caddy per request, by case](img/%s)\n", caddyPicture)
}

// short writes a number of calls. Of next to none there are two digits, however
// many zeros come first.
func short(f float64) string {
	switch {
	case f == 0:
		return "0"
	case f < 0.01:
		return fmt.Sprintf("%.*f", 1-int(math.Floor(math.Log10(f))), f)
	default:
		return fmt.Sprintf("%.2f", f)
	}
}

// sweepRow is a row of the table of the sweep, and a bar of its drawing.
type sweepRow struct{ factor, value, name string }

// title is factor and value, but of the base, which has all of the values.
func (r *sweepRow) title() string {
	if r.name == sweepBase {
		return r.factor
	}
	return r.factor + ": " + r.value
}

// factorRows are those of all factors but distance.
func factorRows(opts *Options) []sweepRow {
	return []sweepRow{
		{"base", "1 shard, 1 replica, 1 zone, " + thousands(opts.sweepKeys()) + " keys", sweepBase},
		{"shards", "2", twoShards},
		{"shards", "4", fourShards},
		{"replicas", "0", "no replica"},
		{"replicas", "2", "2 replicas"},
		{"zones", "3", "3 zones"},
		{"keys", "1", "1 key"},
		{"keys", thousands(opts.sweepKeys() / 3), fewerKeys},
		{"keys", thousands(opts.manyKeys()), manyKeys},
	}
}

func sweepRows(opts *Options) []sweepRow {
	rows := factorRows(opts)
	for _, d := range roundTrips {
		rows = append(rows, sweepRow{"distance", distanceName(d), distanceName(d)})
	}
	return rows
}

// thousands writes a number with commas.
func thousands(n int64) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

func (r *Result) writeSweep(b *strings.Builder) {
	fmt.Fprintf(b, `
### One factor at a time

The Redis store with `+"`charge after`"+`, for %s clients in turn: as they are many, each comes every few seconds, so that each request asks a replica and is charged, unlike those of the %d clients above. Of a third as many, some come twice within the second for which [the ledger](ledger.md) trusts what it was told. Each row differs from the base in one thing. Redis µs are all servers of all shards together, *busiest shard* the servers of that one which had most to do; a call asks a server about one bucket, or changes it, as the commands tell by which buckets are read (`+"`INFO commandstats`"+`); several go to it as one command. Distance is made by a relay in the program that sends the requests, of which each direction takes half; the row without a delay shows what the relay itself does to the figures, and *round trip* is a PING through it while nothing else runs, of each round the median of %d. The %s buckets of the last value of keys were written beforehand, %s a second, by the store that Caddy uses, under the keys that Caddy uses; that case runs in a Caddy of its own, whose heap would slow down or speed up the others.

| factor | value | round trip ms | requests/s | Caddy µs | Redis µs | busiest shard µs | calls per request | Caddy ÷ floor |
|---|---|---|---|---|---|---|---|---|
`, thousands(r.opts.sweepKeys()), clients, pingCount, thousands(r.opts.manyKeys()), thousands(int64(r.fillRate)))
	write := func(factor, value, name string, ping spread.Spread, ratio string) {
		cell := func(format string, of func(sample) float64) string { return r.sweep.spread(name, of).Text(format) }
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", factor, value, ping.Text("%.2f"),
			cell("%.0f", sample.requests), cell("%.1f", sample.ofCaddy), cell("%.1f", sample.redis),
			cell("%.1f", sample.ofBusiest), r.sweep.spread(name, sample.ofCalls).As(short), ratio)
	}
	write("floor", "no limiter", floor, r.pings[0], "")
	for _, row := range sweepRows(&r.opts) {
		write(row.factor, row.value, row.name, r.pingOf(row.name), r.sweep.ratio(row.name, floor).Text("%.2f"))
	}
	fmt.Fprintf(b, "\n![CPU of Caddy and Redis per request, by factor](img/%s)\n", sweepPicture)
}

// pingOf is how far away the Redis of a case of the sweep is.
func (r *Result) pingOf(name string) spread.Spread {
	for i, d := range roundTrips {
		if name == distanceName(d) {
			return r.pings[i+1]
		}
	}
	return r.pings[0]
}

func (r *Result) writeLatency(b *strings.Builder) {
	fmt.Fprintf(b, `
### Latency

Requests come at a steady rate whether others are answered or not, over %d connections, and the latency of each counts from the instant at which it was due, so that nobody's waiting is left out. The rate is half of what the case reached above; the floor gets the same rate in the same round, and what is *added* is the difference of both; there are %d rounds of %v. Below zero it is less than what both wander by. *Lag* is how late the load generator sent requests, because it or all connections were busy, which is in the latency; *from sending* leaves it out.

`, r.opts.Connections, r.opts.Rounds*r.opts.slices(), (r.opts.Length / time.Duration(r.opts.slices())).Round(time.Millisecond))
	writeAddedHead(b, "latency of")
	for _, name := range latencyCases {
		r.writeAdded(b, name, name)
	}
	fmt.Fprintf(b, `
The same, one factor at a time, for the %s clients of the sweep, who are not known from their last request, unless all come with one key: each waits for a replica or, where there is none, for the primary. All have the same rate, half of what the slowest of them reached above, and the same floor, which is in the Caddy of all but that with %s keys. At this rate those with fewer keys come as seldom as others.

`, thousands(r.opts.sweepKeys()), thousands(r.opts.manyKeys()))
	writeAddedHead(b, "latency, one factor at a time")
	for _, row := range factorRows(&r.opts) {
		r.writeAdded(b, row.title(), row.name)
	}
	b.WriteString(`
The same with Redis at a distance: with ` + "`charge after`" + ` each waits for a replica, with ` + "`charge before`" + ` for the primary. Here too all have the same rate and the same floor.

`)
	writeAddedHead(b, "latency at a distance")
	for i, d := range roundTrips {
		for _, name := range []string{distanceName(d), beforeName(d)} {
			r.writeAdded(b, fmt.Sprintf("%s (round trip %.2f ms)", name, r.pings[i+1].Median), name)
		}
	}
	fmt.Fprintf(b, "\n![Latency that the limiter adds, by how far away Redis is](img/%s)\n", latencyPicture)
}

func writeAddedHead(b *strings.Builder, first string) {
	fmt.Fprintf(b, "| %s | requests/s | floor p50 ms | floor p99 ms | added p50 ms | added p99 ms | added p99.9 ms | added p99 ms from sending | lag p99 ms |\n", first)
	b.WriteString("|---|---|---|---|---|---|---|---|---|\n")
}

func (r *Result) writeAdded(b *strings.Builder, title, name string) {
	all := r.latency[name]
	cell := func(of func(latencies) float64) string { return all.spread(of).Text("%.2f") }
	added := func(of func(quantiles) float64) string { return all.added(of).Text("%.2f") }
	fmt.Fprintf(b, "| %s | %.0f | %s | %s | %s | %s | %s | %s | %s |\n", title,
		all.spread(func(l latencies) float64 { return l.rate }).Median,
		cell(func(l latencies) float64 { return l.floor.p50 }), cell(func(l latencies) float64 { return l.floor.p99 }),
		added(quantiles.ofP50), added(quantiles.ofP99), added(quantiles.ofP999), added(quantiles.ofSent99),
		cell(func(l latencies) float64 { return l.limiter.lag99 }))
}

func (r *Result) writeWrk(b *strings.Builder) {
	b.WriteString("\n### As wrk sees it\n\n")
	if len(r.wrk) == 0 {
		b.WriteString("wrk was not asked.\n")
		return
	}
	fmt.Fprintf(b, "The same sites, asked in turn by wrk with one thread and %d connections, and by the load generator of the tables above.\n\n", r.opts.Connections)
	b.WriteString("| requests/s of | wrk | load generator |\n|---|---|---|\n")
	for _, name := range wrkCases {
		fmt.Fprintf(b, "| %s | %s | %s |\n", name, spread.Of(r.wrk[name]).Text("%.0f"), spread.Of(r.own[name]).Text("%.0f"))
	}
}

func (r *Result) writeMemory(b *strings.Builder) {
	fmt.Fprintf(b, `
### Memory

What a bucket takes, here with keys of the length that these clients have, measured once a round, with an empty Redis and a Caddy that has just started: in Redis by `+"`used_memory`"+` of a primary between %s and %s keys, in full tables both times; in Caddy by its heap after a collection of garbage, %s clients later. Tables that double make the latter depend on how many there are.

| bytes for each bucket | |
|---|---|
`, thousands(r.opts.redisKeys()/2), thousands(r.opts.redisKeys()), thousands(r.opts.heapKeys()*9/10))
	for _, of := range []struct {
		where string
		bytes []float64
	}{
		{"each server of Redis", r.memory.redis},
		{"Caddy, memory store", r.memory.store},
		{"Caddy, what it knows of a bucket in Redis", r.memory.ledger},
	} {
		fmt.Fprintf(b, "| %s | %s |\n", of.where, spread.Of(of.bytes).Text("%.0f"))
	}
}
