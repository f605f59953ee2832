package main

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// role is why a client is there.
type role int

const (
	// regular clients have an open window and stay far below their limit.
	regular role = iota
	// greedy ones reach their limit.
	greedy
	// late ones come for the first time while the fault lasts.
	late
	// bystander ones belong to another shard.
	bystander
)

// client sends one request after the other.
type client struct {
	name string
	role role
	// events is its limit.
	events int64

	mu   sync.Mutex
	seen []response
}

// response is what a client was told.
type response struct {
	begun, ended time.Time
	// status is 0 where there was no response.
	status int
	// limited is set if the headers tell of a limit.
	limited bool
	// remaining and reset are what they tell.
	remaining, reset string
}

// plenty is the limit of who does not ask for another.
const plenty = 1_000_000

// requestPatience bounds a request; nothing should take as long.
const requestPatience = time.Minute

// run sends a request every pace, or as soon as the one before is answered, until
// ctx ends. The one that is on its way then is waited for.
func (c *client) run(ctx context.Context, url string, pace time.Duration) {
	http := &http.Client{Transport: &http.Transport{DisableCompression: true}, Timeout: requestPatience}
	defer http.CloseIdleConnections()
	next := time.Now()
	for ctx.Err() == nil {
		r := c.ask(http, url)
		c.mu.Lock()
		c.seen = append(c.seen, r)
		c.mu.Unlock()
		if next = next.Add(pace); next.Before(time.Now()) {
			next = time.Now()
		}
		if pause(ctx, time.Until(next)) != nil {
			return
		}
	}
}

func (c *client) ask(client *http.Client, url string) (r response) {
	r.begun = time.Now()
	defer func() { r.ended = time.Now() }()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return r
	}
	req.Header.Set("X-Client", c.name)
	req.Header.Set("X-Events", strconv.FormatInt(c.events, 10))
	resp, err := client.Do(req)
	if err != nil {
		return r
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return r
	}
	r.status = resp.StatusCode
	r.limited = resp.Header.Get("X-RateLimit-Limit") != ""
	r.remaining, r.reset = resp.Header.Get("X-RateLimit-Remaining"), resp.Header.Get("X-RateLimit-Reset")
	return r
}

// responses are those so far.
func (c *client) responses() []response {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[:len(c.seen):len(c.seen)]
}

// served is how many requests have been let through so far.
func (c *client) served() (n int64) {
	for _, r := range c.responses() {
		if r.status == http.StatusOK {
			n++
		}
	}
	return n
}

// isNormal tells whether a response is one of a limiter that all is well with.
func (r *response) isNormal() bool {
	return r.limited && (r.status == http.StatusOK || r.status == http.StatusTooManyRequests)
}

// isSettledSince tells whether the last few responses are right, to requests that
// began since then.
func (c *client) isSettledSince(then time.Time, isRight func(*response) bool) bool {
	seen := last(c.responses())
	for _, r := range seen {
		if !isRight(&r) || r.begun.Before(then) {
			return false
		}
	}
	return len(seen) == few
}

// few is how many responses in a row make one believe that it stays so.
const few = 5

// last are the last few.
func last(seen []response) []response { return seen[max(0, len(seen)-few):] }

func (c *client) String() string {
	return [...]string{"regular", "greedy", "late", "bystander"}[c.role] + " client " + c.name
}
