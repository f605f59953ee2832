package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestTakesNeverExceedEvents: check and charge are one step, so that no request
// finds room that another one is about to use up, whoever serves it.
func TestTakesNeverExceedEvents(t *testing.T) {
	const (
		events  = 50
		workers = 64
		rounds  = 3
	)
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, algorithm := range counting {
		zones += pathZone(algorithm, "algorithm "+algorithm, "charge before", fmt.Sprint("events ", events))
	}
	caddys := caddytest.StartMany(t, 3, zonesSite(servers.Store(), zones, "respond ok"))
	for _, algorithm := range counting {
		t.Run(algorithm, func(t *testing.T) {
			var admitted, refused caddytest.Tally
			caddytest.Together(t, workers, func(worker int) error {
				for range rounds {
					a, err := caddys[worker%len(caddys)].TryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
					switch {
					case err != nil:
						return err
					case a.Status == http.StatusOK && a.IsLimited():
						admitted.Add(fmt.Sprint(a.Used))
					default:
						if err := a.Refuses(algorithm); err != nil {
							return fmt.Errorf("refusal: %w", err)
						}
						refused.Add("alice")
					}
				}
				return nil
			})
			must(t, "requests", want("number of those admitted", admitted.Total(), events))
			must(t, "requests", want("number of those refused", refused.Total(), rounds*workers-events))
			// Each was told what it alone made of the count.
			for used := range events {
				must(t, "admitted requests", want(fmt.Sprintf("number of those told that %d are used", used+1), admitted.N[fmt.Sprint(used+1)], 1))
			}
			must(t, "Redis", want("count", servers.Content(t, algorithm, "alice").Used, events))
		})
	}
	// Nothing is still on its way that would change the counts.
	for _, c := range caddys {
		c.Stop()
	}
	for _, algorithm := range counting {
		must(t, "Redis, at the end", want("count of "+algorithm, servers.Content(t, algorithm, "alice").Used, events))
	}
}
