package shardlimit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
)

// twoStores is the global option for two stores of one shard each: the default
// one, and the one that is called other. Options are lines for both.
func twoStores(servers shards, options ...string) string {
	return servers[:1].store(options...) + "\n\t" + servers[1:].otherStore(options...)
}

// otherStore is store, but its name is other.
func (s shards) otherStore(options ...string) string {
	return strings.Replace(s.store(options...), "store redis", "store other redis", 1)
}

// rollOut changes the percentage of the only rollout in the config, and returns
// the status and the body of what the admin API answers.
func (c *caddyProcess) rollOut(percent float64) (int, string) {
	c.t.Helper()
	return c.patch("rollout", percent, "percent")
}

// patch replaces the first field of that name in the config, or one below it,
// by the admin API, and returns the status and the body of its answer.
func (c *caddyProcess) patch(field string, value any, below ...string) (int, string) {
	c.t.Helper()
	_, text := c.adminCall(http.MethodGet, "/config/apps/http/servers", "", "")
	var servers any
	must(c.t, "read the config", json.Unmarshal([]byte(text), &servers))
	path, ok := pathTo(servers, field)
	must(c.t, "config", want("having "+field, ok, true))
	for _, name := range below {
		path += "/" + name
	}
	return c.adminCall(http.MethodPatch, "/config/apps/http/servers"+path, "application/json", fmt.Sprint(value))
}

// mustRollOut is rollOut, and waits until only the new config serves.
func (c *caddyProcess) mustRollOut(percent float64) {
	c.t.Helper()
	if status, body := c.rollOut(percent); status != http.StatusOK {
		c.t.Fatalf("roll out to %g percent: status %d: %s", percent, status, body)
	}
	c.awaitServers()
}

// pathTo is the path in the admin API, below that of config, to a field of that
// name.
func pathTo(config any, name string) (path string, ok bool) {
	fields := map[string]any{}
	switch config := config.(type) {
	case map[string]any:
		fields = config
	case []any:
		for i, element := range config {
			fields[fmt.Sprint(i)] = element
		}
	}
	if _, ok := fields[name]; ok {
		return "/" + name, true
	}
	for field, value := range fields {
		if path, ok := pathTo(value, name); ok {
			return "/" + field + path, true
		}
	}
	return "", false
}

// awaitBoth waits until the counts of both stores together are the wanted ones,
// and returns them.
func (s shards) awaitBoth(t *testing.T, zone string, wanted map[string]int64) (own, other map[string]int64) {
	t.Helper()
	eventually(t, "zone "+zone+" is charged in both stores", func() error {
		own, other = s[:1].counts(t, zone), s[1:].counts(t, zone)
		both := maps.Clone(own)
		for key, n := range other {
			both[key] += n
		}
		if !maps.Equal(both, wanted) {
			return fmt.Errorf("counts are %v and %v, want %v together", own, other, wanted)
		}
		return nil
	})
	return own, other
}

