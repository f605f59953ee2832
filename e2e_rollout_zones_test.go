package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// byGroup is the key of zones whose clients are told apart by another header, so
// that they are moved at another percentage.
const byGroup = "key {header.X-Group}"

// places are whose bucket is in which store, of a request whose zones first and
// second count in different ones.
var places = map[string]int{"the second one moved": 0, "the first one moved": 1}

// TestRolloutOfASecondZoneLeavesTheFirstUntouched: as in one store, a refusal
// charges no zone, and costs no more calls.
func TestRolloutOfASecondZoneLeavesTheFirstUntouched(t *testing.T) {
	for _, first := range modes {
		for _, second := range modes {
			for place, at := range places {
				for _, trust := range []string{"1h", "1us"} {
					t.Run(fmt.Sprintf("%s, %s, %s, trust %s", first, second, place, trust), func(t *testing.T) {
						t.Parallel()
						servers := caddytest.StartShards(t, 2, 0)
						c := startWith(t, twoStores(servers, "ledger_trust "+trust), "rollout other 50\n"+
							zoneWith("first", "charge "+first)+zoneWith("second", byGroup, "events 2", "charge "+second), "respond ok")
						secondZoneRefuses(t, c, servers, first, second, "X-Group", at, 2, trust == "1h")
					})
				}
			}
		}
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

// TestRolloutPartsTheZonesOfARequest: each is charged, refunded and given back
// where it counts, and the headers are about all of them.
func TestRolloutPartsTheZonesOfARequest(t *testing.T) {
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			servers := caddytest.StartShards(t, 2, 0)
			backend := caddytest.StartSlowBackend(t)
			c := caddytest.Start(t, splitSite(twoStores(servers), "reverse_proxy /held "+backend.Server.Listener.Addr().String()+
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
				// What is charged after the response is not yet.
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
			c.Stop()
		})
	}
}
