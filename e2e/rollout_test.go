package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
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

// TestRolloutHoldsRequests checks that a request that waits in one store holds nothing in the
// other.
func TestRolloutHoldsRequests(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 4*time.Second, func(full time.Duration) bool {
				servers := caddytest.StartShards(t, 2, 0)
				zones := "rollout other 50\n" + zoneWith("slow", "algorithm gcra", "events 20", "window 1s", "burst 1", "max_wait 10m", "charge "+mode) +
					zoneWith("second", byGroup, "charge before")
				c := startWith(t, twoStores(servers), zones, "respond ok")
				at := -1
				// The bucket is gone soon after the event.
				eventually(t, "a shard has the bucket", func() error {
					must(t, "a request", want("status", c.Probe("/", "X-Key: alice", "X-Group: group").Status, http.StatusOK))
					at = findHolder(t, servers, "slow", "alice")
					return want("being there", at >= 0, true)
				})
				slow, second := servers[at:at+1], servers[1-at:2-at]
				group := ""
				for i := 0; group == "" || second.Content(t, "second", group).Used == 0; i++ {
					group = fmt.Sprint("group-", i)
					must(t, group, want("status", c.Probe("/", "X-Key: bob", "X-Group: "+group).Status, http.StatusOK))
					servers.AwaitUsed(t, "second", group, 1)
				}

				free := keepFull(t, slow, 20, full)
				var held []caddytest.Running
				for i := range 3 {
					r, inTime := waitInLineUntil(t.Context(), t, c, free, fmt.Sprint("request ", i), "X-Group: "+group)
					if !inTime {
						return false
					}
					held = append(held, r)
				}
				// Requests that wait have been refunded what they took.
				second.AwaitUsed(t, "second", group, 1)
				for _, r := range held {
					a := r.Ends(t)
					must(t, "held request", errors.Join(want("status", a.Status, http.StatusOK), want("being answered before it fits", a.Received.Before(free), false)))
				}
				second.AwaitUsed(t, "second", group, 4)
				c.Unload()
				must(t, "at the end", want("what is used of the second zone", second.Content(t, "second", group).Used, 4))
				return true
			})
		})
	}
}

// TestRolloutPenalizes only in the store of the zone that refuses.
func TestRolloutPenalizes(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			flush(t, servers)
			c := startWith(t, twoStores(servers), "rollout other 50\n"+zoneWith("first", "charge before", "penalty 1h")+
				zoneWith("second", byGroup, "events 2", "charge before", "penalty 20000h"), "respond ok")
			key := keyApart(t, servers, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			must(t, "request that fits", c.Probe("/", "X-Key: "+key, "X-Group: "+group).Shows(http.StatusOK, 2, 2))
			a := c.Probe("/", "X-Key: "+key, "X-Group: "+group)
			must(t, "refusal", errors.Join(a.Refuses("second"), want("Retry-After being that of the penalty", a.RetryAfter > 10000*3600, true)))
			eventually(t, "the penalty is stored", func() error {
				return want("its end being the reset", ceilSeconds(second.Content(t, "second", group).Penalty), a.Reset)
			})
			c.Unload()
			must(t, "at the end", errors.Join(want("the penalty of the first zone", first.Content(t, "first", key).Penalty, 0),
				want("what is used of the first zone", first.Content(t, "first", key).Used, 2)))
		})
	}
}

// TestRolloutTakesBatches from both stores, and returns to both what is unused.
func TestRolloutTakesBatches(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			flush(t, servers)
			c := startWith(t, twoStores(servers), "rollout other 50\n"+zoneWith("first")+zoneWith("second", byGroup)+
				zoneWith("batch.first", "events 1000", "charge before", "batch 50")+
				zoneWith("batch.second", byGroup, "events 1000", "charge before", "batch 50"), "respond ok")
			key := keyApart(t, servers, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			asked := int64(1)
			eventually(t, "batches are taken", func() error {
				c.Probe("/", "X-Key: "+key, "X-Group: "+group)
				asked++
				return errors.Join(want("the first store having more than was asked for", first.Content(t, "batch.first", key).Used > asked, true),
					want("the second store having more than was asked for", second.Content(t, "batch.second", group).Used > asked, true))
			})
			must(t, "next request", c.Probe("/", "X-Key: "+key, "X-Group: "+group).Shows(http.StatusOK, 100, asked+1))
			asked++
			c.Unload()
			must(t, "at the end", errors.Join(want("what is used of the first zone", first.Content(t, "batch.first", key).Used, asked),
				want("what is used of the second zone", second.Content(t, "batch.second", group).Used, asked)))
		})
	}
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

