// Package libraries compares the stores with other limiters for Go: those that
// count in Redis with a Take of the Redis store, those that count in memory with
// one of the memory store. They take turns, several rounds; what counts is the
// ratio to the fastest of the others, the peers, in the same round.
package libraries

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// Options say how much is measured. What is zero is as it is by default.
type Options struct {
	// Rounds are how often each limiter is measured.
	Rounds int
	// Length is how long each limiter in Redis runs in a round, and twice as long
	// as each in memory.
	Length time.Duration
	// Goroutines are how many ask at the same time: for each number everything
	// is measured.
	Goroutines []int
}

// The default options.
const (
	defaultRounds = 5
	defaultLength = 300 * time.Millisecond
)

// defaultGoroutines are the default numbers of goroutines.
var defaultGoroutines = []int{1, 16, 64, 256, 1024}

// memoryShare is the part of the time, one in so many, that those in memory
// have: they make a hundred times as many decisions in it.
const memoryShare = 2

// What is refused is measured with these numbers of goroutines alone.
var refusedWith = []int{64, 256}

// ceilingWith is the number of goroutines with which a Take is compared with
// the ceiling; if nothing is measured with it, the largest is in its place.
const ceilingWith = 256

// Result is what was measured.
type Result struct {
	opts Options
	// shared are of limiters in Redis, apart of those in memory; each in the
	// order of goroutines.
	shared, apart []*comparison
}

// Run measures everything. It starts a redis-server for it, and tells progress
// how far it is.
func Run(ctx context.Context, opts Options, progress io.Writer) (_ *Result, err error) {
	if opts.Rounds == 0 {
		opts.Rounds = defaultRounds
	}
	if opts.Length == 0 {
		opts.Length = defaultLength
	}
	if len(opts.Goroutines) == 0 {
		opts.Goroutines = defaultGoroutines
	}
	if opts.Rounds < 1 || opts.Length < 0 || slices.Min(opts.Goroutines) < 1 {
		return nil, errors.New("rounds, length and goroutines must be positive")
	}
	opts.Goroutines = slices.Compact(slices.Sorted(slices.Values(opts.Goroutines)))
	server, err := redistest.Launch(redistest.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	r := &Result{opts: opts}
	for _, goroutines := range opts.Goroutines {
		fmt.Fprintf(progress, "limiters in Redis, %s\n", scene{goroutines: goroutines}.crowd())
		t := &trials{
			server: server, opts: opts, load: newLoad(goroutines, 1, opts.Length),
			ceiling: goroutines == nearest(opts.Goroutines, ceilingWith),
		}
		comparisons, err := t.compare(ctx, redisKinds)
		if err != nil {
			return nil, err
		}
		r.shared = append(r.shared, comparisons...)
	}
	inMemory := opts
	inMemory.Length /= memoryShare
	for _, goroutines := range opts.Goroutines {
		fmt.Fprintf(progress, "limiters in memory, %s\n", scene{goroutines: goroutines}.crowd())
		t := &trials{opts: inMemory, load: newLoad(goroutines, memoryStride, inMemory.Length)}
		comparisons, err := t.compare(ctx, memoryKinds)
		if err != nil {
			return nil, err
		}
		r.apart = append(r.apart, comparisons...)
	}
	return r, nil
}

// nearest is wanted if it is there, or else the largest.
func nearest(numbers []int, wanted int) int {
	if slices.Contains(numbers, wanted) {
		return wanted
	}
	return slices.Max(numbers)
}

// admitted is the comparison of those in Redis in which all is admitted, with
// so many goroutines or, if nothing was measured with those, the most.
func (r *Result) admitted(goroutines int) *comparison {
	return find(r.shared, scene{goroutines: nearest(r.opts.Goroutines, goroutines)})
}

func find(comparisons []*comparison, s scene) *comparison {
	return comparisons[slices.IndexFunc(comparisons, func(c *comparison) bool { return c.scene == s })]
}
