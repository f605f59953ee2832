package e2e

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

// outageSite has a zone that fails open, and a charge_timeout shorter than an outage.
func outageSite(servers caddytest.Shards, options ...string) string {
	return zonesSite(servers.Store(append(options, "charge_timeout 2s")...),
		zoneWith("api", "events 1000000", "on_error allow"), "respond ok")
}

// TestCountsEqualWhatWasServedAfterAnOutage of a shard under load: its restart gets the charges of
// the outage.
func TestCountsEqualWhatWasServedAfterAnOutage(t *testing.T) {
	t.Parallel()
	const clients, workers = 20, 4
	for name, test := range map[string]struct {
		// during is done while the shard is down.
		during func(c *caddytest.Caddy, servers caddytest.Shards, unchecked *caddytest.Tally)
		reload bool
	}{
		"nothing else happens": {},
		"the config is replaced by one that connects anew": {func(c *caddytest.Caddy, servers caddytest.Shards, _ *caddytest.Tally) {
			c.MustLoad(outageSite(servers, "pool_size 2", "ledger_trust 500ms"))
		}, true},
		"the config is replaced twice": {func(c *caddytest.Caddy, servers caddytest.Shards, unchecked *caddytest.Tally) {
			c.MustLoad(outageSite(servers, "pipelining off"))
			unchecked.AwaitGrowth(t, 20)
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
				time.Sleep(15 * time.Millisecond) // an outage has to last, not to be a flood
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
				return nil
			})
			served.AwaitGrowth(t, 60)
			down := servers[1:]
			down.Kill(t)
			start := time.Now()
			unchecked.AwaitGrowth(t, 20)
			// A charge is unsent once charge_timeout has passed.
			awaitUnsentAtLeast(c, 20)
			if test.during != nil {
				test.during(c, servers, &unchecked)
				unchecked.AwaitGrowth(t, 20)
				awaitUnsentAtLeast(c, 60)
			}
			down.Restart(t)
			outage := time.Since(start)
			served.AwaitGrowth(t, 60)
			eventually(t, "the shard is asked again", func() error {
				before := unchecked.Total()
				served.AwaitGrowth(t, 40)
				return want("requests that passed without a check", unchecked.Total(), before)
			})
			stop()
			uncertain := awaitServed(t, servers, c, &served)
			t.Logf("%d requests served, of which %d without a check, in an outage of %v; the outcome of %d charges is unknown, %d connections were reset",
				served.Total(), unchecked.Total(), outage.Round(10*time.Millisecond), uncertain, resets.Load())
		})
	}
}

// awaitServed waits until everything served is charged, except for charges in flight when the
// connection broke: they may count or not. It returns their number and ends Caddy.
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
		must(t, "after Caddy has ended", want("count of "+key+" being more than was served", n > served.N[key], false))
	}
	return uncertain
}

// beforeOutage is how many requests outOfReach makes before the outage.
const beforeOutage = 30

// outOfReach sends requests while all shards are down, and returns how many for each client.
func outOfReach(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy) (served map[string]int64, uncertain int64) {
	t.Helper()
	served = map[string]int64{}
	for i := range beforeOutage {
		key := fmt.Sprintf("client-%d", i%10)
		must(t, key, want("status", c.Ask("/", "X-Key: "+key).Status, http.StatusOK))
		served[key]++
	}
	servers.AwaitCounts(t, "api", served)
	uncertain = undelivered(c, "a", "uncertain")
	servers.Kill(t)
	// Caddy trusts the last replies for a while.
	for key := range served {
		eventually(t, "nothing is known of "+key, func() error {
			a := c.Ask("/", "X-Key: "+key)
			must(t, key, want("status", a.Status, http.StatusOK))
			served[key]++
			return want("being checked", a.IsLimited(), false)
		})
	}
	for i := range 40 {
		key := fmt.Sprintf("client-%d", i%20)
		a := c.Ask("/", "X-Key: "+key)
		must(t, key, errors.Join(want("status", a.Status, http.StatusOK), want("being checked", a.IsLimited(), false)))
		served[key]++
	}
	return served, uncertain
}

