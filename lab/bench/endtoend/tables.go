package endtoend

import (
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// Result holds the measurements.
type Result struct {
	opts         Options
	took         time.Duration
	baseCases    []*endpoint       // of the table of cases, in order
	cases, sweep samples           // of both tables
	returning    samples           // of ManyClients and its floor
	delays       samples           // of the sweep of charge_delay
	latency      map[string]rounds // by the name of the case
	pings        []report.Spread   // as measured by lab.pings
	resident     []float64         // bytes of Caddy per bucket of many clients, by round
	fillRate     float64           // buckets a second that were written beforehand
}

// Cost is the CPU time per request in microseconds of Caddy, of primaries and of replicas,
// and that of Caddy relative to the Floor in the same round.
type Cost struct{ Caddy, Primary, Replica, OverFloor float64 }

// Cost returns the medians of a case of the table, such as ChargeAfter.
func (r *Result) Cost(name string) Cost {
	median := func(of func(sample) float64) float64 { return r.cases.spread(name, of).Median }
	return Cost{median(sample.ofCaddy), median(sample.ofPrimary), median(sample.ofReplica), r.cases.ratio(name, Floor, sample.ofCaddy).Median}
}

// goal is a goal, and the cases of which more rounds can decide it.
type goal struct {
	report.Goal
	cases []string
}

// Goals are the goals, with the measurements.
func (r *Result) Goals() (goals []report.Goal) {
	for _, g := range r.goals() {
		goals = append(goals, g.Goal)
	}
	return goals
}

func (r *Result) goals() []goal {
	ratio := func(in samples, what, name, floor string, bound float64) goal {
		return goal{report.Goal{What: "CPU of Caddy ÷ floor: " + what, Bound: bound, Rounds: in.ratios(name, floor, sample.ofCaddy)}, []string{name, floor}}
	}
	redis := func(in samples, name string, clients int64, bound float64) goal {
		what := "CPU of primary and replica ÷ " + Calibration + ": charge after, " + grouped(clients) + " clients"
		return goal{report.Goal{What: what, Bound: bound, Rounds: in.ratios(name, countingName(clients), sample.redis)}, []string{name, countingName(clients)}}
	}
	calls := report.Goal{What: "calls to Redis per request: batch auto", Bound: 0.01, Rounds: report.ValuesBy(r.cases[BatchAuto], sample.ofCalls)}
	opening := report.Goal{What: "µs of primary and replica per request: charge after, clients never seen before", Bound: 8, Rounds: report.ValuesBy(r.cases[NewClients], sample.redis)}
	resident := "resident bytes of Caddy per bucket that it knows in Redis, with " + grouped(r.opts.sizes().many)
	return []goal{
		ratio(r.cases, "memory store", memoryStore, Floor, memoryBound),
		ratio(r.cases, "Redis store, charge after, 500 clients", ChargeAfter, Floor, chargeAfterBound),
		ratio(r.returning, "Redis store, charge after, 50,000 clients", ManyClients, Floor, manyBound),
		ratio(r.cases, "Redis store, charge after, clients never seen before", NewClients, Floor, newBound),
		ratio(r.cases, "Redis store, batch auto", BatchAuto, Floor, batchBound),
		ratio(r.cases, "Redis store, one refused key", refusedHot, refusedFloor, refusedHotBound),
		redis(r.cases, ChargeAfter, clients, 0.5),
		redis(r.returning, ManyClients, manyClients, 1.3),
		{calls, []string{BatchAuto}},
		{opening, []string{NewClients}},
		{report.Goal{What: resident, Bound: 350, Rounds: r.resident}, nil},
	}
}

// Sections are the tables of the measurements, by their places in the document.
func (r *Result) Sections() map[string]string {
	return map[string]string{
		"setup": fmt.Sprintf("%d requests at a time, %d clients, %d rounds of %v a case, all cases in turn. What goals compare, except clients never seen before, runs for %v of each round, in %d pieces. If these rounds do not decide a goal, its cases have up to %d more. All of it took %v.\n",
			connections, clients, r.opts.Rounds, r.opts.Length, time.Duration(r.opts.sizes().pieces)*r.opts.Length/2, r.opts.sizes().pieces, r.opts.More, r.took.Round(time.Second)),
		"cases": r.caseTable(), "delays": r.delayTable(), "sweep": r.sweepTable(), "latency": r.latencyTables(),
	}
}

func (r *Result) caseTable() string {
	t := report.NewTable("case", "Caddy µs", "primary µs", "replica µs", "Caddy ÷ floor", "goal", "requests/s", "calls per request")
	write := func(in samples, name, floor string, limit float64) {
		cell := func(format string, of func(sample) float64) string { return in.spread(name, of).Text(format) }
		ratio, bound := "", ""
		if floor != "" {
			ratio = in.ratio(name, floor, sample.ofCaddy).Text("%.2f")
		}
		if limit > 0 {
			bound = fmt.Sprintf("≤ %.2f", limit)
		}
		t.Row(name, cell("%.1f", sample.ofCaddy),
			cell("%.1f", sample.ofPrimary), cell("%.1f", sample.ofReplica), ratio, bound,
			cell("%.0f", sample.requests), in.spread(name, sample.ofCalls).As(report.Number))
	}
	for _, c := range r.baseCases {
		write(r.cases, c.name, c.floor, c.limit)
	}
	write(r.returning, ManyClients, Floor, manyBound)
	for _, name := range []string{countingName(clients), pacingName(clients)} {
		write(r.cases, name, "", 0)
	}
	for _, name := range []string{countingName(manyClients), pacingName(manyClients)} {
		write(r.returning, name, "", 0)
	}
	overPace := func(in samples, name string, keys int64) string {
		return in.ratio(name, pacingName(keys), sample.redis).Text("%.2f")
	}
	return t.String() + fmt.Sprintf("\nOf what counting alone costs at their pace, the charges of %s clients cost Redis %s, those of %s clients %s.\n",
		grouped(clients), overPace(r.cases, ChargeAfter, clients), grouped(manyClients), overPace(r.returning, ManyClients, manyClients))
}

func (r *Result) delayTable() string {
	t := report.NewTable("clients", "`charge_delay`", "requests per client and second", "Caddy µs", "Redis µs", "Redis ÷ "+Calibration, "calls per request")
	for _, clients := range delayClients {
		for _, d := range chargeDelays {
			name := delayName(clients, d)
			t.Row(grouped(clients), d.String(), r.delays.spread(name, perClient(clients)).As(report.Digits), r.delays.spread(name, sample.ofCaddy).Text("%.1f"),
				r.delays.spread(name, sample.redis).Text("%.1f"), r.delays.ratio(name, countingName(clients), sample.redis).Text("%.2f"), r.delays.spread(name, sample.ofCalls).As(report.Number))
		}
	}
	return t.String()
}

// perClient is how often each of some clients comes in a second.
func perClient(clients int64) func(sample) float64 {
	return func(s sample) float64 { return s.rate / float64(clients) }
}

// sweepRow is a row of the table of the sweep.
type sweepRow struct{ factor, value, name string }

func (r *sweepRow) title() string {
	if r.name == SweepBase {
		return r.factor
	}
	return r.factor + ": " + r.value
}

func factorRows(opts *Options) []sweepRow {
	return []sweepRow{
		{"base", "1 shard, 1 replica, 1 zone, " + grouped(opts.sizes().sweep) + " keys", SweepBase},
		{"shards", "2", TwoShards},
		{"shards", "4", FourShards},
		{"replicas", "0", "no replica"},
		{"replicas", "2", "2 replicas"},
		{"zones", "3", "3 zones"},
		{"keys", "1", "1 key"},
		{"keys", grouped(opts.sizes().sweep / 3), fewerKeys},
		{"keys", grouped(opts.sizes().many), manyKeys},
	}
}

func sweepRows(opts *Options) []sweepRow {
	rows := factorRows(opts)
	for _, d := range roundTrips {
		rows = append(rows, sweepRow{"distance", distanceName(d), distanceName(d)})
	}
	for _, server := range opts.family {
		rows = append(rows, sweepRow{"server", server, server})
	}
	return rows
}

func grouped(n int64) string { return report.Grouped(float64(n)) }

func (r *Result) sweepTable() string {
	t := report.NewTable("factor", "value", "round trip ms", "requests/s", "Caddy µs", "Redis µs", "busiest shard µs", "calls per request", "Caddy ÷ floor")
	write := func(factor, value, name string, ping report.Spread, ratio string) {
		cell := func(format string, of func(sample) float64) string { return r.sweep.spread(name, of).Text(format) }
		t.Row(factor, value, ping.Text("%.2f"),
			cell("%.0f", sample.requests), cell("%.1f", sample.ofCaddy), cell("%.1f", sample.redis),
			cell("%.1f", sample.ofBusiest), r.sweep.spread(name, sample.ofCalls).As(report.Number), ratio)
	}
	write("floor", "no limiter", Floor, r.pings[0], "")
	for _, row := range sweepRows(&r.opts) {
		write(row.factor, row.value, row.name, r.pingOf(row.name), r.sweep.ratio(row.name, Floor, sample.ofCaddy).Text("%.2f"))
	}
	return t.String() + fmt.Sprintf("\nThe %s buckets of the last value of keys were written beforehand, %s a second, by the store that Caddy uses.\n", grouped(r.opts.sizes().many), report.Grouped(r.fillRate))
}

func (r *Result) pingOf(name string) report.Spread {
	for i, d := range roundTrips {
		if name == distanceName(d) {
			return r.pings[i+1]
		}
	}
	return r.pings[0]
}

// latencyTables are of the cases, of the sweep by factor, and of Redis at a distance.
func (r *Result) latencyTables() string {
	cases := addedTable("latency of")
	for _, name := range latencyCases {
		r.writeAdded(cases, name, name)
	}
	factors := addedTable("latency, one factor at a time")
	for _, row := range factorRows(&r.opts) {
		r.writeAdded(factors, row.title(), row.name)
	}
	distances := addedTable("latency at a distance")
	for i, d := range roundTrips {
		for _, name := range []string{distanceName(d), beforeName(d)} {
			r.writeAdded(distances, fmt.Sprintf("%s (round trip %.2f ms)", name, r.pings[i+1].Median), name)
		}
	}
	return cases.String() + "\n" + factors.String() + "\n" + distances.String()
}

func addedTable(first string) *report.Table {
	return report.NewTable(first, "requests/s", "floor ms", "added ms")
}

func (r *Result) writeAdded(t *report.Table, title, name string) {
	all := r.latency[name]
	t.Row(title, fmt.Sprintf("%.0f", all.spread(func(l latencies) float64 { return l.rate }).Median),
		all.spread(func(l latencies) float64 { return l.floor }).Text("%.2f"), all.added().Text("%.2f"))
}

// Picture draws the CPU time of the cases.
func (r *Result) Picture() *picture.Picture {
	var cases []picture.Bar
	for _, c := range r.baseCases {
		if c.floor != "" {
			cases = append(cases, picture.Bar{Name: c.name, Spread: r.cases.ratio(c.name, c.floor, sample.ofCaddy)})
		}
	}
	cases = append(cases, picture.Bar{Name: ManyClients, Spread: r.returning.ratio(ManyClients, Floor, sample.ofCaddy)})
	return picture.Sets("CPU of Caddy per request", "÷ floor of the same round", picture.Set{Bars: cases})
}
