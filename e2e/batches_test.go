package e2e

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
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// TestSequentialRequestsAreCountedExactly checks that a client that waits for each response sees
// its exact count and is refused exactly at its limit, although charges follow responses, checks go
// to a replica, and the primary's time is an estimate there.
func TestSequentialRequestsAreCountedExactly(t *testing.T) {
	t.Parallel()
	const events = 3
	clients := sweep.Size(16, 400)
	servers := caddytest.StartShards(t, 1, 1)
	c := startWith(t, servers.Store(), zonesPerAlgorithm(fmt.Sprint("events ", events)), "respond ok")
	for _, algorithm := range counting {
		t.Run(algorithm, func(t *testing.T) {
			caddytest.Together(t, 2, func(worker int) error {
				for i := range clients / 2 {
					key := fmt.Sprint("X-Key: ", worker, "-", i)
					for used := range int64(events) {
						a, err := c.TryProbe(t.Context(), "/"+algorithm, key)
						if err := errors.Join(err, a.Shows(200, events, used+1)); err != nil {
							return fmt.Errorf("client %d, request %d: %w", i, used+1, err)
						}
					}
					a, err := c.TryProbe(t.Context(), "/"+algorithm, key)
					if err := errors.Join(err, a.Refuses(algorithm), want("used", a.Used, events)); err != nil {
						return fmt.Errorf("client %d, request too many: %w", i, err)
					}
				}
				return nil
			})
		})
	}
}

// batched are the algorithms that support batch.
var batched = []string{"fixed_window", "sliding_window"}

// batchZones returns a zone for each of the batched algorithms and each batch, named by batchZone.
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

// taken counts the outcomes of one client's requests.
type taken struct {
	mu              sync.Mutex
	served, refused int64
	// lastServed is when the last served request was sent, firstRefused when the first refusal
	// arrived.
	lastServed, firstRefused time.Time
}

// takeAlice sends a request of alice with this cost.
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

