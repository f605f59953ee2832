package shardlimit_test

import (
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestRejectedReloadChangesNothing posts configs that Caddy refuses at various
// stages, and would change everything if they were accepted.
func TestRejectedReloadChangesNothing(t *testing.T) {
	const events = 50
	occupied, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer occupied.Close()
	// The http app starts its servers, then fails because of the last one.
	cannotListen := "\nhttp://" + occupied.Addr().String() + " {\n\trespond never\n}\n"
	servers := caddytest.StartShards(t, 2, 1)
	stores := map[string]struct{ running, other string }{
		"memory": {"", memoryStore(1)},
		"redis":  {servers[:1].Store(), servers.Store("pool_size 1", "check_timeout 1s")},
	}
	for kind, store := range stores {
		t.Run(kind, func(t *testing.T) {
			c := caddytest.Start(t, apiSite(store.running, events, "1h"))
			var used int64
			goesOn := func(after string) {
				t.Helper()
				used++
				a := c.Ask("/", "X-Key: alice")
				must(t, "after "+after, errors.Join(
					a.Is(http.StatusOK, used), want("limit", a.Limit, events),
					want("metric", c.Metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(used, 10)),
					want("metric of refusals", c.Metric(`caddy_rate_limit_declined_requests_total{zone="api"}`), "0")))
				if kind == "redis" {
					servers.AwaitCount(t, "api", "alice", used)
					servers.AwaitReplicas(t)
				}
			}
			goesOn("the start")
			for _, rejected := range []struct{ name, config string }{
				{"a config that cannot be parsed", strings.Replace(apiSite(store.other, 1, "1h"), "zone", "zonk", 1)},
				{"a config with a bad option", apiSite(store.other, 0, "1h")},
				{"a config that cannot listen", apiSite(store.other, 1, "1h") + cannotListen},
				{"a config without a limiter that cannot listen", "{\n\t{{global}}\n}\n{{site}} {\n\trespond ok\n}\n" + cannotListen},
			} {
				if status, body := c.Load(rejected.config); status == http.StatusOK {
					t.Fatalf("%s was accepted: %s", rejected.name, body)
				}
				c.AwaitServers()
				goesOn(rejected.name)
				goesOn(rejected.name + ", again")
			}

			// In JSON the rules are asked when the modules are provisioned.
			_, running := c.AdminCall(http.MethodGet, "/config/", "", "")
			bad := strings.Replace(running, `"window":3600000000000`, `"window":1`, 1)
			if bad == running {
				t.Fatalf("no window in %s", running)
			}
			if status, body := c.AdminCall(http.MethodPost, "/load", "application/json", bad); status == http.StatusOK || !strings.Contains(body, "window") {
				t.Fatalf("load: status %d: %s", status, body)
			}
			goesOn("a config that cannot be provisioned")

			// What is valid is still accepted, and goes on from there.
			c.MustLoad(apiSite(store.running, int(used), "1h"))
			a := c.Ask("/", "X-Key: alice")
			must(t, "after a valid config", errors.Join(
				a.Is(http.StatusTooManyRequests, used), want("limit", a.Limit, used),
				want("metric of refusals", c.Metric(`caddy_rate_limit_declined_requests_total{zone="api"}`), "1")))
			if kind == "redis" {
				if n := len(caddytest.ReadBuckets(t, servers[1].Primary.Client())); n > 0 {
					t.Fatalf("a shard of rejected configs has %d buckets", n)
				}
			}
			t.Logf("%d requests", used)
		})
	}
}
