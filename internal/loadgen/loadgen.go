// Package loadgen sends HTTP requests over keep-alive connections, with little CPU of its
// own, for tests and the laboratory on loopback: Options say what to send and how fast,
// and Run returns a Result. A Sleeper is as precise as the system allows.
package loadgen

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Options describes the load. Either Requests or Duration ends it.
type Options struct {
	Addr        string               // where, as host:port
	Path        string               // the path of every request; empty means /
	Header      string               // the name of a header whose value is Key's; empty means none
	Key         func(n int64) string // Key returns the value for the n-th request, from 0
	Connections int                  // how many requests run at a time; 0 means 1
	// Rate is how many requests are due in a second, whether others are answered or
	// not; 0 means that each connection sends one as soon as it has an answer. A
	// request that finds all connections busy waits, and its waiting counts.
	Rate float64
	// Skip is how many requests at a Rate are left out of Latencies, Lags and Times at
	// first.
	Skip int64
	// Requests is how many are sent at most; 0 means as many as fit into
	// Duration.
	Requests int64
	Duration time.Duration // how long they are sent at most; 0 means a minute
	// OnResponse, if set, receives every response, from several goroutines. The body is
	// already drained.
	OnResponse func(key string, resp *http.Response)
}

// Result is the outcome of a load.
type Result struct {
	Requests int64         // how many were answered
	Status   map[int]int64 // Status counts the answers by status
	Elapsed  time.Duration // how long it took
	// For requests at a Rate, Latencies are from when they were due to their answers,
	// Lags from then to their sending, and Times from there to their answers. All are
	// sorted.
	Latencies, Lags, Times []time.Duration
}

// Run sends the load and waits for the answers.
func Run(ctx context.Context, opts Options) (Result, error) {
	opts.Duration = cmp.Or(opts.Duration, time.Minute)
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

// Quantile returns the duration that a part of all, such as 0.99, does not exceed, or 0
// if there are none.
func Quantile(sorted []time.Duration, part float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(part*float64(len(sorted))), len(sorted)-1)]
}

// turns gives out the numbers of requests, each with the instant at which it is
// due, if there is one. It is not ok if there are no more.
type turns func(ctx context.Context) (n int64, due time.Time, ok bool)

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
	// With room for all, a late request does not delay the others.
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

// worker sends requests over one connection.
type worker struct {
	opts                   *Options
	conn                   net.Conn
	r                      *bufio.Reader
	head, b                []byte // head is what all requests begin with, and b what the last one was
	status                 map[int]int64
	latencies, lags, times []time.Duration
}

func dial(opts *Options) (*worker, error) {
	conn, err := net.Dial("tcp", opts.Addr)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return &worker{
		opts: opts, conn: conn, r: bufio.NewReader(conn), status: map[int]int64{},
		head: []byte("GET " + cmp.Or(opts.Path, "/") + " HTTP/1.1\r\nHost: " + opts.Addr + "\r\n"),
	}, nil
}

func (w *worker) run(ctx context.Context, next turns) error {
	for {
		n, due, ok := next(ctx)
		if !ok {
			return nil
		}
		key := ""
		w.b = append(w.b[:0], w.head...)
		if w.opts.Header != "" {
			key = w.opts.Key(n)
			w.b = append(append(append(w.b, w.opts.Header...), ": "...), key...)
			w.b = append(w.b, "\r\n"...)
		}
		w.b = append(w.b, "\r\n"...)
		sent := time.Now()
		if _, err := w.conn.Write(w.b); err != nil {
			return fmt.Errorf("send request: %w", err)
		}
		status, isLast, err := w.read(key)
		if err != nil {
			return err
		}
		if !due.IsZero() && n >= w.opts.Skip {
			answered := time.Now()
			w.latencies = append(w.latencies, answered.Sub(due))
			w.lags = append(w.lags, sent.Sub(due))
			w.times = append(w.times, answered.Sub(sent))
		}
		w.status[status]++
		if isLast {
			return errors.New("server closed the connection")
		}
	}
}

// read reads an answer, and reports whether it is the connection's last.
func (w *worker) read(key string) (status int, isLast bool, err error) {
	if w.opts.OnResponse == nil {
		if status, ok, err := readPlain(w.r); ok || err != nil {
			return status, false, err
		}
	}
	resp, err := http.ReadResponse(w.r, nil)
	if err != nil {
		return 0, false, fmt.Errorf("read response: %w", err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return 0, false, fmt.Errorf("read body: %w", err)
	}
	if w.opts.OnResponse != nil {
		w.opts.OnResponse(key, resp)
	}
	return resp.StatusCode, resp.Close, nil
}

// readPlain reads an answer whose headers are in r's buffer and say how long the
// body is, at a fraction of what http.ReadResponse takes. Of any other it reads
// nothing, and is not ok.
func readPlain(r *bufio.Reader) (status int, ok bool, err error) {
	// All headers usually arrive with the first byte.
	if _, err := r.Peek(1); err != nil {
		return 0, false, fmt.Errorf("read response: %w", err)
	}
	b, err := r.Peek(r.Buffered())
	if err != nil {
		return 0, false, fmt.Errorf("read response: %w", err)
	}
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		return 0, false, nil
	}
	status, length := plainHead(b[:end])
	if length < 0 {
		return 0, false, nil
	}
	if _, err := r.Discard(end + len("\r\n\r\n") + length); err != nil {
		return 0, false, fmt.Errorf("read body: %w", err)
	}
	return status, true, nil
}

// plainHead reads the status and the length of the body. A negative length means that
// the full parser has to read the answer.
func plainHead(head []byte) (status, length int) {
	line, fields, _ := bytes.Cut(head, []byte("\r\n"))
	rest, isHTTP := bytes.CutPrefix(line, []byte("HTTP/1.1 "))
	if !isHTTP || len(rest) < 3 {
		return 0, -1
	}
	status, err := strconv.Atoi(string(rest[:3]))
	if err != nil || status < 200 {
		return 0, -1
	}
	length = -1
	for len(fields) > 0 {
		line, fields, _ = bytes.Cut(fields, []byte("\r\n"))
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return 0, -1
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")), bytes.EqualFold(name, []byte("Connection")):
			return 0, -1
		}
	}
	return status, length
}
