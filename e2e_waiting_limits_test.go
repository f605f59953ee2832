package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestWaitThatWouldBeTooLong: who would have to wait for longer than max_wait is
// refused at once, whether because of the bucket alone or because of those who
// wait already.
func TestWaitThatWouldBeTooLong(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, mode := range modes {
		zones += zoneWith("slow."+mode, "key {header.X-Key}", "algorithm gcra", "events 1", "window 25m", "max_wait 1h", "charge "+mode,
			"match {\nheader X-Mode "+mode+"\n}")
		zones += pathZone("slower."+mode, "algorithm gcra", "events 1", "window 61m", "burst 2", "max_wait 1h", "charge "+mode)
	}
	for name, store := range bothStores(servers, "ledger_trust 1h") {
		for _, mode := range modes {
			t.Run(name+", "+mode, func(t *testing.T) {
				must(t, "flush", servers[0].Primary.Client().FlushAll(t.Context()).Err())
				c := startWith(t, store, zones, "respond ok")
				zone, header := "slow."+mode, "X-Mode: "+mode
				before := scriptsRun(t, servers)
				must(t, "first request", c.Probe("/", "X-Key: alice", header).Shows(http.StatusOK, 1, 1))
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				if store != "" {
					servers.AwaitUsed(t, zone, "alice", 1)
				}
				waitInLine(t.Context(), t, c, "second", header)
				third := waitInLine(ctx, t, c, "third", header)
				for range 3 {
					// It would have to wait for 75 minutes.
					a := c.Probe("/", "X-Key: alice", header)
					must(t, "fourth request", errors.Join(a.Refuses(zone), want(fmt.Sprintf("Retry-After, %d, being that", a.RetryAfter), a.RetryAfter > 3600 && a.RetryAfter <= 4500, true)))
				}
				must(t, "another client", c.Probe("/", "X-Key: bob", header).Shows(http.StatusOK, 1, 1))
				awaitHeld(t, c, 2)

				// Who leaves makes room.
				leave()
				third.Leaves(t)
				awaitHeld(t, c, 1)
				ctx, leave = context.WithCancel(t.Context())
				defer leave()
				again := waitInLine(ctx, t, c, "again", header)
				if store != "" {
					servers.AwaitUsed(t, zone, "bob", 1)
					// Two requests that passed. The refusal that began the line asked
					// only where no reply to a charge had told that the bucket is
					// full, and the five looks at the line asked nobody.
					asked := map[string]int{"after": 2 * 2, "before": 2 + 1}[mode]
					awaitScripts(t, servers, before+asked)
				}

				// Nobody else waits here.
				for used := range int64(2) {
					must(t, "request", c.Probe("/slower."+mode, "X-Key: alice").Shows(http.StatusOK, 2, used+1))
					if store != "" {
						servers.AwaitUsed(t, "slower."+mode, "alice", used+1)
					}
				}
				must(t, "third request", c.Probe("/slower."+mode, "X-Key: alice").Refuses("slower."+mode))
				leave()
				again.Leaves(t)
			})
		}
	}
}

// TestFullQueue: no more than max_wait_queue requests of a zone wait.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range bothStores(servers) {
		for _, mode := range modes {
			for _, algorithm := range counting {
				t.Run(name+", "+mode+", "+algorithm, func(t *testing.T) {
					must(t, "flush", servers[0].Primary.Client().FlushAll(t.Context()).Err())
					c := startWith(t, store, zoneWith("slow", "algorithm "+algorithm, "events 1", "max_wait 100000h", "max_wait_queue 2", "charge "+mode), "respond ok")
					for _, key := range []string{"alice", "bob"} {
						must(t, key, c.Probe("/", "X-Key: "+key).Shows(http.StatusOK, 1, 1))
						if store != "" {
							servers.AwaitUsed(t, "slow", key, 1)
						}
					}
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					waitInLine(t.Context(), t, c, "second")
					third := waitInLine(ctx, t, c, "third")
					for _, key := range []string{"alice", "bob", "alice"} {
						must(t, key, c.Probe("/", "X-Key: "+key).Refuses("slow"))
					}
					must(t, "a client that need not wait", c.Probe("/", "X-Key: carol").Shows(http.StatusOK, 1, 1))
					leave()
					third.Leaves(t)
					awaitHeld(t, c, 1)
					waitInLine(t.Context(), t, c, "fourth")
					must(t, "bob", c.Probe("/", "X-Key: bob").Refuses("slow"))
				})
			}
		}
	}
}

