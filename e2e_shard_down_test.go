package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// onErrorSite has a zone for each on_error, and a handler with a zone that
// stands in where the other one's shard does not answer.
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

			b := servers[1]
			must(t, "kill the primary", b.Primary.Kill())
			must(t, "kill the replica", b.Replicas[0].Kill())
			withShardDown(t, servers[:1], c, up, down)
			// Charges that surely did not run wait for longer than
			// charge_timeout.
			time.Sleep(2500 * time.Millisecond)
			givenUp := func() {
				t.Helper()
				for i := range servers {
					for _, outcome := range []string{"lost", "uncertain", "expired"} {
						must(t, "metric", want("number of charges of shard "+caddytest.ShardName(i)+" that are "+outcome, undelivered(c, caddytest.ShardName(i), outcome), 0))
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

// withShardDown asks for a client whose shard is up, and for one whose shard
// is down.
func withShardDown(t *testing.T, alive caddytest.Shards, c *caddytest.Caddy, up, down string) {
	t.Helper()
	for i := range 4 {
		for _, path := range []string{"/default", "/allow"} {
			a := c.Ask(path, "X-Key: "+down)
			must(t, path, errors.Join(want("status", a.Status, http.StatusOK), want("having limit headers", a.IsLimited(), false)))
		}
		a := c.Ask("/deny", "X-Key: "+down)
		must(t, "/deny", errors.Join(want("status", a.Status, http.StatusServiceUnavailable), want("having limit headers", a.IsLimited(), false)))

		a = c.Ask("/local", "X-Key: "+down)
		if i < 3 {
			must(t, "/local", a.Is(http.StatusOK, int64(i+1)))
		} else {
			must(t, "/local", a.Is(http.StatusTooManyRequests, 3))
		}
	}
	for _, zone := range []string{"default", "allow", "deny", "local"} {
		useUp(t, alive, c, zone, up, 2)
	}
	a := c.Ask("/both", "X-Key: "+down, "X-Other: "+up)
	must(t, "/both", errors.Join(a.Is(http.StatusOK, 3), want("zone", a.Resource, "second")))
}

// useUp makes the requests of a client from the one with the given number on,
// and one too many.
func useUp(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy, zone, key string, from int64) {
	t.Helper()
	for used := from; used <= 3; used++ {
		must(t, zone, c.Ask("/"+zone, "X-Key: "+key).Is(http.StatusOK, used))
		servers.AwaitCount(t, zone, key, used)
		servers.AwaitReplicas(t)
	}
	must(t, zone, c.Ask("/"+zone, "X-Key: "+key).Is(http.StatusTooManyRequests, 3))
}

// withShardBack asks for both clients when the shard is back, which has lost
// its data, but not what was to be charged while it was down.
func withShardBack(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy, up, down string) {
	t.Helper()
	eventually(t, "the shard works again", func() error {
		a := c.Ask("/probe", "X-Key: "+down)
		return errors.Join(want("probe being checked", a.IsLimited(), true),
			want("probe being charged", servers.Counts(t, "probe")[down] > 0, true))
	})
	// What was allowed, what was counted locally, and of two zones the one whose
	// shard was down; what was denied is not charged.
	for zone, waited := range map[string]int64{"default": 4, "allow": 4, "local": 3, "first": 1} {
		servers.AwaitCount(t, zone, down, waited)
	}
	servers.AwaitReplicas(t)
	for zone, waited := range map[string]int64{"default": 4, "allow": 4, "local": 3} {
		must(t, zone, c.Ask("/"+zone, "X-Key: "+down).Is(http.StatusTooManyRequests, waited))
	}
	useUp(t, servers, c, "deny", down, 1)
	must(t, "/both", c.Ask("/both", "X-Key: "+down, "X-Other: "+down).Is(http.StatusOK, 2))
	servers.AwaitCount(t, "first", down, 2)
	for _, zone := range []string{"default", "allow", "deny", "local"} {
		must(t, zone, c.Ask("/"+zone, "X-Key: "+up).Is(http.StatusTooManyRequests, 3))
	}
}