// TestChargesOfAnOutageOutliveTheStore, which no config uses any longer when the shard is back.
func TestChargesOfAnOutageOutliveTheStore(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served, _ := outOfReach(t, servers, c)
	c.MustLoad(unlimitedSite)
	// The charges outlive their charge_timeout of 2 s too.
	time.Sleep(2500 * time.Millisecond)
	servers.Restart(t)
	servers.AwaitCounts(t, "api", served)
	c.Unload()
	must(t, "log", want("reporting losses", strings.Contains(c.Logs.String(), "charges were lost"), false))
	must(t, "Redis, at the end", want("sum of the counts", sum(servers.Counts(t, "api")), sum(served)))
}

// TestChargesOfAnOutageAreDeliveredAtExit if the shard is back before the exit times out.
func TestChargesOfAnOutageAreDeliveredAtExit(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served, _ := outOfReach(t, servers, c)
	c.Terminate()
	c.AwaitLog("shutting down apps")
	servers.Restart(t)
	c.AwaitEnd()
	lost, uncertain := lostAtExit(t, c)
	counted, least := sum(servers.Counts(t, "api")), sum(served)-lost
	must(t, "Redis, at the end", want(fmt.Sprintf("a sum of the counts of %d, which is between %d and %d,", counted, least, least+uncertain),
		least <= counted && counted <= least+uncertain, true))
	t.Logf("%d of %d charges were lost, %d of them uncertain", lost, sum(served), uncertain) // if the servers took long to come back
}

// lostAtExit returns how many charges Caddy logged as lost at exit, and how many of them as uncertain.
func lostAtExit(t *testing.T, c *caddytest.Caddy) (lost, uncertain int64) {
	t.Helper()
	for _, entry := range entriesOf(c, "charges were lost at exit") {
		lost += int64(entry["charges"].(float64))
		uncertain += int64(entry["uncertain"].(float64))
	}
	return lost, uncertain
}

// TestExitDuringAnOutageReportsLostCharges: all that it could not deliver.
func TestExitDuringAnOutageReportsLostCharges(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served, before := outOfReach(t, servers, c)
	uncertain := undelivered(c, "a", "uncertain") - before
	c.Terminate()
	c.AwaitEnd()
	servers.Restart(t)
	must(t, "Redis", want("sum of the counts", sum(servers.Counts(t, "api")), beforeOutage))
	lost, _ := lostAtExit(t, c)
	must(t, "log", want("number of lost charges", lost, sum(served)-beforeOutage-uncertain))
}

// TestExitReportsLostChargesDespiteAHungRequest of an older config, which may never end.
func TestExitReportsLostChargesDespiteAHungRequest(t *testing.T) {
	t.Parallel() // it spends its time waiting
	backend := caddytest.StartSlowBackend(t)
	site := func(servers caddytest.Shards, options ...string) string {
		return zonesSite("grace_period 200ms\n"+servers.Store(append(options, "charge_timeout 2s")...), zoneWith("api", "events 1000000", "on_error allow"),
			proxyTo("/hang "+backend.Server.Listener.Addr().String())+"\nrespond ok")
	}
	for name, isUsed := range map[string]bool{"the store is in use": true, "no config uses the store": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartLastingShards(t, 1, 1)
			c := caddytest.Start(t, site(servers))
			backend.Start(t, c, "/hang", "X-Key: patient")
			served, before := outOfReach(t, servers, c)
			if isUsed {
				c.MustLoad(site(servers, "ledger_trust 500ms"))
				for i := range 20 {
					key := fmt.Sprintf("client-%d", i)
					must(t, key, want("status", c.Ask("/", "X-Key: "+key).Status, http.StatusOK))
					served[key]++
				}
			} else {
				c.MustLoad(unlimitedSite)
			}
			uncertain := undelivered(c, "a", "uncertain") - before
			c.Terminate()
			c.AwaitEnd()
			lost, _ := lostAtExit(t, c)
			must(t, "log", want("number of lost charges", lost, sum(served)-beforeOutage-uncertain))
		})
	}
}

func sum(counts map[string]int64) (total int64) {
	for _, n := range counts {
		total += n
	}
	return total
}

// undelivered returns a shard's metric of undelivered charges.
func undelivered(c *caddytest.Caddy, shard, outcome string) int64 {
	c.T.Helper()
	text := c.Metric(fmt.Sprintf(`caddy_rate_limit_undelivered_total{operation="charge",outcome=%q,shard=%q,store="default"}`, outcome, shard))
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	must(c.T, "metric", err)
	return n
}

