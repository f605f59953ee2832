package endtoend

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// sample is one case in one round. CPU times are per request, in microseconds.
type sample struct {
	caddy, primary, replica float64 // CPU times, of all shards
	busiest                 float64 // the CPU time of the servers of the busiest shard
	calls                   float64 // calls to Redis, per request
	rate                    float64 // requests/s
}

// samples are the samples of all rounds, by the name of the case.
type samples map[string][]sample

func (s samples) spread(name string, of func(sample) float64) report.Spread {
	return report.SpreadBy(s[name], of)
}

// ratio is a figure of a case, relative to that of another one in the same round.
func (s samples) ratio(name, other string, of func(sample) float64) report.Spread {
	return report.SpreadOf(s.ratios(name, other, of))
}

func (s samples) ratios(name, other string, of func(sample) float64) []float64 {
	return report.RatiosBy(s[name], s[other], of)
}

// The short cases take part in every sixth piece.
const shortEvery = 6

// isLong reports whether a case takes part in all pieces. What goals compare does: rounds have
// to differ by less than the goal. Clients never seen before do not, because they would fill
// Caddy's memory.
func (l *lab) isLong(c *endpoint) bool {
	isFloor := slices.ContainsFunc(l.cases, func(other *endpoint) bool { return other.floor == c.name && other.limit > 0 })
	return isFloor || c == l.returning || c.direct != nil || c.limit > 0 && c.keys < math.MaxInt64
}

// measureAll measures all cases for one round. The round consists of pieces, each half of
// Options.Length, in which the cases take turns: what slows the machine for some seconds then
// slows all cases.
func (l *lab) measureAll(ctx context.Context, cases []*endpoint, pieces int, into samples, isCounted bool) error {
	length := l.opts.Length
	switch {
	case !isCounted:
		length, pieces = length/3, 1
	case pieces > 1:
		length /= 2
	}
	parts := make([]part, len(cases))
	for piece := range pieces {
		l.turn++ // so that the cases take turns in being the first
		for i := range cases {
			i := (i + l.turn) % len(cases)
			if piece%shortEvery != 0 && !l.isLong(cases[i]) {
				continue
			}
			p, err := l.measure(ctx, cases[i], length)
			if err != nil {
				return fmt.Errorf("%s: %w", cases[i].name, err)
			}
			parts[i].add(p)
		}
	}
	if isCounted {
		for i, c := range cases {
			into[c.name] = append(into[c.name], parts[i].sample())
		}
	}
	return nil
}

