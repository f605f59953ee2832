// Package algorithms draws the decisions of each algorithm about the same requests, as
// docs/img/algorithms.svg, and determines its accuracy and cost, for algorithms.md. The
// picture and the accuracy follow from a fixed seed; the cost in Redis is measured. A way
// is one way of counting, a score compares its decisions with those of the exact log.
package algorithms

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var (
	flags    = flag.NewFlagSet("algorithms", flag.ExitOnError)
	out      = report.Out(flags)
	drawing  = flags.String("picture", "../docs/img/algorithms.svg", "file to write the picture to")
	requests = flags.Int("requests", 1_000_000, "requests of the simulation, of a hundredth as many clients")
)

//go:embed algorithms.md
var template string

// Run draws, simulates and measures.
func Run(_ context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	if err := os.WriteFile(*drawing, []byte(draw().String()), 0o644); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	found := simulate(*requests)
	cost, err := measureRedis()
	if err != nil {
		return fmt.Errorf("measure Redis: %w", err)
	}
	return report.Write(*out, "algorithms.md", template, map[string]string{
		report.Result: resultText(found), report.Tables: accuracyTable(found) + "\n" + costTable(cost),
	}, map[string]fmt.Stringer{"algorithms.svg": draw()})
}

// way is one way of counting, with the options of a zone.
type way struct {
	name      string
	algorithm store.Algorithm
	align     bool
	burst     int64
}

var ways = []way{
	{name: "fixed_window", algorithm: store.FixedWindow},
	{name: "fixed_window, align", algorithm: store.FixedWindow, align: true},
	{name: "sliding_window", algorithm: store.SlidingWindow},
	{name: "sliding_log", algorithm: store.SlidingLog},
	{name: "gcra", algorithm: store.GCRA},
	{name: "gcra, burst 2", algorithm: store.GCRA, burst: 2},
	{name: "concurrency", algorithm: store.Concurrency},
}

func (w way) limit(window time.Duration) *store.Limit {
	return &store.Limit{Zone: w.name, Algorithm: w.algorithm, Window: window, Align: w.align}
}

type counter struct {
	bucket algorithm.Bucket
	store.Request
}

func newCounter(limit *store.Limit, events, burst int64) *counter {
	return &counter{algorithm.New(limit), store.Request{Limit: limit, Events: events, Burst: burst, Cost: 1}}
}

func (c *counter) do(op algorithm.Operation, id string, now int64) store.State {
	c.ID = id
	return op.Run(c.bucket, &c.Request, now)
}

// most is the largest number of instants in a half-open interval of some length.
func most(instants []int64, length int64) int {
	n, first := 0, 0
	for i, last := range instants {
		for instants[first] <= last-length {
			first++
		}
		n = max(n, i-first+1)
	}
	return n
}

const (
	day   = int64(24 * time.Hour / time.Microsecond)
	epoch = 1_800_057_600_000_000 // the begin of the traffic, a midnight
)

// traffics draw the instants of a client's n requests within a day.
var traffics = []struct {
	name   string
	arrive func(random *rand.Rand, n int) []int64
}{
	{"Poisson", func(random *rand.Rand, n int) []int64 {
		times := make([]int64, n)
		for i := range times {
			times[i] = random.Int64N(day)
		}
		return times
	}},
	{"bursts", func(random *rand.Rand, n int) []int64 {
		// Each has 5 requests on average, a few seconds apart.
		times := make([]int64, 0, n)
		for at := int64(0); len(times) < n; {
			if len(times) == 0 || random.IntN(5) == 0 {
				at = random.Int64N(day)
			}
			at += int64(random.ExpFloat64() * 5e6)
			times = append(times, at)
		}
		return times
	}},
	{"day curve", func(random *rand.Rand, n int) []int64 {
		// The rate is twice the mean at noon, and next to nothing at midnight.
		times := make([]int64, 0, n)
		for len(times) < n {
			at := random.Int64N(day)
			if share := 0.5 - 0.48*math.Cos(2*math.Pi*float64(at)/float64(day)); random.Float64() < share {
				times = append(times, at)
			}
		}
		return times
	}},
}

type client struct {
	traffic int
	times   []int64
}

const requestsPerClient = 100 // on average

// clients draws n requests of clients that differ widely in their number of requests.
func clients(seed uint64, n int) []client {
	random := rand.New(rand.NewPCG(seed, 0))
	list := make([]client, n/requestsPerClient)
	weights, sum := make([]float64, len(list)), 0.0
	for i := range weights {
		weights[i] = math.Exp(random.NormFloat64() * 0.75)
		sum += weights[i]
	}
	left := n
	for i := range list {
		count := min(int(weights[i]/sum*float64(n)+random.Float64()), left)
		if i == len(list)-1 {
			count = left
		}
		left -= count
		list[i].traffic = i % len(traffics)
		list[i].times = traffics[list[i].traffic].arrive(random, count)
		for j := range list[i].times {
			list[i].times[j] += epoch
		}
		slices.Sort(list[i].times)
	}
	return list
}

