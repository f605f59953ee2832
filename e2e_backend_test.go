package shardlimit_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// slowBackend is a server that begins to answer when it is told to. To /stream
// it begins at once, and ends when it is told to.
type slowBackend struct {
	server  *httptest.Server
	arrived chan *arrival
}

// arrival is a request that is at the backend, which answers it when end is
// closed.
type arrival struct{ end chan struct{} }

func startSlowBackend(t *testing.T) *slowBackend {
	t.Helper()
	b := &slowBackend{arrived: make(chan *arrival, 100)}
	ended := make(chan struct{})
	b.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			_, _ = io.WriteString(w, "first")
			_ = http.NewResponseController(w).Flush()
		}
		a := &arrival{make(chan struct{})}
		b.arrived <- a
		select {
		case <-a.end:
		case <-r.Context().Done():
		case <-ended:
		}
		_, _ = io.WriteString(w, "last")
	}))
	t.Cleanup(func() {
		close(ended)
		b.server.Close()
	})
	return b
}

// await waits until a request has arrived, and so was admitted.
func (b *slowBackend) await(t *testing.T) *arrival {
	t.Helper()
	select {
	case a := <-b.arrived:
		return a
	case <-time.After(waitLimit):
		t.Fatal("no request arrives at the backend")
		return nil
	}
}

// running is a request that waits for its answer.
type running struct {
	answer chan answer
	err    chan error
	// at is where it is, if it was seen to arrive.
	at *arrival
}

// start sends a request and returns when the backend has it.
func (b *slowBackend) start(t *testing.T, c *caddyProcess, path string, headers ...string) running {
	t.Helper()
	r := running{answer: make(chan answer, 1), err: make(chan error, 1)}
	go func() {
		a, err := c.tryAsk(path, headers...)
		if err != nil {
			r.err <- err
			return
		}
		r.answer <- a
	}()
	r.at = b.await(t)
	return r
}

// finish lets requests end that have arrived, and returns their answers.
func (b *slowBackend) finish(t *testing.T, requests ...running) []answer {
	t.Helper()
	for _, r := range requests {
		close(r.at.end)
	}
	answers := make([]answer, len(requests))
	for i, r := range requests {
		select {
		case answers[i] = <-r.answer:
		case err := <-r.err:
			t.Fatal(err)
		case <-time.After(waitLimit):
			t.Fatal("no answer")
		}
	}
	return answers
}

// proxySite is apiSite with a backend.
func proxySite(store string, events int, backend string) string {
	return limitedSite(store, events, "1h", "reverse_proxy "+backend)
}
