package shardlimit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// quotaZone is pathZone whose events a header of the request tells.
func quotaZone(name string, options ...string) string {
	return pathZone(name, append(options[:len(options):len(options)], "events {header.X-Quota} 100")...)
}

// isUnlimited tells how the answer differs from one of which no zone says
// anything.
func isUnlimited(a caddytest.Answer) error {
	return errors.Join(want("status", a.Status, http.StatusOK), want("having limit headers", a.IsLimited(), false),
		want("Retry-After", a.Header.Get("Retry-After"), ""))
}

// isRefusedOutright tells how the answer differs from a refusal by a zone whose
// limit is 0.
func isRefusedOutright(a caddytest.Answer, zone string) error {
	return errors.Join(a.Shows(http.StatusTooManyRequests, 0, 0), want("zone", a.Resource, zone),
		want("X-RateLimit-Reset", a.Reset, int64(-1)), want("Retry-After", a.Header.Get("Retry-After"), ""))
}

// TestQuotaOfNothingAndUnlimited: a quota of 0 refuses every request, and the word
// unlimited none, whatever else is in the zone, and without a call. Only what is
// neither a number nor that word gets the fallback.
func TestQuotaOfNothingAndUnlimited(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	var names []string
	zones := ""
	add := func(name string, options ...string) {
		names = append(names, name)
		zones += quotaZone(name, options...)
	}
	for _, algorithm := range counting {
		for _, mode := range modes {
			add(algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode)
			add(algorithm+"."+mode+".waiting", "algorithm "+algorithm, "charge "+mode, "max_wait 10000h")
			add(algorithm+"."+mode+".reserve", "algorithm "+algorithm, "charge "+mode, "reserve 20 {\nheader X-Staff yes\n}")
			add(algorithm+"."+mode+".cost", "algorithm "+algorithm, "charge "+mode, "cost {header.X-Cost}")
			if algorithm != "sliding_log" {
				add(algorithm+"."+mode+".penalty", "algorithm "+algorithm, "charge "+mode, "penalty 1h")
			}
		}
	}
	for _, mode := range modes {
		add("burst."+mode, "algorithm gcra", "burst 7", "charge "+mode)
	}
	add("batch", "charge before", "batch auto")
	add("concurrency", "algorithm concurrency", "window 1h")
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond ok")
			before := scriptsRun(t, servers)
			for _, zone := range names {
				for range 3 {
					for _, quota := range []string{"0", " 0 ", "00"} {
						must(t, zone+", quota "+quota, isRefusedOutright(c.Probe("/"+zone, "X-Key: alice", "X-Staff: yes", "X-Cost: 0", "X-Quota: "+quota), zone))
					}
					for _, quota := range []string{"unlimited", "\tunlimited "} {
						must(t, zone+", quota "+quota, isUnlimited(c.Probe("/"+zone, "X-Key: alice", "X-Quota: "+quota)))
					}
				}
			}
			must(t, "Redis", want("scripts run for them", scriptsRun(t, servers)-before, 0))
			must(t, "log", errors.Join(want("lines about the fallback", countLines(c, "using the fallback"), 0),
				want("lines about costs", countLines(c, "costs more than its zone ever admits"), 0)))
			for _, zone := range names {
				must(t, zone, errors.Join(
					want("declined requests", c.Metric(`caddy_rate_limit_declined_requests_total{zone="`+zone+`"}`), "9"),
					want("counted requests", c.Metric(`caddy_rate_limit_requests_total{zone="`+zone+`"}`), "9")))
				// What is refused and what is not counted leaves no trace.
				capacity := map[bool]int64{true: 7, false: 3}[strings.HasPrefix(zone, "burst")]
				must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Staff: yes", "X-Cost: 1", "X-Quota: 3").Shows(http.StatusOK, capacity, 1))
			}
			for i, quota := range []string{"", "many", "-1", "2.5", "Unlimited", "unlimited!", "0x10", "-99999999999999999999"} {
				zone := "fixed_window.before"
				must(t, "quota "+quota, c.Probe("/"+zone, "X-Key: bob", "X-Quota: "+quota).Shows(http.StatusOK, 100, int64(i+1)))
			}
			c.AwaitLines(t, 1, "using the fallback", `"zone":"fixed_window.before"`, `"fallback":100`)
		})
	}
}

// TestQuotaBeyondWhatCounts: a number that the algorithm cannot count becomes the
// nearest that it can, and the log says so.
func TestQuotaBeyondWhatCounts(t *testing.T) {
	zones := quotaZone("window") + quotaZone("log", "algorithm sliding_log") +
		quotaZone("drain", "algorithm gcra", "window 87600h", "burst 1000")
	c := startWith(t, "", zones, "respond ok")
	for zone, test := range map[string]struct {
		quotas []string
		limit  int64
	}{
		"window": {[]string{"4503599627370497", "9007199254740993", "99999999999999999999"}, 1 << 52},
		"log":    {[]string{"100001", "99999999999999999999"}, 100_000},
		"drain":  {[]string{"1", "99"}, 1000},
	} {
		for i, quota := range test.quotas {
			must(t, zone+", quota "+quota, c.Probe("/"+zone, "X-Key: alice", "X-Quota: "+quota).Shows(http.StatusOK, test.limit, int64(i+1)))
		}
		c.AwaitLines(t, 1, "using the nearest", `"zone":"`+zone+`"`, `"events":"`+test.quotas[0]+`"`)
	}
	must(t, "log", want("lines about the fallback", countLines(c, "using the fallback"), 0))
}

