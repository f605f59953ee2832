// Package loadgen sends HTTP requests over keep-alive connections, with little
// CPU of its own, for benchmarks and demonstrations on loopback.
package loadgen

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Options is what is sent. Either Requests or Duration ends it.
type Options struct {
	// Addr is where, as host:port.
	Addr string
	// Path is the path of every request; empty means /.
	Path string
	// Header is the name of a header whose value is Key's; empty means none.
	Header string
	// Key returns the value for the n-th request, from 0.
	Key func(n int64) string
	// Connections is how many requests run at a time; 0 means 1.
	Connections int
	// Rate is how many requests come in a second, whether others are answered or
	// not; 0 means that each connection sends one as soon as it has an answer. A
	// request that finds all connections busy waits, and its waiting counts.
	Rate float64
	// Skip is how many requests at a Rate come first that are not in Latencies,
	// Lags and Times.
	Skip int64
	// Requests is how many are sent at most; 0 means as many as fit into
	// Duration.
	Requests int64
	// Duration is how long they are sent at most; 0 means a minute.
	Duration time.Duration
	// OnResponse, if set, is given every response, from several goroutines.
	// The body is already drained.
	OnResponse func(key string, resp *http.Response)
}

// Result is what came of it.
type Result struct {
	// Requests is how many were answered.
	Requests int64
	// Status counts the answers by status.
	Status map[int]int64
	// Elapsed is how long it took.
	Elapsed time.Duration
	// Latencies, of requests at a Rate, are how long answers took from the
	// instants at which the requests were due. Lags are how long after these they
	// were sent, and Times how long answers took from then. All are in order of
	// length.
	Latencies, Lags, Times []time.Duration
}

// Run sends the load and waits for the answers.
func Run(ctx context.Context, opts Options) (Result, error) {
	if opts.Duration == 0 {
		opts.Duration = time.Minute
	}
	result := Result{Status: map[int]int64{}}
	workers := make([]*worker, max(opts.Connections, 1))
	for i := range workers {
		w, err := dial(&opts)
		if err != nil {
			return result, err
		}
		defer w.conn.Close()
		workers[i] = w
	}

	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, opts.Duration)
	defer cancel()
	var (
		wg   sync.WaitGroup
		errs = make([]error, len(workers))
		next = inTurn(&opts)
	)
	if opts.Rate > 0 {
		next = paced(ctx, &opts, start)
	}
	for i, w := range workers {
		wg.Go(func() { errs[i] = w.run(ctx, next) })
	}
	wg.Wait()
	result.Elapsed = time.Since(start)
	for _, w := range workers {
		for code, n := range w.status {
			result.Status[code] += n
			result.Requests += n
		}
		result.Latencies = append(result.Latencies, w.latencies...)
		result.Lags = append(result.Lags, w.lags...)
		result.Times = append(result.Times, w.times...)
	}
	slices.Sort(result.Latencies)
	slices.Sort(result.Lags)
	slices.Sort(result.Times)
	return result, errors.Join(errs...)
}

// Quantile is the duration that a part of all, such as 0.99, does not exceed. It
// is 0 if there are none.
func Quantile(sorted []time.Duration, part float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(part*float64(len(sorted))), len(sorted)-1)]
}
