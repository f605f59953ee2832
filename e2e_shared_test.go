package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
)

// apiSite is a site with one zone, api, that counts by the header X-Key.
func apiSite(store string, events int, window string) string {
	return limitedSite(store, events, window, "respond ok")
}

// limitedSite is a site whose zone, api, counts by the header X-Key what answer
// then answers.
func limitedSite(store string, events int, window, answer string) string {
	return fmt.Sprintf(`
{
	{{global}}
	%s
}
{{site}} {
	rate_limit {
		zone api {
			key {header.X-Key}
			events %d
			window %s
		}
	}
	%s
}
`, store, events, window, answer)
}

// startCaddys runs n Caddys with the same config.
func startCaddys(t *testing.T, n int, caddyfile string) []*caddyProcess {
	t.Helper()
	caddys := make([]*caddyProcess, n)
	for i := range caddys {
		caddys[i] = startCaddy(t, caddyfile)
	}
	return caddys
}

func TestTwoCaddysShareALimit(t *testing.T) {
	const events = 10
	servers := startShards(t, 2, 1)
	caddys := startCaddys(t, 2, apiSite(servers.store(), events, "1h"))

	// Where every charge is waited for, each Caddy sees all that the other
	// one admitted.
	for _, key := range []string{"alice", "bob", "carol", "dave"} {
		for i := range events {
			a := caddys[i%2].ask("/", "X-Key: "+key)
			must(t, fmt.Sprintf("%s's request %d", key, i+1), errors.Join(
				a.is(http.StatusOK, int64(i+1)), want("limit", a.limit, events), want("zone", a.resource, "api")))
			servers.awaitCount(t, "api", key, int64(i+1))
			servers.awaitReplicas(t)
		}
		for i, c := range caddys {
			must(t, fmt.Sprintf("%s's request too many at Caddy %d", key, i), c.ask("/", "X-Key: "+key).is(http.StatusTooManyRequests, events))
		}
	}
}

func TestConcurrentClientsAreCountedExactly(t *testing.T) {
	const (
		events  = 20
		clients = 40
		workers = 8
		rounds  = 4
	)
	servers := startShards(t, 2, 1)
	caddys := startCaddys(t, 2, apiSite(servers.store(), events, "1h"))

	var admitted, refused tally
	together(t, workers, func(worker int) error {
		for i := range rounds * clients {
			key := fmt.Sprintf("client-%d", i%clients)
			a, err := caddys[worker%2].tryAsk("/", "X-Key: "+key)
			switch {
			case err != nil:
				return err
			case a.status == http.StatusOK && a.isLimited():
				admitted.add(key)
			case a.status == http.StatusTooManyRequests:
				refused.add(key)
			default:
				return fmt.Errorf("status %d, headers %v", a.status, a.header)
			}
		}
		return nil
	})
	servers.awaitCounts(t, "api", admitted.n)

	excess := int64(0)
	for key, n := range admitted.n {
		if n < events {
			t.Errorf("%s was admitted %d times only, before its limit of %d was reached", key, n, events)
		}
		excess += n - events
	}
	servers.awaitReplicas(t)
	for key, n := range admitted.n {
		for i, c := range caddys {
			must(t, fmt.Sprintf("%s at Caddy %d", key, i), c.ask("/", "X-Key: "+key).is(http.StatusTooManyRequests, n))
		}
	}
	for i, shard := range servers {
		if n := len(find(t, shard.Primary, "api")); n < clients/4 {
			t.Errorf("shard %s has %d of %d clients", shardName(i), n, clients)
		}
	}
	// Nothing is still on its way that would make the counts wrong later.
	for _, c := range caddys {
		c.stop()
	}
	servers.awaitCounts(t, "api", admitted.n)
	t.Logf("%d requests admitted (%d above the limits, in flight at the same time), %d refused", admitted.total(), excess, refused.total())
}
