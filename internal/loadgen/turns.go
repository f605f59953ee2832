package loadgen

import (
	"context"
	"math"
	"sync/atomic"
	"time"
)

// turns gives out the numbers of requests, each with the instant at which it is
// due, if there is one. It is not ok if there are no more.
type turns func(ctx context.Context) (n int64, due time.Time, ok bool)

// inTurn gives each who asks the next number at once.
func inTurn(opts *Options) turns {
	var next atomic.Int64
	return func(ctx context.Context) (int64, time.Time, bool) {
		n := next.Add(1) - 1
		return n, time.Time{}, ctx.Err() == nil && (opts.Requests == 0 || n < opts.Requests)
	}
}

// paced gives each number when it is due. All that were due in time are given,
// however late.
func paced(ctx context.Context, opts *Options, start time.Time) turns {
	total := int64(math.Ceil(opts.Duration.Seconds() * opts.Rate))
	if opts.Requests > 0 {
		total = min(total, opts.Requests)
	}
	dueAt := func(n int64) time.Time {
		return start.Add(time.Duration(float64(n) / opts.Rate * float64(time.Second)))
	}
	// With room for all, nobody who is late delays the others.
	due := make(chan int64, total)
	go func() {
		defer close(due)
		sleep := NewSleeper()
		defer sleep.Close()
		for n := range total {
			sleep.Until(dueAt(n))
			if ctx.Err() != nil && time.Since(start) < opts.Duration {
				return
			}
			due <- n
		}
	}()
	return func(context.Context) (int64, time.Time, bool) {
		n, ok := <-due
		return n, dueAt(n), ok
	}
}