// measureKnown measures clients that come repeatedly. First each of them comes several
// times, so that Caddy knows as much of it as in the long run.
func (l *lab) measureKnown(ctx context.Context, cases []*endpoint, pieces int, into samples, isCounted bool) error {
	if isCounted {
		return l.measureAll(ctx, cases, pieces, into, true)
	}
	for _, c := range cases {
		if len(c.limits) == 0 {
			continue
		}
		if _, err := c.send(ctx, loadgen.Options{Connections: connections, Requests: l.sizes.passes * c.keys}); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// addRounds measures more rounds of those of the cases whose goals are not decided.
func (l *lab) addRounds(ctx context.Context, r *Result, cases []*endpoint, into samples, say func(format string, args ...any)) error {
	return report.AddRounds(l.opts.More, func() []*endpoint { return r.undecided(cases) }, func(round int, again []*endpoint) error {
		say("not decided, %d cases: round %d of at most %d more", len(again), round+1, l.opts.More)
		return l.measureAll(ctx, again, l.sizes.pieces, into, true)
	})
}

// undecided returns those of the cases on which goals depend that their rounds do not decide,
// and those that keep the pace of one. Goals that depend on other cases as well are left out.
func (r *Result) undecided(cases []*endpoint) []*endpoint {
	wanted := map[string]bool{}
	for _, g := range r.goals() {
		isOf := func(c *endpoint) bool { return slices.Contains(g.cases, c.name) }
		if g.Verdict() != report.Undecided || len(traffic.Those(cases, isOf)) < len(g.cases) {
			continue
		}
		for _, name := range g.cases {
			wanted[name] = true
		}
	}
	return traffic.Those(cases, func(c *endpoint) bool { return wanted[c.name] || c.paceOf != nil && wanted[c.paceOf.name] })
}

// calibrationLength is how many pairs of INCRBY and EXPIRE are in a pipeline.
const calibrationLength = 32

// count counts in Redis without a limiter for a while, as envoyproxy/ratelimit does: INCRBY
// and EXPIRE for each request.
func (c *endpoint) count(ctx context.Context, length time.Duration) (loadgen.Result, error) {
	start, n := time.Now(), int64(0)
	for end := start.Add(length); time.Now().Before(end); n += calibrationLength {
		if c.paceOf != nil && c.paceOf.rate > 0 {
			time.Sleep(time.Until(start.Add(time.Duration(float64(n) / c.paceOf.rate * float64(time.Second)))))
		}
		pipe := c.direct.Pipeline()
		for i := range int64(calibrationLength) {
			key := "calibration-" + strconv.FormatInt((c.sent+i)%c.keys, 10)
			pipe.IncrBy(ctx, key, 1)
			pipe.Expire(ctx, key, time.Hour)
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return loadgen.Result{}, fmt.Errorf("count: %w", err)
		}
		c.sent += calibrationLength
	}
	return loadgen.Result{Requests: n, Status: map[int]int64{c.status: n}, Elapsed: time.Since(start)}, nil
}

// lastCharges is enough time for the charges that are held, for 50 ms, and in flight.
const lastCharges = 100 * time.Millisecond

// settle waits until the charges of a case are counted.
func (c *endpoint) settle() {
	if c.direct == nil {
		time.Sleep(lastCharges + c.store.delay)
	}
}

func (l *lab) measure(ctx context.Context, c *endpoint, length time.Duration) (p part, err error) {
	if c.isAway && l.sizes.passes > 0 {
		if _, err := c.send(ctx, loadgen.Options{Connections: connections, Requests: c.keys}); err != nil {
			return p, err
		}
	}
	if _, err := c.send(ctx, loadgen.Options{Connections: connections, Duration: leadIn(l.opts.Length)}); err != nil {
		return p, err
	}
	c.settle()
	var result loadgen.Result
	before, after, err := traffic.Around(c.use, func() (err error) {
		result, err = c.send(ctx, loadgen.Options{Connections: connections, Duration: length})
		c.settle()
		return err
	})
	if err != nil {
		return p, err
	}
	return part{after.since(&before), result.Requests, result.Elapsed}, nil
}

// greet sends one request of each client of the cases. Clients with a limit of one are
// refused from then on.
func (l *lab) greet(ctx context.Context) error {
	for _, c := range l.cases {
		if c.floor == "" || c.keys > clients {
			continue
		}
		result, err := c.load(ctx, loadgen.Options{Connections: connections, Requests: c.keys})
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		if result.Requests != c.keys {
			return fmt.Errorf("%s: %d of %d clients came", c.name, result.Requests, c.keys)
		}
	}
	time.Sleep(lastCharges)
	return nil
}

// send sends requests of the clients in turn, and requires the status of the case.
func (c *endpoint) send(ctx context.Context, opts loadgen.Options) (loadgen.Result, error) {
	result, err := c.load(ctx, opts)
	if err != nil {
		return result, err
	}
	if odd := result.Requests - result.Status[c.status]; odd > result.Requests/1000 {
		return result, fmt.Errorf("%d of %d responses have another status than %d", odd, result.Requests, c.status)
	}
	return result, nil
}

func (c *endpoint) load(ctx context.Context, opts loadgen.Options) (loadgen.Result, error) {
	if c.direct != nil {
		return c.count(ctx, opts.Duration)
	}
	first := c.sent
	opts.Addr, opts.Header = c.addr, "X-Key"
	opts.Key = func(n int64) string { return clientName((first + n) % c.keys) }
	result, err := loadgen.Run(ctx, opts)
	c.sent += result.Requests
	c.rate = float64(result.Requests) / result.Elapsed.Seconds()
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("send requests: %w", ctx.Err())
	}
	return result, err
}

func clientName(n int64) string { return "client-" + strconv.FormatInt(n, 10) }

// use is the CPU time and calls of processes so far.
type use struct {
	caddy, primary, replica time.Duration
	shards                  []time.Duration // the CPU times of each shard's servers
	calls                   int64
}

func (c *endpoint) use() (u use, err error) {
	if u.caddy, err = c.caddy.CPU(); err != nil {
		return u, err
	}
	for _, shard := range c.store.shards {
		all := time.Duration(0)
		for _, server := range servers(shard) {
			cpu, err := server.CPU()
			if err != nil {
				return u, err
			}
			calls, err := server.Asked()
			if err != nil {
				return u, err
			}
			if server == shard.Primary {
				u.primary += cpu
			} else {
				u.replica += cpu
			}
			u.calls += calls
			all += cpu
		}
		u.shards = append(u.shards, all)
	}
	return u, nil
}

func (u use) since(before *use) use {
	d := use{
		caddy: u.caddy - before.caddy, primary: u.primary - before.primary, replica: u.replica - before.replica,
		calls: u.calls - before.calls,
	}
	for i := range u.shards {
		d.shards = append(d.shards, u.shards[i]-before.shards[i])
	}
	return d
}

// part is what some requests of a case took.
type part struct {
	use      use
	requests int64
	elapsed  time.Duration
}

func (p *part) add(other part) {
	p.use.caddy += other.use.caddy
	p.use.primary += other.use.primary
	p.use.replica += other.use.replica
	p.use.calls += other.use.calls
	p.use.shards = append(p.use.shards, make([]time.Duration, len(other.use.shards)-len(p.use.shards))...)
	for i, d := range other.use.shards {
		p.use.shards[i] += d
	}
	p.requests += other.requests
	p.elapsed += other.elapsed
}

func (p *part) sample() sample {
	requests := float64(max(p.requests, 1))
	each := func(d time.Duration) float64 { return d.Seconds() * 1e6 / requests }
	s := sample{
		caddy: each(p.use.caddy), primary: each(p.use.primary), replica: each(p.use.replica),
		calls: float64(p.use.calls) / requests,
		rate:  requests / p.elapsed.Seconds(),
	}
	for _, d := range p.use.shards {
		s.busiest = max(s.busiest, each(d))
	}
	return s
}

func (s sample) requests() float64  { return s.rate }
func (s sample) redis() float64     { return s.primary + s.replica }
func (s sample) ofCaddy() float64   { return s.caddy }
func (s sample) ofPrimary() float64 { return s.primary }
func (s sample) ofReplica() float64 { return s.replica }
func (s sample) ofBusiest() float64 { return s.busiest }
func (s sample) ofCalls() float64   { return s.calls }

// latencies are the median latencies of one case in one round, in milliseconds, and of
// the floor at the same rate.
type latencies struct{ rate, floor, limiter float64 }

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1e3 }

