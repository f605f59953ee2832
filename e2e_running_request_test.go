package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// unlimitedSite is a config that has nothing of this module.
const unlimitedSite = `
{
	{{global}}
}
{{site}} {
	respond unlimited
}
`

func TestRequestRunningDuringAReloadIsCharged(t *testing.T) {
	t.Parallel()
	servers := startShards(t, 2, 1)
	backend := startSlowBackend(t)
	addr := backend.server.Listener.Addr().String()
	redis, other := servers[:1].store(), servers[1:].store()

	t.Run("redis", func(t *testing.T) {
		for name, config := range map[string]string{
			"the same":                proxySite(redis, 5, addr),
			"other events":            proxySite(redis, 7, addr),
			"other connections":       proxySite(servers[:1].store("pool_size 1", "check_timeout 5s"), 5, addr),
			"a shard more":            proxySite(servers.store(), 5, addr),
			"another shard instead":   proxySite(other, 5, addr),
			"a memory store":          proxySite("", 5, addr),
			"no limiter and no redis": unlimitedSite,
		} {
			t.Run(name, func(t *testing.T) {
				for _, s := range servers {
					must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
				}
				c := startCaddy(t, proxySite(redis, 5, addr))
				whole := backend.start(t, c, "/", "X-Key: alice")
				streamed := backend.start(t, c, "/stream", "X-Key: bob")
				servers.awaitCounts(t, "api", map[string]int64{"bob": 1})

				c.mustLoad(config)
				if config == unlimitedSite {
					must(t, "request after the reload", want("body", c.ask("/").body, "unlimited"))
				}
				for i, a := range backend.finish(t, whole, streamed) {
					must(t, fmt.Sprintf("running request %d", i), errors.Join(a.is(http.StatusOK, 1), want("limit", a.limit, 5)))
				}
				charged := func() { servers[:1].awaitCounts(t, "api", map[string]int64{"alice": 1, "bob": 1}) }
				if name == "another shard instead" {
					// A running request counts where the config that runs looks for it.
					charged = func() {
						servers[1:].awaitCounts(t, "api", map[string]int64{"alice": 1})
						servers[:1].awaitCounts(t, "api", map[string]int64{"bob": 1})
					}
				}
				charged()
				if config == unlimitedSite {
					// Nothing uses the connections any more.
					eventually(t, "the connections are closed", func() error {
						_, stacks := c.adminCall(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", "")
						return want("one at work", strings.Contains(stacks, "/store/redis."), false)
					})
				}
				// Once Caddy has ended, no other charge is on its way.
				c.stop()
				charged()
			})
		}
	})

	t.Run("memory, then no limiter", func(t *testing.T) {
		c := startCaddy(t, proxySite("", 5, addr))
		first := backend.start(t, c, "/", "X-Key: alice")
		c.mustLoad(proxySite(memoryStore(1000), 7, addr))
		second := backend.start(t, c, "/", "X-Key: alice")
		c.mustLoad(unlimitedSite)
		// Both were checked before either was charged, but the first was in
		// flight when the second was.
		for i, a := range backend.finish(t, first, second) {
			must(t, fmt.Sprintf("running request %d", i), errors.Join(a.is(http.StatusOK, int64(i+1)), want("limit", a.limit, []int64{5, 7}[i])))
		}
	})

	t.Run("memory across a reload", func(t *testing.T) {
		c := startCaddy(t, proxySite("", 5, addr))
		first := backend.start(t, c, "/", "X-Key: alice")
		c.mustLoad(proxySite(memoryStore(1000), 7, addr))
		must(t, "running request", backend.finish(t, first)[0].is(http.StatusOK, 1))
		second := backend.start(t, c, "/", "X-Key: alice")
		must(t, "next request", backend.finish(t, second)[0].is(http.StatusOK, 2))
	})
}
