package shardlimit_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestEveryAlgorithmThroughCaddy: three events are admitted and the fourth is
// not.
func TestEveryAlgorithmThroughCaddy(t *testing.T) {
	const events, window = 3, 10000 * 3600
	servers := caddytest.StartShards(t, 1, 1)
	backend := caddytest.StartSlowBackend(t)
	zones := pathZone("concurrency", "algorithm concurrency", "events 3")
	for _, algorithm := range counting {
		for _, mode := range modes {
			zones += pathZone(algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode, "events 3")
		}
	}
	answers := "reverse_proxy /concurrency " + backend.Server.Listener.Addr().String() + "\nrespond ok"
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, answers)
			for _, algorithm := range counting {
				for _, mode := range modes {
					zone := algorithm + "." + mode
					for used := range int64(events) {
						a := c.Probe("/"+zone, "X-Key: alice")
						must(t, zone, errors.Join(a.Shows(http.StatusOK, events, used+1), want("zone", a.Resource, zone),
							want("Retry-After", a.RetryAfter, -1), want("having a reset", a.Reset >= a.Sent.Unix(), true)))
						if store != "" {
							servers.AwaitUsed(t, zone, "alice", used+1)
							servers.AwaitReplicas(t)
						}
					}
					for range 2 {
						a := c.Probe("/"+zone, "X-Key: alice")
						must(t, zone, errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, events, events),
							want("Retry-After being no more than two windows", a.RetryAfter <= 2*window, true),
							want("having a reset", a.Reset > a.Sent.Unix(), true)))
					}
					must(t, zone+", another client", c.Probe("/"+zone, "X-Key: bob").Shows(http.StatusOK, events, 1))
				}
			}

			// Requests at the same time are counted while they run.
			var held []caddytest.Running
			for range events {
				held = append(held, backend.Hold(t, c, "/concurrency", "X-Key: alice"))
			}
			a := c.Probe("/concurrency", "X-Key: alice")
			must(t, "concurrency", errors.Join(a.Refuses("concurrency"), a.Shows(http.StatusTooManyRequests, events, events), want("reset", a.Reset, -1)))
			other := backend.Hold(t, c, "/concurrency", "X-Key: bob")
			for i, a := range backend.Finish(t, append(held, other)...) {
				used := int64(i)%events + 1
				must(t, "concurrency", errors.Join(a.Shows(http.StatusOK, events, used), want("reset", a.Reset, -1), want("Retry-After", a.RetryAfter, -1)))
			}
		})
	}
}

// TestCostThatNeverFits: a client is not told to come back.
func TestCostThatNeverFits(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
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
						a := probeNever(c, "/"+zone, "X-Key: alice", "X-Cost: 3")
						must(t, zone, errors.Join(a.Shows(http.StatusTooManyRequests, 2, 0), want("zone", a.Resource, zone)))
					}
					must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Cost: 2").Shows(http.StatusOK, 2, 2))
					lines := c.AwaitLines(t, 1, "costs more than its zone ever admits", `"zone":"`+zone+`"`)
					for _, text := range []string{`"cost":3`, `"capacity":2`, `"hint":"raise events or, with gcra, burst`} {
						must(t, zone, want("the log having "+text, strings.Contains(lines[0], text), true))
					}
				}
			}
		})
	}
}

// probeNever is probe of what is refused for good.
func probeNever(c *caddytest.Caddy, path string, headers ...string) caddytest.Answer {
	c.T.Helper()
	a := c.Probe(path, headers...)
	must(c.T, path, errors.Join(want("status", a.Status, http.StatusTooManyRequests), want("having Retry-After", a.Header.Values("Retry-After") != nil, false)))
	return a
}
