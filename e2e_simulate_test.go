package shardlimit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// simulated is what POST /rate_limit/simulate answers.
type simulated struct {
	Decision string
	Zone     string
	Wait     float64
	Zones    []struct {
		Name, Store, Outcome, Reason, Error string
		ClientKey                           string `json:"client_key"`
		Limit, Used, Remaining, Cost        int64
		Reset                               float64
		Allowed                             bool
	}
	PassedOver []string `json:"passed_over"`
	Error      string
}

// simulate simulates a request to the site with headers given as "Name: value".
func simulate(c *caddytest.Caddy, path string, headers ...string) (s simulated) {
	c.T.Helper()
	given := http.Header{}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		given.Add(name, value)
	}
	body, err := json.Marshal(map[string]any{"url": c.URL + path, "headers": given})
	must(c.T, "encode", err)
	c.AdminJSON(http.MethodPost, "/rate_limit/simulate", string(body), &s)
	return s
}

// names are those of the zones that count the request.
func (s simulated) names() string {
	var names []string
	for _, z := range s.Zones {
		names = append(names, z.Name)
	}
	return strings.Join(names, " ")
}

// TestSimulateForetells what a request is told then, and counts nothing: with
// all algorithms and ways of charging, in memory and in Redis.
func TestSimulateForetells(t *testing.T) {
	const events = 3
	servers := caddytest.StartShards(t, 2, 1)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			zones := ""
			for _, algorithm := range counting {
				for _, mode := range modes {
					zones += pathZone(algorithm+"."+mode, fmt.Sprintf("events %d", events), "algorithm "+algorithm, "charge "+mode)
				}
			}
			c := caddytest.Start(t, zonesSite(store, zones, "respond ok"))
			for _, algorithm := range counting {
				for _, mode := range modes {
					zone := algorithm + "." + mode
					for used := range int64(events + 2) {
						before := dumpOf(t, servers)
						s := simulate(c, "/"+zone, "X-Key: alice")
						must(t, zone+" leaves Redis", want("change", maps.Equal(before, dumpOf(t, servers)), true))
						a := c.Probe("/"+zone, "X-Key: alice")
						decision := map[int]string{http.StatusOK: "allowed", http.StatusTooManyRequests: "refused"}[a.Status]
						if len(s.Zones) != 1 {
							t.Fatalf("%s: %+v", zone, s)
						}
						z := s.Zones[0]
						must(t, fmt.Sprintf("%s after %d: %+v", zone, used, s), errors.Join(
							want("decision", s.Decision, decision), want("zone", z.Name, zone), want("limit", z.Limit, int64(events)),
							want("used", z.Used, min(used, events)), want("remaining", z.Remaining, max(events-used, 0)),
							want("cost", z.Cost, 1), want("outcome", z.Outcome, decision), want("error", z.Error, ""),
							want("store", z.Store, "default"), want("client key", strings.HasSuffix(z.ClientKey, ":alice"), true)))
						if used > 0 && used < events && z.Reset < float64(time.Now().Unix()) {
							t.Errorf("%s: reset is %f", zone, z.Reset)
						}
						if decision == "refused" && (s.Zone != zone || s.Wait <= 0 || z.Reason != "over_limit") {
							t.Errorf("%s: %+v", zone, s)
						}
						if name == "redis" {
							servers.AwaitUsed(t, zone, "alice", min(used+1, events))
						}
					}
				}
			}
		})
	}
}

// dumpOf is all that is in Redis.
func dumpOf(t *testing.T, s caddytest.Shards) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, shard := range s {
		client := shard.Primary.Client()
		keys, err := client.Keys(t.Context(), "*").Result()
		must(t, "keys", err)
		for _, key := range keys {
			if all[key], err = client.Dump(t.Context(), key).Result(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// TestSimulateWaitsOnlyWhereAllWould: of two full zones one holds requests, and
// the other refuses them at once.
func TestSimulateWaitsOnlyWhereAllWould(t *testing.T) {
	c := caddytest.Start(t, zonesSite("",
		zoneWith("fast", "events 1", "window 20s")+zoneWith("patient", "events 1", "window 30s", "charge before", "max_wait 1m"), "respond ok"))
	c.Probe("/", "X-Key: alice")
	a, s := c.Probe("/", "X-Key: alice"), simulate(c, "/", "X-Key: alice")
	must(t, fmt.Sprintf("%+v", s), errors.Join(
		want("status", a.Status, http.StatusTooManyRequests), want("decision", s.Decision, "refused")))
}
