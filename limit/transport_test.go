package limit_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/limit"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// provider is a server that answers with what it is told to.
func provider(t *testing.T) (server *httptest.Server, answer func(status int, headers ...string), asked func() int64) {
	t.Helper()
	var next atomic.Pointer[http.HandlerFunc]
	var n atomic.Int64
	answer = func(status int, headers ...string) {
		f := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for _, h := range headers {
				name, value, _ := strings.Cut(h, ": ")
				w.Header().Set(name, value)
			}
			w.WriteHeader(status)
		})
		next.Store(&f)
	}
	answer(http.StatusOK)
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.Add(1)
		(*next.Load())(w, r)
	}))
	t.Cleanup(server.Close)
	return server, answer, n.Load
}

func get(ctx context.Context, transport http.RoundTripper, address string) (status int, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return 0, err
	}
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return 0, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, resp.Body.Close()
}

// TestTransportObeys: what the provider says to one process closes the bucket for the other one, once.
func TestTransportObeys(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	server, answer, asked := provider(t)
	soon := time.Now().Add(20 * time.Minute).UTC()
	for name, headers := range map[string][]string{
		"seconds":             {"Retry-After: 600"},
		"date":                {"Date: " + soon.Add(-10*time.Minute).Format(http.TimeFormat), "Retry-After: " + soon.Format(http.TimeFormat)},
		"RateLimit":           {`RateLimit: "minute";r=0;t=600`},
		"X-RateLimit-Reset":   {"X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 600"},
		"span":                {"X-RateLimit-Reset-Tokens: 10m0s"},
		"garbage, then sense": {"Retry-After: later", "RateLimit-Reset: 600"},
	} {
		for status, closes := range map[int]bool{http.StatusTooManyRequests: true, http.StatusServiceUnavailable: true, 529: true, http.StatusOK: false, http.StatusNotFound: false} {
			config := limit.Config{Name: "provider", Events: 100, Window: time.Hour}
			key := func(*http.Request) string { return name + http.StatusText(status) }
			one := &limit.Transport{Limit: limitOf(t, openRedis(t, redis), config), Key: key}
			other := &limit.Transport{Limit: limitOf(t, openRedis(t, redis), config), Key: key}
			answer(status, headers...)
			got, err := get(t.Context(), one, server.URL)
			must(t, name, errors.Join(err, want("status", got, status)))
			answer(http.StatusOK)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			before := asked()
			got, err = get(ctx, other, server.URL)
			cancel()
			if !closes {
				must(t, name, errors.Join(err, want("status", got, http.StatusOK)))
				continue
			}
			must(t, name, errors.Join(want("deadline", errors.Is(err, limit.ErrDeadline), true), want("requests sent", asked(), before)))
			bucket, err := other.Limit.Take(t.Context(), key(nil), 1)
			must(t, name, errors.Join(err, want("allowed", bucket.Allowed, false), want("spent", bucket.Used, 1),
				want("for ten minutes", bucket.RetryAfter > 9*time.Minute && bucket.RetryAfter <= 10*time.Minute+time.Second, true)))
		}
	}
}

// TestTransportWaits for the time that the server says, and sends the next request then.
func TestTransportWaits(t *testing.T) {
	t.Parallel()
	server, answer, _ := provider(t)
	transport := &limit.Transport{Limit: limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "provider", Events: 100, Window: time.Hour})}
	answer(http.StatusTooManyRequests, "Retry-After: 1")
	began := time.Now()
	got, err := get(t.Context(), transport, server.URL)
	must(t, "the first", errors.Join(err, want("status", got, http.StatusTooManyRequests)))
	answer(http.StatusOK)
	got, err = get(t.Context(), transport, server.URL)
	took := time.Since(began)
	must(t, "the second", errors.Join(err, want("status", got, http.StatusOK), want("waited", took >= time.Second, true)))
}

// TestTransportKeys: each host has a bucket, whatever its case, and hosts do not close each other's.
func TestTransportKeys(t *testing.T) {
	t.Parallel()
	server, _, _ := provider(t)
	target, err := url.Parse(server.URL)
	must(t, "parse", err)
	l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "hosts", Events: 2, Window: time.Hour})
	transport := &limit.Transport{Limit: l, Base: redirecting(target.Host)}
	for _, host := range []string{"A.example", "a.example", "b.example:81", "b.example"} {
		got, err := get(t.Context(), transport, "http://"+host)
		must(t, host, errors.Join(err, want("status", got, http.StatusOK)))
	}
	for key, used := range map[string]int64{"a.example": 2, "b.example:81": 1, "b.example": 1} {
		must(t, key, want("used", usedOf(t, l, key), used))
	}
}

// redirecting sends all requests to one server.
type redirecting string

func (host redirecting) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Host = string(host)
	return http.DefaultTransport.RoundTrip(r)
}

