package endtoend

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// Result holds the measurements.
type Result struct {
	opts         Options
	took         time.Duration
	baseCases    []*endpoint          // of the table of cases, in order
	cases, sweep samples              // of both tables
	returning    samples              // of ManyClients and its floor
	delays       samples              // of the sweep of charge_delay
	latency      map[string]rounds    // by the name of the case
	wrk, own     map[string][]float64 // requests/s by wrk, and by the load generator
	pings        []report.Spread      // as measured by lab.pings
	memory       memory
	fillRate     float64 // buckets a second that were written beforehand
}

// Cost is the CPU time per request in microseconds of Caddy, of primaries, of replicas, of
// both together, and of the servers of the busiest shard; and calls to Redis per request,
// and requests in a second.
type Cost struct{ Caddy, Primary, Replica, Redis, Busiest, Calls, Rate float64 }

// Cost returns the medians of a case, such as ChargeAfter.
func (r *Result) Cost(name string) Cost {
	if name == ManyClients {
		return r.returning.cost(name)
	}
	return r.cases.cost(name)
}

// OverFloor is the median of the CPU time of Caddy for a case of the table, relative to that of
// the Floor in the same round. The case and the Floor may have different rounds, so their
// medians are not to be compared.
func (r *Result) OverFloor(name string) float64 {
	return r.cases.ratio(name, Floor, sample.ofCaddy).Median
}

// SweepCost returns the medians of a case of the sweep, such as SweepBase.
func (r *Result) SweepCost(name string) Cost { return r.sweep.cost(name) }

func (s samples) cost(name string) Cost {
	median := func(of func(sample) float64) float64 { return s.spread(name, of).Median }
	return Cost{
		median(sample.ofCaddy), median(sample.ofPrimary), median(sample.ofReplica), median(sample.redis), median(sample.ofBusiest),
		median(sample.ofCalls), median(sample.requests),
	}
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
		{report.Goal{What: resident, Bound: 350, Rounds: r.memory.resident}, nil},
	}
}

// Markdown is the tables of the measurements, with explanations.
func (r *Result) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d requests at a time, %d clients, %d rounds of %v a case, all cases in turn. What goals compare, except clients never seen before, runs for %v of each round, in %d pieces. If these rounds do not decide a goal, its cases have up to %d more; a row has all rounds of its case, so rows may be of different rounds: compare ratios. Caddy's call once a second for a refused client falls before the measured part of each piece; [calls](calls.md) counts it. Everything here took %v.\n\n",
		connections, clients, r.opts.Rounds, r.opts.Length, time.Duration(r.opts.sizes().pieces)*r.opts.Length/2, r.opts.sizes().pieces, r.opts.More, r.took.Round(time.Second))
	r.writeCases(&b)
	r.writeDelays(&b)
	r.writeSweep(&b)
	r.writeLatency(&b)
	r.writeWrk(&b)
	r.writeMemory(&b)
	return b.String()
}

func (r *Result) writeCases(b *strings.Builder) {
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
			cell("%.0f", sample.requests), in.spread(name, sample.ofCalls).As(short))
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
	fmt.Fprintf(b, `%s
The %s are measured by themselves, in turn with the floor and with *%s*, and with the same at their pace, after each client has come %d times. The last four rows show what counting alone costs Redis, with as many keys as a case has clients: as fast as the program can, and as many requests a second as the clients sent. Of what it costs at their pace, the charges of %s clients cost Redis %s, those of %s clients %s.

The floor of a refused request is *%s*, the same response without a limiter. *%s*, which has a goal, takes turns with it in all of the %d pieces, the other refused cases in every %dth. The rows that end in *%s* are both sites again, each as the only one of a Caddy.

![CPU of Caddy per request, by case](../img/%s)
`, t, strings.TrimPrefix(ManyClients, "redis store, "), countingName(manyClients), r.opts.sizes().passes,
		grouped(clients), overPace(r.cases, ChargeAfter, clients), grouped(manyClients), overPace(r.returning, ManyClients, manyClients),
		refusedFloor, refusedHot, r.opts.sizes().pieces, shortEvery, strings.TrimPrefix(ownCaddy, ", "), caddyPicture)
}

