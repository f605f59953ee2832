package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// answer is a response and what its limit headers say; -1 where there is no
// such header.
type answer struct {
	status                        int
	header                        http.Header
	body                          string
	limit, remaining, used, reset int64
	retryAfter                    int64
	resource                      string
	// The client's clock around the request. All processes of a test share
	// one clock.
	sent, received time.Time
}

// ask requests a path with headers given as "Name: value", from the goroutine
// of the test.
func (c *caddyProcess) ask(path string, headers ...string) answer {
	c.t.Helper()
	a, err := c.tryAsk(path, headers...)
	if err != nil {
		c.t.Fatal(err)
	}
	return a
}

// tryAsk is ask for any goroutine. It refuses an answer that contradicts
// itself.
func (c *caddyProcess) tryAsk(path string, headers ...string) (answer, error) {
	return c.askContext(context.Background(), path, headers...)
}

func (c *caddyProcess) askContext(ctx context.Context, path string, headers ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+path, nil)
	if err != nil {
		return answer{}, err
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	a := answer{sent: time.Now()}
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	a.received = time.Now()
	a.status, a.header, a.body = resp.StatusCode, resp.Header, string(body)
	a.resource = resp.Header.Get("X-RateLimit-Resource")
	for name, to := range map[string]*int64{
		"X-RateLimit-Limit": &a.limit, "X-RateLimit-Remaining": &a.remaining, "X-RateLimit-Used": &a.used,
		"X-RateLimit-Reset": &a.reset, "Retry-After": &a.retryAfter,
	} {
		*to = -1
		switch values := resp.Header.Values(name); len(values) {
		case 0:
		case 1:
			if *to, err = strconv.ParseInt(values[0], 10, 64); err != nil || *to < 0 {
				return answer{}, fmt.Errorf("%s is %q", name, values[0])
			}
		default:
			return answer{}, fmt.Errorf("%s has %d values: %q", name, len(values), values)
		}
	}
	if err := a.contradiction(); err != nil {
		return a, fmt.Errorf("%w: status %d, headers %v", err, a.status, a.header)
	}
	return a, nil
}

// isLimited tells whether the answer has limit headers.
func (a answer) isLimited() bool { return a.limit >= 0 }

// errTooEarly is the contradiction of a refusal that makes the client come back
// before the reset. It is none where requests in flight are what refuses it: how
// they end is not known.
var errTooEarly = errors.New("the client is to come back before the reset")

// contradiction tells what the headers say that cannot be true together.
func (a answer) contradiction() error {
	if a.status == http.StatusTooManyRequests && a.retryAfter < 1 {
		return errors.New("a refusal has no Retry-After of at least 1")
	}
	if !a.isLimited() {
		if a.remaining >= 0 || a.used >= 0 || a.reset >= 0 || a.resource != "" {
			return errors.New("limit headers are incomplete")
		}
		return nil
	}
	if a.remaining != max(a.limit-a.used, 0) {
		return errors.New("what is used and what remains are not the limit")
	}
	if a.reset < 0 || a.resource == "" {
		return errors.New("limit headers are incomplete")
	}
	if a.status != http.StatusTooManyRequests {
		return nil
	}
	if a.remaining != 0 {
		return errors.New("refused with something remaining")
	}
	// The reset in the header is rounded up, so the true one may be up to a
	// second earlier.
	if comeBack := a.received.Add(time.Duration(a.retryAfter) * time.Second); comeBack.Before(time.Unix(a.reset-1, 0)) {
		return fmt.Errorf("%w: waiting %d seconds leads to %v", errTooEarly, a.retryAfter, comeBack)
	}
	if leave := a.sent.Add(time.Duration(a.retryAfter-2) * time.Second); leave.After(time.Unix(a.reset, 0)) {
		return errors.New("Retry-After is longer than the window")
	}
	return nil
}

// is tells how the answer differs from a status and a count.
func (a answer) is(status int, used int64) error {
	return errors.Join(want("status", a.status, status), want("used", a.used, used))
}

// must ends the test unless err is nil.
func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// together runs f n times at the same time, and fails the test by their
// errors once all have ended.
func together(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, n)
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			errs[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// startTraffic runs n workers, each of which calls f again and again. Calling
// stop, or the end of the test, ends and awaits them, and fails the test by
// their errors.
func startTraffic(t *testing.T, n int, f func(worker, i int) error) (stop func()) {
	t.Helper()
	var ended atomic.Bool
	var wg sync.WaitGroup
	errs := make([]error, n)
	for worker := range n {
		wg.Go(func() {
			for i := 0; !ended.Load() && errs[worker] == nil; i++ {
				errs[worker] = f(worker, i)
			}
		})
	}
	stop = sync.OnceFunc(func() {
		ended.Store(true)
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}
