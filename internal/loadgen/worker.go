package loadgen

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// worker sends requests over one connection.
type worker struct {
	opts *Options
	conn net.Conn
	r    *bufio.Reader
	// head is what all requests begin with, and b what the last one was.
	head, b                []byte
	status                 map[int]int64
	latencies, lags, times []time.Duration
}

func dial(opts *Options) (*worker, error) {
	conn, err := net.Dial("tcp", opts.Addr)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	path := opts.Path
	if path == "" {
		path = "/"
	}
	return &worker{
		opts: opts, conn: conn, r: bufio.NewReader(conn), status: map[int]int64{},
		head: []byte("GET " + path + " HTTP/1.1\r\nHost: " + opts.Addr + "\r\n"),
	}, nil
}

// run sends requests until there are no more.
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

// read reads an answer, and tells whether it is the connection's last.
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
