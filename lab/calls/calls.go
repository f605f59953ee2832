// Package calls counts the calls to Redis that a request costs through several processes
// with batches, for calls.md; package bench counts those of other traffic. It starts its
// own Redis servers, and takes the counts from their INFO commandstats. A process is what
// one Caddy has of a store, a batchCase the traffic of one client.
package calls

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var (
	flags  = flag.NewFlagSet("calls", flag.ExitOnError)
	out    = report.Out(flags)
	window = flags.Duration("window", 8*time.Second, "the window of the limits; each case takes four")
)

//go:embed calls.md
var template string

// errEnded is the error of a measurement that was cancelled.
var errEnded = errors.New("ended early")

// Run counts the calls of all cases.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	batches, err := measureBatches(ctx, batchLimits, batchProcesses, *window)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("%s. Windows of %v.\n\n", report.Machine(), *window) + batchTable(batches)
	return report.Write(*out, "calls.md", template, map[string]string{report.Tables: text}, nil)
}

// calls is the number of calls to the servers of a shard, without replication.
type calls struct{ primary, replica int64 }

func (c calls) sum() int64 { return c.primary + c.replica }

func (c calls) since(before calls) calls {
	return calls{c.primary - before.primary, c.replica - before.replica}
}

func countCalls(shard *redistest.Shard) (c calls, err error) {
	if c.primary, err = shard.Primary.Asked(); err != nil {
		return c, err
	}
	for _, replica := range shard.Replicas {
		n, err := replica.Asked()
		if err != nil {
			return c, err
		}
		c.replica += n
	}
	return c, nil
}

type tally struct {
	requests int64
	windows  map[int64]int64 // allowed requests, by the end of their window
	err      error           // the first failure
}

func (t *tally) count(st *store.State) {
	t.requests++
	switch {
	case st.Err != nil:
		t.err = cmp.Or(t.err, st.Err)
	case st.Allowed:
		t.windows[st.Receipt.Period]++
	}
}

func (t *tally) add(o *tally) {
	t.requests += o.requests
	for end, n := range o.windows {
		t.windows[end] += n
	}
	t.err = cmp.Or(t.err, o.err)
}

type load struct {
	callers int     // the most requests at a time
	rate    float64 // requests in a second, at random instants
	until   time.Time
	request func(ctx context.Context, caller int) store.State
}

// slack is how much too early a request may come: a caller that sleeps before each
// request would spend more time on that than on the request.
const slack = 2 * time.Millisecond

func (l *load) run(ctx context.Context) *tally {
	tallies := make([]tally, l.callers)
	_ = traffic.Together(l.callers, func(caller int) error {
		tallies[caller].windows = map[int64]int64{}
		l.call(ctx, caller, &tallies[caller])
		return nil
	})
	total := &tally{windows: map[int64]int64{}}
	for i := range tallies {
		total.add(&tallies[i])
	}
	if total.err == nil && ctx.Err() != nil {
		total.err = errEnded
	}
	return total
}

func (l *load) call(ctx context.Context, caller int, t *tally) {
	for at := time.Now(); ctx.Err() == nil; {
		pause := rand.ExpFloat64() * float64(l.callers) / l.rate * float64(time.Second)
		if at = at.Add(time.Duration(pause)); !at.Before(l.until) {
			return
		}
		now := time.Now()
		if early := at.Sub(now); early > slack {
			time.Sleep(early)
			now = at
		}
		if !now.Before(l.until) {
			return
		}
		st := l.request(ctx, caller)
		t.count(&st)
	}
}

// patient is a timeout that a busy machine does not exceed.
const patient = time.Minute

// usual are the options that the Redis store gives a ledger unless its config says
// otherwise.
var usual = ledger.Options{ChargeDelay: ledger.UsualChargeDelay, Trust: ledger.DefaultTrust}

// process is what one Caddy has of a store: registry, a ledger, and connections of its own.
type process struct {
	shard  *redis.Shard
	ledger *ledger.Ledger
	lost   atomic.Int64 // requests that could not be delivered
}

func newProcess(servers *redistest.Shard, opts ledger.Options) *process {
	p := new(process)
	shard := redis.ShardOptions{Primary: servers.Primary.Addr(), DialTimeout: patient}
	for _, replica := range servers.Replicas {
		shard.Replicas = append(shard.Replicas, replica.Addr())
	}
	p.shard = redis.NewShard(shard)
	s := redis.New(redis.Options{
		Members:      []redis.Member{{Name: "a", Shard: p.shard}},
		CheckTimeout: patient, ChargeTimeout: patient,
		OnUndelivered: func(string, *store.Limit, algorithm.Operation, error) { p.lost.Add(1) },
	})
	opts.OnUndelivered = func(_ string, _ *store.Limit, _ algorithm.Operation, requests int64, _ error) { p.lost.Add(requests) }
	p.ledger = ledger.New(ledger.NewRegistry(nil), s, opts)
	p.ledger.Warm(context.Background())
	return p
}

func (p *process) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	p.ledger.Flush(ctx)
	p.ledger.Leave()
	p.shard.Close(ctx)
	if n := p.lost.Load(); n > 0 {
		return fmt.Errorf("%d requests could not be delivered", n)
	}
	return nil
}

func (p *process) take(ctx context.Context, r store.Request) store.State {
	return store.Answers(ctx, p.ledger.Take, []store.Request{r})[0]
}

const (
	steadyShare, heavyShare = 0.8, 1.2 // the requests of a window, relative to the limit
	fixedPart               = 100      // the limit divided by a fixed batch
	// batchCallers is the most requests at a time in all processes, leastCallers the least
	// such bound for each of them.
	batchCallers, leastCallers = 64, 4
	attempts                   = 3 // a busy machine may fail to generate the load
)