type rounds []latencies

func (r rounds) added() report.Spread {
	return r.spread(func(l latencies) float64 { return l.limiter - l.floor })
}

func (r rounds) spread(of func(latencies) float64) report.Spread { return report.SpreadBy(r, of) }

// latencyCases are the cases whose latency is measured on loopback.
var latencyCases = []string{memoryStore, ChargeAfter, ChargeBefore, BatchAuto, refusedHot}

// measureLatencies runs each case at half of the rate that it reached before, after its
// floor at the same rate. In the sweep, the cases at a distance share a rate and a floor,
// and so do all others.
func (l *lab) measureLatencies(ctx context.Context, r *Result, isCounted bool) error {
	for _, name := range latencyCases {
		c := called(l.cases, name)
		rate := r.cases.spread(name, sample.requests).Median / 2
		if err := l.against(ctx, c.floor, rate, r.latency, isCounted, c); err != nil {
			return err
		}
	}
	var byFactor, far []*endpoint
	for _, row := range factorRows(&l.opts) {
		byFactor = append(byFactor, called(l.sweep, row.name))
	}
	for i, roundTrip := range roundTrips {
		far = append(far, called(l.sweep, distanceName(roundTrip)), l.distances[i])
	}
	for _, group := range [][]*endpoint{byFactor, far} {
		if err := l.against(ctx, Floor, r.sharedRate(group), r.latency, isCounted, group...); err != nil {
			return err
		}
	}
	return nil
}

// sharedRate is half of the rate that each of the cases reached. Cases with charge
// before, which the sweep lacks, are assumed to reach the rate of charge before on
// loopback.
func (r *Result) sharedRate(cases []*endpoint) float64 {
	least := math.Inf(1)
	for _, c := range cases {
		reached := r.sweep.spread(c.name, sample.requests)
		if len(r.sweep[c.name]) == 0 {
			reached = r.cases.spread(ChargeBefore, sample.requests)
		}
		least = math.Min(least, reached.Median)
	}
	return least / 2
}

func (l *lab) against(ctx context.Context, floor string, rate float64, into map[string]rounds, isCounted bool, cases ...*endpoint) error {
	without, err := l.paced(ctx, called(l.cases, floor), rate)
	if err != nil {
		return err
	}
	for _, c := range cases {
		q, err := l.paced(ctx, c, rate)
		if err != nil {
			return err
		}
		if isCounted {
			into[c.name] = append(into[c.name], latencies{rate: rate, floor: without, limiter: q})
		}
	}
	return nil
}