// TestQuotaBesideOtherZones: a zone whose limit is 0 refuses before any other is
// asked, where it is enforced; one without a limit leaves the others as they are.
func TestQuotaBesideOtherZones(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range bothStores(servers, "max_new_buckets 1000000") {
		for _, mode := range modes {
			t.Run(name+", "+mode, func(t *testing.T) {
				must(t, "flush", servers[0].Primary.Client().FlushAll(t.Context()).Err())
				zones := zoneWith("other", "charge "+mode) + zoneWith("plan", "charge "+mode, "algorithm gcra", "burst 9", "events {header.X-Quota} 100", "max_wait 1s") +
					zoneWith("trial", "charge "+mode, "algorithm gcra", "events {header.X-Trial} 200", "enforce 0") + "}\nrate_limit {\n" +
					zoneWith("inner", "charge "+mode, "events {header.X-Inner} 300")
				c := startWith(t, store, zones, `respond "{http.rate_limit.trial.outcome} {http.rate_limit.trial.limit} {http.rate_limit.other.used}"`)
				// with is a request of alice with other quotas than 5.
				with := func(headers ...string) []string {
					all := append(headers, "X-Key: alice")
					for _, name := range []string{"X-Quota", "X-Trial", "X-Inner"} {
						if !slices.ContainsFunc(headers, func(h string) bool { return strings.HasPrefix(h, name) }) {
							all = append(all, name+": 5")
						}
					}
					return all
				}
				used := int64(0)
				passes := func(what, body string, limit int64, headers ...string) {
					t.Helper()
					used++
					a := c.Probe("/", with(headers...)...)
					must(t, what, errors.Join(want("status", a.Status, http.StatusOK), want("limit", a.Limit, limit), want("body", a.Body, body)))
					if store != "" {
						servers.AwaitUsed(t, "other", "alice", used)
					}
				}
				other := func() int64 { // which the check tells before the charge
					if mode == "before" {
						return used + 1
					}
					return used
				}
				passes("all limits", fmt.Sprint("allowed 5 ", other()), 5)
				before := scriptsRun(t, servers)
				must(t, "limit 0", isRefusedOutright(c.Probe("/", with("X-Quota: 0")...), "plan"))
				must(t, "Redis", want("scripts run for it", scriptsRun(t, servers)-before, 0))
				must(t, "limit 0 behind others", isRefusedOutright(c.Probe("/", with("X-Inner: 0")...), "inner"))
				if store != "" {
					servers.AwaitUsed(t, "other", "alice", used)
				}
				passes("observed limit 0", fmt.Sprint("would_refuse 0 ", other()), 0, "X-Trial: 0")
				passes("some unlimited", fmt.Sprint("  ", other()), 100, "X-Quota: unlimited", "X-Trial: unlimited", "X-Inner: unlimited")
				s := simulate(c, "/", with("X-Quota: unlimited", "X-Inner: 0")...)
				must(t, fmt.Sprintf("simulation %+v", s), errors.Join(want("decision", s.Decision, "refused"), want("zone", s.Zone, "inner"),
					want("wait", s.Wait, 0), want("zones", s.names(), "other trial inner")))
				s = simulate(c, "/", with("X-Quota: 0")...)
				must(t, fmt.Sprintf("simulation %+v", s), errors.Join(want("decision", s.Decision, "refused"), want("zone", s.Zone, "plan"),
					want("wait", s.Wait, 0), want("reason", s.Zones[1].Reason, "over_limit"), want("limit", s.Zones[1].Limit, 0)))
			})
		}
	}
}

// TestQuotaWithoutAStore: neither a limit of 0 nor none needs the store, so its
// outage changes nothing.
func TestQuotaWithoutAStore(t *testing.T) {
	for onError, status := range map[string]int{"allow": http.StatusOK, "deny": http.StatusServiceUnavailable, "local": http.StatusOK} {
		for _, mode := range modes {
			t.Run(onError+", "+mode, func(t *testing.T) {
				t.Parallel()
				c := startWith(t, caddytest.RedisStore("shard a {\nprimary "+caddytest.FreeAddr(t)+"\n}"), quotaZone("plan", "charge "+mode, "on_error "+onError), "respond ok")
				for range 3 {
					must(t, "limit 0", isRefusedOutright(c.Probe("/plan", "X-Key: alice", "X-Quota: 0"), "plan"))
					must(t, "unlimited", isUnlimited(c.Probe("/plan", "X-Key: alice", "X-Quota: unlimited")))
					must(t, "limit 5", want("status", c.Probe("/plan", "X-Key: alice", "X-Quota: 5").Status, status))
				}
			})
		}
	}
}

// TestQuotaIsTold in the fields of the draft and in the body of a refusal.
func TestQuotaIsTold(t *testing.T) {
	c := startWith(t, "", zoneWith("plan", "events {header.X-Quota} 100", "algorithm gcra", "burst 9", "window 60s")+"headers ietf\nproblem\n", "respond ok")
	a := c.Probe("/", "X-Key: alice", "X-Quota: 0")
	var body struct {
		Type     string
		Violated []string `json:"violated-policies"`
	}
	must(t, "body", json.Unmarshal([]byte(a.Body), &body))
	must(t, "limit 0", errors.Join(want("status", a.Status, http.StatusTooManyRequests), want("policy", a.Header.Get("RateLimit-Policy"), `"plan";q=0;w=60`),
		want("limit", a.Header.Get("RateLimit"), `"plan";r=0`), want("type", body.Type, "https://iana.org/assignments/http-problem-types#quota-exceeded"),
		want("zones", fmt.Sprint(body.Violated), "[plan]")))
	a = c.Probe("/", "X-Key: alice", "X-Quota: unlimited")
	must(t, "unlimited", errors.Join(want("status", a.Status, http.StatusOK), want("policy", a.Header.Get("RateLimit-Policy"), ""), want("limit", a.Header.Get("RateLimit"), "")))
}