// askAll sends the same number of requests for each client while the primary hangs. A response that
// waits for the primary fails the test: check_timeout exceeds the timeout of the test's client.
func askAll(t *testing.T, c *caddytest.Caddy, clients []string, each int) {
	t.Helper()
	for range each {
		for _, key := range clients {
			a := c.Ask("/", "X-Key: "+key)
			must(t, key, errors.Join(want("status", a.Status, http.StatusOK), want("being checked", a.IsLimited(), true)))
		}
	}
}

func TestHungPrimaryDelaysNoResponse(t *testing.T) {
	t.Parallel()
	const each = 10
	for _, test := range []struct {
		pipelining, timeout string
		hangs               time.Duration // 0: until charges are given up
	}{
		{"off", "1h", time.Nanosecond},
		// Longer than a client of Redis commonly waits for a reply.
		{"on", "1h", 6 * time.Second},
		{"on", "2s", 0},
		{"off", "2s", 0},
	} {
		t.Run(fmt.Sprintf("pipelining %s, charge_timeout %s, hangs %v", test.pipelining, test.timeout, test.hangs), func(t *testing.T) {
			// They spend their time waiting.
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			// A check on the replica may take half of check_timeout.
			store := servers.Store("pipelining "+test.pipelining, "charge_timeout "+test.timeout, "check_timeout 1h")
			c := caddytest.Start(t, apiSite(store, 1000, "1h"))
			clients := []string{"alice", "bob", "carol"}
			wanted := map[string]int64{}
			for _, key := range clients {
				must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 1))
				wanted[key] = 1
			}
			servers.AwaitCounts(t, "api", wanted)
			servers.AwaitReplicas(t)

			primary := servers[0].Primary
			must(t, "hang", primary.Pause())
			askAll(t, c, clients, each)
			charges := int64(each * len(clients))
			givenUp := func() int64 { return undelivered(c, "a", "lost") + undelivered(c, "a", "expired") }

			if test.hangs > 0 {
				time.Sleep(test.hangs) // the case is how long it hangs
				must(t, "resume", primary.Resume())
				for _, key := range clients {
					wanted[key] += each
				}
				servers.AwaitCounts(t, "api", wanted)
				must(t, "metric", want("number of charges that failed", givenUp()+undelivered(c, "a", "uncertain"), 0))
				return
			}
			eventually(t, "charges are given up", func() error {
				return want("their outcome being unknown", undelivered(c, "a", "uncertain") > 0, true)
			})
			// The others stay pending in the ledger, beyond charge_timeout and the replies to
			// charges sent by then.
			time.Sleep(3 * time.Second)
			must(t, "pending charges", want("number given up that did not run", givenUp(), 0))
			must(t, "resume", primary.Resume())
			// Charges that did not run before all count now. Those in flight may count, but never
			// twice.
			var uncertain, counted int64
			eventually(t, "pending charges are delivered", func() error {
				uncertain, counted = undelivered(c, "a", "uncertain"), 0
				for _, n := range servers.Counts(t, "api") {
					counted += n - 1
				}
				return want(fmt.Sprintf("%d being at least %d, less %d that are uncertain", counted, charges, uncertain), counted >= charges-uncertain, true)
			})
			c.Stop()
			for _, key := range clients {
				n := servers.Counts(t, "api")[key] - 1
				must(t, key, want(fmt.Sprintf("%d requests counting more than once", n), n > each, false))
			}
			logs := c.Logs.String()
			must(t, "log", errors.Join(want("reporting failed charges", strings.Contains(logs, `"msg":"charges or refunds failed"`), true),
				want("reporting lost charges", strings.Contains(logs, `"msg":"charges were lost at exit"`), false)))
			t.Logf("%d of %d charges were uncertain, %d charges counted", uncertain, charges, counted)
		})
	}
}