const (
	seed   = 2017
	events = 12
	window = time.Hour
)

// score compares the decisions of an algorithm with those of the exact log.
type score struct {
	requests          int
	over              int // requests that the log refused
	refused, admitted int // wrong decisions, if each side counts its own admissions
	differ            int // different decisions, if both sides count the log's admissions
	most              int // admissions of one client in one window, or at the same time
}

func (s *score) decide(fits, took bool) {
	switch {
	case fits && !took:
		s.refused++
	case took && !fits:
		s.admitted++
	}
	if !fits {
		s.over++
	}
}

func (s *score) add(o score) {
	s.requests += o.requests
	s.over += o.over
	s.refused += o.refused
	s.admitted += o.admitted
	s.differ += o.differ
	s.most = max(s.most, o.most)
}

// scores are the scores of each way, by traffic; the last is of all together.
type scores [][]score

func (s scores) of(a store.Algorithm) []score {
	return s[slices.IndexFunc(ways, func(w way) bool { return w.algorithm == a })]
}

// worst is the most that was admitted, relative to the limit.
func (s score) worst(w way) float64 {
	if w.algorithm == store.Concurrency {
		return float64(s.most) / slots
	}
	return float64(s.most) / events
}

func simulate(requests int) scores {
	result := make(scores, len(ways))
	for i := range result {
		result[i] = make([]score, len(traffics)+1)
	}
	for number, c := range clients(seed, requests) {
		for i, w := range ways {
			var s score
			if w.algorithm == store.Concurrency {
				s = countRunning(w, uint64(number), c.times)
			} else {
				s = compare(w, c.times)
			}
			result[i][c.traffic].add(s)
			result[i][len(traffics)].add(s)
		}
	}
	return result
}

func compare(w way, times []int64) score {
	s := score{requests: len(times)}
	limit := w.limit(window)
	exact := newCounter(&store.Limit{Algorithm: store.SlidingLog, Window: window}, events, 0)
	own := newCounter(limit, events, w.burst)
	same := newCounter(limit, events, w.burst)
	var taken []int64
	for i, now := range times {
		id := strconv.Itoa(i)
		fits := exact.do(algorithm.Take, id, now).Allowed
		took := own.do(algorithm.Take, id, now).Allowed
		s.decide(fits, took)
		if took {
			taken = append(taken, now)
		}
		if same.do(algorithm.Check, id, now).Allowed != fits {
			s.differ++
		}
		if fits {
			same.do(algorithm.Charge, id, now)
		}
	}
	s.most = most(taken, window.Microseconds())
	return s
}

const (
	slots    = 2
	lease    = 30 * time.Second
	renewal  = 10 * time.Second
	duration = 2 * time.Minute // on average
)

// running is one client's running tasks, and its leases.
type running struct {
	leases *counter
	tasks  []task
}

type task struct {
	id         string
	end, renew int64
}

// countRunning sends one client's requests, which last some time, through leases that are
// renewed, and compares the decisions with the number of running requests.
func countRunning(w way, number uint64, times []int64) score {
	s := score{requests: len(times)}
	random := rand.New(rand.NewPCG(seed, number))
	r := running{leases: newCounter(w.limit(lease), slots, 0)}
	for i, now := range times {
		r.advance(now)
		id := strconv.Itoa(i)
		fits := len(r.tasks) < slots
		took := r.leases.do(algorithm.Take, id, now).Allowed
		s.decide(fits, took)
		if took {
			end := now + int64(random.ExpFloat64()*float64(duration.Microseconds()))
			r.tasks = append(r.tasks, task{id, end, now + renewal.Microseconds()})
		}
		s.most = max(s.most, len(r.tasks))
	}
	s.differ = s.refused + s.admitted
	return s
}

// advance renews and ends requests until an instant.
func (r *running) advance(until int64) {
	for {
		next, at := -1, until
		for i, t := range r.tasks {
			if first := min(t.end, t.renew); first <= at {
				next, at = i, first
			}
		}
		if next < 0 {
			return
		}
		t := &r.tasks[next]
		if t.end > t.renew {
			r.leases.do(algorithm.Charge, t.id, at)
			t.renew += renewal.Microseconds()
			continue
		}
		r.leases.do(algorithm.Refund, t.id, at)
		r.tasks[next] = r.tasks[len(r.tasks)-1]
		r.tasks = r.tasks[:len(r.tasks)-1]
	}
}

