package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// startPricedBackend is a server whose responses say what they cost, as the
// request wants it.
func startPricedBackend(t *testing.T) (addr string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if cost, ok := r.Header["X-Ask-Cost"]; ok {
			w.Header()["X-Cost"] = cost
		}
		if r.URL.Query().Has("304") {
			w.WriteHeader(http.StatusNotModified)
		}
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

func TestBackendDefinedCost(t *testing.T) {
	const events = 100
	servers := caddytest.StartShards(t, 1, 0)
	zones, names := "", []string{}
	for _, algorithm := range counting {
		for _, mode := range modes {
			name := algorithm + "." + mode
			names = append(names, name)
			zones += pathZone(name, "algorithm "+algorithm, "charge "+mode, "cost {http.response.header.X-Cost}")
		}
	}
	answers := "reverse_proxy " + startPricedBackend(t)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, answers)
			sums := map[string]int64{}
			for _, zone := range names {
				used := int64(0)
				for _, step := range []struct {
					query, cost string
					charged     int64
				}{
					// It is free, and told where it stands.
					{"", "0", 0},
					{"", "5", 5},
					{"", "0", 0},
					{"", "1", 1},
					{"", " 7 ", 7},
					// A free status is free, whatever it costs.
					{"?304", "9", 0},
					{"", "cheap", 1},
					{"", "-3", 1},
					{"", "1.5", 1},
					{"", "9007199254740993", 1},
					{"", "", 1},
					{"", "40", 40},
				} {
					what := fmt.Sprintf("%s, cost %q%s", zone, step.cost, step.query)
					used += step.charged
					status := http.StatusOK
					if step.query != "" {
						status = http.StatusNotModified
					}
					a := c.Probe("/"+zone+step.query, "X-Key: alice", "X-Ask-Cost: "+step.cost)
					must(t, what, errors.Join(a.Shows(status, events, used), want("zone", a.Resource, zone)))
					if store != "" {
						servers.AwaitUsed(t, zone, "alice", used)
					}
				}
				sums[zone] = used
			}
			// The last one is not admitted as long as it may cost 1, and the
			// backend does not get to say that it is free.
			for _, zone := range names {
				must(t, zone, c.Probe("/"+zone, "X-Key: alice", fmt.Sprint("X-Ask-Cost: ", events-sums[zone])).Shows(http.StatusOK, events, events))
				if store != "" {
					servers.AwaitUsed(t, zone, "alice", events)
				}
				must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Ask-Cost: 0").Refuses(zone))
			}
			c.Stop()
			for _, zone := range names {
				c.AwaitLines(t, 1, "cost is not a number from 0 to 2^52; charging 1", `"zone":"`+zone+`"`)
				if store != "" {
					must(t, "at the end", want("used of "+zone, servers.Content(t, zone, "alice").Used, events))
				}
			}
		})
	}
}

// TestCostOfTheRequest: where it is known beforehand, there is nothing to
// correct.
func TestCostOfTheRequest(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, algorithm := range counting {
		for _, mode := range modes {
			zones += pathZone(algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode, "events 10", "cost {header.X-Cost}")
			zones += pathZone("fixed."+algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode, "events 10", "cost 4")
		}
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond ok")
			for _, algorithm := range counting {
				for _, mode := range modes {
					for _, zone := range []string{algorithm + "." + mode, "fixed." + algorithm + "." + mode} {
						for used := int64(4); used <= 8; used += 4 {
							must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Cost: 4").Shows(http.StatusOK, 10, used))
							if store != "" {
								servers.AwaitUsed(t, zone, "alice", used)
							}
						}
						// Two are left and four are wanted.
						a := c.Probe("/"+zone, "X-Key: alice", "X-Cost: 4")
						must(t, zone, errors.Join(a.Is(http.StatusTooManyRequests, 8), want("having Retry-After", a.RetryAfter >= 1, true)))
					}
					zone := algorithm + "." + mode
					must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Cost: 2").Shows(http.StatusOK, 10, 10))
				}
			}
		})
	}
}