// paced is the median latency of a case at a rate.
func (l *lab) paced(ctx context.Context, c *endpoint, rate float64) (float64, error) {
	length := l.opts.Length / time.Duration(l.sizes.shorter)
	// The first requests on a connection suffer from the previous case.
	lead := leadIn(length)
	result, err := c.send(ctx, loadgen.Options{
		Connections: connections, Rate: rate, Duration: lead + length, Skip: int64(rate * lead.Seconds()),
	})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.name, err)
	}
	return milliseconds(loadgen.Quantile(result.Latencies, 0.5)), nil
}

// pingCount is the number of pings to a server in a round.
const pingCount = 40

// pings are the milliseconds of a PING to the default store's primary while nothing else
// runs: without a proxy, and through the proxies in the order of roundTrips.
func (l *lab) pings(ctx context.Context) (all []report.Spread, err error) {
	addrs := []string{l.stores.base.shards[0].Primary.Addr()}
	for _, far := range l.stores.far {
		addrs = append(addrs, far.proxies[0].Addr())
	}
	took := make([][]float64, len(addrs))
	for range l.opts.Rounds {
		for i, addr := range addrs {
			d, err := ping(ctx, addr)
			if err != nil {
				return nil, err
			}
			took[i] = append(took[i], milliseconds(d))
		}
	}
	for _, values := range took {
		all = append(all, report.SpreadOf(values))
	}
	return all, nil
}

func ping(ctx context.Context, addr string) (time.Duration, error) {
	client := goredis.NewClient(&goredis.Options{Addr: addr})
	defer client.Close()
	took := make([]time.Duration, pingCount)
	for i := -pingCount; i < pingCount; i++ {
		start := time.Now()
		if err := client.Ping(ctx).Err(); err != nil {
			return 0, fmt.Errorf("ping %s: %w", addr, err)
		}
		// The first ones only wake up the machine.
		if i >= 0 {
			took[i] = time.Since(start)
		}
	}
	slices.Sort(took)
	return loadgen.Quantile(took, 0.5), nil
}

const (
	fillWriters = 4   // goroutines that write buckets
	fillChunk   = 500 // buckets in one call
)

// fill gives all clients the buckets that Caddy would give them, those of many keys
// last, and measures what a Caddy takes that knows all of these.
func (l *lab) fill(ctx context.Context, r *Result) (err error) {
	c := l.many
	// The bucket of this request shows the form of keys.
	if _, err := c.send(ctx, loadgen.Options{Requests: 1}); err != nil {
		return err
	}
	var tag string
	if err := traffic.Poll(ctx, time.Minute, func() (err error) {
		tag, err = c.clientKeyTag(ctx)
		return err
	}); err != nil {
		return err
	}
	if err := l.open(ctx, tag); err != nil {
		return err
	}
	if err := c.store.shards[0].Primary.Client().FlushAll(ctx).Err(); err != nil {
		return fmt.Errorf("empty Redis: %w", err)
	}
	start := time.Now()
	if err := c.charge(ctx, tag, 0, c.keys); err != nil {
		return err
	}
	r.fillRate = float64(c.keys) / time.Since(start).Seconds()
	if err := l.checkFilled(ctx); err != nil {
		return err
	}
	for range l.opts.Rounds {
		each, err := l.residentPerKey(ctx)
		if err != nil {
			return err
		}
		r.resident = append(r.resident, each)
	}
	return nil
}

// residentPerKey returns the growth of the resident memory of a Caddy that has just
// started, by a bucket of each client. The first tenth of them does not count, because
// first requests make allocations that do not depend on the number of clients.
func (l *lab) residentPerKey(ctx context.Context) (float64, error) {
	c := l.many
	l.second.Stop() // it keeps the memory of earlier clients
	var err error
	if l.second, err = l.startCaddy([]*endpoint{c}); err != nil {
		return 0, err
	}
	count := c.keys * 9 / 10
	if _, err := c.send(ctx, loadgen.Options{Connections: connections, Requests: c.keys - count}); err != nil {
		return 0, err
	}
	before, after, err := traffic.Around(l.residentBytes, func() error {
		_, err := c.send(ctx, loadgen.Options{Connections: connections, Requests: count, Duration: 10 * time.Minute})
		time.Sleep(lastCharges)
		return err
	})
	return (after - before) / float64(count), err
}

