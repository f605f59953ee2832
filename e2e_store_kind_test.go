package shardlimit_test

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestChargesOutliveAChangeOfTheStoresKind: what waits for Redis is delivered,
// though the store of that name counts in memory for a while.
func TestChargesOutliveAChangeOfTheStoresKind(t *testing.T) {
	const clients, before, during, after = 20, 50, 100, 50
	memory := zonesSite(memoryStore(1000), zoneWith("api", "events 1000000"), "respond ok")
	implicit := zonesSite("", zoneWith("api", "events 1000000"), "respond ok")
	occupied, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	t.Cleanup(func() { _ = occupied.Close() })
	// The http app starts its servers, then fails because of the last one.
	cannotListen := "\nhttp://" + occupied.Addr().String() + " {\n\trespond never\n}\n"
	for name, meanwhile := range map[string][]string{
		"memory":                {memory},
		"no block":              {implicit},
		"two other configs":     {memory, implicit},
		"no limiter, then both": {unlimitedSite, memory, implicit},
		"back and forth":        {memory, "redis", implicit, "redis", memory, "redis", unlimitedSite},
		"rejected configs":      {memory, memory + cannotListen, "redis" + cannotListen, implicit, "redis" + cannotListen},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := startLastingShards(t, 1, 0)
			redis := outageSite(servers)
			c := startCaddy(t, redis)
			served := map[string]int64{}
			serve := func(n int) {
				t.Helper()
				for i := range n {
					key := fmt.Sprintf("client-%d", i%clients)
					must(t, key, want("status", c.probe("/", "X-Key: "+key).status, http.StatusOK))
					served[key]++
				}
			}
			serve(before)
			servers.awaitCounts(t, "api", served)
			servers.kill(t)
			serve(during)
			for _, config := range meanwhile {
				config = strings.Replace(config, "redis", redis, 1)
				if !strings.HasSuffix(config, cannotListen) {
					c.mustLoad(config)
				} else if status, body := c.load(config); status == http.StatusOK {
					t.Fatalf("a config that cannot listen was accepted: %s", body)
				}
				// What waits is tried once a second, whichever config runs.
				time.Sleep(1200 * time.Millisecond)
			}
			c.mustLoad(redis)
			c.awaitUnsent(during)
			servers.restart(t)
			serve(after)
			servers.awaitCounts(t, "api", served)
			must(t, "metric", want("number of lost charges", c.undelivered("a", "lost"), 0))
		})
	}
}

// awaitUnsent waits until that many charges wait to be sent. When they are tried
// they are on their way for a moment.
func (c *caddyProcess) awaitUnsent(n int64) {
	c.t.Helper()
	eventually(c.t, "charges wait", func() error {
		return want("number of them", c.metric(`caddy_rate_limit_ledger_unsent{store="default"}`), fmt.Sprint(n))
	})
}

// TestChargesAreDeliveredThoughTheStoreBecameAnother, which the config that runs
// has no use for.
func TestChargesAreDeliveredThoughTheStoreBecameAnother(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startLastingShards(t, 1, 1)
	c := startCaddy(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	c.mustLoad(zonesSite("", zoneWith("api", "events 1000000"), "respond ok"))
	servers.restart(t)
	servers.awaitCounts(t, "api", served)
}

// TestRequestThatOutlivesTheKindOfItsStore is charged to the store in which it
// was admitted, even if that cannot be reached when the request ends.
func TestRequestThatOutlivesTheKindOfItsStore(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startLastingShards(t, 1, 0)
	backend := startSlowBackend(t)
	redis := proxySite(servers.store("charge_timeout 300ms"), 5, backend.server.Listener.Addr().String())
	c := startCaddy(t, redis)
	running := backend.start(t, c, "/", "X-Key: alice")
	servers.kill(t)
	c.mustLoad(apiSite("", 5, "1h"))
	must(t, "the running request", want("status", backend.finish(t, running)[0].status, http.StatusOK))
	time.Sleep(1200 * time.Millisecond)
	c.mustLoad(redis)
	c.awaitUnsent(1)
	servers.restart(t)
	servers.awaitCounts(t, "api", map[string]int64{"alice": 1})
}
