package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// twoStores is the global option for two stores of one shard each, default and other, with the same
// options.
func twoStores(servers caddytest.Shards, options ...string) string {
	return servers[:1].Store(options...) + "\n\t" + otherStore(servers[1:], options...)
}

// otherStore returns the store of Shards under the name other.
func otherStore(s caddytest.Shards, options ...string) string {
	return strings.Replace(s.Store(options...), "store redis", "store other redis", 1)
}

// rollOut changes the percentage of the only rollout in the config, and returns the admin API's
// answer.
func rollOut(c *caddytest.Caddy, percent float64) (int, string) {
	c.T.Helper()
	return patch(c, "rollout", percent, "percent")
}

// patch replaces the first field of that name in the config, or one below it, and returns the admin
// API's answer.
func patch(c *caddytest.Caddy, field string, value any, below ...string) (int, string) {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/config/apps/http/servers", "", "")
	var servers any
	must(c.T, "read the config", json.Unmarshal([]byte(text), &servers))
	path, ok := pathTo(servers, field)
	must(c.T, "config", want("having "+field, ok, true))
	for _, name := range below {
		path += "/" + name
	}
	return c.AdminCall(http.MethodPatch, "/config/apps/http/servers"+path, "application/json", fmt.Sprint(value))
}

// mustRollOut is rollOut, and waits until only the new config serves.
func mustRollOut(c *caddytest.Caddy, percent float64) {
	c.T.Helper()
	if status, body := rollOut(c, percent); status != http.StatusOK {
		c.T.Fatalf("roll out to %g percent: status %d: %s", percent, status, body)
	}
	c.AwaitServers()
}

// pathTo returns the admin API's path below config to a field of that name.
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
func awaitBoth(t *testing.T, s caddytest.Shards, zone string, wanted map[string]int64) (own, other map[string]int64) {
	t.Helper()
	eventually(t, "zone "+zone+" is charged in both stores", func() error {
		own, other = s[:1].Counts(t, zone), s[1:].Counts(t, zone)
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

// TestRolloutIsChangedAmidTraffic by the admin API: it moves the added share of clients, and none
// of them back.
func TestRolloutIsChangedAmidTraffic(t *testing.T) {
	t.Parallel()
	const clients, workers, events = 80, 4, 1_000_000
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			servers := caddytest.StartShards(t, 2, 0)
			zones := zoneWith("api", fmt.Sprint("events ", events), "charge "+mode)
			c := startWith(t, twoStores(servers), "rollout other 0\n"+zones, "respond ok")
			var admitted caddytest.Tally
			var resets, number atomic.Int64
			// Each moved client, with its count in its own store at the time of the move.
			moved := map[string]int64{}
			for _, percent := range []float64{12.5, 50, 100} {
				stop := caddytest.StartTraffic(t, workers, func(int, int) error {
					// All clients take turns, however slow a worker is.
					return admits(c, fmt.Sprintf("client-%d", number.Add(1)%clients), events, &admitted, &resets)
				})
				admitted.AwaitGrowth(t, 2*clients)
				mustRollOut(c, percent)
				admitted.AwaitGrowth(t, 2*clients)
				stop()

				own, other := awaitBoth(t, servers, "api", admitted.N)
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
				t.Logf("%g percent: %d of %d clients moved, %d requests, %d connections reset", percent, len(moved), clients, admitted.Total(), resets.Load())

				// Every client continues in its store.
				for i := range clients {
					key, used := fmt.Sprintf("client-%d", i), int64(0)
					if _, isMoved := moved[key]; isMoved {
						used = other[key] + 1
					} else {
						used = own[key] + 1
					}
					must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, used))
					admitted.Add(key)
				}
				awaitBoth(t, servers, "api", admitted.N)
			}
			must(t, "100 percent", want("number of clients moved", len(moved), clients))

			status, body := rollOut(c, 100.5)
			c.AwaitServers()
			must(t, "percentage out of range", errors.Join(want("being accepted", status == http.StatusOK, false),
				want("saying why", strings.Contains(body, "rollout.percent 100.5: it must be from 0 to 100"), true)))
			_, other := awaitBoth(t, servers, "api", admitted.N)
			must(t, "after that", c.Ask("/", "X-Key: client-0").Is(http.StatusOK, other["client-0"]+1))
			admitted.Add("client-0")

			// A client that is moved back finds its old count.
			mustRollOut(c, 0)
			for key, used := range moved {
				must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, used+1))
				admitted.Add(key)
			}
			// The other store becomes the handler's own.
			_, other = awaitBoth(t, servers, "api", admitted.N)
			c.MustLoad(zonesSite(twoStores(servers), "store other\n"+zones, "respond ok"))
			for key, used := range other {
				must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, used+1))
			}
		})
	}
}

