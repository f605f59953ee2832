package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// batched are the algorithms that go with batch.
var batched = []string{"fixed_window", "sliding_window"}

// batchZones are zones for each of the batched algorithms and each batch, by the
// names that batchZone makes.
func batchZones(batches []string, options ...string) (zones string) {
	for _, algorithm := range batched {
		for _, batch := range batches {
			zones += pathZone(batchZone(algorithm, batch),
				append(options[:len(options):len(options)], "algorithm "+algorithm, "charge before", "batch "+batch)...)
		}
	}
	return zones
}

func batchZone(algorithm, batch string) string { return algorithm + "." + batch }

// taken is what came of requests of one client.
type taken struct {
	mu              sync.Mutex
	served, refused int64
	// lastServed is when the last one was sent that was served, and firstRefused
	// when the first refusal was received.
	lastServed, firstRefused time.Time
}

// takeAlice makes a request of alice's that costs so much.
func (k *taken) takeAlice(t *testing.T, c *caddytest.Caddy, zone string, cost int64) error {
	a, err := c.TryProbe(t.Context(), "/"+zone, "X-Key: alice", fmt.Sprint("X-Cost: ", cost))
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if a.Status == http.StatusOK && a.IsLimited() {
		k.served += cost
		if a.Sent.After(k.lastServed) {
			k.lastServed = a.Sent
		}
		return nil
	}
	k.refused++
	if k.firstRefused.IsZero() || a.Received.Before(k.firstRefused) {
		k.firstRefused = a.Received
	}
	return a.Refuses(zone)
}

// TestBatchNeverExceedsEvents, and one Caddy uses them up: it refuses nobody as
// long as the store or it has some.
func TestBatchNeverExceedsEvents(t *testing.T) {
	const (
		events  = 600
		workers = 48
		rounds  = 16
	)
	batches := []string{"50", "7", "auto"}
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprint(n, " Caddys"), func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			caddys := caddytest.StartMany(t, n, zonesSite(servers.Store(), batchZones(batches, fmt.Sprint("events ", events)), "respond ok"))
			for _, algorithm := range batched {
				for _, batch := range batches {
					t.Run(algorithm+", batch "+batch, func(t *testing.T) {
						zone := batchZone(algorithm, batch)
						var all taken
						caddytest.Together(t, workers, func(worker int) error {
							for range rounds {
								if err := all.takeAlice(t, caddys[worker%n], zone, 1); err != nil {
									return err
								}
							}
							return nil
						})
						atOnce := all.served
						must(t, "requests", want(fmt.Sprintf("%d being served, which is too many,", atOnce), atOnce > events, false))
						if n == 1 {
							must(t, "one Caddy", errors.Join(want("number of requests served", atOnce, events),
								want("a refusal being received before the last request was sent that was served", all.firstRefused.Before(all.lastServed), false)))
						}
						// What lies in one Caddy comes back, and then another one has it.
						eventually(t, "all events are used up", func() error {
							for _, c := range caddys {
								if err := all.takeAlice(t, c, zone, 1); err != nil {
									t.Fatal(err)
								}
							}
							return want("number of requests served", all.served, events)
						})
						servers.AwaitUsed(t, zone, "alice", events)
						for _, c := range caddys {
							must(t, "request too many", c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
						}
						t.Logf("%d served at once, %d later", atOnce, all.served-atOnce)
					})
				}
			}
		})
	}
}

// TestBatchRefusesNobodyWhileThereIsRoom: many requests wait for a batch at the
// same time, some in vain, and none is refused for that.
func TestBatchRefusesNobodyWhileThereIsRoom(t *testing.T) {
	const workers, rounds = 64, 30
	batches := []string{"50", "3", "auto"}
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprint("far ", far), func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 0)
			store := servers.Store()
			if far {
				proxy := redistest.StartProxy(t, servers[0].Primary.Addr())
				must(t, "delay replies", proxy.Delay(10*time.Millisecond))
				store = strings.Replace(store, servers[0].Primary.Addr(), proxy.Addr(), 1)
			}
			c := startWith(t, store, batchZones(batches, "events 100000", "cost {header.X-Cost}"), "respond ok")
			for _, algorithm := range batched {
				for _, batch := range batches {
					t.Run(algorithm+", batch "+batch, func(t *testing.T) {
						zone := batchZone(algorithm, batch)
						var all taken
						caddytest.Together(t, workers, func(worker int) error {
							for i := range rounds {
								// Not all fit into what another one fetches.
								cost := []int64{1, 1, 1, 2, 1, 7, 1, 40}[(worker+i)%8]
								if err := all.takeAlice(t, c, zone, cost); err != nil {
									return err
								}
							}
							return nil
						})
						must(t, "requests", want("number of those refused", all.refused, 0))
						servers.AwaitUsed(t, zone, "alice", all.served)
					})
				}
			}
		})
	}
}

// TestBatchLeftoversCountForALargerRequest: what lies in this process and what the
// store has left are enough together.
func TestBatchLeftoversCountForALargerRequest(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	c := startWith(t, servers.Store(), batchZones([]string{"40"}, "events 100", "cost {header.X-Cost}"), "respond ok")
	for _, algorithm := range batched {
		for client, costs := range map[string][]int64{
			"batches": {30, 30, 30, 10},
			"more":    {1, 70, 29},
			"all":     {1, 99},
		} {
			t.Run(algorithm+", "+client, func(t *testing.T) {
				zone, used := batchZone(algorithm, "40"), int64(0)
				for _, cost := range costs {
					used += cost
					a := c.Probe("/"+zone, "X-Key: "+client, fmt.Sprint("X-Cost: ", cost))
					must(t, fmt.Sprint("request that makes it ", used), a.Shows(http.StatusOK, 100, used))
				}
				servers.AwaitUsed(t, zone, client, 100)
			})
		}
	}
}

// TestBatchDiesWithItsWindow: no window admits what was taken in another one.
func TestBatchDiesWithItsWindow(t *testing.T) {
	const events = 60
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartShards(t, 1, 1)
	caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store(),
		batchZones([]string{"20", "auto"}, fmt.Sprint("events ", events), "window 2s"), "respond ok"))
	for _, batch := range []string{"20", "auto"} {
		t.Run("batch "+batch, func(t *testing.T) {
			t.Parallel()
			zone := batchZone("fixed_window", batch)
			var admitted caddytest.Tally
			deadline := time.Now().Add(caddytest.WaitLimit)
			caddytest.Together(t, 2*len(caddys), func(worker int) error {
				for admitted.Clients() < 4 && time.Now().Before(deadline) {
					a, err := caddys[worker%2].TryProbe(t.Context(), "/"+zone, "X-Key: alice")
					switch {
					case err != nil:
						return err
					case a.Status == http.StatusOK:
						admitted.Add(fmt.Sprint(a.Reset))
					}
					time.Sleep(5 * time.Millisecond)
				}
				return nil
			})
			for reset, n := range admitted.N {
				must(t, "the window until "+reset, want(fmt.Sprintf("having admitted %d, which is too many,", n), n > events, false))
			}
			must(t, "windows", want("being more than two", len(admitted.N) > 2, true))
			t.Logf("admitted %v", admitted.N)
		})
	}
}