// TestRolloutStoreThatIsDown checks that a zone follows the on_error of the store in which it
// counts, and that zones in the other store are unaffected.
func TestRolloutStoreThatIsDown(t *testing.T) {
	t.Parallel()
	type outage struct{ place, onError string }
	var all []outage
	for _, place := range slices.Sorted(maps.Keys(places)) {
		for _, onError := range []string{"allow", "deny", "local"} {
			all = append(all, outage{place, onError})
		}
	}
	for _, o := range sweep.Of(t, all, 3) {
		t.Run(fmt.Sprint(o), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			at, onError := places[o.place], o.onError
			servers := caddytest.StartShards(t, 2, 0)
			// The store that stays up has another on_error.
			options := [2]string{"on_error deny", "on_error deny"}
			if onError == "deny" {
				options = [2]string{"on_error allow", "on_error allow"}
			}
			down := 1 - at
			options[down] = "on_error " + onError
			zones := "rollout other 50\n" + zoneWith("first", "charge before") + zoneWith("second", byGroup, "events 3", "charge before")
			c := startWith(t, servers[:1].Store(options[0])+"\n\t"+otherStore(servers[1:], options[1]), zones, "respond ok")
			key := keyApart(t, servers, c, "X-Group", at)
			group := "group-" + key
			up := servers[at : at+1]
			must(t, "kill", servers[down].Primary.Kill())

			used := int64(1)
			for i := range int64(5) {
				a := c.Probe("/", "X-Key: "+key, "X-Group: "+group)
				what := fmt.Sprint("request ", i, " of both")
				switch {
				case onError == "deny":
					must(t, what, errors.Join(want("status", a.Status, http.StatusServiceUnavailable), want("being limited", a.IsLimited(), false)))
				case onError == "local" && i < 2:
					// The store has counted one.
					used++
					must(t, what, errors.Join(a.Shows(http.StatusOK, 3, i+2), want("zone", a.Resource, "second")))
				case onError == "local":
					// The first zone is refunded.
					must(t, what, a.Refuses("second"))
				default:
					used++
					must(t, what, errors.Join(a.Shows(http.StatusOK, 100, used), want("zone", a.Resource, "first")))
				}
				up.AwaitUsed(t, "first", key, used)
			}
			c.Stop()
			must(t, "at the end", want("what is used of the first zone", up.Content(t, "first", key).Used, used))
		})
	}
}

// byGroup is the key of zones that identify clients by another header, and so move them at another
// percentage.
const byGroup = "key {header.X-Group}"

// places are the stores of the first zone's bucket, of requests whose zones first and second count
// in different ones.
var places = map[string]int{"the second one moved": 0, "the first one moved": 1}

// TestRolloutOfASecondZoneLeavesTheFirstUntouched checks that, as in one store, a refusal charges
// no zone and costs no more calls.
func TestRolloutOfASecondZoneLeavesTheFirstUntouched(t *testing.T) {
	t.Parallel()
	type refusal struct{ first, second, place, trust string }
	var all []refusal
	for _, first := range modes {
		for _, second := range modes {
			for _, place := range slices.Sorted(maps.Keys(places)) {
				for _, trust := range slices.Sorted(maps.Keys(trusts)) {
					all = append(all, refusal{first, second, place, trust})
				}
			}
		}
	}
	for _, r := range sweep.Of(t, all, 4) {
		t.Run(fmt.Sprint(r), func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 2, 0)
			c := startWith(t, trusting(t, servers, twoStores(servers, trusts[r.trust]...), r.trust), "rollout other 50\n"+
				zoneWith("first", "charge "+r.first)+zoneWith("second", byGroup, "events 2", "charge "+r.second), "respond ok")
			secondZoneRefuses(t, c, servers, r.first, r.second, "X-Group", places[r.place], 2, r.trust)
		})
	}
}

// splitSite has the zones first and second, which count by different headers,
// and zones like them of every algorithm.
func splitSite(stores, answers string) string {
	zones := "rollout other 50\n" + zoneWith("first") + zoneWith("second", byGroup)
	for _, algorithm := range append(counting, "concurrency") {
		zones += zoneWith("first."+algorithm, "algorithm "+algorithm, "charge before") +
			zoneWith("second."+algorithm, "algorithm "+algorithm, "charge before", byGroup)
	}
	return zonesSite(stores, zones, answers)
}

// TestRolloutSplitsTheZonesOfARequest checks that each zone is charged, refunded and freed in its
// own store, and that the headers cover all zones.
func TestRolloutSplitsTheZonesOfARequest(t *testing.T) {
	t.Parallel()
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			servers := caddytest.StartShards(t, 2, 0)
			backend := caddytest.StartSlowBackend(t)
			c := caddytest.Start(t, splitSite(twoStores(servers), proxyTo("/held "+backend.Server.Listener.Addr().String())+
				"\n@plain not header X-Status *\nrespond @plain ok\n"+byStatus))
			key := keyApart(t, servers, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			used := int64(1)
			holds := func(running int64) {
				t.Helper()
				both := func(zone string, used int64) {
					t.Helper()
					first.AwaitUsed(t, "first"+zone, key, used)
					second.AwaitUsed(t, "second"+zone, group, used)
				}
				// Zones with charge after have not yet charged the running request.
				both("", used)
				for _, algorithm := range counting {
					both("."+algorithm, used+running)
				}
				both(".concurrency", running)
			}
			headers := []string{"X-Key: " + key, "X-Group: " + group}
			for _, step := range []settlement{{"/", 200, false}, {"/", 304, true}, {"/error", 404, false}, {"/error", 304, true}} {
				a := c.Probe(step.how, append(headers, fmt.Sprint("X-Status: ", step.status))...)
				if !step.free {
					used++
				}
				must(t, step.how, a.Shows(step.status, 100, used))
				holds(0)
			}
			held := backend.Hold(t, c, "/held", headers...)
			holds(1)
			must(t, "request", want("status", backend.Finish(t, held)[0].Status, http.StatusOK))
			used++
			holds(0)

			// The zone with the least left is reported, wherever it counts.
			for _, other := range []struct{ zone, key, group string }{{"first", key, "another"}, {"second", "another", group}} {
				a := c.Probe("/", "X-Key: "+other.key, "X-Group: "+other.group, "X-Status: 200")
				used := used + 1
				must(t, "request of half a client", errors.Join(a.Shows(http.StatusOK, 100, used), want("zone", a.Resource, other.zone)))
			}
			c.Unload()
		})
	}
}
