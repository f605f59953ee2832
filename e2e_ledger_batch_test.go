package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

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
func (k *taken) takeAlice(t *testing.T, c *caddyProcess, zone string, cost int64) error {
	a, err := c.tryProbe(t.Context(), "/"+zone, "X-Key: alice", fmt.Sprint("X-Cost: ", cost))
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if a.status == http.StatusOK && a.isLimited() {
		k.served += cost
		if a.sent.After(k.lastServed) {
			k.lastServed = a.sent
		}
		return nil
	}
	k.refused++
	if k.firstRefused.IsZero() || a.received.Before(k.firstRefused) {
		k.firstRefused = a.received
	}
	return a.refuses(zone)
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
			servers := startShards(t, 1, 1)
			caddys := startCaddys(t, n, zonesSite(servers.store(), batchZones(batches, fmt.Sprint("events ", events)), "respond ok"))
			for _, algorithm := range batched {
				for _, batch := range batches {
					t.Run(algorithm+", batch "+batch, func(t *testing.T) {
						zone := batchZone(algorithm, batch)
						var all taken
						together(t, workers, func(worker int) error {
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
						servers.awaitUsed(t, zone, "alice", events)
						for _, c := range caddys {
							must(t, "request too many", c.probe("/"+zone, "X-Key: alice").refuses(zone))
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
			servers := startShards(t, 1, 0)
			store := servers.store()
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
						together(t, workers, func(worker int) error {
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
						servers.awaitUsed(t, zone, "alice", all.served)
					})
				}
			}
		})
	}
}

// TestBatchLeftoversCountForALargerRequest: what lies in this process and what the
// store has left are enough together.
func TestBatchLeftoversCountForALargerRequest(t *testing.T) {
	servers := startShards(t, 1, 0)
	c := startWith(t, servers.store(), batchZones([]string{"40"}, "events 100", "cost {header.X-Cost}"), "respond ok")
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
					a := c.probe("/"+zone, "X-Key: "+client, fmt.Sprint("X-Cost: ", cost))
					must(t, fmt.Sprint("request that makes it ", used), a.shows(http.StatusOK, 100, used))
				}
				servers.awaitUsed(t, zone, client, 100)
			})
		}
	}
}

// TestBatchDiesWithItsWindow: no window admits what was taken in another one.
func TestBatchDiesWithItsWindow(t *testing.T) {
	const events = 60
	t.Parallel() // it spends its time waiting
	servers := startShards(t, 1, 1)
	caddys := startCaddys(t, 2, zonesSite(servers.store(),
		batchZones([]string{"20", "auto"}, fmt.Sprint("events ", events), "window 2s"), "respond ok"))
	for _, batch := range []string{"20", "auto"} {
		t.Run("batch "+batch, func(t *testing.T) {
			t.Parallel()
			zone := batchZone("fixed_window", batch)
			var admitted tally
			deadline := time.Now().Add(waitLimit)
			together(t, 2*len(caddys), func(worker int) error {
				for admitted.clients() < 4 && time.Now().Before(deadline) {
					a, err := caddys[worker%2].tryProbe(t.Context(), "/"+zone, "X-Key: alice")
					switch {
					case err != nil:
						return err
					case a.status == http.StatusOK:
						admitted.add(fmt.Sprint(a.reset))
					}
					time.Sleep(5 * time.Millisecond)
				}
				return nil
			})
			for reset, n := range admitted.n {
				must(t, "the window until "+reset, want(fmt.Sprintf("having admitted %d, which is too many,", n), n > events, false))
			}
			must(t, "windows", want("being more than two", len(admitted.n) > 2, true))
			t.Logf("admitted %v", admitted.n)
		})
	}
}
