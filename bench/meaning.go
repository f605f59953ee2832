package main

import (
	"fmt"
	"math"
	"runtime"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/bench/endtoend"
	"github.com/shardlimit/caddy-shardlimit/bench/goal"
	"github.com/shardlimit/caddy-shardlimit/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

// measured is all of it.
type measured struct {
	// own is how many allocations the limiter's code makes for a request on the
	// memory store.
	own       float64
	endToEnd  *endtoend.Result
	libraries *libraries.Result
	took      time.Duration
	// stolen is the part of the processors' time that others had meanwhile.
	stolen float64
}

func (m *measured) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s, %s, %s; %s. The whole took %v, during which the host gave %.0f %% of the processors' time to others.\n",
		machine.Processor(), runtime.NumCPU(), runtime.Version(), machine.Redis(), strings.Join(libraries.Versions(), ", "),
		time.Now().UTC().Format(time.DateOnly), m.took.Round(time.Second), 100*m.stolen)
	b.WriteString("\n## Goals\n\n" + goal.Table(m.goals()))
	b.WriteString("\n## What the figures mean\n\n" + m.meaning())
	b.WriteString("\n## The limiter in Caddy\n\n" + m.endToEnd.Markdown())
	b.WriteString("\n## Take and other limiters\n\n" + m.libraries.Markdown())
	return b.String()
}

// mostOwn is how many allocations the limiter's own code may make.
const mostOwn = 6

func (m *measured) goals() []goal.Goal {
	own := goal.Goal{What: "allocations of the limiter's own code per request: memory store", Bound: mostOwn, Median: m.own, Min: m.own, Max: m.own}
	goals := append(m.endToEnd.Goals(), own)
	return append(goals, m.libraries.Goals()...)
}

// busy is which part of a processor's time is planned with: beyond that requests
// wait for each other.
const busy = 0.5

// million is how many requests a second the hardware is computed for.
const million = 1e6

// traffic is a kind of requests, by what is known of their clients.
type traffic struct{ what, name string }

var traffics = []traffic{
	{"each client comes some thirty times a second, to one Caddy", endtoend.ChargeAfter},
	{"each client comes every few seconds", endtoend.ManyClients},
	{"`charge before`, each request a take", endtoend.ChargeBefore},
	{"`batch auto`, one hot key", endtoend.BatchAuto},
	{"all are refused", endtoend.Refused},
}

// meaning says what follows from the figures.
func (m *measured) meaning() string {
	var b strings.Builder
	f, l := m.endToEnd.Figures(), m.libraries.Figures()
	fmt.Fprintf(&b, "**Where the limit is.** A redis-server runs scripts on one processor. `redis-benchmark`, which does nothing but send the script of a take, 30 in a pipeline, gets %s calls a second out of one here, each for %.1f µs of its time. A Take of %d callers gets %s decisions a second, %.0f %% of that, for %.1f µs each; the rest goes to the program that asks, which has to share %d processors with Redis.\n\n",
		thousands(l.CeilingRate), l.CeilingServerMicros, l.Goroutines, thousands(l.TakeRate), 100*l.TakeRate/l.CeilingRate, l.TakeServerMicros, runtime.NumCPU())
	fmt.Fprintf(&b, "**What a request costs.** Caddy needs %.1f µs of CPU time for a request without a limiter that sends the same headers, and %.1f µs with the Redis store and `charge after`, of a client that it knows. The primary needs %.1f µs for it and the replica %.1f µs. Such a request makes %.2f calls to Redis, one of a client that comes seldom %.2f. At half of what this machine can serve the limiter adds %.2f ms in the median and %.2f ms at the 99th percentile.\n\n",
		f.FloorMicros, f.LimiterMicros, f.PrimaryMicros, f.ReplicaMicros, f.KnownCalls, f.SeldomCalls, f.AddedP50Millis, f.AddedP99Millis)
	fmt.Fprintf(&b, "**What a shard costs, and gives.** Clients that come seldom cost all servers of a single shard %.1f µs a request; of two shards the busier one has %.1f µs of it. Shards do not make a request cheaper: each of N does an Nth of the work, on a processor of its own, in shorter pipelines, which cost more for each call. On one machine more of them serve nothing faster, which is why this page compares time and not throughput.\n\n",
		f.ShardMicros, f.Shards2Micros)
	fmt.Fprintf(&b, "**A million requests a second**, computed from the table of cases, with every processor busy for half of its time. Caddy's part is all of Caddy, without TLS and with nothing behind it.\n\n")
	b.WriteString("| requests | processors for Caddy | shards (a primary each) | replicas |\n|---|---|---|---|\n")
	for _, t := range traffics {
		c := m.endToEnd.Cost(t.name)
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", t.what, processors(c.Caddy), processors(c.Primary), processors(c.Replica))
	}
	fmt.Fprintf(&b, "\nOne processor of Redis so carries %s requests a second of clients that come seldom, and %s of clients that come often. How hot keys, more Caddys and batches change that is in [scaling](scaling.md).\n",
		thousands(busy*million/m.endToEnd.Cost(endtoend.ManyClients).Primary), thousands(busy*million/m.endToEnd.Cost(endtoend.ChargeAfter).Primary))
	return b.String()
}

// processors is how many are needed for a million requests a second that cost so
// many microseconds each.
func processors(micros float64) string { return fmt.Sprint(int(math.Ceil(micros / busy))) }

// thousands writes a number with commas, rounded to three digits.
func thousands(f float64) string {
	if f <= 0 {
		return "0"
	}
	unit := math.Pow(10, math.Floor(math.Log10(f))-2)
	n := int64(math.Round(f/unit) * unit)
	text := fmt.Sprint(n)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}
