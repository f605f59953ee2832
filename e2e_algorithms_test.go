package shardlimit_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
)

// TestEveryAlgorithmThroughCaddy: three events are admitted and the fourth is
// not.
func TestEveryAlgorithmThroughCaddy(t *testing.T) {
	const events, window = 3, 10000 * 3600
	servers := startShards(t, 1, 1)
	backend := startSlowBackend(t)
	zones := pathZone("concurrency", "algorithm concurrency", "events 3")
	for _, algorithm := range counting {
		for _, mode := range modes {
			zones += pathZone(algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode, "events 3")
		}
	}
	answers := "reverse_proxy /concurrency " + backend.server.Listener.Addr().String() + "\nrespond ok"
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, answers)
			for _, algorithm := range counting {
				for _, mode := range modes {
					zone := algorithm + "." + mode
					for used := range int64(events) {
						a := c.probe("/"+zone, "X-Key: alice")
						must(t, zone, errors.Join(a.shows(http.StatusOK, events, used+1), want("zone", a.resource, zone),
							want("Retry-After", a.retryAfter, -1), want("having a reset", a.reset >= a.sent.Unix(), true)))
						if store != "" {
							servers.awaitUsed(t, zone, "alice", used+1)
							servers.awaitReplicas(t)
						}
					}
					for range 2 {
						a := c.probe("/"+zone, "X-Key: alice")
						must(t, zone, errors.Join(a.refuses(zone), a.shows(http.StatusTooManyRequests, events, events),
							want("Retry-After being no more than two windows", a.retryAfter <= 2*window, true),
							want("having a reset", a.reset > a.sent.Unix(), true)))
					}
					must(t, zone+", another client", c.probe("/"+zone, "X-Key: bob").shows(http.StatusOK, events, 1))
				}
			}

			// Requests at the same time are counted while they run.
			var held []running
			for range events {
				held = append(held, backend.hold(t, c, "/concurrency", "X-Key: alice"))
			}
			a := c.probe("/concurrency", "X-Key: alice")
			must(t, "concurrency", errors.Join(a.refuses("concurrency"), a.shows(http.StatusTooManyRequests, events, events), want("reset", a.reset, -1)))
			other := backend.hold(t, c, "/concurrency", "X-Key: bob")
			for i, a := range backend.finish(t, append(held, other)...) {
				used := int64(i)%events + 1
				must(t, "concurrency", errors.Join(a.shows(http.StatusOK, events, used), want("reset", a.reset, -1), want("Retry-After", a.retryAfter, -1)))
			}
		})
	}
}

// TestCostThatNeverFits: a client is not told to come back.
func TestCostThatNeverFits(t *testing.T) {
	servers := startShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("burst."+mode, "algorithm gcra", "events 100", "burst 2", "cost {header.X-Cost}", "charge "+mode)
		zones += pathZone("window."+mode, "events 2", "cost {header.X-Cost}", "charge "+mode)
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond ok")
			for _, mode := range modes {
				for _, zone := range []string{"burst." + mode, "window." + mode} {
					for range 2 {
						a := c.probeNever("/"+zone, "X-Key: alice", "X-Cost: 3")
						must(t, zone, errors.Join(a.shows(http.StatusTooManyRequests, 2, 0), want("zone", a.resource, zone)))
					}
					must(t, zone, c.probe("/"+zone, "X-Key: alice", "X-Cost: 2").shows(http.StatusOK, 2, 2))
					lines := c.awaitLines(t, 1, "costs more than its zone ever admits", `"zone":"`+zone+`"`)
					for _, text := range []string{`"cost":3`, `"capacity":2`, `"hint":"raise events or, with gcra, burst`} {
						must(t, zone, want("the log having "+text, strings.Contains(lines[0], text), true))
					}
				}
			}
		})
	}
}

// probeNever is probe of what is refused for good.
func (c *caddyProcess) probeNever(path string, headers ...string) answer {
	c.t.Helper()
	a := c.probe(path, headers...)
	must(c.t, path, errors.Join(want("status", a.status, http.StatusTooManyRequests), want("having Retry-After", a.header.Values("Retry-After") != nil, false)))
	return a
}
