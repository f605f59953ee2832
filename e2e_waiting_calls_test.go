package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestLineCostsOneCallASecond: while requests of a client wait, a Caddy asks about
// the client's bucket once a second, however many more come: those that would have
// to wait too long, and those for which there is no room.
func TestLineCostsOneCallASecond(t *testing.T) {
	const requests = 200
	servers := startShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		for _, algorithm := range counting {
			zones += pathZone("long."+mode+"."+algorithm, "max_wait 25000h", "algorithm "+algorithm, "events 1", "charge "+mode)
			zones += pathZone("full."+mode+"."+algorithm, "max_wait 100000h", "max_wait_queue 3", "algorithm "+algorithm, "events 1", "charge "+mode)
		}
	}
	c := startWith(t, servers.store(), zones, "respond ok")
	for _, mode := range modes {
		for _, algorithm := range counting {
			for _, why := range []string{"long", "full"} {
				zone := strings.Join([]string{why, mode, algorithm}, ".")
				t.Run(zone, func(t *testing.T) {
					must(t, "first request", c.probe("/"+zone, "X-Key: alice").shows(http.StatusOK, 1, 1))
					servers.awaitUsed(t, zone, "alice", 1)
					servers.awaitReplicas(t)
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					held := c.fillLine(ctx, t, "/"+zone, "X-Key: alice")
					before, start := servers.calls(t), time.Now()
					for range requests {
						must(t, "request too many", c.probe("/"+zone, "X-Key: alice").refuses(zone))
					}
					took, made := time.Since(start), servers.calls(t)-before
					most := int64(took/time.Second) + 2
					must(t, "servers", want(fmt.Sprintf("having got %d calls for %d requests in %v, which is more than %d,", made, requests, took, most), made > most, false))
					leave()
					for _, r := range held {
						r.leaves(t)
					}
					c.awaitHeld(t, 0)
				})
			}
		}
	}
}

// fillLine begins requests until one is not held, but refused, and returns those
// that are.
func (c *caddyProcess) fillLine(ctx context.Context, t *testing.T, path string, headers ...string) (held []running) {
	t.Helper()
	for refused := false; !refused; {
		r := c.begin(ctx, path, headers...)
		eventually(t, "a request is held or refused", func() error {
			select {
			case a := <-r.answer:
				refused = true
				return want("status", a.status, http.StatusTooManyRequests)
			case err := <-r.err:
				return err
			default:
			}
			if refused {
				return nil
			}
			return want("number of requests that are held", c.held(), len(held)+1)
		})
		if !refused {
			held = append(held, r)
		}
	}
	return held
}
