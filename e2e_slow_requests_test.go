package shardlimit_test

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestSlowRequestsOccupyLaterWindows with charge after, where a request counts
// until its response begins. With charge before it counts in the window in which
// it came, and the next one is open to others.
func TestSlowRequestsOccupyLaterWindows(t *testing.T) {
	const window = 300 * time.Millisecond
	servers := caddytest.StartShards(t, 1, 1)
	for name, store := range bothStores(servers) {
		for _, mode := range modes {
			for _, algorithm := range counting {
				t.Run(name+", "+mode+", "+algorithm, func(t *testing.T) {
					t.Parallel() // it spends its time waiting
					backend := caddytest.StartSlowBackend(t)
					c := startWith(t, store, zoneWith(mode+"."+algorithm, "algorithm "+algorithm, "events 2", "window "+window.String(), "charge "+mode),
						"reverse_proxy "+backend.Server.Listener.Addr().String())
					slow := []caddytest.Running{backend.Hold(t, c, "/", "X-Key: alice"), backend.Hold(t, c, "/", "X-Key: alice")}
					for range 2 {
						time.Sleep(2 * window)
						if mode == "before" {
							slow = append(slow, backend.Hold(t, c, "/", "X-Key: alice"))
							continue
						}
						a := c.Probe("/", "X-Key: alice")
						must(t, "request while slow ones run", errors.Join(a.Refuses(mode+"."+algorithm), want("Retry-After", a.RetryAfter, 1)))
					}
					for _, a := range backend.Finish(t, slow...) {
						must(t, "slow request", want("status", a.Status, http.StatusOK))
					}
				})
			}
		}
	}
}
