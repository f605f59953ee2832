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

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// measured is all of it.
type measured struct {
	// own is how many allocations the limiter's code makes for a request on the
	// memory store, by round.
	own       []float64
	endToEnd  *endtoend.Result
	libraries *libraries.Result
	took      time.Duration
	// versions are those of what was measured and of what measured it.
	versions []string
	// stolen is the part of the processors' time that others had meanwhile.
	stolen float64
}

func (m *measured) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s; %s. The whole took %v, during which the host gave %.0f %% of the processors' time to others. A figure in a table is the median of its rounds (with their least and most, where these differ in the digits that are written).\n",
		machine.Processor(), runtime.NumCPU(), strings.Join(m.versions, ", "),
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
	own := goal.Goal{What: "allocations of the limiter's own code per request: memory store", Bound: mostOwn, Spread: spread.Of(m.own)}
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
	{"each client comes many times a second, to one Caddy", endtoend.ChargeAfter},
	{"each client comes every few seconds", endtoend.ManyClients},
	{"`charge before`, each request a take", endtoend.ChargeBefore},
	{"`batch auto`, one hot key", endtoend.BatchAuto},
	{"all are refused, to 500 clients", endtoend.Refused},
}

// meaning says what follows from the figures.
func (m *measured) meaning() string {
	var b strings.Builder
	f, l := m.endToEnd.Figures(), m.libraries.Figures()
	fmt.Fprintf(&b, "**Where the limit is.** A redis-server runs scripts on one processor. `redis-benchmark`, which does nothing but send the script of a take, 30 in a pipeline, gets %s calls a second out of one here, each for %.1f µs of its time. A Take of %d callers, of which those that leave together are one call, gets %s decisions a second for %.1f µs each, which is %.0f %% of what `redis-benchmark` reached in the same rounds, though the program that asks, and the kernel, share %d processors with Redis.\n\n",
		thousands(l.CeilingRate), l.CeilingServerMicros, l.Goroutines, thousands(l.TakeRate), l.TakeServerMicros, 100*l.CeilingPart, runtime.NumCPU())
	fmt.Fprintf(&b, "**What a request costs.** Caddy needs %.1f µs of CPU time for a request without a limiter that sends the same headers, and %.1f µs with the Redis store and `charge after`, of a client that it knows. The primary needs %.1f µs for it and the replica %.1f µs. Such a request makes %.2f calls to Redis, one of a client that comes seldom %.2f. At half of what this machine can serve the limiter adds %.2f ms in the median, though such a request waits for nothing but the processor, and %.2f ms at the 99th percentile, of which the floor itself has as much and more.\n\n",
		f.FloorMicros, f.LimiterMicros, f.PrimaryMicros, f.ReplicaMicros, f.KnownCalls, f.SeldomCalls, f.AddedP50Millis, f.AddedP99Millis)
	fmt.Fprintf(&b, "**What a shard costs, and gives.** A request of a client that comes seldom costs the servers of a single shard %.1f µs; those of two shards %.1f µs together, of which the busier shard has %.1f, and those of four %.1f µs, of which the busiest has %.1f. More shards do more work, for each of them gets shorter pipelines, and each call costs more in those; but they do it on processors of their own, and the busiest one has less. Once pipelines are long on each shard as well, the sum grows no more. On one machine more shards serve nothing faster, which is why this page compares time and not throughput.\n\n",
		f.Shards[0].All, f.Shards[1].All, f.Shards[1].Busiest, f.Shards[2].All, f.Shards[2].Busiest)
	fmt.Fprintf(&b, "**A million requests a second**, computed from the table of cases, with every processor busy for half of its time. Caddy's part is all of Caddy, without TLS and with nothing behind it.\n\n")
	b.WriteString("| requests | processors for Caddy | shards (a primary each) | replicas, one a shard at least |\n|---|---|---|---|\n")
	for _, t := range traffics {
		c := m.endToEnd.Cost(t.name)
		shards := processors(c.Primary)
		fmt.Fprintf(&b, "| %s | %d | %d | %d |\n", t.what, processors(c.Caddy), shards, max(shards, processors(c.Replica)))
	}
	fmt.Fprintf(&b, "\nWhat is refused, and batches, cost Redis calls by the client and by the second, not by the request: with more clients, more Caddys or smaller limits they need more than this. A primary that is busy for half of its time so carries %s requests a second of clients that come seldom, and %s of those that come often; what these save are the checks, which replicas have. How hot keys, more Caddys and batches change that is in [scaling](scaling.md).\n",
		thousands(busy*million/m.endToEnd.Cost(endtoend.ManyClients).Primary), thousands(busy*million/m.endToEnd.Cost(endtoend.ChargeAfter).Primary))
	return b.String()
}

// processors is how many are needed for a million requests a second that cost so
// many microseconds each.
func processors(micros float64) int { return int(math.Ceil(micros / busy)) }

// thousands writes a number with commas, rounded to three digits.
func thousands(f float64) string {
	if f <= 0 {
		return "0"
	}
	unit := math.Pow(10, max(math.Floor(math.Log10(f))-2, 0))
	n := int64(math.Round(f/unit) * unit)
	text := fmt.Sprint(n)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}