// onErrorSite has a zone for each on_error, and a handler with two zones, one of which answers for
// both if the other one's shard is down.
func onErrorSite(store string) string {
	zone := func(name, key, more string) string {
		return fmt.Sprintf("zone %s {\nkey %s\nevents 3\nwindow 1h\n%s\n}\n", name, key, more)
	}
	return "{\n\t{{global}}\n\t" + store + "\n}\n{{site}} {\n" +
		"handle /default {\nrate_limit {\n" + zone("default", "{header.X-Key}", "") + "}\n}\n" +
		"handle /allow {\nrate_limit {\n" + zone("allow", "{header.X-Key}", "on_error allow") + "}\n}\n" +
		"handle /deny {\nrate_limit {\n" + zone("deny", "{header.X-Key}", "on_error deny") + "}\n}\n" +
		"handle /local {\nrate_limit {\n" + zone("local", "{header.X-Key}", "on_error local") + "}\n}\n" +
		"handle /both {\nrate_limit {\n" +
		zone("first", "{header.X-Key}", "on_error allow") + zone("second", "{header.X-Other}", "on_error allow") + "}\n}\n" +
		"handle /probe {\nrate_limit {header.X-Key} 1000000 1h probe\n}\n" +
		"respond ok\n}\n"
}

// clientsOf returns a client of each of two shards.
func clientsOf(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy, path, zone string) (ofA, ofB string) {
	t.Helper()
	for i := 0; ofA == "" || ofB == ""; i++ {
		key := fmt.Sprintf("client-%d", i)
		c.Ask(path, "X-Key: "+key)
		servers.AwaitCount(t, zone, key, 1)
		if servers.Owner(t, zone, key) == 0 {
			ofA = key
		} else {
			ofB = key
		}
	}
	return ofA, ofB
}

func TestShardThatIsDownAffectsOnlyItsClients(t *testing.T) {
	t.Parallel()
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			// They spend their time waiting.
			t.Parallel()
			servers := caddytest.StartShards(t, 2, 1)
			c := caddytest.Start(t, onErrorSite(servers.Store(pipelining, "charge_timeout 2s")))
			up, down := clientsOf(t, servers, c, "/default", "default")
			for i, key := range []string{up, down} {
				for _, zone := range []string{"allow", "deny", "local"} {
					must(t, zone, c.Ask("/"+zone, "X-Key: "+key).Is(http.StatusOK, 1))
					servers.AwaitCount(t, zone, key, 1)
				}
				used := int64(i + 1)
				must(t, "both", c.Ask("/both", "X-Key: "+key, "X-Other: "+up).Is(http.StatusOK, used))
				servers.AwaitCount(t, "first", key, 1)
				servers.AwaitCount(t, "second", up, used)
				servers.AwaitReplicas(t)
			}

			uncertain := map[string]int64{}
			for i := range servers {
				uncertain[caddytest.ShardName(i)] = undelivered(c, caddytest.ShardName(i), "uncertain")
			}
			b := servers[1]
			must(t, "kill the primary", b.Primary.Kill())
			must(t, "kill the replica", b.Replicas[0].Kill())
			withShardDown(t, servers[:1], c, up, down)
			// Charges that did not run stay pending beyond charge_timeout.
			time.Sleep(2500 * time.Millisecond)
			givenUp := func() {
				t.Helper()
				for shard, before := range uncertain {
					for outcome, n := range map[string]int64{"lost": 0, "uncertain": before, "expired": 0} {
						must(t, "metric", want("number of charges of shard "+shard+" that are "+outcome, undelivered(c, shard, outcome), n))
					}
				}
			}
			givenUp()

			must(t, "restart the primary", b.Primary.Restart())
			must(t, "restart the replica", b.Replicas[0].Restart())
			withShardBack(t, servers, c, up, down)
			givenUp()
		})
	}
}

// withShardDown sends requests of a client whose shard is up, and of one whose shard is down.
func withShardDown(t *testing.T, alive caddytest.Shards, c *caddytest.Caddy, up, down string) {
	t.Helper()
	for i := range 4 {
		a := c.Ask("/allow", "X-Key: "+down)
		must(t, "/allow", errors.Join(want("status", a.Status, http.StatusOK), want("having limit headers", a.IsLimited(), false)))
		a = c.Ask("/deny", "X-Key: "+down)
		must(t, "/deny", errors.Join(want("status", a.Status, http.StatusServiceUnavailable), want("having limit headers", a.IsLimited(), false)))

		for _, path := range []string{"/default", "/local"} {
			// The shard has counted one.
			if a := c.Ask(path, "X-Key: "+down); i < 2 {
				must(t, path, a.Is(http.StatusOK, int64(i+2)))
			} else {
				must(t, path, a.Is(http.StatusTooManyRequests, 3))
			}
		}
	}
	for _, zone := range []string{"default", "allow", "deny", "local"} {
		useUp(t, alive, c, zone, up, 2)
	}
	a := c.Ask("/both", "X-Key: "+down, "X-Other: "+up)
	must(t, "/both", errors.Join(a.Is(http.StatusOK, 3), want("zone", a.Resource, "second")))
}

