// Package loadgen sends HTTP requests over keep-alive connections, with little
// CPU of its own, for benchmarks and demonstrations on loopback.
package loadgen

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
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
}

// Run sends the load and waits for the answers.
func Run(ctx context.Context, opts Options) (Result, error) {
	if opts.Duration == 0 {
		opts.Duration = time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, opts.Duration)
	defer cancel()
	var (
		wg   sync.WaitGroup
		next atomic.Int64
		mu   sync.Mutex
		errs []error
	)
	result := Result{Status: map[int]int64{}}
	start := time.Now()
	for range max(opts.Connections, 1) {
		wg.Go(func() {
			status, err := worker(ctx, &opts, &next)
			mu.Lock()
			defer mu.Unlock()
			for code, n := range status {
				result.Status[code] += n
				result.Requests += n
			}
			errs = append(errs, err)
		})
	}
	wg.Wait()
	result.Elapsed = time.Since(start)
	return result, errors.Join(errs...)
}

// worker sends requests over one connection.
func worker(ctx context.Context, opts *Options, next *atomic.Int64) (map[int]int64, error) {
	status := map[int]int64{}
	conn, err := net.Dial("tcp", opts.Addr)
	if err != nil {
		return status, fmt.Errorf("connect: %w", err)
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	path := opts.Path
	if path == "" {
		path = "/"
	}
	var b []byte
	for ctx.Err() == nil {
		n := next.Add(1) - 1
		if opts.Requests > 0 && n >= opts.Requests {
			break
		}
		key := ""
		b = append(b[:0], "GET "+path+" HTTP/1.1\r\nHost: "+opts.Addr+"\r\n"...)
		if opts.Header != "" {
			key = opts.Key(n)
			b = append(b, opts.Header+": "+key+"\r\n"...)
		}
		b = append(b, "\r\n"...)
		if _, err := conn.Write(b); err != nil {
			return status, fmt.Errorf("send request: %w", err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return status, fmt.Errorf("read response: %w", err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return status, fmt.Errorf("read body: %w", err)
		}
		status[resp.StatusCode]++
		if opts.OnResponse != nil {
			opts.OnResponse(key, resp)
		}
		if resp.Close {
			return status, errors.New("server closed the connection")
		}
	}
	return status, nil
}