func (r *Result) writeDelays(b *strings.Builder) {
	b.WriteString("\n### Charges that wait for each other\n\nWhat `charge_delay` saves, by how often each client comes: the more often, the more of its charges become one. The requests come from some clients in turn; how many of them a client makes in a second is the rate that was measured, divided by the clients. Before each part all clients come once, as they do again and again in the long run, so that Caddy knows them and makes no checks; what is left are charges.\n\n")
	t := report.NewTable("clients", "`charge_delay`", "requests per client and second", "Caddy µs", "Redis µs", "Redis ÷ "+Calibration, "calls per request")
	for _, clients := range delayClients {
		for _, d := range chargeDelays {
			name := delayName(clients, d)
			t.Row(grouped(clients), d.String(), r.delays.spread(name, perClient(clients)).As(report.Digits), r.delays.spread(name, sample.ofCaddy).Text("%.1f"),
				r.delays.spread(name, sample.redis).Text("%.1f"), r.delays.ratio(name, countingName(clients), sample.redis).Text("%.2f"), r.delays.spread(name, sample.ofCalls).As(short))
		}
	}
	fmt.Fprintf(b, "%s\n![Calls per request, by how often a client comes, and charge_delay](../img/%s)\n\n![CPU of Redis per request, by how often a client comes, and charge_delay](../img/%s)\n", t, delayCallsPicture, delayPicture)
}

// perClient is how often each of some clients comes in a second.
func perClient(clients int64) func(sample) float64 {
	return func(s sample) float64 { return s.rate / float64(clients) }
}

// byPace is a figure of the cases of the sweep of charge_delay, by how often each client
// comes in the median of the rounds with any delay.
func (r *Result) byPace(of func(name string, clients int64) report.Spread) (all []picture.Series) {
	for _, d := range chargeDelays {
		all = append(all, picture.Series{Name: "charge_delay " + d.String()})
	}
	for _, clients := range slices.Backward(delayClients) {
		var rates []sample
		for _, d := range chargeDelays {
			rates = append(rates, r.delays[delayName(clients, d)]...)
		}
		// Rounded, because it becomes a tick of the scale.
		pace, _ := strconv.ParseFloat(report.Digits(report.SpreadBy(rates, perClient(clients)).Median), 64)
		for i, d := range chargeDelays {
			all[i].X = append(all[i].X, pace)
			all[i].Y = append(all[i].Y, of(delayName(clients, d), clients))
		}
	}
	return all
}

// short writes a number of calls, small ones with two significant digits.
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
	return rows
}

func grouped(n int64) string { return report.Grouped(float64(n)) }

func (r *Result) writeSweep(b *strings.Builder) {
	fmt.Fprintf(b, `
### One factor at a time

The Redis store with `+"`charge after`"+`, for %s clients in turn: as with clients that come to several Caddys, each request asks a replica and is charged (`+"`ledger_trust 900ms`"+`), unlike those of the clients above. Of a third as many, some come twice within the time for which [the ledger](calls.md) trusts what it was told. Each row differs from the base in one thing. Without a replica the primary answers the checks, without a script. Redis µs are all servers of all shards together, *busiest shard* the servers of that one which had most to do; a call asks a server about one bucket, or changes it, as the commands tell by which buckets are read (`+"`INFO commandstats`"+`); several go to it as one command. Distance is made by a relay in the program that sends the requests, of which each direction takes half; the row without a delay shows what the relay itself does to the figures, and *round trip* is a PING through it while nothing else runs, of each round the median of %d. The %s buckets of the last value of keys were written beforehand, %s a second, by the store that Caddy uses, under the keys that Caddy uses; that case runs in a Caddy of its own, whose heap would slow down or speed up the others.

`, grouped(r.opts.sizes().sweep), pingCount, grouped(r.opts.sizes().many), report.Grouped(r.fillRate))
	t := report.NewTable("factor", "value", "round trip ms", "requests/s", "Caddy µs", "Redis µs", "busiest shard µs", "calls per request", "Caddy ÷ floor")
	write := func(factor, value, name string, ping report.Spread, ratio string) {
		cell := func(format string, of func(sample) float64) string { return r.sweep.spread(name, of).Text(format) }
		t.Row(factor, value, ping.Text("%.2f"),
			cell("%.0f", sample.requests), cell("%.1f", sample.ofCaddy), cell("%.1f", sample.redis),
			cell("%.1f", sample.ofBusiest), r.sweep.spread(name, sample.ofCalls).As(short), ratio)
	}
	write("floor", "no limiter", Floor, r.pings[0], "")
	for _, row := range sweepRows(&r.opts) {
		write(row.factor, row.value, row.name, r.pingOf(row.name), r.sweep.ratio(row.name, Floor, sample.ofCaddy).Text("%.2f"))
	}
	fmt.Fprintf(b, "%s\n![CPU of Caddy and Redis per request, by factor](../img/%s)\n", t, sweepPicture)
}