// useUp sends a client's requests number from to 3, and one too many.
func useUp(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy, zone, key string, from int64) {
	t.Helper()
	for used := from; used <= 3; used++ {
		must(t, zone, c.Ask("/"+zone, "X-Key: "+key).Is(http.StatusOK, used))
		servers.AwaitCount(t, zone, key, used)
		servers.AwaitReplicas(t)
	}
	must(t, zone, c.Ask("/"+zone, "X-Key: "+key).Is(http.StatusTooManyRequests, 3))
}

// withShardBack sends requests of both clients to the restarted shard, which has lost its data, but
// gets the charges of its outage.
func withShardBack(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy, up, down string) {
	t.Helper()
	eventually(t, "the shard works again", func() error {
		a := c.Ask("/probe", "X-Key: "+down)
		return errors.Join(want("probe being checked", a.IsLimited(), true),
			want("probe being charged", servers.Counts(t, "probe")[down] > 0, true))
	})
	// Probes may be known to have room, and say nothing of the connections of checks.
	eventually(t, "the shard's servers are asked again", func() error {
		open := gaugeOf(t, c, `caddy_rate_limit_breaker_open{purpose="charges",role="primary",shard="b",store="default"}`)
		for _, role := range []string{"primary", "replica"} {
			open += gaugeOf(t, c, `caddy_rate_limit_breaker_open{purpose="checks",role="`+role+`",shard="b",store="default"}`)
		}
		return want("breakers that are open", open, 0)
	})
	// It gets the charges of allowed and of locally counted requests and, of two zones, of the one
	// whose shard was down, but not of denied requests.
	for zone, waited := range map[string]int64{"default": 2, "allow": 4, "local": 2, "first": 1} {
		servers.AwaitCount(t, zone, down, waited)
	}
	servers.AwaitReplicas(t)
	must(t, "allow", c.Ask("/allow", "X-Key: "+down).Is(http.StatusTooManyRequests, 4))
	for _, zone := range []string{"default", "local"} {
		useUp(t, servers, c, zone, down, 3)
	}
	useUp(t, servers, c, "deny", down, 1)
	must(t, "/both", c.Ask("/both", "X-Key: "+down, "X-Other: "+down).Is(http.StatusOK, 2))
	servers.AwaitCount(t, "first", down, 2)
	for _, zone := range []string{"default", "allow", "deny", "local"} {
		must(t, zone, c.Ask("/"+zone, "X-Key: "+up).Is(http.StatusTooManyRequests, 3))
	}
}

// gaugeOf is the value of a metric.
func gaugeOf(t *testing.T, c *caddytest.Caddy, name string) float64 {
	t.Helper()
	value, err := strconv.ParseFloat(c.Metric(name), 64)
	must(t, name, err)
	return value
}

// TestReplicasServeANewCaddy checks that a Caddy that starts while the primary is down, and one
// that gets new connections by a reload, refuse by the replica's counts.
func TestReplicasServeANewCaddy(t *testing.T) {
	t.Parallel()
	const events = 3
	servers := caddytest.StartShards(t, 1, 1)
	site := func(option string) string { return apiSite(servers.Store("on_error deny", option), events, "1h") }
	reloaded := caddytest.Start(t, site("pool_size 4"))
	useUpAPI := func(key string) {
		t.Helper()
		for used := range int64(events) {
			must(t, key, reloaded.Ask("/", "X-Key: "+key).Is(http.StatusOK, used+1))
			servers.AwaitCount(t, "api", key, used+1)
		}
	}
	useUpAPI("alice")
	useUpAPI("bob")
	servers.AwaitReplicas(t)
	must(t, "kill the primary", servers[0].Primary.Kill())

	started := caddytest.Start(t, site("pool_size 4"))
	reloaded.MustLoad(site("pool_size 5"))
	for name, c := range map[string]*caddytest.Caddy{"started": started, "reloaded": reloaded} {
		for _, key := range []string{"alice", "bob", "alice"} {
			must(t, name, c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, events))
		}
		// A replica cannot open a window.
		a := c.Ask("/", "X-Key: carol")
		must(t, name, errors.Join(want("status", a.Status, http.StatusServiceUnavailable), want("having limit headers", a.IsLimited(), false)))
	}

	must(t, "restart the primary", servers[0].Primary.Restart())
	eventually(t, "the primary decides again", func() error {
		return started.Ask("/", "X-Key: carol").Is(http.StatusOK, 1)
	})
}