// TestRequestRunningDuringARolloutSettlesWhereItWasAdmitted checks that charges, refunds and freed
// slots go to the store that admitted the request.
func TestRequestRunningDuringARolloutSettlesWhereItWasAdmitted(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	backend := caddytest.StartSlowBackend(t)
	c := startWith(t, twoStores(servers), "rollout other 0\n"+
		zoneWith("after")+zoneWith("before", "charge before")+zoneWith("free", "charge before", "count_status not 2xx")+
		zoneWith("slots", "algorithm concurrency", "events 5"), proxyTo(backend.Server.Listener.Addr().String()))
	holds := func(what string, store caddytest.Shards, after, before, free, slots int64) {
		t.Helper()
		for zone, used := range map[string]int64{"after": after, "before": before, "free": free, "slots": slots} {
			eventually(t, what, func() error {
				return want("what is used of zone "+zone, store.Content(t, zone, "alice").Used, used)
			})
		}
	}
	own, other := servers[:1], servers[1:]
	first := backend.Hold(t, c, "/", "X-Key: alice")
	holds("the first one runs", own, 0, 1, 1, 1)
	mustRollOut(c, 100)
	second := backend.Hold(t, c, "/", "X-Key: alice")
	holds("the second one runs", other, 0, 1, 1, 1)
	holds("the first one still runs", own, 0, 1, 1, 1)
	mustRollOut(c, 0)
	third := backend.Hold(t, c, "/", "X-Key: alice")
	holds("the third one runs", own, 0, 2, 2, 2)

	must(t, "second request", want("status", backend.Finish(t, second, third, first)[0].Status, http.StatusOK))
	holds("all have ended", own, 2, 2, 0, 0)
	holds("all have ended", other, 1, 1, 0, 0)
	c.Unload()
	holds("at the end", own, 2, 2, 0, 0)
	holds("at the end", other, 1, 1, 0, 0)
}

// TestRolloutOfTwoHandlers checks that a bucket is charged once, whichever handlers have its zone,
// and that a client that only one of them moves has two buckets.
func TestRolloutOfTwoHandlers(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for name, test := range map[string]struct {
		outer, inner string
		own, other   int64
	}{
		"the same":            {"rollout other 100", "rollout other 100", 0, 3},
		"by one":              {"rollout other 100", "rollout other 0", 3, 3},
		"to the store of one": {"rollout other 100", "store other", 0, 3},
		"crosswise, all":      {"rollout other 100", "store other\nrollout default 100", 3, 3},
	} {
		t.Run(name, func(t *testing.T) {
			flush(t, servers)
			c := caddytest.Start(t, twoHandlersSite(twoStores(servers), test.outer+"\n"+zoneWith("api", "events 3"), test.inner+"\n"+zoneWith("api", "events 3")))
			for used := range int64(3) {
				must(t, "request that fits", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used+1))
			}
			must(t, "request too many", c.Ask("/", "X-Key: alice").Is(http.StatusTooManyRequests, 3))
			c.Unload()
			must(t, "counts", errors.Join(want("of the default store", servers[:1].Counts(t, "api")["alice"], test.own),
				want("of the other store", servers[1:].Counts(t, "api")["alice"], test.other)))
		})
	}
}

// TestRolloutMovesRequestsAsAWhole: all zones count a request where its client of the first zone is, whatever their
// keys, and settle it there; the other store, which is down, is not noticed.
func TestRolloutMovesRequestsAsAWhole(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	zones := "rollout other 50\n" + zoneWith("first") + zoneWith("second", "key {header.X-Group}", "charge before")
	c := startWith(t, servers[:1].Store("on_error deny")+"\n\t"+otherStore(servers[1:], "on_error allow"), zones, byStatus)
	c.AwaitLog("clients of a zone have a limit in each store")
	ask := func(key string, status int) caddytest.Answer {
		return c.Probe(map[bool]string{true: "/error", false: "/"}[status >= 400], "X-Key: "+key, "X-Group: all", fmt.Sprint("X-Status: ", status))
	}
	client, counts := [2]string{}, [2]int64{}
	for i := 0; client[0] == "" || client[1] == ""; i++ {
		key := fmt.Sprint("client-", i)
		must(t, key, want("status", ask(key, http.StatusOK).Status, http.StatusOK))
		eventually(t, "a shard has the bucket", func() error {
			return want("being there", findHolder(t, servers, "first", key) >= 0, true)
		})
		at := findHolder(t, servers, "first", key)
		counts[at]++
		servers[at:at+1].AwaitUsed(t, "second", "all", counts[at])
		client[at] = key
	}
	for at, key := range client {
		there := servers[at : at+1]
		must(t, key, ask(key, http.StatusOK).Shows(http.StatusOK, 100, counts[at]+1))
		must(t, key, want("status", ask(key, http.StatusNotModified).Status, http.StatusNotModified))
		must(t, key, want("status", ask(key, http.StatusNotFound).Status, http.StatusNotFound))
		counts[at] += 2
		there.AwaitUsed(t, "first", key, 3)
		there.AwaitUsed(t, "second", "all", counts[at])
		must(t, key, want("what the other store has", servers[1-at:2-at].Content(t, "first", key).Used, 0))
	}
	must(t, "kill", servers[0].Primary.Kill())
	must(t, "client of the store that is down", errors.Join(want("status", ask(client[0], http.StatusOK).Status, http.StatusServiceUnavailable),
		ask(client[1], http.StatusOK).Shows(http.StatusOK, 100, counts[1]+1)))
	c.Stop()
	must(t, "at the end", want("what is used of the first zone", servers[1:].Content(t, "first", client[1]).Used, 4))
}
