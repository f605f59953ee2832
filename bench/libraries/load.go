package libraries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// clientKeys are whose events are asked for, in turn. As there are more of them
// than goroutines, no two ask for the same one at the same time.
var clientKeys = func() (keys [2000]string) {
	for i := range keys {
		keys[i] = "client-" + strconv.Itoa(i)
	}
	return keys
}()

// memoryStride is how many decisions in memory there are between two looks at
// the clock, which takes about as long as one of them.
const memoryStride = 64

// load is what some goroutines ask for at the same time.
type load struct {
	// stride is how many decisions there are between two looks at the clock.
	stride  int
	tallies []tally
}

// tally is what came of one goroutine's decisions.
type tally struct {
	admitted int
	// latencies are how long each stride took. They are kept to be used again.
	latencies []time.Duration
	err       error
}

// fastest is more strides a second than there will be.
const fastest = 400_000

// newLoad has room for all latencies, so that making it is not counted among
// what a limiter allocates.
func newLoad(goroutines, stride int, length time.Duration) *load {
	l := &load{stride: stride, tallies: make([]tally, goroutines)}
	room := 2*int(length.Seconds()*fastest)/goroutines + 16
	for i := range l.tallies {
		l.tallies[i].latencies = make([]time.Duration, 0, room)
	}
	return l
}

func (l *load) goroutines() int { return len(l.tallies) }

// run makes every goroutine ask for one decision after the other until the
// time is up, and returns how long it took until all of them counted, which is
// what settled waits for.
func (l *load) run(d decide, settled func() error, length time.Duration) (elapsed time.Duration, err error) {
	var (
		wg   sync.WaitGroup
		next atomic.Int64
	)
	start := time.Now()
	end := start.Add(length)
	for i := range l.tallies {
		wg.Go(func() {
			t := tally{latencies: l.tallies[i].latencies[:0]}
			for begin := time.Now(); begin.Before(end) && t.err == nil; {
				t.decide(d, int(next.Add(int64(l.stride))), l.stride)
				now := time.Now()
				t.latencies = append(t.latencies, now.Sub(begin))
				begin = now
			}
			l.tallies[i] = t
		})
	}
	wg.Wait()
	errs := []error{settled()}
	elapsed = time.Since(start)
	for i := range l.tallies {
		errs = append(errs, l.tallies[i].err)
	}
	if err := errors.Join(errs...); err != nil {
		return 0, fmt.Errorf("decide: %w", err)
	}
	return elapsed, nil
}

// decide asks for one event of each of some clients.
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

// counts returns how many decisions there were, and how many admitted.
func (l *load) counts() (decisions, admitted int) {
	for i := range l.tallies {
		decisions += l.stride * len(l.tallies[i].latencies)
		admitted += l.tallies[i].admitted
	}
	return decisions, admitted
}

// quantiles returns the latencies that parts of the strides did not exceed.
func (l *load) quantiles(parts ...float64) []time.Duration {
	var all []time.Duration
	for i := range l.tallies {
		all = append(all, l.tallies[i].latencies...)
	}
	slices.Sort(all)
	return quantiles(all, parts)
}

func quantiles(sorted []time.Duration, parts []float64) (values []time.Duration) {
	for _, part := range parts {
		values = append(values, sorted[int(part*float64(len(sorted)-1))])
	}
	return values
}

// touch asks for one event of every client key.
func touch(d decide) error {
	var wg sync.WaitGroup
	errs := make([]error, len(clientKeys))
	for i, key := range clientKeys {
		wg.Go(func() { _, errs[i] = d(context.Background(), key) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("decide: %w", err)
	}
	return nil
}
