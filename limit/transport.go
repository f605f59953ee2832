package limit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
)

// Transport is an [http.RoundTripper] for outgoing calls. Each request waits for its limit first, as
// [Limit.Wait] does with an event, for as long as its context allows. If the server answers 429, 503 or
// 529 and says for how long it wants no more requests, in Retry-After, RateLimit or fields like
// X-RateLimit-Reset, the bucket is closed for so long, at most an hour, for all processes and Caddys
// that share it; so it is by a 402 or 403 whose Retry-After or used-up limit says so. If many answers
// say so, the first counts. Whoever can provoke an answer closes the bucket of its Key for all. This process
// obeys even if the store does not answer. The answer itself is returned as it is. A Transport sends no
// request again.
type Transport struct {
	// Base sends the requests. Nil means [http.DefaultTransport].
	Base http.RoundTripper
	// Limit is what they spend from, with an algorithm whose buckets can be closed: not SlidingLog
	// or Concurrency. Required.
	Limit *Limit
	// Key returns the key of a request's bucket. Nil means the host in lower case, with a port if the URL
	// has one.
	Key func(*http.Request) string
	// OnError, if it is not nil, is told that the store does not answer, and decides: without an error
	// the request is sent without a limit; an error is that of the request. It is also told, after the
	// answer, of a bucket that could not be closed; then what it returns does not matter. Nil means that
	// the error is that of the request.
	OnError func(*http.Request, error) error
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	key, err := t.admit(r)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // A RoundTripper always closes it.
		}
		return nil, err
	}
	resp, err := t.base().RoundTrip(r)
	if err != nil {
		return resp, err
	}
	if wait := retryafter.Read(resp.StatusCode, resp.Header, time.Now()); wait > 0 {
		if err := t.obey(r.Context(), key, wait); err != nil && t.OnError != nil {
			_ = t.OnError(r, err)
		}
	}
	return resp, nil
}

// CloseIdleConnections closes those of Base, if it can. [http.Client.CloseIdleConnections] calls it.
func (t *Transport) CloseIdleConnections() {
	if base, can := t.base().(interface{ CloseIdleConnections() }); can {
		base.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

// obey closes the bucket of a key, in this process and in the store. It does not delay the answer by more
// than two checks of the store: a peek and the penalty.
func (t *Transport) obey(ctx context.Context, key string, wait time.Duration) error {
	l := t.Limit
	r, err := l.request(key, 0)
	if err != nil {
		return err
	}
	l.closures.add(r.ClientKey, time.Now().Add(wait))
	// The answer counts for others, whether or not this caller still waits.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*l.store.checkTimeout)
	defer cancel()
	if err = l.Penalize(ctx, key, wait); ctx.Err() != nil && err != nil {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}

// closures are until when servers want no more, by client key.
type closures struct {
	mu    sync.Mutex
	until map[string]time.Time
}

// maxClosures bounds them, at less than 400 bytes each. Of others the store alone knows.
const maxClosures = 10_000

// add notes a closure, unless one is noted that has not ended.
func (c *closures) add(clientKey string, until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.until[clientKey].After(now) {
		return
	}
	if len(c.until) >= maxClosures {
		maps.DeleteFunc(c.until, func(_ string, until time.Time) bool { return !until.After(now) })
	}
	if c.until == nil {
		c.until = map[string]time.Time{}
	}
	if len(c.until) < maxClosures {
		c.until[clientKey] = until
	}
}

// left returns how long the bucket of a key is closed yet.
func (c *closures) left(clientKey string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	until, isClosed := c.until[clientKey]
	left := time.Until(until)
	if isClosed && left <= 0 {
		delete(c.until, clientKey)
	}
	return max(left, 0)
}

// awaitOpen waits until no server has closed the bucket of a key in this process.
func (l *Limit) awaitOpen(ctx context.Context, key string) error {
	r, err := l.request(key, 0)
	if err != nil {
		return err
	}
	for {
		left := l.closures.left(r.ClientKey)
		if left == 0 {
			return nil
		}
		if deadline, has := ctx.Deadline(); has && time.Until(deadline) < left {
			return ErrDeadline
		}
		timer := time.NewTimer(left + jitter(left))
		select {
		case <-timer.C:
		case <-l.store.done:
			err = ErrClosed
		case <-ctx.Done():
			err = ctx.Err()
		}
		timer.Stop()
		if err != nil {
			return err
		}
	}
}

// admit waits until the limit admits a request, and returns the key of its bucket.
func (t *Transport) admit(r *http.Request) (key string, err error) {
	if t.Limit == nil {
		return "", errors.New("limit: Transport.Limit is nil: set it")
	}
	if err := t.Limit.mayPenalize(); err != nil {
		return "", fmt.Errorf("%w: Transport closes buckets", err)
	}
	if t.Key != nil {
		key = t.Key(r)
	} else {
		key = strings.ToLower(r.URL.Host)
	}
	if err := t.Limit.awaitOpen(r.Context(), key); err != nil {
		return "", err
	}
	err = t.Limit.Wait(r.Context(), key, 1)
	if errors.Is(err, ErrUnavailable) && t.OnError != nil {
		err = t.OnError(r, err)
	}
	return key, err
}
