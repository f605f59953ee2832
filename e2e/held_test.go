package e2e

import (
	"errors"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestRefusedForWhatAnotherCaddyHolds: requests that run at one Caddy may turn out to be free, so another one tells
// their client to come again in a second. Once they are, it lets the client pass, and once they are charged, it
// refuses it until there is room.
func TestRefusedForWhatAnotherCaddyHolds(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	zones := ""
	for _, algorithm := range counting {
		options := []string{"algorithm " + algorithm, "events 3", "window 10m", "charge before"}
		zones += pathZone(algorithm+".charged", options...) + pathZone(algorithm+".free", append(options, "count_status 401")...)
	}
	caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store("check_timeout 1m"), zones,
		"@quick header X-Quick yes\nrespond @quick ok\n"+proxyTo(backend.Server.Listener.Addr().String())))
	for _, algorithm := range counting {
		for _, ending := range []string{"charged", "free"} {
			t.Run(algorithm+", "+ending, func(t *testing.T) {
				zone := algorithm + "." + ending
				var running []caddytest.Running
				for range 3 {
					running = append(running, backend.Hold(t, caddys[1], "/"+zone, "X-Key: alice"))
				}
				ask := func() caddytest.Answer { return caddys[0].Probe("/"+zone, "X-Key: alice", "X-Quick: yes") }
				for range 3 {
					a := ask()
					must(t, "while they run", errors.Join(a.Refuses(zone), want("Retry-After", a.RetryAfter, 1)))
				}
				backend.Finish(t, running...)
				eventually(t, "the other Caddy knows how they have ended", func() error {
					a := ask()
					if ending == "charged" {
						return errors.Join(a.Refuses(zone), want("Retry-After, of more than a minute,", a.RetryAfter > 60, true))
					}
					return want("status", a.Status, http.StatusOK)
				})
			})
		}
	}
	awaitNothingHeld(t, servers)
}
