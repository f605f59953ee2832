package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// startLastingShards starts n shards whose data survives a restart, as far as
// their servers have replied.
func startLastingShards(t *testing.T, n, replicas int) shards {
	t.Helper()
	s := make(shards, n)
	for i := range s {
		s[i] = redistest.StartShard(t, replicas, "--appendonly", "yes", "--appendfsync", "no")
	}
	return s
}

func (s shards) kill(t *testing.T) {
	t.Helper()
	for _, shard := range s {
		must(t, "kill the primary", shard.Primary.Kill())
		for _, replica := range shard.Replicas {
			must(t, "kill the replica", replica.Kill())
		}
	}
}

func (s shards) restart(t *testing.T) {
	t.Helper()
	for _, shard := range s {
		must(t, "restart the primary", shard.Primary.Restart())
		for _, replica := range shard.Replicas {
			must(t, "restart the replica", replica.Restart())
		}
	}
}

// outageSite is a site whose zone fails open, and whose charges are not tried for
// longer than an outage lasts.
func outageSite(servers shards, options ...string) string {
	return zonesSite(servers.store(append(options, "charge_timeout 2s")...),
		zoneWith("api", "events 1000000", "on_error allow"), "respond ok")
}

// TestCountsEqualWhatWasServedAfterAnOutage of a shard under load: what was served
// meanwhile is charged when it is back.
func TestCountsEqualWhatWasServedAfterAnOutage(t *testing.T) {
	const clients, workers = 20, 4
	for name, test := range map[string]struct {
		// during is done while the shard is down.
		during func(c *caddyProcess, servers shards)
		reload bool
	}{
		"nothing else happens": {},
		"the config is replaced by one that connects anew": {func(c *caddyProcess, servers shards) {
			c.mustLoad(outageSite(servers, "pool_size 2", "ledger_trust 500ms"))
		}, true},
		"the config is replaced twice": {func(c *caddyProcess, servers shards) {
			c.mustLoad(outageSite(servers, "pipelining off"))
			time.Sleep(time.Second)
			c.mustLoad(outageSite(servers))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := startLastingShards(t, 2, 1)
			c := startCaddy(t, outageSite(servers))
			var served, unchecked tally
			var resets atomic.Int64
			stop := startTraffic(t, workers, func(worker, i int) error {
				key := fmt.Sprintf("client-%d", (i+worker)%clients)
				a, err := c.tryProbe(t.Context(), "/", "X-Key: "+key)
				var failed *url.Error
				switch {
				case test.reload && errors.As(err, &failed):
					resets.Add(1) // by the system, when a listener is closed
				case err != nil:
					return err
				case a.status != http.StatusOK:
					return fmt.Errorf("status %d, headers %v", a.status, a.header)
				default:
					served.add(key)
					if !a.isLimited() {
						unchecked.add(key)
					}
				}
				time.Sleep(time.Millisecond)
				return nil
			})
			served.awaitGrowth(t, 200)
			down := servers[1:]
			down.kill(t)
			start := time.Now()
			unchecked.awaitGrowth(t, 20)
			if test.during != nil {
				time.Sleep(2 * time.Second)
				test.during(c, servers)
			}
			time.Sleep(time.Until(start.Add(10 * time.Second)))
			down.restart(t)
			outage := time.Since(start)
			served.awaitGrowth(t, 200)
			eventually(t, "the shard is asked again", func() error {
				before := unchecked.total()
				served.awaitGrowth(t, 100)
				return want("requests that passed without a check", unchecked.total(), before)
			})
			stop()
			uncertain := servers.awaitServed(t, c, &served)
			t.Logf("%d requests served, of which %d without a check, in an outage of %v; the outcome of %d charges is unknown, %d connections were reset",
				served.total(), unchecked.total(), outage.Round(10*time.Millisecond), uncertain, resets.Load())
		})
	}
}

