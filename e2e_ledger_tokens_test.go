package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// takesBatch makes requests of a client until Redis has more than they cost, and
// returns how many they were.
func takesBatch(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, zone, client string, headers ...string) (asked int64) {
	t.Helper()
	eventually(t, "a batch is taken", func() error {
		c.Probe("/"+zone, append(headers, "X-Key: "+client)...)
		asked++
		return want("Redis having more than was asked for", servers.Content(t, zone, client).Used > asked, true)
	})
	return asked
}

// TestBatchComesBack when nobody uses it, and when Caddy no longer can.
func TestBatchComesBack(t *testing.T) {
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
					must(t, "after the end of caddy", want("what is used of zone "+zone, servers.Content(t, zone, "alice").Used, n))
					continue
				}
				servers.AwaitUsed(t, zone, "alice", n)
			}
			t.Logf("%v were asked for; the rest came back within %v", asked, time.Since(start).Round(10*time.Millisecond))
			if name == "stopped" || name == "store of no config" {
				return
			}
			for zone, n := range asked {
				must(t, "request after all came back", c.Probe("/"+zone, "X-Key: alice").Shows(http.StatusOK, 100000, n+1))
			}
			c.Stop()
			for zone, n := range asked {
				must(t, "at the end", want("what is used of zone "+zone, servers.Content(t, zone, "alice").Used, n+1))
			}
		})
	}
}

// TestBatchRefundsCostNoCall: what a free response gives back is there for the
// next request.
func TestBatchRefundsCostNoCall(t *testing.T) {
	const requests = 300
	servers := caddytest.StartShards(t, 1, 0)
	c := startWith(t, servers.Store(), batchZones([]string{"50"}, "events 100"), byStatus)
	for _, algorithm := range batched {
		t.Run(algorithm, func(t *testing.T) {
			zone := batchZone(algorithm, "50")
			// More than the client may have, were it not given back.
			before, start, paid := callsTo(t, servers), time.Now(), int64(0)
			for i := range requests {
				status := http.StatusNotModified
				if i%10 == 9 {
					status = http.StatusOK
					paid++
				}
				a := c.Probe("/"+zone, "X-Key: alice", fmt.Sprint("X-Status: ", status))
				must(t, fmt.Sprint("request ", i+1), a.Shows(status, 100, paid))
			}
			made := callsTo(t, servers) - before
			// A batch that is idle for a second, as it may be on a busy machine,
			// is given back and taken again.
			most := 1 + 2*int64(time.Since(start)/time.Second)
			must(t, "Redis", want(fmt.Sprintf("having got %d calls, which is more than %d,", made, most), made > most, false))
			servers.AwaitUsed(t, zone, "alice", paid)
			t.Logf("%d requests, %d of them free, cost %d calls", requests, requests-paid, made)
		})
	}
}

// TestBatchHasBackWhatAnotherZoneRefuses, so that who is refused takes nothing.
func TestBatchHasBackWhatAnotherZoneRefuses(t *testing.T) {
	for _, algorithm := range batched {
		for _, mode := range modes {
			t.Run(algorithm+", "+mode, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := caddytest.StartShards(t, 1, 0)
				zones := zoneWith("first", "algorithm "+algorithm, "charge before", "batch 30") + zoneWith("second", "charge "+mode, "events 20")
				c := startWith(t, servers.Store(), zones, "respond ok")
				served, refused := int64(0), 0
				for range 150 {
					if a := c.Probe("/", "X-Key: alice"); a.Status == http.StatusOK {
						served++
					} else {
						must(t, "refusal", a.Refuses("second"))
						refused++
					}
				}
				must(t, "requests", errors.Join(want("number of those served", served, 20), want("number of those refused", refused, 130)))
				servers.AwaitUsed(t, "second", "alice", 20)
				servers.AwaitUsed(t, "first", "alice", 20)
			})
		}
	}
}

// TestBatchShare: all Caddys together hold no more than their share of the limit.
func TestBatchShare(t *testing.T) {
	const events, workers = 6000, 6
	for _, percent := range []int64{0, 2, 25} {
		share := percent
		if share == 0 {
			share = 10
		}
		t.Run(fmt.Sprint(share, " percent"), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			options := []string{fmt.Sprint("events ", events), "batch auto", "charge before"}
			if percent > 0 {
				options = append(options, fmt.Sprint("batch_share ", percent))
			}
			servers := caddytest.StartShards(t, 1, 0)
			caddys := caddytest.StartMany(t, 3, zonesSite(servers.Store(), zoneWith("api", options...), "respond ok"))
			var served caddytest.Tally
			for _, c := range caddys {
				must(t, "first request", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
				served.Add("alice")
			}
			// Each says that it is there, and hears how many there are when it says so
			// again.
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
				time.Sleep(2 * time.Millisecond)
				return nil
			})
			most := int64(0)
			for start := time.Now(); time.Since(start) < 4*time.Second && served.Total() < events*3/4; {
				// What is served in between is not held any more.
				used := servers.Content(t, "api", "alice").Used
				most = max(most, used-served.Total())
				time.Sleep(time.Millisecond)
			}
			stop()
			// What a worker was served, but has not counted yet, is not held.
			bound := events*share/100 + workers
			must(t, "Caddys", want(fmt.Sprintf("holding %d of %d, which is more than %d,", most, events, bound), most > bound, false))
			servers.AwaitUsed(t, "api", "alice", served.Total())
			t.Logf("%d served; the Caddys held %d of %d at most, %d percent", served.Total(), most, events, most*100/events)
		})
	}
}