// TestRolloutIsChangedAmidTraffic by the admin API: only the share that is added
// is moved, nobody is moved back, and nobody notices.
func TestRolloutIsChangedAmidTraffic(t *testing.T) {
	t.Parallel()
	const clients, workers, events = 200, 4, 1_000_000
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			servers := startShards(t, 2, 0)
			zones := zoneWith("api", fmt.Sprint("events ", events), "charge "+mode)
			c := startWith(t, twoStores(servers), "rollout other 0\n"+zones, "respond ok")
			var admitted tally
			var resets, number atomic.Int64
			// The clients, how far they were in their own stores, when they were
			// moved.
			moved := map[string]int64{}
			for _, percent := range []float64{12.5, 20, 50, 100} {
				stop := startTraffic(t, workers, func(int, int) error {
					// Whichever worker is late, all clients come in turn.
					key := fmt.Sprintf("client-%d", number.Add(1)%clients)
					a, err := c.tryAsk("/", "X-Key: "+key)
					var failed *url.Error
					switch {
					case errors.As(err, &failed):
						// As in TestReloadsAmidTrafficLoseNothing.
						resets.Add(1)
					case err != nil:
						return err
					case a.status != http.StatusOK || a.limit != events:
						return fmt.Errorf("status %d, headers %v", a.status, a.header)
					default:
						admitted.add(key)
					}
					return nil
				})
				admitted.awaitGrowth(t, 2*clients)
				c.mustRollOut(percent)
				admitted.awaitGrowth(t, 2*clients)
				stop()

				own, other := servers.awaitBoth(t, "api", admitted.n)
				for key, n := range other {
					was, isMoved := moved[key]
					if !isMoved {
						moved[key] = own[key]
						if own[key] == 0 || n == 0 {
							t.Errorf("%g percent: %s was counted %d times and, once moved, %d times", percent, key, own[key], n)
						}
					} else if own[key] != was {
						t.Errorf("%g percent: %s was moved before, and then counted %d times more in its own store", percent, key, own[key]-was)
					}
				}
				for key := range moved {
					must(t, key, want("being counted in the other store", other[key] > 0, true))
				}
				if share := 100 * float64(len(moved)) / clients; math.Abs(share-percent) > 5 {
					t.Errorf("%g percent move %g", percent, share)
				}
				t.Logf("%g percent: %d of %d clients moved, %d requests, %d connections reset", percent, len(moved), clients, admitted.total(), resets.Load())

				// Everybody goes on where he is.
				for i := range clients {
					key, used := fmt.Sprintf("client-%d", i), int64(0)
					if _, isMoved := moved[key]; isMoved {
						used = other[key] + 1
					} else {
						used = own[key] + 1
					}
					must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, used))
					admitted.add(key)
				}
				servers.awaitBoth(t, "api", admitted.n)
			}
			must(t, "100 percent", want("number of clients moved", len(moved), clients))

			status, body := c.rollOut(100.5)
			c.awaitServers()
			must(t, "percentage out of range", errors.Join(want("being accepted", status == http.StatusOK, false),
				want("telling why", strings.Contains(body, "rollout other 100.5: it must be from 0 to 100 percent"), true)))
			_, other := servers.awaitBoth(t, "api", admitted.n)
			must(t, "after that", c.ask("/", "X-Key: client-0").is(http.StatusOK, other["client-0"]+1))
			admitted.add("client-0")

			// Whoever is moved back finds what is left of his old counts.
			c.mustRollOut(0)
			for key, used := range moved {
				must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, used+1))
				admitted.add(key)
			}
			// The other store becomes the handler's own.
			_, other = servers.awaitBoth(t, "api", admitted.n)
			c.mustLoad(zonesSite(twoStores(servers), "store other\n"+zones, "respond ok"))
			for key, used := range other {
				must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, used+1))
			}
		})
	}
}

// TestRequestRunningDuringARolloutSettlesWhereItWasAdmitted: it is charged,
// refunded and gives back its slot there.
func TestRequestRunningDuringARolloutSettlesWhereItWasAdmitted(t *testing.T) {
	servers := startShards(t, 2, 0)
	backend := startSlowBackend(t)
	c := startWith(t, twoStores(servers), "rollout other 0\n"+
		zoneWith("after")+zoneWith("before", "charge before")+zoneWith("free", "charge before", "free_status 2xx")+
		zoneWith("slots", "algorithm concurrency", "events 5"), "reverse_proxy "+backend.server.Listener.Addr().String())
	holds := func(what string, store shards, after, before, free, slots int64) {
		t.Helper()
		for zone, used := range map[string]int64{"after": after, "before": before, "free": free, "slots": slots} {
			eventually(t, what, func() error {
				return want("what is used of zone "+zone, store.content(t, zone, "alice").used, used)
			})
		}
	}
	own, other := servers[:1], servers[1:]
	first := backend.hold(t, c, "/", "X-Key: alice")
	holds("the first one runs", own, 0, 1, 1, 1)
	c.mustRollOut(100)
	second := backend.hold(t, c, "/", "X-Key: alice")
	holds("the second one runs", other, 0, 1, 1, 1)
	holds("the first one still runs", own, 0, 1, 1, 1)
	c.mustRollOut(0)
	third := backend.hold(t, c, "/", "X-Key: alice")
	holds("the third one runs", own, 0, 2, 2, 2)

	must(t, "second request", want("status", backend.finish(t, second, third, first)[0].status, http.StatusOK))
	holds("all have ended", own, 2, 2, 0, 0)
	holds("all have ended", other, 1, 1, 0, 0)
	c.stop()
	holds("at the end", own, 2, 2, 0, 0)
	holds("at the end", other, 1, 1, 0, 0)
}
