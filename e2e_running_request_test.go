package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
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
	servers := caddytest.StartShards(t, 2, 1)
	backend := caddytest.StartSlowBackend(t)
	addr := backend.Server.Listener.Addr().String()
	redis, other := servers[:1].Store(), servers[1:].Store()

	t.Run("redis", func(t *testing.T) {
		for name, config := range map[string]string{
			"the same":                proxySite(redis, 5, addr),
			"other events":            proxySite(redis, 7, addr),
			"other connections":       proxySite(servers[:1].Store("pool_size 1", "check_timeout 5s"), 5, addr),
			"a shard more":            proxySite(servers.Store(), 5, addr),
			"another shard instead":   proxySite(other, 5, addr),
			"a memory store":          proxySite("", 5, addr),
			"no limiter and no redis": unlimitedSite,
		} {
			t.Run(name, func(t *testing.T) {
				for _, s := range servers {
					must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
				}
				c := caddytest.Start(t, proxySite(redis, 5, addr))
				whole := backend.Start(t, c, "/", "X-Key: alice")
				streamed := backend.Start(t, c, "/stream", "X-Key: bob")
				servers.AwaitCounts(t, "api", map[string]int64{"bob": 1})

				c.MustLoad(config)
				if config == unlimitedSite {
					must(t, "request after the reload", want("body", c.Ask("/").Body, "unlimited"))
				}
				for i, a := range backend.Finish(t, whole, streamed) {
					must(t, fmt.Sprintf("running request %d", i), errors.Join(a.Is(http.StatusOK, 1), want("limit", a.Limit, 5)))
				}
				charged := func() { servers[:1].AwaitCounts(t, "api", map[string]int64{"alice": 1, "bob": 1}) }
				if name == "another shard instead" {
					// A running request counts where the config that runs looks for it.
					charged = func() {
						servers[1:].AwaitCounts(t, "api", map[string]int64{"alice": 1})
						servers[:1].AwaitCounts(t, "api", map[string]int64{"bob": 1})
					}
				}
				charged()
				if config == unlimitedSite {
					// Nothing uses the connections any more.
					eventually(t, "the connections are closed", func() error {
						_, stacks := c.AdminCall(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", "")
						return want("one at work", strings.Contains(stacks, "/store/redis."), false)
					})
				}
				// Once Caddy has ended, no other charge is on its way.
				c.Stop()
				charged()
			})
		}
	})

	t.Run("memory, then no limiter", func(t *testing.T) {
		c := caddytest.Start(t, proxySite("", 5, addr))
		first := backend.Start(t, c, "/", "X-Key: alice")
		c.MustLoad(proxySite(memoryStore(1000), 7, addr))
		second := backend.Start(t, c, "/", "X-Key: alice")
		c.MustLoad(unlimitedSite)
		// Both were checked before either was charged, but the first was in
		// flight when the second was.
		for i, a := range backend.Finish(t, first, second) {
			must(t, fmt.Sprintf("running request %d", i), errors.Join(a.Is(http.StatusOK, int64(i+1)), want("limit", a.Limit, []int64{5, 7}[i])))
		}
	})

	t.Run("memory across a reload", func(t *testing.T) {
		c := caddytest.Start(t, proxySite("", 5, addr))
		first := backend.Start(t, c, "/", "X-Key: alice")
		c.MustLoad(proxySite(memoryStore(1000), 7, addr))
		must(t, "running request", backend.Finish(t, first)[0].Is(http.StatusOK, 1))
		second := backend.Start(t, c, "/", "X-Key: alice")
		must(t, "next request", backend.Finish(t, second)[0].Is(http.StatusOK, 2))
	})
}
