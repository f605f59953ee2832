package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"
)

// TestWaitThatWouldBeTooLong: who would have to wait for longer than max_wait is
// refused at once, whether because of the bucket alone or because of those who
// wait already.
func TestWaitThatWouldBeTooLong(t *testing.T) {
	servers := startShards(t, 1, 0)
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
				before := servers.scripts(t)
				must(t, "first request", c.probe("/", "X-Key: alice", header).shows(http.StatusOK, 1, 1))
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				if store != "" {
					servers.awaitUsed(t, zone, "alice", 1)
				}
				c.line(t.Context(), t, "second", header)
				third := c.line(ctx, t, "third", header)
				for range 3 {
					// It would have to wait for 75 minutes.
					a := c.probe("/", "X-Key: alice", header)
					must(t, "fourth request", errors.Join(a.refuses(zone), want(fmt.Sprintf("Retry-After, %d, being that", a.retryAfter), a.retryAfter > 3600 && a.retryAfter <= 4500, true)))
				}
				must(t, "another client", c.probe("/", "X-Key: bob", header).shows(http.StatusOK, 1, 1))
				c.awaitHeld(t, 2)

				// Who leaves makes room.
				leave()
				third.leaves(t)
				c.awaitHeld(t, 1)
				ctx, leave = context.WithCancel(t.Context())
				defer leave()
				again := c.line(ctx, t, "again", header)
				if store != "" {
					servers.awaitUsed(t, zone, "bob", 1)
					// Two requests that passed. The refusal that began the line asked
					// only where no reply to a charge had told that the bucket is
					// full, and the five looks at the line asked nobody.
					asked := map[string]int{"after": 2 * 2, "before": 2 + 1}[mode]
					servers.awaitScripts(t, before+asked)
				}

				// Nobody else waits here.
				for used := range int64(2) {
					must(t, "request", c.probe("/slower."+mode, "X-Key: alice").shows(http.StatusOK, 2, used+1))
					if store != "" {
						servers.awaitUsed(t, "slower."+mode, "alice", used+1)
					}
				}
				must(t, "third request", c.probe("/slower."+mode, "X-Key: alice").refuses("slower."+mode))
				leave()
				again.leaves(t)
			})
		}
	}
}

// TestFullQueue: no more than max_wait_queue requests of a zone wait.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	servers := startShards(t, 1, 0)
	for name, store := range bothStores(servers) {
		for _, mode := range modes {
			for _, algorithm := range counting {
				t.Run(name+", "+mode+", "+algorithm, func(t *testing.T) {
					must(t, "flush", servers[0].Primary.Client().FlushAll(t.Context()).Err())
					c := startWith(t, store, zoneWith("slow", "algorithm "+algorithm, "events 1", "max_wait 100000h", "max_wait_queue 2", "charge "+mode), "respond ok")
					for _, key := range []string{"alice", "bob"} {
						must(t, key, c.probe("/", "X-Key: "+key).shows(http.StatusOK, 1, 1))
						if store != "" {
							servers.awaitUsed(t, "slow", key, 1)
						}
					}
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					c.line(t.Context(), t, "second")
					third := c.line(ctx, t, "third")
					for _, key := range []string{"alice", "bob", "alice"} {
						must(t, key, c.probe("/", "X-Key: "+key).refuses("slow"))
					}
					must(t, "a client that need not wait", c.probe("/", "X-Key: carol").shows(http.StatusOK, 1, 1))
					leave()
					third.leaves(t)
					c.awaitHeld(t, 1)
					c.line(t.Context(), t, "fourth")
					must(t, "bob", c.probe("/", "X-Key: bob").refuses("slow"))
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
				servers := startShards(t, 1, 0)
				backend := startArrivals(t)
				c := startWith(t, servers.store("check_timeout 1h"), zoneWith("slow", "algorithm gcra", "events 20", "window 1s", "burst 1",
					fmt.Sprint("max_wait ", full+2*time.Second), "charge "+mode), "reverse_proxy "+backend.addr)
				// It is another client's, lest Caddy knows that alice's bucket is full:
				// then it would not ask, and not learn for how long.
				must(t, "first request", want("status", c.probe("/", "X-Key: bob", "X-Name: before").status, http.StatusOK))
				before := scriptsOf(mode)
				servers.awaitScripts(t, before)
				room := servers.keepFull(t, 20, full)
				first, inTime := c.lineUntil(t.Context(), t, room, "first")
				if !inTime {
					return false
				}
				second, inTime := c.lineUntil(t.Context(), t, room, "second")
				if !inTime {
					return false
				}
				servers.awaitScripts(t, before+1)
				must(t, "hang", servers[0].Primary.Pause())
				if !isBefore(room) {
					must(t, "resume", servers[0].Primary.Resume())
					return false
				}
				a := second.ends(t)
				must(t, "second request", errors.Join(a.refuses("slow"),
					want("waiting for less than max_wait", a.received.Sub(a.sent) < full+2*time.Second, false)))
				must(t, "resume", servers[0].Primary.Resume())
				must(t, "first request", want("status", first.ends(t).status, http.StatusOK))
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
	servers := startShards(t, 1, 0)
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
				must(t, "request", want("status", c.probe("/", "X-Key: alice").status, http.StatusOK))
			}
			together(t, workers, func(int) error {
				for range requests {
					a, err := c.tryProbe(t.Context(), "/", "X-Key: alice")
					if err = errors.Join(err, want("status", a.status, http.StatusOK)); err != nil {
						return err
					}
				}
				return nil
			})
			const all = before + workers*requests
			if store == "" {
				must(t, "next request", want("body", c.probe("/", "X-Key: alice").body, fmt.Sprintf("%d %[1]d %[1]d %[1]d", all+1)))
				return
			}
			c.stop()
			for _, algorithm := range counting {
				must(t, "Redis", want("used of "+algorithm, servers.content(t, algorithm, "alice").used, all))
			}
		})
	}
}