// awaitServed waits until all that was served is charged, but for charges that
// were on their way when the connection broke, whose number it returns: they may
// count or not. It ends Caddy.
func (s shards) awaitServed(t *testing.T, c *caddyProcess, served *tally) (uncertain int64) {
	t.Helper()
	uncertain = c.undelivered("a", "uncertain") + c.undelivered("b", "uncertain")
	must(t, "metric", want("number of lost charges", c.undelivered("a", "lost")+c.undelivered("b", "lost"), 0))
	eventually(t, "what was served is charged", func() error {
		missing, counts := int64(0), s.counts(t, "api")
		for key, n := range served.n {
			if counts[key] > n {
				t.Fatalf("%s is charged for %d, but was served %d times", key, counts[key], n)
			}
			missing += n - counts[key]
		}
		if missing > uncertain {
			return fmt.Errorf("%d of %d charges are missing, of which %d are uncertain", missing, served.total(), uncertain)
		}
		return nil
	})
	c.stop()
	for key, n := range s.counts(t, "api") {
		must(t, "after the end of caddy", want("count of "+key+" being more than was served", n > served.n[key], false))
	}
	return uncertain
}

// beforeOutage is how many requests outOfReach makes before the outage.
const beforeOutage = 30

// outOfReach makes requests while all shards are down, and returns how many for
// each client.
func outOfReach(t *testing.T, servers shards, c *caddyProcess) map[string]int64 {
	t.Helper()
	served := map[string]int64{}
	for i := range beforeOutage {
		key := fmt.Sprintf("client-%d", i%10)
		must(t, key, want("status", c.ask("/", "X-Key: "+key).status, http.StatusOK))
		served[key]++
	}
	servers.awaitCounts(t, "api", served)
	servers.kill(t)
	// What was said before is trusted for a while.
	for key := range served {
		eventually(t, "nothing is known of "+key, func() error {
			a := c.ask("/", "X-Key: "+key)
			must(t, key, want("status", a.status, http.StatusOK))
			served[key]++
			return want("being checked", a.isLimited(), false)
		})
	}
	for i := range 100 {
		key := fmt.Sprintf("client-%d", i%20)
		a := c.ask("/", "X-Key: "+key)
		must(t, key, errors.Join(want("status", a.status, http.StatusOK), want("being checked", a.isLimited(), false)))
		served[key]++
	}
	return served
}

// TestChargesOfAnOutageOutliveTheStore: no config uses the store any more when the
// shard comes back.
func TestChargesOfAnOutageOutliveTheStore(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startLastingShards(t, 1, 1)
	c := startCaddy(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	c.mustLoad(unlimitedSite)
	time.Sleep(2500 * time.Millisecond)
	servers.restart(t)
	servers.awaitCounts(t, "api", served)
	c.stop()
	must(t, "log", want("telling of losses", strings.Contains(c.logs.String(), "charges were lost"), false))
	must(t, "Redis, at the end", want("sum of the counts", sum(servers.counts(t, "api")), sum(served)))
}

// TestChargesOfAnOutageAreDeliveredAtExit, if the shard comes back before the
// patience of the exit is over.
func TestChargesOfAnOutageAreDeliveredAtExit(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startLastingShards(t, 1, 1)
	c := startCaddy(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	c.terminate()
	time.Sleep(500 * time.Millisecond)
	servers.restart(t)
	c.awaitEnd()
	lost := c.lostAtExit(t)
	must(t, "Redis, at the end", want("sum of the counts", sum(servers.counts(t, "api")), sum(served)-lost))
	t.Logf("%d of %d charges were lost", lost, sum(served)) // if the servers took long to come back
}

// lostAtExit is how many charges Caddy says were lost when it ended.
func (c *caddyProcess) lostAtExit(t *testing.T) int64 {
	t.Helper()
	_, rest, found := strings.Cut(c.logs.String(), `"msg":"charges were lost at exit","charges":`)
	if !found {
		return 0
	}
	number, _, _ := strings.Cut(rest, "}")
	lost, err := strconv.ParseInt(number, 10, 64)
	must(t, "log", err)
	return lost
}

// TestExitDuringAnOutageTellsWhatIsLost, which is all that could not be charged.
func TestExitDuringAnOutageTellsWhatIsLost(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startLastingShards(t, 1, 1)
	c := startCaddy(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	uncertain := c.undelivered("a", "uncertain")
	c.terminate()
	c.awaitEnd()
	servers.restart(t)
	must(t, "Redis", want("sum of the counts", sum(servers.counts(t, "api")), beforeOutage))
	must(t, "log", want("number of lost charges", c.lostAtExit(t), sum(served)-beforeOutage-uncertain))
}

func sum(counts map[string]int64) (total int64) {
	for _, n := range counts {
		total += n
	}
	return total
}
