package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
)

// TestRolloutStoreThatIsDown: zones follow the store in which they are asked, and
// those that count in the other one are none the worse.
func TestRolloutStoreThatIsDown(t *testing.T) {
	for place, at := range places {
		for _, onError := range []string{"allow", "deny", "local"} {
			t.Run(place+", "+onError, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := startShards(t, 2, 0)
				// The store that stays up would do something else.
				options := [2]string{"on_error deny", "on_error deny"}
				if onError == "deny" {
					options = [2]string{"on_error allow", "on_error allow"}
				}
				down := 1 - at
				options[down] = "on_error " + onError
				zones := "rollout other 50\n" + zoneWith("first", "charge before") + zoneWith("second", byGroup, "events 3", "charge before")
				c := startWith(t, servers[:1].store(options[0])+"\n\t"+servers[1:].otherStore(options[1]), zones, "respond ok")
				key := servers.apart(t, c, "X-Group", at)
				group := "group-" + key
				up := servers[at : at+1]
				must(t, "kill", servers[down].Primary.Kill())

				used := int64(1)
				for i := range int64(5) {
					a := c.probe("/", "X-Key: "+key, "X-Group: "+group)
					what := fmt.Sprint("request ", i, " of both")
					switch {
					case onError == "deny":
						must(t, what, errors.Join(want("status", a.status, http.StatusServiceUnavailable), want("being limited", a.isLimited(), false)))
					case onError == "local" && i < 3:
						used++
						must(t, what, errors.Join(a.shows(http.StatusOK, 3, i+1), want("zone", a.resource, "second")))
					case onError == "local":
						// The other zone gets back what it lost.
						must(t, what, a.refuses("second"))
					default:
						used++
						must(t, what, errors.Join(a.shows(http.StatusOK, 100, used), want("zone", a.resource, "first")))
					}
					up.awaitUsed(t, "first", key, used)
				}
				c.stop()
				must(t, "at the end", want("what is used of the first zone", up.content(t, "first", key).used, used))
			})
		}
	}
}