// TestBatchNeverExceedsEvents also checks that a single Caddy uses up all events: it refuses no
// request while the store or its batch has some.
func TestBatchNeverExceedsEvents(t *testing.T) {
	t.Parallel()
	const (
		events  = 150
		workers = 20
		rounds  = 10
	)
	batches := []string{"20", "7", "auto"}
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
								want("a refusal preceding the last request served", all.firstRefused.Before(all.lastServed), false)))
						}
						// A Caddy returns its unused batch, which another one then takes.
						eventually(t, "all events are used up", func() error {
							for _, c := range caddys {
								must(t, "take", all.takeAlice(t, c, zone, 1))
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

// TestBatchRefusesNoRequestWhileThereIsRoom has many requests wait for one batch, which does not
// cover them all.
func TestBatchRefusesNoRequestWhileThereIsRoom(t *testing.T) {
	t.Parallel()
	const workers, rounds = 32, 8
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
								// Not every cost fits into the batch that another request fetches.
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

// TestBatchLeftoversCountForALargerRequest admits a request that needs both the rest of a batch and
// the rest in the store.
func TestBatchLeftoversCountForALargerRequest(t *testing.T) {
	t.Parallel()
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

// TestBatchDiesWithItsWindow checks that no window admits from a batch of another one.
func TestBatchDiesWithItsWindow(t *testing.T) {
	const events = 20
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartShards(t, 1, 1)
	caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store(),
		batchZones([]string{"7", "auto"}, fmt.Sprint("events ", events), "window 2s"), "respond ok"))
	for _, batch := range []string{"7", "auto"} {
		t.Run("batch "+batch, func(t *testing.T) {
			t.Parallel()
			zone := batchZone("fixed_window", batch)
			var admitted caddytest.Tally
			deadline := time.Now().Add(caddytest.Patience)
			caddytest.Together(t, 2*len(caddys), func(worker int) error {
				for admitted.Clients() < 3 && time.Now().Before(deadline) {
					a, err := caddys[worker%2].TryProbe(t.Context(), "/"+zone, "X-Key: alice")
					switch {
					case err != nil:
						return err
					case a.Status == http.StatusOK:
						admitted.Add(fmt.Sprint(a.Reset))
					}
					time.Sleep(40 * time.Millisecond) // a pace that exceeds the limit of each window
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

// takesBatch sends requests of a client until Redis has counted more than they cost, and returns
// their number.
func takesBatch(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, zone, client string, headers ...string) (asked int64) {
	t.Helper()
	eventually(t, "a batch is taken", func() error {
		c.Probe("/"+zone, append(headers, "X-Key: "+client)...)
		asked++
		return want("Redis having more than was asked for", servers.Content(t, zone, client).Used > asked, true)
	})
	return asked
}

// TestUnusedBatchIsReturned when it stays idle, and when Caddy can no longer use it.
func TestUnusedBatchIsReturned(t *testing.T) {
	t.Parallel()
	site := func(servers caddytest.Shards, options ...string) string {
		return zonesSite(servers.Store(options...), batchZones([]string{"50", "auto"}, "events 100000"), "respond ok")
	}
	for name, end := range map[string]func(*caddytest.Caddy, caddytest.Shards){
		"idle":                 func(*caddytest.Caddy, caddytest.Shards) {},
		"stopped":              func(c *caddytest.Caddy, _ caddytest.Shards) { c.Stop() },
		"store of no config":   func(c *caddytest.Caddy, _ caddytest.Shards) { c.MustLoad(unlimitedSite) },
		"config replaced":      func(c *caddytest.Caddy, s caddytest.Shards) { c.MustLoad(site(s)) },
		"connections replaced": func(c *caddytest.Caddy, s caddytest.Shards) { c.MustLoad(site(s, "pool_size 2")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 2, 1)
			c := caddytest.Start(t, site(servers))
			asked := map[string]int64{}
			for _, algorithm := range batched {
				for _, batch := range []string{"50", "auto"} {
					zone := batchZone(algorithm, batch)
					asked[zone] = takesBatch(t, c, servers, zone, "alice")
				}
			}
			start := time.Now()
			end(c, servers)
			for zone, n := range asked {
				if name == "stopped" {
					must(t, "after Caddy has ended", want("what is used of zone "+zone, servers.Content(t, zone, "alice").Used, n))
					continue
				}
				servers.AwaitUsed(t, zone, "alice", n)
			}
			t.Logf("%v were asked for; the rest was returned within %v", asked, time.Since(start).Round(10*time.Millisecond))
			if name == "stopped" || name == "store of no config" {
				return
			}
			for zone, n := range asked {
				must(t, "request after the return", c.Probe("/"+zone, "X-Key: alice").Shows(http.StatusOK, 100000, n+1))
			}
			c.Unload()
			for zone, n := range asked {
				must(t, "at the end", want("what is used of zone "+zone, servers.Content(t, zone, "alice").Used, n+1))
			}
		})
	}
}

// TestBatchRefundsCostNoCall checks that the refund of a free response stays in the batch for the
// next request.
func TestBatchRefundsCostNoCall(t *testing.T) {
	t.Parallel()
	const events, requests = 20, 40
	servers := caddytest.StartShards(t, 1, 0)
	c := startWith(t, servers.Store(), batchZones([]string{"10"}, fmt.Sprint("events ", events)), byStatus)
	for _, algorithm := range batched {
		t.Run(algorithm, func(t *testing.T) {
			zone := batchZone(algorithm, "10")
			// Without refunds these would exceed the limit.
			before, start, paid := callsTo(t, servers), time.Now(), int64(0)
			for i := range requests {
				status := http.StatusNotModified
				if i%10 == 9 {
					status = http.StatusOK
					paid++
				}
				a := c.Probe("/"+zone, "X-Key: alice", fmt.Sprint("X-Status: ", status))
				must(t, fmt.Sprint("request ", i+1), a.Shows(status, events, paid))
			}
			made := callsTo(t, servers) - before
			// On a busy machine a batch may idle for a second, and is returned and taken again.
			most := 1 + 2*int64(time.Since(start)/time.Second)
			must(t, "Redis", want(fmt.Sprintf("having got %d calls, which is more than %d,", made, most), made > most, false))
			servers.AwaitUsed(t, zone, "alice", paid)
			t.Logf("%d requests, %d of them free, cost %d calls", requests, requests-paid, made)
		})
	}
}

// TestBatchRegainsWhatAnotherZoneRefuses checks that a refused request takes nothing.
func TestBatchRegainsWhatAnotherZoneRefuses(t *testing.T) {
	t.Parallel()
	for _, algorithm := range batched {
		for _, mode := range modes {
			t.Run(algorithm+", "+mode, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := caddytest.StartShards(t, 1, 0)
				zones := zoneWith("first", "algorithm "+algorithm, "charge before", "events 30", "batch 10") + zoneWith("second", "charge "+mode, "events 6")
				c := startWith(t, servers.Store(), zones, "respond ok")
				served, refused := int64(0), 0
				for range 40 {
					if a := c.Probe("/", "X-Key: alice"); a.Status == http.StatusOK {
						served++
					} else {
						must(t, "refusal", a.Refuses("second"))
						refused++
					}
				}
				must(t, "requests", errors.Join(want("number of those served", served, 6), want("number of those refused", refused, 34)))
				servers.AwaitUsed(t, "second", "alice", 6)
				servers.AwaitUsed(t, "first", "alice", 6)
			})
		}
	}
}

// TestBatchShare checks that all Caddys together hold no more than their share of the limit.
func TestBatchShare(t *testing.T) {
	t.Parallel()
	const events, workers, share = 1500, 6, 10
	options := []string{fmt.Sprint("events ", events), "batch auto", "charge before"}
	servers := caddytest.StartShards(t, 1, 0)
	caddys := caddytest.StartMany(t, 3, zonesSite(servers.Store(), zoneWith("api", options...), "respond ok"))
	var served caddytest.Tally
	for _, c := range caddys {
		must(t, "first request", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
		served.Add("alice")
	}
	// Each Caddy learns the number of Caddys when it renews its registration.
	said, primary := map[string]float64{}, servers[0].Primary.Client()
	eventually(t, "the Caddys know of each other", func() error {
		leases, err := primary.Keys(t.Context(), "*:\\*processes:*").Result()
		if err == nil {
			err = want("number of buckets", len(leases), 1)
		}
		if err != nil {
			return err
		}
		now, err := primary.ZRangeWithScores(t.Context(), leases[0], 0, -1).Result()
		if err == nil {
			err = want("number of leases", len(now), len(caddys))
		}
		if err != nil {
			return err
		}
		renewed := 0
		for _, lease := range now {
			id := fmt.Sprint(lease.Member)
			if _, known := said[id]; !known {
				said[id] = lease.Score
			}
			if lease.Score > said[id] {
				renewed++
			}
		}
		return want("number of those renewed", renewed, len(caddys))
	})
	stop := caddytest.StartTraffic(t, workers, func(worker, _ int) error {
		a, err := caddys[worker%len(caddys)].TryProbe(t.Context(), "/", "X-Key: alice")
		if err != nil || a.Status != http.StatusOK {
			return errors.Join(err, want("status", a.Status, http.StatusOK))
		}
		served.Add("alice")
		return nil
	})
	most := int64(0)
	for start := time.Now(); served.Total() < events*3/5; {
		// Requests served between the two reads are no longer held.
		used := servers.Content(t, "api", "alice").Used
		most = max(most, used-served.Total())
		must(t, "requests", want("taking longer than a test waits", time.Since(start) > caddytest.Patience, false))
		time.Sleep(5 * time.Millisecond) // every batch is seen, and most of the time left to the requests
	}
	stop()
	// A worker may have been served without having counted it yet.
	const bound int64 = events*share/100 + workers
	must(t, "Caddys", want(fmt.Sprintf("holding %d of %d, which is more than %d,", most, events, bound), most > bound, false))
	servers.AwaitUsed(t, "api", "alice", served.Total())
	t.Logf("%d served; the Caddys held %d of %d at most, %d percent", served.Total(), most, events, most*100/events)
}

// TestTakesNeverExceedEvents checks that a take is atomic: no request finds room that a concurrent
// one uses up, at any Caddy.
func TestTakesNeverExceedEvents(t *testing.T) {
	t.Parallel()
	const (
		events  = 20
		workers = 32
		rounds  = 2
	)
	servers := caddytest.StartShards(t, 1, 0)
	zones := zonesPerAlgorithm("charge before", fmt.Sprint("events ", events))
	caddys := caddytest.StartMany(t, 3, zonesSite(servers.Store(), zones, "respond ok"))
	for _, algorithm := range counting {
		t.Run(algorithm, func(t *testing.T) {
			var admitted, refused caddytest.Tally
			caddytest.Together(t, workers, func(worker int) error {
				for range rounds {
					a, err := caddys[worker%len(caddys)].TryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
					switch {
					case err != nil:
						return err
					case a.Status == http.StatusOK && a.IsLimited():
						admitted.Add(fmt.Sprint(a.Used))
					default:
						if err := a.Refuses(algorithm); err != nil {
							return fmt.Errorf("refusal: %w", err)
						}
						refused.Add("alice")
					}
				}
				return nil
			})
			must(t, "requests", want("number of those admitted", admitted.Total(), events))
			must(t, "requests", want("number of those refused", refused.Total(), rounds*workers-events))
			// Each admitted request got a count of its own.
			for used := range events {
				must(t, "admitted requests", want(fmt.Sprintf("number of answers with %d used", used+1), admitted.N[fmt.Sprint(used+1)], 1))
			}
			must(t, "Redis", want("count", servers.Content(t, algorithm, "alice").Used, events))
		})
	}
	// No charge is still in flight that would change the counts.
	for _, c := range caddys {
		c.Unload()
	}
	for _, algorithm := range counting {
		must(t, "Redis, at the end", want("count of "+algorithm, servers.Content(t, algorithm, "alice").Used, events))
	}
}
