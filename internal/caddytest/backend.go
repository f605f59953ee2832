package caddytest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// SlowBackend is a server that answers on command. A request of /stream gets the
// beginning of its answer at once.
type SlowBackend struct {
	Server *httptest.Server
	// Arrived has each request that has arrived.
	Arrived chan *Arrival
}

// Arrival is a request that is at the backend, which answers it when End is
// closed.
type Arrival struct{ End chan struct{} }

// StartSlowBackend starts one, and closes it when the test ends.
func StartSlowBackend(t *testing.T) *SlowBackend {
	t.Helper()
	b := &SlowBackend{Arrived: make(chan *Arrival, 100)}
	ended := make(chan struct{})
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			_, _ = io.WriteString(w, "first")
			_ = http.NewResponseController(w).Flush()
		}
		a := &Arrival{make(chan struct{})}
		b.Arrived <- a
		select {
		case <-a.End:
		case <-r.Context().Done():
		case <-ended:
		}
		_, _ = io.WriteString(w, "last")
	}))
	t.Cleanup(func() {
		close(ended)
		b.Server.Close()
	})
	return b
}

// Await waits until a request has arrived, and so was admitted.
func (b *SlowBackend) Await(t *testing.T) *Arrival {
	t.Helper()
	return b.awaitOf(t, Running{})
}

// awaitOf is Await for one request, and fails at once if the request ends elsewhere.
func (b *SlowBackend) awaitOf(t *testing.T, r Running) *Arrival {
	t.Helper()
	select {
	case a := <-b.Arrived:
		return a
	case a := <-r.Answer:
		t.Fatalf("the request does not arrive at the backend: its answer is %+v", a)
	case err := <-r.Err:
		t.Fatalf("the request does not arrive at the backend: %v", err)
	case <-time.After(Patience):
		t.Fatal("no request arrives at the backend")
	}
	return nil
}

// Running is a request that waits for its answer. One of its channels gets a
// value.
type Running struct {
	Answer chan Answer
	Err    chan error
	// at is the request at the backend, if Await has seen it.
	at *Arrival
}

// Begin sends a request as TryProbe does.
func (c *Caddy) Begin(ctx context.Context, path string, headers ...string) Running {
	return begin(func() (Answer, error) {
		a, err := c.TryProbe(ctx, path, headers...)
		if err != nil {
			err = fmt.Errorf("%s: %w", path, err)
		}
		return a, err
	})
}

func begin(ask func() (Answer, error)) Running {
	r := Running{Answer: make(chan Answer, 1), Err: make(chan error, 1)}
	go func() {
		a, err := ask()
		if err != nil {
			r.Err <- err
			return
		}
		r.Answer <- a
	}()
	return r
}

// Start sends a request as TryAsk does, and returns when the backend has it.
func (b *SlowBackend) Start(t *testing.T, c *Caddy, path string, headers ...string) Running {
	t.Helper()
	r := begin(func() (Answer, error) { return c.TryAsk(path, headers...) })
	r.at = b.awaitOf(t, r)
	return r
}

// Hold is Start for zones of any algorithm.
func (b *SlowBackend) Hold(t *testing.T, c *Caddy, path string, headers ...string) Running {
	t.Helper()
	r := c.Begin(t.Context(), path, headers...)
	r.at = b.awaitOf(t, r)
	return r
}

// Finish ends requests that have arrived, and returns their answers.
func (b *SlowBackend) Finish(t *testing.T, requests ...Running) []Answer {
	t.Helper()
	for _, r := range requests {
		close(r.at.End)
	}
	answers := make([]Answer, len(requests))
	for i, r := range requests {
		answers[i] = r.Ends(t)
	}
	return answers
}

// Ends waits for the answer.
func (r Running) Ends(t *testing.T) Answer {
	t.Helper()
	select {
	case a := <-r.Answer:
		return a
	case err := <-r.Err:
		t.Fatal(err)
	case <-time.After(Patience):
		t.Fatal("no answer")
	}
	return Answer{}
}

// Leaves waits until the client has given up.
func (r Running) Leaves(t *testing.T) {
	t.Helper()
	select {
	case a := <-r.Answer:
		t.Fatalf("a request that is given up is answered: %d %v", a.Status, a.Header)
	case err := <-r.Err:
		Must(t, "a request that is given up", Want("its error being that", errors.Is(err, context.Canceled), true))
	}
}