// TestPatienceEndsInTheLine: who waits for those before it does so no longer than
// max_wait, though they wait for a Redis that hangs.
func TestPatienceEndsInTheLine(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 6*time.Second, func(full time.Duration) bool {
				servers := caddytest.StartShards(t, 1, 0)
				backend := startArrivals(t)
				c := startWith(t, servers.Store("check_timeout 1h"), zoneWith("slow", "algorithm gcra", "events 20", "window 1s", "burst 1",
					fmt.Sprint("max_wait ", full+2*time.Second), "charge "+mode), "reverse_proxy "+backend.addr)
				// It is another client's, lest Caddy knows that alice's bucket is full:
				// then it would not ask, and not learn for how long.
				must(t, "first request", want("status", c.Probe("/", "X-Key: bob", "X-Name: before").Status, http.StatusOK))
				before := scriptsOf(mode)
				awaitScripts(t, servers, before)
				room := keepFull(t, servers, 20, full)
				first, inTime := waitInLineUntil(t.Context(), t, c, room, "first")
				if !inTime {
					return false
				}
				second, inTime := waitInLineUntil(t.Context(), t, c, room, "second")
				if !inTime {
					return false
				}
				awaitScripts(t, servers, before+1)
				must(t, "hang", servers[0].Primary.Pause())
				if !isBefore(room) {
					must(t, "resume", servers[0].Primary.Resume())
					return false
				}
				a := second.Ends(t)
				must(t, "second request", errors.Join(a.Refuses("slow"),
					want("waiting for less than max_wait", a.Received.Sub(a.Sent) < full+2*time.Second, false)))
				must(t, "resume", servers[0].Primary.Resume())
				must(t, "first request", want("status", first.Ends(t).Status, http.StatusOK))
				must(t, "backend", want("order", fmt.Sprintf("%q", backend.all()), fmt.Sprintf("%q", []string{"before", "first"})))
				return true
			})
		})
	}
}

// TestHeldRequestIsCountedOnce: it gives back what it took when it begins to
// wait. When it takes it again at once, that must not be given back as well.
func TestHeldRequestIsCountedOnce(t *testing.T) {
	const before, workers, requests = 50, 4, 100
	servers := caddytest.StartShards(t, 1, 0)
	zones := zoneWith("pace", "algorithm gcra", "events 1000", "window 1s", "burst 1", "max_wait 100s", "charge before")
	for _, algorithm := range counting {
		zones += zoneWith(algorithm, "algorithm "+algorithm, "events 1000", "charge before")
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond \"{http.rate_limit.fixed_window.used} {http.rate_limit.sliding_window.used} "+
				"{http.rate_limit.sliding_log.used} {http.rate_limit.gcra.used}\"")
			// The refunds of gcra may come in another order than what they are
			// of, as long as that is not the first in the bucket.
			for range before {
				must(t, "request", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
			}
			caddytest.Together(t, workers, func(int) error {
				for range requests {
					a, err := c.TryProbe(t.Context(), "/", "X-Key: alice")
					if err = errors.Join(err, want("status", a.Status, http.StatusOK)); err != nil {
						return err
					}
				}
				return nil
			})
			const all = before + workers*requests
			if store == "" {
				must(t, "next request", want("body", c.Probe("/", "X-Key: alice").Body, fmt.Sprintf("%d %[1]d %[1]d %[1]d", all+1)))
				return
			}
			c.Stop()
			for _, algorithm := range counting {
				must(t, "Redis", want("used of "+algorithm, servers.Content(t, algorithm, "alice").Used, all))
			}
		})
	}
}
