package libraries

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// clientKeys are the clients, in turn. As there are more clients than goroutines, no two
// decisions at the same time are about the same client.
var clientKeys = func() (keys [2000]string) {
	for i := range keys {
		keys[i] = "client-" + strconv.Itoa(i)
	}
	return keys
}()

// memoryStride is the number of decisions in memory for each reading of the clock, which
// takes about as long as a decision.
const memoryStride = 64

type load struct {
	stride  int // decisions for each reading of the clock
	tallies []tally
}

type tally struct {
	admitted  int
	latencies []time.Duration // of each stride; the memory is used again
	err       error
}

// newLoad makes room for all latencies, so that this does not count as an allocation of a
// limiter.
func newLoad(goroutines, stride int, length time.Duration) *load {
	l := &load{stride: stride, tallies: make([]tally, goroutines)}
	const fastest = 400_000 // more strides a second than any limiter makes
	room := 2*int(length.Seconds()*fastest)/goroutines + 16
	for i := range l.tallies {
		l.tallies[i].latencies = make([]time.Duration, 0, room)
	}
	return l
}

func (l *load) goroutines() int { return len(l.tallies) }

// run makes every goroutine ask for one decision after the other for some time, at least for one, and
// returns the time until settled reports that all of them count.
func (l *load) run(d decide, settled func() error, length time.Duration) (elapsed time.Duration, err error) {
	var next atomic.Int64
	start := time.Now()
	end := start.Add(length)
	err = traffic.Together(len(l.tallies), func(i int) error {
		t := tally{latencies: l.tallies[i].latencies[:0]}
		for begin := time.Now(); len(t.latencies) == 0 || begin.Before(end) && t.err == nil; {
			t.decide(d, int(next.Add(int64(l.stride))), l.stride)
			now := time.Now()
			t.latencies = append(t.latencies, now.Sub(begin))
			begin = now
		}
		l.tallies[i] = t
		return t.err
	})
	err = errors.Join(settled(), err)
	elapsed = time.Since(start)
	if err != nil {
		return 0, fmt.Errorf("decide: %w", err)
	}
	return elapsed, nil
}

func (t *tally) decide(d decide, first, stride int) {
	for i := range stride {
		ok, err := d(context.Background(), clientKeys[(first+i)%len(clientKeys)])
		if err != nil {
			t.err = err
			return
		}
		if ok {
			t.admitted++
		}
	}
}

func (l *load) counts() (decisions, admitted int) {
	for i := range l.tallies {
		decisions += l.stride * len(l.tallies[i].latencies)
		admitted += l.tallies[i].admitted
	}
	return decisions, admitted
}

// latencies returns those of all strides, sorted.
func (l *load) latencies() (all []time.Duration) {
	for i := range l.tallies {
		all = append(all, l.tallies[i].latencies...)
	}
	slices.Sort(all)
	return all
}

// sample is the measurements of one limiter in one round.
type sample struct {
	rate                      float64 // decisions per second
	client, server            float64 // microseconds of CPU time per decision
	allocations, bytes, calls float64 // per decision
	latency                   float64 // the median, in milliseconds
}

func measure(l *limiter, s scene, load *load, server *redistest.Server, length time.Duration) (sample, error) {
	d, err := l.limit(s.events())
	if err != nil {
		return sample{}, err
	}
	if err := empty(server); err != nil {
		return sample{}, err
	}
	if err := traffic.Together(len(clientKeys), func(i int) error {
		_, err := d(context.Background(), clientKeys[i])
		return err
	}); err != nil {
		return sample{}, fmt.Errorf("decide: %w", err)
	}
	// The warm-up makes the connections, and the pipelines reach their length.
	if _, err := load.run(d, l.settled, length/10); err != nil {
		return sample{}, err
	}
	runtime.GC() // collects the garbage of the previous limiter

	var elapsed time.Duration
	used, err := usageOf(server, l.kind.commands, func() (err error) {
		elapsed, err = load.run(d, l.settled, length)
		return err
	})
	if err != nil {
		return sample{}, err
	}
	decisions, admitted := load.counts()
	if s.refused && admitted > 0 || !s.refused && admitted < decisions {
		return sample{}, fmt.Errorf("%d of %d decisions admit, want all or, of refusals, none", admitted, decisions)
	}
	n, latencies := float64(decisions), load.latencies()
	return sample{
		rate: n / elapsed.Seconds(), client: micros(used.client) / n, server: micros(used.server) / n,
		allocations: float64(used.allocations) / n, bytes: float64(used.bytes) / n, calls: float64(used.calls) / n,
		latency: micros(loadgen.Quantile(latencies, 0.5)) / 1e3,
	}, nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// usage is the processor time, user and system, of this program and of the server, the
// allocations of this program, and the commands that were sent.
type usage struct {
	client, server     time.Duration
	allocations, bytes uint64
	calls              int64
}

// usageOf is the usage of do. The program's own usage is read right before and after it,
// so that it does not include the reading of the server's usage.
func usageOf(server *redistest.Server, commands map[string]int64, do func() error) (u usage, err error) {
	var before, after usage
	if err := errors.Join(before.readServer(server, commands), before.readClient(), do(), after.readClient(), after.readServer(server, commands)); err != nil {
		return u, err
	}
	return usage{
		after.client - before.client, after.server - before.server,
		after.allocations - before.allocations, after.bytes - before.bytes, after.calls - before.calls,
	}, nil
}

func (u *usage) readClient() (err error) {
	var memory runtime.MemStats
	u.client, err = process.CPUTime()
	runtime.ReadMemStats(&memory)
	u.allocations, u.bytes = memory.Mallocs, memory.TotalAlloc
	return err
}

// readServer reads the usage of a server, if there is one. Only the commands that a
// limiter sends count.
func (u *usage) readServer(server *redistest.Server, commands map[string]int64) error {
	if server == nil {
		return nil
	}
	made, err := server.Calls()
	if err != nil {
		return err
	}
	u.calls = countCalls(made, commands)
	u.server, err = server.CPU()
	return err
}

func countCalls(made, commands map[string]int64) (sum int64) {
	for name, sent := range commands {
		sum += made[name] * sent
	}
	return sum
}

// checkCount returns an error unless l counts: with a limit of five it must refuse the
// sixth event of a client, and admit the first one of another.
func checkCount(l *limiter, server *redistest.Server) error {
	ctx := context.Background()
	if err := empty(server); err != nil {
		return err
	}
	const events = 5
	d, err := l.limit(events)
	if err != nil {
		return err
	}
	for n := 1; n <= events+2; n++ {
		key, want := "a", n <= events
		if n == events+2 {
			key, want = "b", true
		}
		admitted, err := d(ctx, key)
		if err != nil {
			return fmt.Errorf("decide: %w", err)
		}
		if err := l.settled(); err != nil {
			return fmt.Errorf("settle: %w", err)
		}
		if admitted != want {
			return fmt.Errorf("limit %d: admitted is %t for call %d, of client %s", events, admitted, n, key)
		}
	}
	return nil
}

// empty removes all buckets of a server, if there is one.
func empty(server *redistest.Server) error {
	if server == nil {
		return nil
	}
	if err := server.Client().FlushAll(context.Background()).Err(); err != nil {
		return fmt.Errorf("empty the server: %w", err)
	}
	return nil
}
