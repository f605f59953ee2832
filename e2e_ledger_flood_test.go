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
func flood(t *testing.T, caddys []*caddyProcess, path string) (served, refused []answer) {
	t.Helper()
	var mu sync.Mutex
	together(t, floodSize, func(i int) error {
		a, err := caddys[i%len(caddys)].tryProbe(t.Context(), path, "X-Key: alice")
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		switch {
		case a.status == http.StatusOK && a.isLimited():
			served = append(served, a)
		case a.status == http.StatusTooManyRequests:
			refused = append(refused, a)
		default:
			return fmt.Errorf("status %d, headers %v", a.status, a.header)
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
	servers := startShards(t, 1, 1)
	backend := startLateBackend(t)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, floodZones("charge after"), "reverse_proxy "+backend.addr)
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					backend.restart()
					served, refused := flood(t, []*caddyProcess{c}, "/"+algorithm)
					must(t, "flood", errors.Join(want("number of requests served", len(served), floodEvents),
						want("number of those that reached the backend", backend.arrived.Load(), floodEvents)))
					early := 0
					for _, a := range refused {
						must(t, "refusal", a.refuses(algorithm))
						if a.received.Before(backend.settles()) {
							// Only what is in flight is in its way.
							must(t, "refusal while all is in flight", want("Retry-After", a.retryAfter, 1))
							early++
						}
					}
					t.Logf("%d served, %d refused, %d of them while all was in flight", len(served), len(refused), early)
					if store != "" {
						servers.awaitUsed(t, algorithm, "alice", floodEvents)
					}
					eventually(t, "the refusals tell how long it takes for something to drain", func() error {
						a := c.probe("/"+algorithm, "X-Key: alice")
						return errors.Join(a.refuses(algorithm), want("waiting for long", a.retryAfter > 1000, true))
					})
				})
			}
			if store == "" {
				return
			}
			client.CloseIdleConnections() // Caddy waits for those that were never used
			c.stop()
			for _, algorithm := range counting {
				must(t, "Redis, at the end", want("count of "+algorithm, servers.content(t, algorithm, "alice").used, floodEvents))
			}
		})
	}
}

// TestRequestsInFlightRefuseOthersForASecond, for so long as none of them ends.
// One that turns out to be free makes room for another.
func TestRequestsInFlightRefuseOthersForASecond(t *testing.T) {
	servers := startShards(t, 1, 1)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			backend := startSlowBackend(t)
			c := startWith(t, store, floodZones("charge after", "free_status 200"), "reverse_proxy "+backend.server.Listener.Addr().String())
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					answers := make(chan answer, floodSize)
					var ended sync.WaitGroup
					for range floodSize {
						ended.Go(func() {
							a, err := c.tryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
							if err != nil {
								a = answer{body: err.Error()}
							}
							answers <- a
						})
					}
					next := func() answer {
						select {
						case a := <-answers:
							return a
						case <-time.After(waitLimit):
							t.Fatalf("no answer, while %d requests are at the backend", len(backend.arrived))
							return answer{}
						}
					}
					for i := range floodSize - floodEvents {
						a := next()
						must(t, fmt.Sprint("refusal ", i, " ", a.body), errors.Join(a.refuses(algorithm), want("Retry-After", a.retryAfter, 1)))
					}
					for range floodEvents {
						close(backend.await(t).end)
					}
					for range floodEvents {
						must(t, "request that is served", want("status", next().status, http.StatusOK))
					}
					ended.Wait()
					// Nothing was charged.
					again := backend.hold(t, c, "/"+algorithm, "X-Key: alice")
					must(t, "request after all were free", backend.finish(t, again)[0].shows(http.StatusOK, floodEvents, 0))
				})
			}
		})
	}
}
