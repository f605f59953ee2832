package shardlimit_test

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
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
			servers := caddytest.StartLastingShards(t, 1, 0)
			redis := outageSite(servers)
			c := caddytest.Start(t, redis)
			served := map[string]int64{}
			serve := func(n int) {
				t.Helper()
				for i := range n {
					key := fmt.Sprintf("client-%d", i%clients)
					must(t, key, want("status", c.Probe("/", "X-Key: "+key).Status, http.StatusOK))
					served[key]++
				}
			}
			serve(before)
			servers.AwaitCounts(t, "api", served)
			servers.Kill(t)
			serve(during)
			for _, config := range meanwhile {
				config = strings.Replace(config, "redis", redis, 1)
				if !strings.HasSuffix(config, cannotListen) {
					c.MustLoad(config)
				} else if status, body := c.Load(config); status == http.StatusOK {
					t.Fatalf("a config that cannot listen was accepted: %s", body)
				}
				// What waits is tried once a second, whichever config runs.
				time.Sleep(1200 * time.Millisecond)
			}
			c.MustLoad(redis)
			awaitUnsent(c, during)
			servers.Restart(t)
			serve(after)
			servers.AwaitCounts(t, "api", served)
			must(t, "metric", want("number of lost charges", undelivered(c, "a", "lost"), 0))
		})
	}
}

// awaitUnsent waits until that many charges wait to be sent. When they are tried
// they are on their way for a moment.
func awaitUnsent(c *caddytest.Caddy, n int64) {
	c.T.Helper()
	eventually(c.T, "charges wait", func() error {
		return want("number of them", c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`), fmt.Sprint(n))
	})
}

// TestChargesAreDeliveredThoughTheStoreBecameAnother, which the config that runs
// has no use for.
func TestChargesAreDeliveredThoughTheStoreBecameAnother(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served := outOfReach(t, servers, c)
	c.MustLoad(zonesSite("", zoneWith("api", "events 1000000"), "respond ok"))
	servers.Restart(t)
	servers.AwaitCounts(t, "api", served)
}

// TestRequestThatOutlivesTheKindOfItsStore is charged to the store in which it
// was admitted, even if that cannot be reached when the request ends.
func TestRequestThatOutlivesTheKindOfItsStore(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	redis := proxySite(servers.Store("charge_timeout 300ms"), 5, backend.Server.Listener.Addr().String())
	c := caddytest.Start(t, redis)
	running := backend.Start(t, c, "/", "X-Key: alice")
	servers.Kill(t)
	c.MustLoad(apiSite("", 5, "1h"))
	must(t, "the running request", want("status", backend.Finish(t, running)[0].Status, http.StatusOK))
	time.Sleep(1200 * time.Millisecond)
	c.MustLoad(redis)
	awaitUnsent(c, 1)
	servers.Restart(t)
	servers.AwaitCounts(t, "api", map[string]int64{"alice": 1})
}
