// Package traffic has the parts of the laboratory's clients that send one request after
// the other and keep each response, and the pauses between them. For as many requests
// as possible there is package loadgen of the module. The package knows HTTP alone.
package traffic

import (
	"context"
	"io"
	"net/http"
	"time"
)

// requestTimeout bounds a request; nothing should take as long.
const requestTimeout = time.Minute

// NewClient returns one with connections of its own, which stay open.
func NewClient(connections int) *http.Client {
	return &http.Client{
		Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: connections},
		Timeout:   requestTimeout,
	}
}

// Exchange is a request and its response.
type Exchange struct {
	Begun, Ended time.Time
	Status       int // 0 where there was no response
	Header       http.Header
}

// Ask makes a request with some headers.
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

// Pause waits, unless ctx ends.
func Pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
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
