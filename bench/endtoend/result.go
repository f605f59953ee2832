package endtoend

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/bench/goal"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// Result is what was measured.
type Result struct {
	opts Options
	took time.Duration
	// baseCases are those of the table of cases, in order.
	baseCases []*site
	// cases and sweep are the samples of both tables.
	cases, sweep samples
	// latency are the latencies by the name of the case.
	latency map[string]rounds
	// wrk are requests/s as wrk sees them, and own what the load generator saw
	// next.
	wrk, own map[string][]float64
	// pings are how many milliseconds away Redis is, at once and then in the order
	// of roundTrips.
	pings  []spread.Spread
	memory memory
	// fillRate is how many buckets a second were written beforehand.
	fillRate float64
}

func newResult(opts Options, l *lab) *Result {
	return &Result{
		opts: opts, baseCases: l.cases, cases: samples{}, sweep: samples{},
		latency: map[string]rounds{}, wrk: map[string][]float64{}, own: map[string][]float64{},
	}
}

// Figures are medians for a text.
type Figures struct {
	// FloorMicros and LimiterMicros are the CPU time of Caddy for a request,
	// without a limiter and with the Redis store, charge after.
	FloorMicros, LimiterMicros float64
	// PrimaryMicros and ReplicaMicros are the CPU times of both for such a
	// request.
	PrimaryMicros, ReplicaMicros float64
	// RequestsPerSecond is what one Caddy serves with it on this machine.
	RequestsPerSecond float64
	// Shards are CPU times of Redis for a request of a client that comes seldom, on
	// 1, 2 and 4 shards.
	Shards [3]ShardCost
	// SeldomCalls and KnownCalls are how many calls to Redis a request costs of a
	// client that comes seldom, and of one that comes often.
	SeldomCalls, KnownCalls float64
	// AddedP50Millis and AddedP99Millis are the latency that the Redis store adds
	// at half of saturation, Redis on loopback.
	AddedP50Millis, AddedP99Millis float64
}

// ShardCost is CPU time per request, in microseconds, of all servers of all shards
// and of those of the shard that had most to do.
type ShardCost struct{ All, Busiest float64 }

// Figures returns them.
func (r *Result) Figures() Figures {
	sweep := func(name string, of func(sample) float64) float64 { return r.sweep.spread(name, of).Median }
	shards := func(name string) ShardCost {
		return ShardCost{sweep(name, sample.redis), sweep(name, sample.ofBusiest)}
	}
	latency, limiter := r.latency[ChargeAfter], r.Cost(ChargeAfter)
	return Figures{
		FloorMicros:       r.Cost(floor).Caddy,
		LimiterMicros:     limiter.Caddy,
		PrimaryMicros:     limiter.Primary,
		ReplicaMicros:     limiter.Replica,
		RequestsPerSecond: r.cases.spread(ChargeAfter, sample.requests).Median,
		Shards:            [3]ShardCost{shards(sweepBase), shards(twoShards), shards(fourShards)},
		SeldomCalls:       sweep(sweepBase, sample.ofCalls),
		KnownCalls:        r.cases.spread(ChargeAfter, sample.ofCalls).Median,
		AddedP50Millis:    latency.added(quantiles.ofP50).Median,
		AddedP99Millis:    latency.added(quantiles.ofP99).Median,
	}
}

// Cost is CPU time per request in microseconds, of all of Caddy, of the primary
// and of the replica.
type Cost struct{ Caddy, Primary, Replica float64 }

// Cost is the median of a case, such as ChargeAfter.
func (r *Result) Cost(name string) Cost {
	median := func(of func(sample) float64) float64 { return r.cases.spread(name, of).Median }
	return Cost{median(sample.ofCaddy), median(sample.ofPrimary), median(sample.ofReplica)}
}

// The bounds for what is not a ratio.
const (
	redisMicrosBound = 9
	batchCallsBound  = 0.01
	refusedBound     = 1
	addedBound       = 1
)

// Goals are the speeds that were aimed at.
func (r *Result) Goals() []goal.Goal {
	ratio := func(what, name, floor string, bound float64) goal.Goal {
		return goalOf("CPU of Caddy ÷ floor: "+what, bound, "", r.cases.ratio(name, floor))
	}
	goals := []goal.Goal{
		ratio("memory store", memoryStore, floor, memoryBound),
		ratio("Redis store, charge after, 500 clients", ChargeAfter, floor, chargeAfterBound),
		ratio("Redis store, charge after, 50,000 clients", ManyClients, floor, chargeAfterBound),
		goalOf("CPU of primary and replica per request: Redis store, charge after, 500 clients", redisMicrosBound, " µs",
			r.cases.spread(ChargeAfter, sample.redis)),
		ratio("Redis store, batch auto", BatchAuto, floor, batchBound),
		goalOf("calls to Redis per request: batch auto", batchCallsBound, "", r.cases.spread(BatchAuto, sample.ofCalls)),
		ratio("Redis store, one refused key", refusedHot, refusedFloor, refusedHotBound),
		goalOf("calls to Redis per second: one refused key", refusedBound, "", r.cases.spread(refusedHot, sample.ofPerSecond)),
	}
	for _, name := range latencyCases {
		goals = append(goals, goalOf("added p99 at half of saturation: "+name, addedBound, " ms", r.latency[name].added(quantiles.ofP99)))
	}
	return goals
}

func goalOf(what string, bound float64, unit string, s spread.Spread) goal.Goal {
	return goal.Goal{What: what, Bound: bound, Unit: unit, Spread: s}
}
