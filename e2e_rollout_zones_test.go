package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
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
						servers := startShards(t, 2, 0)
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
			servers := startShards(t, 2, 0)
			backend := startSlowBackend(t)
			c := startCaddy(t, splitSite(twoStores(servers), "reverse_proxy /held "+backend.server.Listener.Addr().String()+
				"\n@plain not header X-Status *\nrespond @plain ok\n"+byStatus))
			key := servers.apart(t, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			used := int64(1)
			holds := func(running int64) {
				t.Helper()
				both := func(zone string, used int64) {
					t.Helper()
					first.awaitUsed(t, "first"+zone, key, used)
					second.awaitUsed(t, "second"+zone, group, used)
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
				a := c.probe(step.how, append(headers, fmt.Sprint("X-Status: ", step.status))...)
				if !step.free {
					used++
				}
				must(t, step.how, a.shows(step.status, 100, used))
				holds(0)
			}
			held := backend.hold(t, c, "/held", headers...)
			holds(1)
			must(t, "request", want("status", backend.finish(t, held)[0].status, http.StatusOK))
			used++
			holds(0)

			// The zone with the least left is reported, wherever it counts.
			for _, other := range []struct{ zone, key, group string }{{"first", key, "another"}, {"second", "another", group}} {
				a := c.probe("/", "X-Key: "+other.key, "X-Group: "+other.group, "X-Status: 200")
				used := used + 1
				must(t, "request of half a client", errors.Join(a.shows(http.StatusOK, 100, used), want("zone", a.resource, other.zone)))
			}
			c.stop()
		})
	}
}
