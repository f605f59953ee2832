package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestRolloutStoreThatIsDown: zones follow the store in which they are asked, and
// those that count in the other one are none the worse.
func TestRolloutStoreThatIsDown(t *testing.T) {
	for place, at := range places {
		for _, onError := range []string{"allow", "deny", "local"} {
			t.Run(place+", "+onError, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := caddytest.StartShards(t, 2, 0)
				// The store that stays up would do something else.
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
					case onError == "local" && i < 3:
						used++
						must(t, what, errors.Join(a.Shows(http.StatusOK, 3, i+1), want("zone", a.Resource, "second")))
					case onError == "local":
						// The other zone gets back what it lost.
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
}
