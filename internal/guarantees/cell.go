package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// cell is what is varied.
type cell struct {
	limit  limit
	caddys int
	lag    time.Duration
	// connections is how many requests the client makes at a time.
	connections int
}

func (c cell) String() string {
	return fmt.Sprintf("%s, %d Caddys, lag %v, %d at a time", c.limit, c.caddys, c.lag, c.connections)
}

var (
	caddyCounts = []int{1, 2, 4}
	lags        = []time.Duration{0, 100 * time.Millisecond, time.Second}
	crowds      = []int{1, 16, 256}
)

// flood is from how many requests at a time on few limits are tried together,
// so that it is Caddy that is busy and not the machine.
const (
	flood        = 100
	floodsAtOnce = 4
)

// groups are all cells. Those of a group are tried at the same time, each with a
// client of its own.
func groups(limits []limit) (all [][]cell) {
	for _, lag := range lags {
		for _, caddys := range caddyCounts {
			for _, connections := range crowds {
				size := len(limits)
				if connections >= flood {
					size = floodsAtOnce
				}
				var group []cell
				for _, l := range limits {
					if len(group) == size {
						all, group = append(all, group), nil
					}
					group = append(group, cell{l, caddys, lag, connections})
				}
				all = append(all, group)
			}
		}
	}
	return all
}

const (
	// bystanderPace keeps the second client of a zone below its limit.
	bystanderPace = 80 * time.Millisecond
)

// rest is how long a connection waits that was refused. All together come 250
// times a second, so that room is found soon, and refusals leave the processor
// to what they are there to measure.
func rest(connections int) time.Duration {
	return max(20*time.Millisecond, time.Duration(connections)*4*time.Millisecond)
}

// run sends requests of two clients for that long, and returns the responses.
func (c cell) run(ctx context.Context, sites []*site, name string, lasts time.Duration) (seen, others []response) {
	ctx, end := context.WithTimeout(ctx, lasts)
	defer end()
	greedy := &traffic{client: name, zone: c.limit.zone(), sites: sites, connections: c.connections, rest: rest(c.connections)}
	modest := &traffic{client: name + "-bystander", zone: c.limit.zone(), sites: sites, connections: 1, pace: bystanderPace, rest: bystanderPace}
	var running sync.WaitGroup
	running.Go(func() { seen = greedy.run(ctx) })
	running.Go(func() { others = modest.run(ctx) })
	running.Wait()
	return seen, others
}