var (
	batchLimits    = []int64{1_000, 10_000, 100_000, 1_000_000}
	batchProcesses = []int{1, 4, 16}
)

// batchCase is the traffic of one client through processes that take batches.
type batchCase struct {
	limit     int64
	processes int
	auto      bool
}

func (c batchCase) batch() int64 {
	if c.auto {
		return store.BatchAuto
	}
	return c.limit / fixedPart
}

func (c batchCase) String() string {
	kind := "fixed"
	if c.auto {
		kind = "auto"
	}
	return fmt.Sprintf("%s, limit %d, %d processes", kind, c.limit, c.processes)
}

// phase is one window of traffic.
type phase struct {
	requests int64
	calls
}

func (p *phase) perRequest() float64 { return float64(p.sum()) / float64(p.requests) }

type batched struct {
	batchCase
	window        time.Duration
	steady, heavy phase
	admitted      int64 // in the window of the heavy traffic
	again         phase // steady traffic after that
}

// leases is the calls per request by which the processes are counted. Their number does
// not depend on the number of clients.
func (b *batched) leases() float64 {
	if !b.auto {
		return 0
	}
	return float64(b.processes) * b.window.Seconds() / float64(b.steady.requests)
}

func (b *batched) stranded() float64     { return float64(b.limit-b.admitted) / float64(b.limit) }
func (b *batched) isSteady(p phase) bool { return p.requests*100 > b.limit*75 && p.requests < b.limit }
func (b *batched) isHeavy(p phase) bool  { return p.requests*100 > b.limit*110 }

// measureBatches runs all cases, those of the limits at the same time, each on servers of
// its own.
func measureBatches(ctx context.Context, limits []int64, processes []int, window time.Duration) (list []*batched, err error) {
	shards := make([]*redistest.Shard, len(limits))
	for i := range shards {
		if shards[i], err = redistest.LaunchShard(1); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, shards[i].Stop()) }()
	}
	for _, auto := range []bool{true, false} {
		for _, n := range processes {
			results := make([]*batched, len(limits))
			if err := traffic.Together(len(limits), func(i int) (err error) {
				c := batchCase{limits[i], n, auto}
				if results[i], err = c.measure(ctx, shards[i], window); err != nil {
					return fmt.Errorf("%v: %w", c, err)
				}
				return nil
			}); err != nil {
				return nil, err
			}
			for _, b := range results {
				fmt.Printf("%v: %d calls for %d requests, %d for %d of which %d admitted, %d for %d\n", b.batchCase,
					b.steady.sum(), b.steady.requests, b.heavy.sum(), b.heavy.requests, b.admitted, b.again.sum(), b.again.requests)
			}
			list = append(list, results...)
		}
	}
	return list, nil
}

// measure sends steady traffic until batches have found their size, then measures a
// window of steady traffic, one of heavy traffic, and one of steady traffic again. A
// window in which the machine was too busy for the load is repeated.
func (c batchCase) measure(ctx context.Context, servers *redistest.Shard, window time.Duration) (_ *batched, err error) {
	processes := make([]*process, c.processes)
	for i := range processes {
		processes[i] = newProcess(servers, usual)
	}
	defer func() { err = errors.Join(err, traffic.Each(processes, (*process).close)) }()

	// The windows are aligned, so their ends are known.
	start := time.Now()
	first := start.Truncate(window).Add(window)
	if first.Sub(start) < window/2 {
		first = first.Add(window)
	}
	b := &batched{batchCase: c, window: window}
	_, total, err := c.send(ctx, servers, processes, window, steadyShare, first)
	if err != nil {
		return nil, err
	}
	end := first
	try := func(share float64, ph *phase, isDone func(phase) bool) error {
		for range attempts {
			end = end.Add(window)
			got, more, err := c.send(ctx, servers, processes, window, share, end)
			if err != nil {
				return err
			}
			total.add(more) // some of the requests may be late, in the next window
			if *ph = got; isDone(got) {
				break
			}
		}
		return nil
	}
	err = try(steadyShare, &b.steady, b.isSteady)
	if err == nil {
		err = try(heavyShare, &b.heavy, b.isHeavy)
	}
	full := end
	if err == nil {
		err = try(steadyShare, &b.again, b.isSteady)
	}
	if err != nil {
		return nil, err
	}
	b.admitted = total.windows[full.UnixMicro()]
	for _, n := range total.windows {
		if n > c.limit {
			return nil, fmt.Errorf("%d requests were admitted in a window, which is above the limit", n)
		}
	}
	return b, nil
}

func (c batchCase) send(
	ctx context.Context, servers *redistest.Shard, processes []*process, window time.Duration, share float64, until time.Time,
) (ph phase, total *tally, err error) {
	r := store.Request{
		Limit:     &store.Limit{Zone: c.String(), Algorithm: store.FixedWindow, Window: window, Align: true},
		ClientKey: "client", Events: c.limit, Cost: 1, Batch: c.batch(),
	}
	l := load{
		callers: c.processes * max(batchCallers/c.processes, leastCallers),
		rate:    share * float64(c.limit) / window.Seconds(), until: until,
		request: func(ctx context.Context, caller int) store.State {
			return processes[caller%len(processes)].take(ctx, r)
		},
	}
	before, after, err := traffic.Around(func() (calls, error) { return countCalls(servers) }, func() error {
		total = l.run(ctx)
		return total.err
	})
	if err != nil {
		return ph, nil, err
	}
	return phase{total.requests, after.since(before)}, total, nil
}
