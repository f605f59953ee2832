package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// A flood is that many requests of one client at the same time, each on a
// connection of its own, and what one limit admits of them.
const (
	floodSize   = 256
	floodEvents = 100
	// floodTakes is how long the backend takes for each.
	floodTakes = 200 * time.Millisecond
)

// lateBackend is a server that answers what it is asked after floodTakes.
type lateBackend struct {
	addr string
	// arrived is how many requests it has seen.
	arrived atomic.Int64
	mu      sync.Mutex
	first   time.Time
}

func startLateBackend(t *testing.T) *lateBackend {
	t.Helper()
	b := new(lateBackend)
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		b.arrived.Add(1)
		b.mu.Lock()
		if b.first.IsZero() {
			b.first = time.Now()
		}
		b.mu.Unlock()
		time.Sleep(floodTakes)
	}))
	t.Cleanup(server.Close)
	b.addr = server.Listener.Addr().String()
	return b
}

// restart forgets what has arrived.
func (b *lateBackend) restart() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.first = time.Time{}
	b.arrived.Store(0)
}

// settles is the earliest instant at which anything that has arrived can be
// answered, and so settled.
func (b *lateBackend) settles() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.first.Add(floodTakes)
}

// flood sends a flood, spread over Caddys, and returns the answers.
func flood(t *testing.T, caddys []*caddytest.Caddy, path string) (served, refused []caddytest.Answer) {
	t.Helper()
	var mu sync.Mutex
	caddytest.Together(t, floodSize, func(i int) error {
		a, err := caddys[i%len(caddys)].TryProbe(t.Context(), path, "X-Key: alice")
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		switch {
		case a.Status == http.StatusOK && a.IsLimited():
			served = append(served, a)
		case a.Status == http.StatusTooManyRequests:
			refused = append(refused, a)
		default:
			return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
		}
		return nil
	})
	return served, refused
}

// floodZones are zones for a flood, one for each algorithm.
func floodZones(options ...string) (zones string) {
	for _, algorithm := range counting {
		zones += pathZone(algorithm, append(options[:len(options):len(options)], "algorithm "+algorithm, fmt.Sprint("events ", floodEvents))...)
	}
	return zones
}

// TestOneCaddyNeverAdmitsMoreThanTheLimit although it charges what it admits
// after the responses: what is in flight counts.
func TestOneCaddyNeverAdmitsMoreThanTheLimit(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	backend := startLateBackend(t)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, floodZones("charge after"), "reverse_proxy "+backend.addr)
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					backend.restart()
					served, refused := flood(t, []*caddytest.Caddy{c}, "/"+algorithm)
					must(t, "flood", errors.Join(want("number of requests served", len(served), floodEvents),
						want("number of those that reached the backend", backend.arrived.Load(), floodEvents)))
					early := 0
					for _, a := range refused {
						must(t, "refusal", a.Refuses(algorithm))
						if a.Received.Before(backend.settles()) {
							// Only what is in flight is in its way.
							must(t, "refusal while all is in flight", want("Retry-After", a.RetryAfter, 1))
							early++
						}
					}
					t.Logf("%d served, %d refused, %d of them while all was in flight", len(served), len(refused), early)
					if store != "" {
						servers.AwaitUsed(t, algorithm, "alice", floodEvents)
					}
					eventually(t, "the refusals tell how long it takes for something to drain", func() error {
						a := c.Probe("/"+algorithm, "X-Key: alice")
						return errors.Join(a.Refuses(algorithm), want("waiting for long", a.RetryAfter > 1000, true))
					})
				})
			}
			if store == "" {
				return
			}
			caddytest.Client.CloseIdleConnections() // Caddy waits for those that were never used
			c.Stop()
			for _, algorithm := range counting {
				must(t, "Redis, at the end", want("count of "+algorithm, servers.Content(t, algorithm, "alice").Used, floodEvents))
			}
		})
	}
}

// TestRequestsInFlightRefuseOthersForASecond, for so long as none of them ends.
// One that turns out to be free makes room for another.
func TestRequestsInFlightRefuseOthersForASecond(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			backend := caddytest.StartSlowBackend(t)
			c := startWith(t, store, floodZones("charge after", "free_status 200"), "reverse_proxy "+backend.Server.Listener.Addr().String())
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					answers := make(chan caddytest.Answer, floodSize)
					var ended sync.WaitGroup
					for range floodSize {
						ended.Go(func() {
							a, err := c.TryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
							if err != nil {
								a = caddytest.Answer{Body: err.Error()}
							}
							answers <- a
						})
					}
					next := func() caddytest.Answer {
						select {
						case a := <-answers:
							return a
						case <-time.After(caddytest.WaitLimit):
							t.Fatalf("no answer, while %d requests are at the backend", len(backend.Arrived))
							return caddytest.Answer{}
						}
					}
					for i := range floodSize - floodEvents {
						a := next()
						must(t, fmt.Sprint("refusal ", i, " ", a.Body), errors.Join(a.Refuses(algorithm), want("Retry-After", a.RetryAfter, 1)))
					}
					for range floodEvents {
						close(backend.Await(t).End)
					}
					for range floodEvents {
						must(t, "request that is served", want("status", next().Status, http.StatusOK))
					}
					ended.Wait()
					// Nothing was charged.
					again := backend.Hold(t, c, "/"+algorithm, "X-Key: alice")
					must(t, "request after all were free", backend.Finish(t, again)[0].Shows(http.StatusOK, floodEvents, 0))
				})
			}
		})
	}
}