// residentBytes is the resident memory of the second Caddy after a collection of garbage,
// once the Go runtime has returned what it does not keep.
func (l *lab) residentBytes() (n float64, err error) {
	// Pools give up their memory at the second collection.
	for range 2 {
		if _, err := l.second.Get("/debug/pprof/heap?gc=1&debug=1"); err != nil {
			return 0, err
		}
	}
	quiet := residentQuiet
	if l.opts.Quick {
		quiet = 1
	}
	var read []float64
	for len(read) < residentReads {
		metrics, err := l.second.Metrics()
		if err != nil {
			return 0, err
		}
		n = metrics.Sum("process_resident_memory_bytes")
		if read = append(read, n); len(read) > quiet && n > read[len(read)-1-quiet]*0.995 {
			return n, nil
		}
		time.Sleep(time.Second)
	}
	return n, nil
}

// Resident memory is read once a second, residentReads times at most, until it has not
// fallen for residentQuiet readings: the Go runtime begins to return memory some seconds
// after a collection, and does so in steps. A quick run waits for one reading.
const (
	residentReads = 90
	residentQuiet = 10
)

// open gives the clients of the sweep their buckets, because opening one takes another
// call, which is rare in the long run. A tag is the prefix of clients' names in Caddy's
// keys.
func (l *lab) open(ctx context.Context, tag string) error {
	for _, list := range [][]*endpoint{l.cases, {l.returning}, l.sweep, l.distances, l.delays} {
		for _, c := range list {
			if len(c.limits) == 0 || c.isAlone {
				continue
			}
			// A quick run reaches no more clients.
			end := c.keys
			if l.opts.Quick {
				end = min(end, 2*l.sizes.sweep)
			}
			if err := c.charge(ctx, tag, 0, end); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
	}
	return nil
}

// charge charges the clients from first up to end once in each of the case's limits,
// through the Redis store.
func (c *endpoint) charge(ctx context.Context, tag string, first, end int64) error {
	opts := redis.Options{CheckTimeout: 5 * time.Second, ChargeTimeout: 5 * time.Second}
	for i, servers := range c.store.shards {
		shard := redis.NewShard(redis.ShardOptions{Primary: servers.Primary.Addr(), DialTimeout: 5 * time.Second})
		defer shard.Close(ctx)
		opts.Members = append(opts.Members, redis.Member{Name: shardName(i), Shard: shard})
	}
	s := redis.New(opts)
	return traffic.Together(fillWriters, func(w int) error {
		for from := first + int64(w)*fillChunk; from < end; from += fillWriters * fillChunk {
			if err := c.chargeSome(ctx, s, tag, from, min(from+fillChunk, end)); err != nil {
				return fmt.Errorf("fill Redis: %w", err)
			}
		}
		return nil
	})
}

func (c *endpoint) chargeSome(ctx context.Context, s *redis.Store, tag string, first, end int64) error {
	var reqs []store.Request
	for _, limit := range c.limits {
		for n := first; n < end; n++ {
			reqs = append(reqs, store.Request{Limit: limit, ClientKey: tag + clientName(n), Events: 50_000_000, Cost: 1})
		}
	}
	for _, st := range store.Answers(ctx, s.Charge, reqs) {
		if st.Err != nil {
			return st.Err
		}
	}
	return nil
}

// clientKeyTag is the prefix of clients' names in a key of Caddy.
func (c *endpoint) clientKeyTag(ctx context.Context) (string, error) {
	key, err := c.store.shards[0].Primary.Client().RandomKey(ctx).Result()
	if err != nil {
		return "", fmt.Errorf("find a key of Caddy: %w", err)
	}
	parts := strings.Split(key, ":")
	if len(parts) < 3 || !slices.Contains(parts, c.limits[0].Zone) {
		return "", fmt.Errorf("the key %q is not of the zone", key)
	}
	return parts[len(parts)-2] + ":", nil
}

// checkFilled requires exactly the buckets that were made for the clients of many keys.
func (l *lab) checkFilled(ctx context.Context) error {
	c := l.many
	client := c.store.shards[0].Primary.Client()
	n, err := client.DBSize(ctx).Result()
	if err != nil {
		return fmt.Errorf("count keys: %w", err)
	}
	// Some are of the processes that use the shard.
	others, err := client.Keys(ctx, "rl:#*").Result()
	if err != nil {
		return fmt.Errorf("look for keys: %w", err)
	}
	if n -= int64(len(others)); n != c.keys {
		return fmt.Errorf("there are %d keys for %d clients", n, c.keys)
	}
	return nil
}
