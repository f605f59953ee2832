// Package endtoend measures what the limiter costs: CPU time per request in
// Caddy's process and in Redis, and latency. The comparison is with Caddy
// without a limiter that sends the same headers, the floor. All cases run in
// turn, several rounds; what counts is their ratio to, or difference from, the
// floor of the same round.
package endtoend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Options say how much is measured.
type Options struct {
	// Rounds is how many rounds there are, of which the median counts; 0 means 5.
	Rounds int
	// Length is how long each case runs in a round; 0 means a second.
	Length time.Duration
	// Connections is how many requests run at a time; 0 means 64.
	Connections int
	// Quick leaves out what takes long, for tests: there are fewer clients, and
	// nothing is run to warm up.
	Quick bool
	// Caddy is the path of a Caddy with this module; one is built if it is empty.
	Caddy string
}

// sweepKeys is how many clients the cases of the sweep have, unless that is what
// differs.
func (o *Options) sweepKeys() int64 {
	if o.Quick {
		return 1_000
	}
	return 30_000
}

// manyKeys is how many the last value of the sweep by keys has.
func (o *Options) manyKeys() int64 {
	if o.Quick {
		return 5_000
	}
	return 1_000_000
}

// redisKeys is how many have buckets when it is seen what those take in Redis. It
// and half of it are numbers for which Redis's tables are full.
func (o *Options) redisKeys() int64 {
	if o.Quick {
		return 1 << 12
	}
	return 1 << 15
}

// heapKeys is how many of these are counted to see what they take of Caddy's heap.
func (o *Options) heapKeys() int64 {
	if o.Quick {
		return 2_000
	}
	return 25_000
}

// leadIn is how long a case runs before it is measured for so long, so that what
// is known of its clients is what it would be in the long run.
func leadIn(length time.Duration) time.Duration { return length / 8 }

// slices is how many rounds of latencies there are for each other round, each so
// much shorter: a pause of the machine spoils a round, and so not many of them.
func (o *Options) slices() int {
	if o.Quick {
		return 1
	}
	return 3
}

// Run measures everything and tells progress what it does.
func Run(ctx context.Context, opts Options, progress io.Writer) (_ *Result, err error) {
	if opts.Rounds == 0 {
		opts.Rounds = 5
	}
	if opts.Length == 0 {
		opts.Length = time.Second
	}
	if opts.Connections == 0 {
		opts.Connections = 64
	}
	start := time.Now()
	say := func(format string, args ...any) {
		fmt.Fprintf(progress, "%4.0fs "+format+"\n", append([]any{time.Since(start).Seconds()}, args...)...)
	}
	l, err := openLab(opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	r := newResult(opts, l)
	say("memory: %d rounds, then fill Redis with %d buckets", opts.Rounds, opts.manyKeys())
	if err := l.fill(ctx, r); err != nil {
		return nil, err
	}
	if r.pings, err = l.pings(ctx); err != nil {
		return nil, err
	}
	if err := l.greet(ctx); err != nil {
		return nil, err
	}
	for _, step := range []struct {
		name   string
		rounds int
		run    func(ctx context.Context, isCounted bool) error
	}{
		{"cases", opts.Rounds, func(ctx context.Context, isCounted bool) error { return l.measureAll(ctx, l.cases, r.cases, isCounted) }},
		{"sweep", opts.Rounds, func(ctx context.Context, isCounted bool) error { return l.measureAll(ctx, l.sweep, r.sweep, isCounted) }},
		{"latency", opts.Rounds * opts.slices(), func(ctx context.Context, isCounted bool) error { return l.measureLatencies(ctx, r, isCounted) }},
		{"wrk", opts.Rounds, func(ctx context.Context, isCounted bool) error { return l.crossCheck(ctx, r, isCounted) }},
	} {
		// The first round opens windows and connections.
		for round := range step.rounds + 1 {
			if round == 0 && opts.Quick {
				continue
			}
			say("%s: round %d of %d", step.name, round, step.rounds)
			if err := step.run(ctx, round > 0); err != nil {
				return nil, fmt.Errorf("%s: %w", step.name, err)
			}
		}
	}
	if err := l.checkFilled(ctx); err != nil {
		return nil, err
	}
	r.took = time.Since(start)
	say("done")
	return r, nil
}
