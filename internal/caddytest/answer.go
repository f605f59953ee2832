package caddytest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Client is for servers that are no Caddy of the test.
var Client = newClient()

// newClient returns a client that keeps enough connections for tests with many
// workers, and gives up on a server that hangs.
func newClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true},
		Timeout:   Patience,
	}
}

// Get requests a path with headers given as "Name: value".
func (c *Caddy) Get(path string, headers ...string) *http.Response {
	c.T.Helper()
	resp, err := c.Try(path, headers...)
	if err != nil {
		c.T.Fatal(err)
	}
	return resp
}

// Try is Get for any goroutine.
func (c *Caddy) Try(path string, headers ...string) (*http.Response, error) {
	return c.do(context.Background(), path, headers)
}

// do requests a path and reads all of the response.
func (c *Caddy) do(ctx context.Context, path string, headers []string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+path, nil)
	if err != nil {
		return nil, err
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	resp, err := c.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, err
}

// Remaining returns the header that says how much is left, or "".
func Remaining(resp *http.Response) string { return resp.Header.Get("X-RateLimit-Remaining") }

// Answer is a response and the values of its limit headers, -1 for each that it
// does not have.
type Answer struct {
	Status                        int
	Header                        http.Header
	Body                          string
	Limit, Remaining, Used, Reset int64
	RetryAfter                    int64
	Resource                      string
	// The client's clock around the request. All processes of a test share
	// one clock.
	Sent, Received time.Time
}

// Ask requests a path of a site whose zones are fixed windows, with headers given
// as "Name: value".
func (c *Caddy) Ask(path string, headers ...string) Answer {
	c.T.Helper()
	a, err := c.TryAsk(path, headers...)
	if err != nil {
		c.T.Fatal(err)
	}
	return a
}

// TryAsk is Ask for any goroutine. An answer that contradicts itself is an
// error.
func (c *Caddy) TryAsk(path string, headers ...string) (Answer, error) {
	return c.AskContext(context.Background(), path, headers...)
}

// AskContext is TryAsk for the rest of ctx.
func (c *Caddy) AskContext(ctx context.Context, path string, headers ...string) (Answer, error) {
	a := Answer{Sent: time.Now()}
	resp, err := c.do(ctx, path, headers)
	if err != nil {
		return Answer{}, err
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, err
	}
	a.Received = time.Now()
	a.Status, a.Header, a.Body = resp.StatusCode, resp.Header, string(body)
	a.Resource = resp.Header.Get("X-RateLimit-Resource")
	for name, to := range map[string]*int64{
		"X-RateLimit-Limit": &a.Limit, "X-RateLimit-Remaining": &a.Remaining, "X-RateLimit-Used": &a.Used,
		"X-RateLimit-Reset": &a.Reset, "Retry-After": &a.RetryAfter,
	} {
		*to = -1
		switch values := resp.Header.Values(name); len(values) {
		case 0:
		case 1:
			if *to, err = strconv.ParseInt(values[0], 10, 64); err != nil || *to < 0 {
				return Answer{}, fmt.Errorf("%s is %q", name, values[0])
			}
		default:
			return Answer{}, fmt.Errorf("%s has %d values: %q", name, len(values), values)
		}
	}
	if err := a.contradiction(); err != nil {
		return a, fmt.Errorf("%w: status %d, headers %v", err, a.Status, a.Header)
	}
	return a, nil
}

// ErrTooEarly reports a Retry-After that ends before the reset. It is no contradiction
// if requests in flight are the reason: their outcome is unknown.
var ErrTooEarly = errors.New("the client is to come back before the reset")

// contradiction returns an error where the headers cannot be true together.
func (a Answer) contradiction() error {
	if a.Status == http.StatusTooManyRequests && a.RetryAfter < 1 {
		return errors.New("a refusal has no Retry-After of at least 1")
	}
	if !a.IsLimited() {
		if a.Remaining >= 0 || a.Used >= 0 || a.Reset >= 0 || a.Resource != "" {
			return errors.New("limit headers are incomplete")
		}
		return nil
	}
	if a.Remaining != max(a.Limit-a.Used, 0) {
		return errors.New("used and remaining do not add up to the limit")
	}
	if a.Reset < 0 || a.Resource == "" {
		return errors.New("limit headers are incomplete")
	}
	if a.Status != http.StatusTooManyRequests {
		return nil
	}
	if a.Remaining != 0 {
		return errors.New("refused with something remaining")
	}
	// The reset in the header is rounded up, so the true one may be up to a
	// second earlier.
	if comeBack := a.Received.Add(time.Duration(a.RetryAfter) * time.Second); comeBack.Before(time.Unix(a.Reset-1, 0)) {
		return fmt.Errorf("%w: waiting %d seconds leads to %v", ErrTooEarly, a.RetryAfter, comeBack)
	}
	if leave := a.Sent.Add(time.Duration(a.RetryAfter-2) * time.Second); leave.After(time.Unix(a.Reset, 0)) {
		return errors.New("Retry-After is longer than the window")
	}
	return nil
}

// Probe is Ask for zones of any algorithm.
func (c *Caddy) Probe(path string, headers ...string) Answer {
	c.T.Helper()
	a, err := c.TryProbe(context.Background(), path, headers...)
	Must(c.T, path, err)
	return a
}

// TryProbe is Probe for any goroutine. Only in a fixed window of events that
// cost 1 do all of the headers add up, as Ask demands.
func (c *Caddy) TryProbe(ctx context.Context, path string, headers ...string) (Answer, error) {
	a, err := c.AskContext(ctx, path, headers...)
	if a.Header == nil {
		return a, err
	}
	if a.IsLimited() != (a.Remaining >= 0) || a.IsLimited() != (a.Used >= 0) || a.IsLimited() != (a.Resource != "") ||
		!a.IsLimited() && a.Reset >= 0 {
		return a, errors.New("limit headers are incomplete")
	}
	if a.Remaining > max(a.Limit-a.Used, 0) {
		return a, errors.New("used and remaining exceed the limit")
	}
	return a, nil
}

// IsLimited reports whether the answer has limit headers.
func (a Answer) IsLimited() bool { return a.Limit >= 0 }

// Is returns how the answer differs from a status and a count.
func (a Answer) Is(status int, used int64) error {
	return errors.Join(Want("status", a.Status, status), Want("used", a.Used, used))
}

// Shows returns how the answer differs from a status and from the headers of a
// zone with that limit, of which used is used.
func (a Answer) Shows(status int, limit, used int64) error {
	return errors.Join(a.Is(status, used), Want("limit", a.Limit, limit), Want("remaining", a.Remaining, max(limit-used, 0)))
}

// Refuses returns how the answer differs from a refusal by a zone that ends with
// time.
func (a Answer) Refuses(zone string) error {
	return errors.Join(Want("status", a.Status, 429), Want("zone", a.Resource, zone), Want("remaining", a.Remaining, 0),
		Want("Retry-After being at least 1", a.RetryAfter >= 1, true))
}