// TestTransportClosesIdleConnections: those of Base, as a client asks.
func TestTransportClosesIdleConnections(t *testing.T) {
	t.Parallel()
	closed := make(chan struct{}, 1)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			closed <- struct{}{}
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "idle", Events: 1, Window: time.Hour})
	client := &http.Client{Transport: &limit.Transport{Limit: l, Base: &http.Transport{}}}
	resp, err := client.Get(server.URL)
	must(t, "get", err)
	_, err = io.Copy(io.Discard, resp.Body)
	must(t, "read", errors.Join(err, resp.Body.Close()))
	client.CloseIdleConnections()
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Error("the connection is open")
	}
	(&http.Client{Transport: &limit.Transport{Limit: l, Base: answering{}}}).CloseIdleConnections()
}

// body notes whether it was closed.
type body struct {
	io.Reader
	closed bool
}

func (b *body) Close() error {
	b.closed = true
	return nil
}

// TestTransportErrors: the body is closed without a request, and OnError decides about a store that is
// away.
func TestTransportErrors(t *testing.T) {
	t.Parallel()
	server, answer, asked := provider(t)
	memory := limit.OpenMemory(limit.Memory{})
	away, err := limit.OpenRedis(limit.Redis{CheckTimeout: 20 * time.Millisecond, Shards: []limit.Shard{{Primary: "127.0.0.1:1"}}})
	must(t, "open", err)
	t.Cleanup(away.Close)
	failing := limitOf(t, away, limit.Config{Name: "api", Events: 10, Window: time.Hour})
	mine := errors.New("mine")
	told := 0
	for name, test := range map[string]struct {
		transport limit.Transport
		want      error
		text      string
	}{
		"no limit":    {limit.Transport{}, nil, "Transport.Limit"},
		"sliding log": {limit.Transport{Limit: limitOf(t, memory, limit.Config{Name: "log", Algorithm: limit.SlidingLog, Events: 10, Window: time.Hour})}, nil, "sliding_log"},
		"concurrency": {limit.Transport{Limit: limitOf(t, memory, limit.Config{Name: "slots", Algorithm: limit.Concurrency, Events: 10})}, nil, "concurrency"},
		"away":        {limit.Transport{Limit: failing}, limit.ErrUnavailable, ""},
		"away, and so decided": {limit.Transport{Limit: failing, OnError: func(_ *http.Request, err error) error {
			return errors.Join(mine, err)
		}}, mine, ""},
	} {
		b := &body{Reader: strings.NewReader("text")}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, b)
		must(t, "request", err)
		resp, err := test.transport.RoundTrip(r)
		if resp != nil {
			_ = resp.Body.Close()
		}
		if err == nil || test.want != nil && !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s: %v", name, err)
		}
		must(t, name, errors.Join(want("closed", b.closed, true), want("requests sent", asked(), 0)))
	}
	answer(http.StatusTooManyRequests, "Retry-After: 600")
	open := &limit.Transport{Limit: failing, OnError: func(_ *http.Request, err error) error {
		if errors.Is(err, limit.ErrUnavailable) {
			told++
		}
		return nil
	}}
	got, err := get(t.Context(), open, server.URL)
	must(t, "sent without a limit", errors.Join(err, want("status", got, http.StatusTooManyRequests), want("told of the wait and of the answer", told, 2)))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	before := asked()
	_, err = get(ctx, open, server.URL)
	must(t, "the server's word counts without the store", errors.Join(want("deadline", errors.Is(err, limit.ErrDeadline), true), want("requests sent", asked(), before)))
}

// answering answers all requests.
type answering http.Header

func (a answering) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header(a), Body: http.NoBody}, nil
}

// TestTransportDelaysLittle: a store that does not answer holds no response back for long, and the server
// is obeyed until it wants requests again.
func TestTransportDelaysLittle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := new(faulty)
		told := 0
		transport := &limit.Transport{
			Limit: limitOf(t, memoryWith(f), limit.Config{Name: "api", Events: 10, Window: time.Hour}), Base: answering{"Retry-After": {"60"}},
			OnError: func(_ *http.Request, err error) error {
				must(t, "told", want("unavailable", errors.Is(err, limit.ErrUnavailable), true))
				told++
				return nil
			},
		}
		began := time.Now()
		transport.Base = answeringThen{transport.Base, func() { f.set(time.Hour, store.ErrUncertain) }}
		_, err := get(t.Context(), transport, "http://a.example")
		must(t, "the answer", errors.Join(err, want("took", time.Since(began), 100*time.Millisecond), want("told", told, 1)))
		f.set(0, nil)
		_, err = get(t.Context(), transport, "http://b.example")
		must(t, "another host", err)
		f.set(0, nil)
		began = time.Now()
		_, err = get(t.Context(), transport, "http://a.example")
		waited := time.Since(began)
		must(t, "the next", errors.Join(err, want("waited", waited > 59*time.Second && waited < 62*time.Second, true)))
	})
}

// answeringThen does something once a request is answered.
type answeringThen struct {
	http.RoundTripper
	then func()
}

func (a answeringThen) RoundTrip(r *http.Request) (*http.Response, error) {
	a.then()
	return a.RoundTripper.RoundTrip(r)
}