const (
	measuredClients = 2_000
	measuredCallers = 64
	measuredRounds  = 5
	measuredTimes   = 5
	measuredCalls   = measuredClients * measuredTimes
)

// sizes are how many events the measured buckets have had.
var sizes = []int{1, 100, 1000}

var measured = []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take}

// cost is the memory and CPU time that Redis needs for one way of counting.
type cost struct {
	bytes  []int64     // of a bucket of each of the sizes
	micros [][]float64 // the CPU time of redis-server for each operation, by round
}

// apart are the ways that differ in cost.
func apart() []way {
	return traffic.Those(ways, func(w way) bool { return !w.align && w.burst == 0 })
}

func measureRedis() (costs map[string]*cost, err error) {
	server, err := redistest.Launch()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	costs = map[string]*cost{}
	shard := redis.NewShard(redis.ShardOptions{Primary: server.Addr()})
	defer shard.Close(context.Background())
	s := redis.New(redis.Options{
		Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: time.Minute, ChargeTimeout: time.Minute,
	})
	for _, w := range apart() {
		costs[w.name] = &cost{bytes: make([]int64, len(sizes)), micros: make([][]float64, len(measured))}
		if err := measureMemory(server, s, w, costs[w.name]); err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
	}
	// The first round, which does not count, loads scripts and opens connections.
	for round := range measuredRounds + 1 {
		for _, w := range apart() {
			micros, err := measureCPU(server, s, w, round)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", w.name, err)
			}
			for i, m := range micros {
				if round > 0 {
					costs[w.name].micros[i] = append(costs[w.name].micros[i], m)
				}
			}
		}
	}
	return costs, nil
}

func id(n int) string { return fmt.Sprintf("%011d", n) }

// measureMemory fills the only bucket on the server.
func measureMemory(server *redistest.Server, s *redis.Store, w way, c *cost) error {
	ctx, client := context.Background(), server.Client()
	done := 0
	for i, size := range sizes {
		var reqs []store.Request
		for ; done < size; done++ {
			reqs = append(reqs, store.Request{
				Limit: w.limit(window), ClientKey: "x7Q:203.0.113.7", Events: int64(size), Cost: 1, ID: id(done),
			})
		}
		for _, st := range store.Answers(ctx, s.Charge, reqs) {
			if st.Err != nil {
				return st.Err
			}
		}
		key, err := client.RandomKey(ctx).Result()
		if err != nil {
			return fmt.Errorf("find the bucket: %w", err)
		}
		if c.bytes[i], err = client.MemoryUsage(ctx, key, 0).Result(); err != nil {
			return fmt.Errorf("measure the bucket: %w", err)
		}
	}
	return client.FlushAll(ctx).Err()
}

// measureCPU does every operation some times for every client, and returns the
// microseconds of redis-server for each. Each client has had as many charges before, so
// that no bucket is empty.
func measureCPU(server *redistest.Server, s *redis.Store, w way, round int) (micros []float64, err error) {
	limit := w.limit(window)
	limit.Zone += strconv.Itoa(round)
	if err := callAll(s, limit, algorithm.Charge, 0); err != nil {
		return nil, err
	}
	for i, op := range measured {
		before, after, err := traffic.Around(server.CPU, func() error { return callAll(s, limit, op, i+1) })
		if err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		micros = append(micros, float64((after-before).Microseconds())/measuredCalls)
	}
	return micros, server.Client().FlushAll(context.Background()).Err()
}

// callAll makes measuredTimes calls for each client, from many callers at a time. The turn
// makes their IDs unique.
func callAll(s *redis.Store, limit *store.Limit, op algorithm.Operation, turn int) error {
	calls := map[algorithm.Operation]func(context.Context, []*store.Ask){
		algorithm.Check: s.Check, algorithm.Charge: s.Charge, algorithm.Take: s.Take,
	}
	return traffic.Together(measuredCallers, func(caller int) (err error) {
		for n := range measuredTimes {
			for c := caller; c < measuredClients; c += measuredCallers {
				st := store.Answers(context.Background(), calls[op], []store.Request{{
					Limit: limit, ClientKey: "x7Q:" + id(c), Events: 100, Cost: 1,
					ID: id(turn*measuredCalls + n*measuredClients + c),
				}})[0]
				if err == nil && st.Err == nil && !st.Allowed {
					st.Err = errors.New("it was refused")
				}
				err = errors.Join(err, st.Err)
			}
		}
		return err
	})
}
