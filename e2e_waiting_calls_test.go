package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestLineCostsOneCallASecond: while requests of a client wait, a Caddy asks about
// the client's bucket once a second, however many more come: those that would have
// to wait too long, and those for which there is no room.
func TestLineCostsOneCallASecond(t *testing.T) {
	const requests = 200
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		for _, algorithm := range counting {
			zones += pathZone("long."+mode+"."+algorithm, "max_wait 25000h", "algorithm "+algorithm, "events 1", "charge "+mode)
			zones += pathZone("full."+mode+"."+algorithm, "max_wait 100000h", "max_wait_queue 3", "algorithm "+algorithm, "events 1", "charge "+mode)
		}
	}
	c := startWith(t, servers.Store(), zones, "respond ok")
	for _, mode := range modes {
		for _, algorithm := range counting {
			for _, why := range []string{"long", "full"} {
				zone := strings.Join([]string{why, mode, algorithm}, ".")
				t.Run(zone, func(t *testing.T) {
					must(t, "first request", c.Probe("/"+zone, "X-Key: alice").Shows(http.StatusOK, 1, 1))
					servers.AwaitUsed(t, zone, "alice", 1)
					servers.AwaitReplicas(t)
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					held := fillLine(ctx, t, c, "/"+zone, "X-Key: alice")
					before, start := callsTo(t, servers), time.Now()
					for range requests {
						must(t, "request too many", c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
					}
					took, made := time.Since(start), callsTo(t, servers)-before
					most := int64(took/time.Second) + 2
					must(t, "servers", want(fmt.Sprintf("having got %d calls for %d requests in %v, which is more than %d,", made, requests, took, most), made > most, false))
					leave()
					for _, r := range held {
						r.Leaves(t)
					}
					awaitHeld(t, c, 0)
				})
			}
		}
	}
}

// fillLine begins requests until one is not held, but refused, and returns those
// that are.
func fillLine(ctx context.Context, t *testing.T, c *caddytest.Caddy, path string, headers ...string) (held []caddytest.Running) {
	t.Helper()
	for refused := false; !refused; {
		r := c.Begin(ctx, path, headers...)
		eventually(t, "a request is held or refused", func() error {
			select {
			case a := <-r.Answer:
				refused = true
				return want("status", a.Status, http.StatusTooManyRequests)
			case err := <-r.Err:
				return err
			default:
			}
			if refused {
				return nil
			}
			return want("number of requests that are held", heldBy(c), len(held)+1)
		})
		if !refused {
			held = append(held, r)
		}
	}
	return held
}