func (r *Result) pingOf(name string) report.Spread {
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

Requests come at a steady rate whether others are answered or not, over %d connections, and the latency of each counts from the instant at which it was due, so that nobody's waiting is left out. The rate is half of what the case reached above; the floor gets the same rate in the same round, and what is *added* is the difference of both; there are %d rounds of %v. Below zero it is less than what both wander by. These are medians: where the load generator, Caddy and Redis share the processors, the floor alone has a 99th percentile that wanders by more than any limiter adds.

`, connections, r.opts.Rounds*r.opts.sizes().slices, (r.opts.Length / time.Duration(r.opts.sizes().shorter)).Round(time.Millisecond))
	t := addedTable("latency of")
	for _, name := range latencyCases {
		r.writeAdded(t, name, name)
	}
	b.WriteString(t.String())
	fmt.Fprintf(b, `
The same, one factor at a time, for the %s clients of the sweep: each waits for a replica or, where there is none, for the primary, unless all come with one key. All have the same rate, half of what the slowest of them reached above, and the same floor, which is in the Caddy of all but that with %s keys. At this rate those with fewer keys come as seldom as others.

`, grouped(r.opts.sizes().sweep), grouped(r.opts.sizes().many))
	t = addedTable("latency, one factor at a time")
	for _, row := range factorRows(&r.opts) {
		r.writeAdded(t, row.title(), row.name)
	}
	b.WriteString(t.String())
	b.WriteString(`
The same with Redis at a distance: with ` + "`charge after`" + ` each waits for a replica, with ` + "`charge before`" + ` for the primary. Here too all have the same rate and the same floor.

`)
	t = addedTable("latency at a distance")
	for i, d := range roundTrips {
		for _, name := range []string{distanceName(d), beforeName(d)} {
			r.writeAdded(t, fmt.Sprintf("%s (round trip %.2f ms)", name, r.pings[i+1].Median), name)
		}
	}
	fmt.Fprintf(b, "%s\n![Latency that the limiter adds, by how far away Redis is](../img/%s)\n", t, latencyPicture)
}

func addedTable(first string) *report.Table {
	return report.NewTable(first, "requests/s", "floor ms", "added ms")
}

func (r *Result) writeAdded(t *report.Table, title, name string) {
	all := r.latency[name]
	t.Row(title, fmt.Sprintf("%.0f", all.spread(func(l latencies) float64 { return l.rate }).Median),
		all.spread(func(l latencies) float64 { return l.floor }).Text("%.2f"), all.added().Text("%.2f"))
}

func (r *Result) writeWrk(b *strings.Builder) {
	b.WriteString("\n### As wrk sees it\n\n")
	fmt.Fprintf(b, "The same sites, asked in turn by wrk with one thread and %d connections, and by the load generator of the tables above.\n\n", connections)
	t := report.NewTable("requests/s of", "wrk", "load generator")
	for _, name := range wrkCases {
		t.Row(name, report.SpreadOf(r.wrk[name]).Text("%.0f"), report.SpreadOf(r.own[name]).Text("%.0f"))
	}
	b.WriteString(t.String())
}

func (r *Result) writeMemory(b *strings.Builder) {
	fmt.Fprintf(b, `
### Memory

What a bucket takes, here with keys of the length that these clients have, measured once a round, with an empty Redis and a Caddy that has just started: in Redis by `+"`used_memory`"+` of a primary between %s and %s keys, in full tables both times; in Caddy by its heap after a collection of garbage, %s clients later. Tables that double make the latter depend on how many there are. Resident memory is read after a collection of garbage, once it falls no further, in %d rounds; between collections it grows to about twice the heap (GOGC).

`, grouped(r.opts.sizes().redis/2), grouped(r.opts.sizes().redis), grouped(r.opts.sizes().heap*9/10), len(r.memory.resident))
	t := report.NewTable("bytes for each bucket", "")
	t.Row("each server of Redis", report.SpreadOf(r.memory.redis).Text("%.0f"))
	t.Row("Caddy, memory store", report.SpreadOf(r.memory.store).Text("%.0f"))
	t.Row("Caddy, what it knows of a bucket in Redis", report.SpreadOf(r.memory.ledger).Text("%.0f"))
	t.Row("the same, resident memory, with "+grouped(r.opts.sizes().many)+" of them", report.SpreadOf(r.memory.resident).Text("%.0f"))
	b.WriteString(t.String())
}

// The pictures.
const (
	caddyPicture      = "bench-caddy.svg"
	sweepPicture      = "bench-sweep.svg"
	latencyPicture    = "bench-latency.svg"
	delayPicture      = "bench-delay.svg"
	delayCallsPicture = "bench-delay-calls.svg"
)

// Pictures draws the measurements, by the names of files.
func (r *Result) Pictures() map[string]*picture.Picture {
	var cases, sweep []picture.Bar
	for _, c := range r.baseCases {
		if c.floor != "" {
			cases = append(cases, picture.Bar{Name: c.name, Spread: r.cases.ratio(c.name, c.floor, sample.ofCaddy)})
		}
	}
	cases = append(cases, picture.Bar{Name: ManyClients, Spread: r.returning.ratio(ManyClients, Floor, sample.ofCaddy)})
	const pace = "requests per client and second"
	calls := r.byPace(func(name string, _ int64) report.Spread { return r.delays.spread(name, sample.ofCalls) })
	redis := r.byPace(func(name string, clients int64) report.Spread {
		return r.delays.ratio(name, countingName(clients), sample.redis)
	})
	for _, row := range sweepRows(&r.opts) {
		all := r.sweep.spread(row.name, func(s sample) float64 { return s.caddy + s.redis() })
		sweep = append(sweep, picture.Bar{Name: row.title(), Spread: all})
	}
	return map[string]*picture.Picture{
		caddyPicture:      picture.Bars("CPU of Caddy per request", "÷ floor of the same round", cases...),
		sweepPicture:      picture.Bars("CPU of Caddy and Redis per request", "µs", sweep...),
		delayPicture:      picture.Lines("CPU of Redis per request, by charge_delay", pace, "÷ "+Calibration, redis...),
		delayCallsPicture: picture.Lines("Calls to Redis per request, by charge_delay", pace, "calls per request", calls...),
		latencyPicture:    picture.Lines("Latency that the limiter adds, at one rate", "round trip to Redis, ms", "ms", r.byDistance()...),
	}
}

func (r *Result) byDistance() (all []picture.Series) {
	for _, kind := range []struct {
		name string
		of   func(time.Duration) string
	}{{"charge after", distanceName}, {"charge before", beforeName}} {
		s := picture.Series{Name: kind.name}
		for at, roundTrip := range roundTrips {
			// The difference of two figures may be negative by chance. The least and the
			// most, which the table shows, would leave no room.
			s.Append(max(math.Round(r.pings[at+1].Median*100)/100, 0.01), max(r.latency[kind.of(roundTrip)].added().Median, 0))
		}
		all = append(all, s)
	}
	return all
}
