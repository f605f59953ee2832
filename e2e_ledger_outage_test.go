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

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// outageSite is a site whose zone fails open, and whose charges are not tried for
// longer than an outage lasts.
func outageSite(servers caddytest.Shards, options ...string) string {
	return zonesSite(servers.Store(append(options, "charge_timeout 2s")...),
		zoneWith("api", "events 1000000", "on_error allow"), "respond ok")
}

// TestCountsEqualWhatWasServedAfterAnOutage of a shard under load: what was served
// meanwhile is charged when it is back.
func TestCountsEqualWhatWasServedAfterAnOutage(t *testing.T) {
	const clients, workers = 20, 4
	for name, test := range map[string]struct {
		// during is done while the shard is down.
		during func(c *caddytest.Caddy, servers caddytest.Shards)
		reload bool
	}{
		"nothing else happens": {},
		"the config is replaced by one that connects anew": {func(c *caddytest.Caddy, servers caddytest.Shards) {
			c.MustLoad(outageSite(servers, "pool_size 2", "ledger_trust 500ms"))
		}, true},
		"the config is replaced twice": {func(c *caddytest.Caddy, servers caddytest.Shards) {
			c.MustLoad(outageSite(servers, "pipelining off"))
			time.Sleep(time.Second)
			c.MustLoad(outageSite(servers))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartLastingShards(t, 2, 1)
			c := caddytest.Start(t, outageSite(servers))
			var served, unchecked caddytest.Tally
			var resets atomic.Int64
			stop := caddytest.StartTraffic(t, workers, func(worker, i int) error {
				key := fmt.Sprintf("client-%d", (i+worker)%clients)
				a, err := c.TryProbe(t.Context(), "/", "X-Key: "+key)
				var failed *url.Error
				switch {
				case test.reload && errors.As(err, &failed):
					resets.Add(1) // by the system, when a listener is closed
				case err != nil:
					return err
				case a.Status != http.StatusOK:
					return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
				default:
					served.Add(key)
					if !a.IsLimited() {
						unchecked.Add(key)
					}
				}
				time.Sleep(time.Millisecond)
				return nil
			})
			served.AwaitGrowth(t, 200)
			down := servers[1:]
			down.Kill(t)
			start := time.Now()
			unchecked.AwaitGrowth(t, 20)
			if test.during != nil {
				time.Sleep(2 * time.Second)
				test.during(c, servers)
			}
			time.Sleep(time.Until(start.Add(10 * time.Second)))
			down.Restart(t)
			outage := time.Since(start)
			served.AwaitGrowth(t, 200)
			eventually(t, "the shard is asked again", func() error {
				before := unchecked.Total()
				served.AwaitGrowth(t, 100)
				return want("requests that passed without a check", unchecked.Total(), before)
			})
			stop()
			uncertain := awaitServed(t, servers, c, &served)
			t.Logf("%d requests served, of which %d without a check, in an outage of %v; the outcome of %d charges is unknown, %d connections were reset",
				served.Total(), unchecked.Total(), outage.Round(10*time.Millisecond), uncertain, resets.Load())
		})
	}
}

// awaitServed waits until all that was served is charged, but for charges that
// were on their way when the connection broke, whose number it returns: they may
// count or not. It ends Caddy.
func awaitServed(t *testing.T, s caddytest.Shards, c *caddytest.Caddy, served *caddytest.Tally) (uncertain int64) {
	t.Helper()
	uncertain = undelivered(c, "a", "uncertain") + undelivered(c, "b", "uncertain")
	must(t, "metric", want("number of lost charges", undelivered(c, "a", "lost")+undelivered(c, "b", "lost"), 0))
	eventually(t, "what was served is charged", func() error {
		missing, counts := int64(0), s.Counts(t, "api")
		for key, n := range served.N {
			if counts[key] > n {
				t.Fatalf("%s is charged for %d, but was served %d times", key, counts[key], n)
			}
			missing += n - counts[key]
		}
		if missing > uncertain {
			return fmt.Errorf("%d of %d charges are missing, of which %d are uncertain", missing, served.Total(), uncertain)
		}
		return nil
	})
	c.Stop()
	for key, n := range s.Counts(t, "api") {
		must(t, "after the end of caddy", want("count of "+key+" being more than was served", n > served.N[key], false))
	}
	return uncertain
}

// beforeOutage is how many requests outOfReach makes before the outage.
const beforeOutage = 30

// outOfReach makes requests while all shards are down, and returns how many for
// each client.
func outOfReach(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy) map[string]int64 {
	t.Helper()
	served := map[string]int64{}
	for i := range beforeOutage {
		key := fmt.Sprintf("client-%d", i%10)
		must(t, key, want("status", c.Ask("/", "X-Key: "+key).Status, http.StatusOK))
		served[key]++
	}
	servers.AwaitCounts(t, "api", served)
	servers.Kill(t)
	// What was said before is trusted for a while.
	for key := range served {
		eventually(t, "nothing is known of "+key, func() error {
			a := c.Ask("/", "X-Key: "+key)
			must(t, key, want("status", a.Status, http.StatusOK))
			served[key]++
			return want("being checked", a.IsLimited(), false)
		})
	}
	for i := range 100 {
		key := fmt.Sprintf("client-%d", i%20)
		a := c.Ask("/", "X-Key: "+key)
		must(t, key, errors.Join(want("status", a.Status, http.StatusOK), want("being checked", a.IsLimited(), false)))
		served[key]++
	}
	return served
}

// TestChargesOfAnOutageOutliveTheStore: no config uses the store any more when the
// shard comes back.
func TestChargesOfAnOutageOutliveTheStore(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	c.MustLoad(unlimitedSite)
	time.Sleep(2500 * time.Millisecond)
	servers.Restart(t)
	servers.AwaitCounts(t, "api", served)
	c.Stop()
	must(t, "log", want("telling of losses", strings.Contains(c.Logs.String(), "charges were lost"), false))
	must(t, "Redis, at the end", want("sum of the counts", sum(servers.Counts(t, "api")), sum(served)))
}

// TestChargesOfAnOutageAreDeliveredAtExit, if the shard comes back before the
// patience of the exit is over.
func TestChargesOfAnOutageAreDeliveredAtExit(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	c.Terminate()
	time.Sleep(500 * time.Millisecond)
	servers.Restart(t)
	c.AwaitEnd()
	lost := lostAtExit(t, c)
	must(t, "Redis, at the end", want("sum of the counts", sum(servers.Counts(t, "api")), sum(served)-lost))
	t.Logf("%d of %d charges were lost", lost, sum(served)) // if the servers took long to come back
}

// lostAtExit is how many charges Caddy says were lost when it ended.
func lostAtExit(t *testing.T, c *caddytest.Caddy) int64 {
	t.Helper()
	_, rest, found := strings.Cut(c.Logs.String(), `"msg":"charges were lost at exit","charges":`)
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
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	uncertain := undelivered(c, "a", "uncertain")
	c.Terminate()
	c.AwaitEnd()
	servers.Restart(t)
	must(t, "Redis", want("sum of the counts", sum(servers.Counts(t, "api")), beforeOutage))
	must(t, "log", want("number of lost charges", lostAtExit(t, c), sum(served)-beforeOutage-uncertain))
}

func sum(counts map[string]int64) (total int64) {
	for _, n := range counts {
		total += n
	}
	return total
}
