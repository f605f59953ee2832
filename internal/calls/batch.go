package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// steadyShare and heavyShare are what comes in a window, relative to the
	// limit.
	steadyShare, heavyShare = 0.8, 1.2
	// batchShare is how many percent of the limit batches hold at most.
	batchShare = 10
	// fixedPart is the part of the limit that a fixed batch is, inverted.
	fixedPart = 100
	// batchCallers is how many requests run at the same time at most, in all
	// processes, and leastCallers in each.
	batchCallers, leastCallers = 64, 4
	// attempts is how many windows may be needed for one that counts.
	attempts = 3
)

var (
	batchLimits    = []int64{1_000, 10_000, 100_000, 1_000_000}
	batchProcesses = []int{1, 4, 16}
)

// batchCase is one client's steady traffic through processes that take batches.
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

// batched is what a case needed.
type batched struct {
	batchCase
	window        time.Duration
	steady, heavy phase
	// admitted is how many were in the window of the heavy traffic.
	admitted int64
	// again is steady traffic after that.
	again phase
}

// leases is which part of that processes need to be counted, whatever number
// of clients there is.
func (b *batched) leases() float64 {
	if !b.auto {
		return 0
	}
	return float64(b.processes) * b.window.Seconds() / float64(b.steady.requests)
}

// stranded is the part of the limit that nobody got.
func (b *batched) stranded() float64 { return float64(b.limit-b.admitted) / float64(b.limit) }

// isSteady and isHeavy tell whether the load was what it should be.
func (b *batched) isSteady(p phase) bool { return p.requests*100 > b.limit*75 && p.requests < b.limit }
func (b *batched) isHeavy(p phase) bool  { return p.requests*100 > b.limit*110 }

// measureBatches runs all cases, those of the limits at the same time, each on
// servers of its own.
func measureBatches(ctx context.Context, limits []int64, processes []int, window time.Duration) (list []*batched, err error) {
	shards := make([]*redistest.Shard, len(limits))
	defer func() {
		for _, s := range shards {
			if s != nil {
				err = errors.Join(err, s.Stop())
			}
		}
	}()
	for i := range shards {
		if shards[i], err = redistest.LaunchShard(1); err != nil {
			return nil, err
		}
	}
	for _, auto := range []bool{true, false} {
		for _, n := range processes {
			results, errs := make([]*batched, len(limits)), make([]error, len(limits))
			var wg sync.WaitGroup
			for i, limit := range limits {
				c := batchCase{limit, n, auto}
				wg.Go(func() {
					if results[i], errs[i] = c.measure(ctx, shards[i], window); errs[i] != nil {
						errs[i] = fmt.Errorf("%v: %w", c, errs[i])
					}
				})
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
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

// measure sends steady traffic until batches have found their size, then for
// the window that is measured, heavy traffic for another, and steady traffic
// again. A window in which the machine was too busy to send what it should is
// followed by another try.
func (c batchCase) measure(ctx context.Context, servers *redistest.Shard, window time.Duration) (_ *batched, err error) {
	processes := make([]*process, c.processes)
	for i := range processes {
		processes[i] = newProcess(servers)
	}
	defer func() { err = errors.Join(err, closeAll(processes)) }()

	// Windows that begin when the clock says so can be told from here.
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
			// Of the requests, some may come late, in the next window.
			total.add(more)
			if *ph = got; isDone(got) {
				break
			}
		}
		return nil
	}
	if err := try(steadyShare, &b.steady, b.isSteady); err != nil {
		return nil, err
	}
	if err := try(heavyShare, &b.heavy, b.isHeavy); err != nil {
		return nil, err
	}
	full := end
	if err := try(steadyShare, &b.again, b.isSteady); err != nil {
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

// send sends a share of the limit in each window, until an instant.
func (c batchCase) send(
	ctx context.Context, servers *redistest.Shard, processes []*process, window time.Duration, share float64, until time.Time,
) (ph phase, total *tally, err error) {
	before, err := countCalls(servers)
	if err != nil {
		return ph, nil, err
	}
	r := store.Request{
		Limit:     &store.Limit{Zone: c.String(), Algorithm: store.FixedWindow, Window: window, Align: true},
		ClientKey: "client", Events: c.limit, Cost: 1, Batch: c.batch(), BatchShare: batchShare,
	}
	l := load{
		callers: c.processes * max(batchCallers/c.processes, leastCallers),
		rate:    share * float64(c.limit) / window.Seconds(), until: until,
		request: func(ctx context.Context, caller, _ int) store.State {
			return processes[caller%len(processes)].take(ctx, r)
		},
	}
	total = l.run(ctx)
	if total.err != nil {
		return ph, nil, total.err
	}
	after, err := countCalls(servers)
	return phase{total.requests, after.since(before)}, total, err
}
