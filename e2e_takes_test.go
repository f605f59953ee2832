package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"
)

// TestTakesNeverExceedEvents: check and charge are one step, so that no request
// finds room that another one is about to use up, whoever serves it.
func TestTakesNeverExceedEvents(t *testing.T) {
	const (
		events  = 50
		workers = 64
		rounds  = 3
	)
	servers := startShards(t, 1, 0)
	zones := ""
	for _, algorithm := range counting {
		zones += pathZone(algorithm, "algorithm "+algorithm, "charge before", fmt.Sprint("events ", events))
	}
	caddys := startCaddys(t, 3, zonesSite(servers.store(), zones, "respond ok"))
	for _, algorithm := range counting {
		t.Run(algorithm, func(t *testing.T) {
			var admitted, refused tally
			together(t, workers, func(worker int) error {
				for range rounds {
					a, err := caddys[worker%len(caddys)].tryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
					switch {
					case err != nil:
						return err
					case a.status == http.StatusOK && a.isLimited():
						admitted.add(fmt.Sprint(a.used))
					default:
						if err := a.refuses(algorithm); err != nil {
							return fmt.Errorf("refusal: %w", err)
						}
						refused.add("alice")
					}
				}
				return nil
			})
			must(t, "requests", want("number of those admitted", admitted.total(), events))
			must(t, "requests", want("number of those refused", refused.total(), rounds*workers-events))
			// Each was told what it alone made of the count.
			for used := range events {
				must(t, "admitted requests", want(fmt.Sprintf("number of those told that %d are used", used+1), admitted.n[fmt.Sprint(used+1)], 1))
			}
			must(t, "Redis", want("count", servers.content(t, algorithm, "alice").used, events))
		})
	}
	// Nothing is still on its way that would change the counts.
	for _, c := range caddys {
		c.stop()
	}
	for _, algorithm := range counting {
		must(t, "Redis, at the end", want("count of "+algorithm, servers.content(t, algorithm, "alice").used, events))
	}
}