func TestClientsDoNotNoticeScriptFlush(t *testing.T) {
	t.Parallel()
	const workers, flushes = 4, 5
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			servers := caddytest.StartShards(t, 2, 1)
			c := caddytest.Start(t, apiSite(servers.Store(pipelining), 1_000_000, "1h"))
			nodes := servers.Replicas()
			for _, shard := range servers {
				nodes = append(nodes, shard.Primary)
			}
			var admitted caddytest.Tally
			stop := caddytest.StartTraffic(t, workers, func(_, i int) error {
				return admits(c, fmt.Sprintf("client-%d", i%10), 1_000_000, &admitted, nil)
			})
			for range flushes {
				admitted.AwaitGrowth(t, 20)
				for _, node := range nodes {
					must(t, "flush scripts", node.Client().ScriptFlush(t.Context()).Err())
				}
			}
			admitted.AwaitGrowth(t, 20)
			stop()
			servers.AwaitCounts(t, "api", admitted.N)
			for _, shard := range []string{"a", "b"} {
				must(t, "metric", errors.Join(
					want("lost charges", undelivered(c, shard, "lost"), 0), want("uncertain charges", undelivered(c, shard, "uncertain"), 0)))
			}
			t.Logf("%d requests, %d times SCRIPT FLUSH on %d servers", admitted.Total(), flushes, len(nodes))
		})
	}
}

// TestScriptFlushStormLosesNoCharge flushes the scripts faster than Caddy can load them.
func TestScriptFlushStormLosesNoCharge(t *testing.T) {
	t.Parallel()
	const requests = 20
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			servers := caddytest.StartShards(t, 1, 0)
			backend := caddytest.StartSlowBackend(t)
			c := caddytest.Start(t, proxySite(servers.Store(pipelining), 100, backend.Server.Listener.Addr().String()))
			var all []caddytest.Running
			for range requests {
				all = append(all, backend.Start(t, c, "/", "X-Key: alice"))
			}
			var flushes caddytest.Tally
			primary := servers[0].Primary.Client()
			stop := caddytest.StartTraffic(t, 4, func(int, int) error {
				flushes.Add("")
				return primary.ScriptFlush(t.Context()).Err()
			})
			flushes.AwaitGrowth(t, 50)
			for _, a := range backend.Finish(t, all...) {
				must(t, "request", want("status", a.Status, http.StatusOK))
			}
			flushes.AwaitGrowth(t, 300)
			stop()
			servers.AwaitCount(t, "api", "alice", requests)
			must(t, "metric", errors.Join(
				want("lost charges", undelivered(c, "a", "lost"), 0), want("uncertain charges", undelivered(c, "a", "uncertain"), 0)))
			t.Logf("%d times SCRIPT FLUSH", flushes.Total())
		})
	}
}

// TestUnsureCheckSpendsNothing checks that a request after an uncertain check is charged, and is in
// flight no longer than it runs.
func TestUnsureCheckSpendsNothing(t *testing.T) {
	t.Parallel()
	const requests = 3
	for _, onError := range []string{"local", "allow"} {
		c := startWith(t, "rate_limit {\nstore guest {\nunsure\n}\n}", zoneWith("api", "events 10", "on_error "+onError), "respond ok")
		for range requests {
			must(t, onError, want("status", c.Ask("/", "X-Key: alice").Status, http.StatusOK))
		}
		eventually(t, "nothing is in flight", func() error {
			status, _ := adminStatus(c)
			return want("in flight", status.Stores[0].Ledger.InFlight, 0)
		})
		must(t, onError, want("charged", c.Metric(`caddy_rate_limit_settled_cost_total{kind="charged",zone="api"}`), fmt.Sprint(requests)))
	}
}
