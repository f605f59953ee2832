// Package traffic has what the programs of the laboratory share to send single requests
// and keep each response, to pause, to poll, and to do several things in turn or at the
// same time. Package loadgen of the module sends as many requests as possible. The
// package depends on HTTP alone.
package traffic

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// NewClient returns a client with connections of its own, which stay open.
func NewClient(connections int) *http.Client {
	return &http.Client{
		Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: connections},
		Timeout:   time.Minute, // longer than any request should take
	}
}

// Exchange is a request and its response.
type Exchange struct {
	Begun, Ended time.Time
	Status       int // 0 where there was no response
	Header       http.Header
}

// Ask sends a GET request with the given headers.
func Ask(client *http.Client, url string, headers map[string]string) (x Exchange) {
	x.Begun = time.Now()
	defer func() { x.Ended = time.Now() }()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return x
	}
	for name, value := range headers {
		req.Header.Set(name, value)
	}
	resp, err := client.Do(req)
	if err != nil {
		return x
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err == nil {
		x.Status, x.Header = resp.StatusCode, resp.Header
	}
	return x
}

// Pause waits for d, or until ctx ends.
func Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Each calls do for one item after the other, and joins the errors.
func Each[T any](items []T, do func(T) error) (err error) {
	for _, item := range items {
		err = errors.Join(err, do(item))
	}
	return err
}

// Those returns the items for which is holds.
func Those[T any](items []T, is func(T) bool) (some []T) {
	for _, item := range items {
		if is(item) {
			some = append(some, item)
		}
	}
	return some
}

// Together calls do for 0 to n-1 at the same time, and joins the errors.
func Together(n int, do func(i int) error) error {
	errs := make([]error, n)
	var running sync.WaitGroup
	for i := range n {
		running.Go(func() { errs[i] = do(i) })
	}
	running.Wait()
	return errors.Join(errs...)
}

// Around calls do, and returns the results of read before and after that.
func Around[T any](read func() (T, error), do func() error) (before, after T, err error) {
	if before, err = read(); err == nil {
		if err = do(); err == nil {
			after, err = read()
		}
	}
	return before, after, err
}

// Poll calls done until it returns nil. After the timeout it returns done's last error.
func Poll(ctx context.Context, timeout time.Duration, done func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		missing := done()
		if missing == nil {
			return nil
		}
		if err := Pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return missing
		}
	}
}
