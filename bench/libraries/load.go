package main

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
var clientKeys = func() (keys [500]string) {
	for i := range keys {
		keys[i] = "client-" + strconv.Itoa(i)
	}
	return keys
}()

// load is what some goroutines ask for at the same time.
type load struct {
	// latencies are how long the decisions of each goroutine took. They are
	// kept to be used again.
	latencies [][]time.Duration
}

// outcome is what came of a load.
type outcome struct {
	decisions, admitted int
	elapsed             time.Duration
	// latencies are sorted.
	latencies []time.Duration
}

func newLoad(goroutines int) *load { return &load{latencies: make([][]time.Duration, goroutines)} }

func (l *load) goroutines() int { return len(l.latencies) }

// run makes every goroutine ask for one decision after the other until the
// time is up.
func (l *load) run(d decide, length time.Duration) (outcome, error) {
	var (
		wg       sync.WaitGroup
		next     atomic.Int64
		admitted atomic.Int64
		errs     = make([]error, len(l.latencies))
	)
	start := time.Now()
	end := start.Add(length)
	for i := range l.latencies {
		wg.Go(func() {
			took, mine := l.latencies[i][:0], int64(0)
			for begin := time.Now(); begin.Before(end); {
				ok, err := d(context.Background(), clientKeys[next.Add(1)%int64(len(clientKeys))])
				if err != nil {
					errs[i] = err
					break
				}
				if ok {
					mine++
				}
				now := time.Now()
				took = append(took, now.Sub(begin))
				begin = now
			}
			l.latencies[i] = took
			admitted.Add(mine)
		})
	}
	wg.Wait()
	o := outcome{elapsed: time.Since(start), admitted: int(admitted.Load())}
	if err := errors.Join(errs...); err != nil {
		return o, fmt.Errorf("decide: %w", err)
	}
	o.latencies = slices.Concat(l.latencies...)
	slices.Sort(o.latencies)
	if o.decisions = len(o.latencies); o.decisions == 0 {
		return o, errors.New("no decision in time")
	}
	return o, nil
}

// quantile returns the latency that a part q of the decisions did not exceed.
func (o *outcome) quantile(q float64) time.Duration {
	return o.latencies[int(q*float64(len(o.latencies)-1))]
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
