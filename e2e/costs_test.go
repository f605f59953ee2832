package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// startPricedBackend starts a server whose responses have the cost that the request asks for.
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
	t.Parallel()
	const events = 100
	servers := caddytest.StartShards(t, 1, 0)
	names, zones := zonesPerWay("cost {http.response.header.X-Cost}")
	answers := proxyTo(startPricedBackend(t))
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, answers)
		sums := map[string]int64{}
		for _, zone := range names {
			used := int64(0)
			for _, step := range []struct {
				query, cost string
				charged     int64
			}{
				// A free request gets the count as well.
				{"", "0", 0},
				{"", "5", 5},
				{"", "0", 0},
				{"", "1", 1},
				{"", " 7 ", 7},
				// A free status outweighs the cost.
				{"?304", "9", 0},
				{"", "cheap", 1},
				{"", "-3", 1},
				{"", "1.5", 2},
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
				awaitUsed(t, servers, store, zone, "alice", used)
			}
			sums[zone] = used
		}
		// At the limit no request is admitted: it may cost 1, and the backend is not asked whether
		// it is free.
		for _, zone := range names {
			must(t, zone, c.Probe("/"+zone, "X-Key: alice", fmt.Sprint("X-Ask-Cost: ", events-sums[zone])).Shows(http.StatusOK, events, events))
			awaitUsed(t, servers, store, zone, "alice", events)
			must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Ask-Cost: 0").Refuses(zone))
		}
		c.Unload()
		for _, zone := range names {
			for _, cause := range []string{"not_found", "out_of_range"} {
				c.AwaitLines(t, 1, "cost is not known; charging the fallback", `"cause":"`+cause+`"`, `"fallback":1,`, `"zone":"`+zone+`"`)
			}
			if store != "" {
				must(t, "at the end", want("used of "+zone, servers.Content(t, zone, "alice").Used, events))
			}
		}
	})
}

// TestCostOfTheRequest uses costs that are known before the response, which needs no correction
// then.
func TestCostOfTheRequest(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for algorithm, mode := range ways {
		zones += pathZone(algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode, "events 10", "cost {header.X-Cost}")
		zones += pathZone("fixed."+algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode, "events 10", "cost 4")
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		for algorithm, mode := range ways {
			for _, zone := range []string{algorithm + "." + mode, "fixed." + algorithm + "." + mode} {
				for used := int64(4); used <= 8; used += 4 {
					must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Cost: 4").Shows(http.StatusOK, 10, used))
					awaitUsed(t, servers, store, zone, "alice", used)
				}
				// Two are left and four are wanted.
				a := c.Probe("/"+zone, "X-Key: alice", "X-Cost: 4")
				must(t, zone, errors.Join(a.Is(http.StatusTooManyRequests, 8), want("having Retry-After", a.RetryAfter >= 1, true)))
			}
			zone := algorithm + "." + mode
			must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Cost: 2").Shows(http.StatusOK, 10, 10))
		}
	})
}

func TestFreeStatusesLeaveTheCountAlone(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := startWith(t, servers.Store(), pathZone("default")+pathZone("custom", "count_status not 404 5xx")+pathZone("none", "count_status all"), `
@fresh header If-None-Match *
respond @fresh 304
@404 path */404
respond @404 404
@502 path */502
respond @502 502
@503 path */503
error @503 503
respond ok`)
	const etag = `If-None-Match: "v1"`
	used := map[string]int64{}
	for _, step := range []struct {
		path    string
		headers []string
		status  int
		free    bool
	}{
		// The first request opens a window although it is free.
		{"/default/page", []string{etag}, http.StatusNotModified, true},
		{"/default/page", nil, http.StatusOK, false},
		{"/default/page", []string{etag}, http.StatusNotModified, true},
		{"/default/page", []string{etag}, http.StatusNotModified, true},
		{"/default/404", nil, http.StatusNotFound, false},
		{"/default/502", nil, http.StatusBadGateway, false},
		{"/default/503", nil, http.StatusServiceUnavailable, false},

		{"/custom/page", []string{etag}, http.StatusNotModified, false},
		{"/custom/page", nil, http.StatusOK, false},
		{"/custom/404", nil, http.StatusNotFound, true},
		{"/custom/502", nil, http.StatusBadGateway, true},
		{"/custom/503", nil, http.StatusServiceUnavailable, true},

		{"/none/page", []string{etag}, http.StatusNotModified, false},
		{"/none/page", nil, http.StatusOK, false},
		{"/none/404", nil, http.StatusNotFound, false},
	} {
		zone, _, _ := strings.Cut(step.path[1:], "/")
		before := used[zone]
		if !step.free {
			used[zone]++
		}
		a := c.Ask(step.path, append([]string{"X-Key: alice"}, step.headers...)...)
		must(t, fmt.Sprintf("%s after %d", step.path, before), errors.Join(a.Is(step.status, used[zone]), want("zone", a.Resource, zone)))
		servers.AwaitCount(t, zone, "alice", used[zone])
		if _, open := servers.Buckets(t, zone)["alice"]; !open {
			t.Fatalf("no window of zone %s was opened", zone)
		}
	}
	// A wrong charge would have arrived by now.
	c.Unload()
	for zone, n := range used {
		must(t, "at the end", want("count of zone "+zone, servers.Counts(t, zone)["alice"], n))
	}
}

// byStatus answers with the status that X-Status names, as a response or as an error. The path
// /panic panics.
const byStatus = `
@error path */error
error @error "as told" {header.X-Status}
@panic path */panic
test_answer @panic panic
respond "" {header.X-Status}
`

// TestLoginForgives checks that a response with a status of reset_status empties the bucket of its
// client, in all Caddys, and of no other client.
func TestLoginForgives(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	names, zones := zonesPerWay("events 5", "count_status 401", "reset_status 2xx")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		caddys := caddytest.StartMany(t, 2, zonesSite(store, zones, byStatus))
		if store == "" {
			// In memory each counts by itself.
			caddys[1] = caddys[0]
		}
		for _, zone := range names {
			probe := func(c *caddytest.Caddy, client string, status int) caddytest.Answer {
				return c.Probe("/"+zone, "X-Key: "+client, fmt.Sprint("X-Status: ", status))
			}
			for used := int64(1); used <= 3; used++ {
				for _, client := range []string{"alice", "bob"} {
					must(t, zone+": a guess", probe(caddys[0], client, 401).Shows(401, 5, used))
					awaitUsed(t, servers, store, zone, client, used)
				}
			}
			must(t, zone+": a login", probe(caddys[1], "alice", 200).Shows(200, 5, 0))
			awaitUsed(t, servers, store, zone, "alice", 0)
			must(t, zone+": another login", probe(caddys[1], "alice", 200).Shows(200, 5, 0))
			awaitUsed(t, servers, store, zone, "alice", 0)
			for used := int64(1); used <= 5; used++ {
				must(t, zone+": a guess again", probe(caddys[1], "alice", 401).Shows(401, 5, used))
				awaitUsed(t, servers, store, zone, "alice", used)
			}
			must(t, zone+": one guess too many", probe(caddys[1], "alice", 401).Shows(429, 5, 5))
			must(t, zone+": somebody else", probe(caddys[1], "bob", 401).Shows(401, 5, 4))
		}
	})
}

// TestLoginKeepsWhatIsInFlight: a guess that is running when a login empties the bucket counts
// when it ends, whatever was charged before, and so does nothing else.
func TestLoginKeepsWhatIsInFlight(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	names, zones := zonesPerWay("events 10", "count_status 401", "reset_status 2xx")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		backend := caddytest.StartSlowBackend(t)
		c := startWith(t, store, zones, "@held header X-Held *\n"+proxyTo("@held "+backend.Server.Listener.Addr().String(), "replace_status 401")+"\n"+byStatus)
		for _, zone := range names {
			probe := func(status int) caddytest.Answer {
				return c.Probe("/"+zone, "X-Key: alice", fmt.Sprint("X-Status: ", status))
			}
			must(t, zone+": a guess", want("status", probe(401).Status, 401))
			awaitUsed(t, servers, store, zone, "alice", 1)
			held := backend.Hold(t, c, "/"+zone, "X-Key: alice", "X-Held: yes")
			must(t, zone+": a login", want("status", probe(200).Status, 200))
			awaitUsed(t, servers, store, zone, "alice", 0)
			backend.Finish(t, held)
			awaitUsed(t, servers, store, zone, "alice", 1)
			must(t, zone+": another guess", probe(401).Shows(401, 10, 2))
		}
	})
}

// TestForgivenessInAnOutage: a login while the store cannot answer changes no count; one after that,
// and after a reload, empties the bucket.
func TestForgivenessInAnOutage(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 0)
	for _, charge := range modes {
		zone := "login." + charge
		site := zonesSite(servers.Store("check_timeout 1m", "charge_timeout 1m"), zoneWith(zone, "events 5", "count_status 401", "reset_status 200", "charge "+charge), byStatus)
		c := caddytest.Start(t, site)
		probe := func(status int) caddytest.Answer {
			return c.Probe("/", "X-Key: alice", fmt.Sprint("X-Status: ", status))
		}
		for used := int64(1); used <= 2; used++ {
			must(t, "a guess", probe(401).Shows(401, 5, used))
			servers.AwaitUsed(t, zone, "alice", used)
		}
		servers.Kill(t)
		must(t, "a login", want("status", probe(200).Status, 200))
		c.AwaitLog("store cannot answer")
		servers.Restart(t)
		servers.AwaitUsed(t, zone, "alice", 2)
		must(t, "metric", want("forgiven", c.MetricSum("caddy_rate_limit_forgiven_total"), 0))
		c.MustLoad(site + "# reloaded\n")
		eventually(t, "a login forgives", func() error {
			must(t, "a login", want("status", probe(200).Status, 200))
			return want("having forgiven", c.MetricSum("caddy_rate_limit_forgiven_total") > 0, true)
		})
		servers.AwaitUsed(t, zone, "alice", 0)
	}
}

// settlement is a request and whether it costs something.
type settlement struct {
	how    string // what comes after the zone in the path
	status int
	free   bool
}

// settlements are the options that name free statuses, with requests for each. The first request
// costs something, so that the bucket is not empty.
var settlements = map[string]struct {
	option string
	steps  []settlement
}{
	"default": {"", []settlement{
		{"", 200, false},
		{"", 304, true},
		{"/error", 304, true},
		{"", 304, true},
		{"/panic", 500, false},
		{"", 304, true},
		{"", 404, false},
		{"/error", 503, false},
		{"", 503, false},
	}},
	"free": {"count_status not 5xx", []settlement{
		{"", 200, false},
		{"/error", 503, true},
		{"/panic", 500, true},
		{"", 304, false},
		{"", 503, true},
		{"/error", 404, false},
	}},
	"count": {"count_status 401 403", []settlement{
		{"", 401, false},
		{"", 200, true},
		{"/error", 403, false},
		{"/panic", 500, true},
		{"/error", 503, true},
		{"", 304, true},
		{"", 403, false},
	}},
	"none": {"count_status all", []settlement{
		{"", 304, false},
		{"/panic", 500, false},
		{"/error", 503, false},
	}},
}

func TestRefundOn304(t *testing.T) {
	t.Parallel()
	const events = 70
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, algorithm := range counting {
		for name, s := range settlements {
			options := []string{"algorithm " + algorithm, "charge before", fmt.Sprint("events ", events)}
			if s.option != "" {
				options = append(options, s.option)
			}
			zones += pathZone(algorithm+"."+name, options...)
		}
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, byStatus)
		left := map[string]caddytest.Content{}
		for _, algorithm := range counting {
			for name, s := range settlements {
				zone := algorithm + "." + name
				left[zone] = settleEach(t, c, servers, zone, events, s.steps, store != "")
			}
		}
		// After the limiter has ended, no charge or refund is in flight.
		c.Unload()
		for zone, b := range left {
			if store != "" {
				must(t, "at the end", want(zone, servers.Content(t, zone, "alice").Spent, b.Spent))
			}
		}
	})
}

// settleEach sends the requests, checks the answers and, in Redis, the bucket before and after
// each. It returns the last content.
func settleEach(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, zone string, events int64, steps []settlement, redis bool) caddytest.Content {
	t.Helper()
	used := int64(0)
	before := caddytest.Content{}
	for i, step := range steps {
		what := fmt.Sprintf("%s%s, step %d, status %d", zone, step.how, i, step.status)
		if !step.free {
			used++
		}
		if step.how == "/panic" {
			// On a reused connection the client would retry.
			c.Client.CloseIdleConnections()
		}
		a, err := c.TryProbe(t.Context(), "/"+zone+step.how, "X-Key: alice", fmt.Sprint("X-Status: ", step.status))
		if step.how == "/panic" {
			// There is no answer; the next request shows how this one was settled.
			must(t, what, want("being answered", err == nil, false))
		} else {
			must(t, what, err)
			must(t, what, a.Shows(step.status, events, used))
		}
		if !redis {
			continue
		}
		if !step.free && step.how != "/panic" {
			// The request took its cost before the response.
			must(t, what, want("used in Redis", servers.Content(t, zone, "alice").Used, used))
		}
		servers.AwaitUsed(t, zone, "alice", used)
		after := servers.Content(t, zone, "alice")
		must(t, what, want("bucket unchanged", after.Spent == before.Spent, step.free))
		before = after
	}
	return before
}

// TestRefundOfTheFirstRequest checks that the refund of the only request empties the bucket.
func TestRefundOfTheFirstRequest(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	zones := zonesPerAlgorithm("charge before")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, byStatus)
		for _, algorithm := range counting {
			must(t, algorithm, c.Probe("/"+algorithm, "X-Key: bob", "X-Status: 304").Shows(http.StatusNotModified, 100, 0))
			awaitUsed(t, servers, store, algorithm, "bob", 0)
			must(t, algorithm, c.Probe("/"+algorithm, "X-Key: bob", "X-Status: 200").Shows(http.StatusOK, 100, 1))
		}
	})
}

// quotaZone is pathZone with the events that a header of the request names.
func quotaZone(name string, options ...string) string {
	return pathZone(name, append(options[:len(options):len(options)], "events {header.X-Quota} 100")...)
}

// isUnlimited returns how the answer differs from one without limits.
func isUnlimited(a caddytest.Answer) error {
	return errors.Join(want("status", a.Status, http.StatusOK), want("having limit headers", a.IsLimited(), false),
		want("Retry-After", a.Header.Get("Retry-After"), ""))
}

// isRefusedOutright returns how the answer differs from a refusal by a zone whose
// limit is 0.
func isRefusedOutright(a caddytest.Answer, zone string) error {
	return errors.Join(a.Shows(http.StatusTooManyRequests, 0, 0), want("zone", a.Resource, zone),
		want("X-RateLimit-Reset in the future", a.Reset > a.Sent.Unix(), true), want("Retry-After", a.Header.Get("Retry-After"), ""))
}

// TestQuotaOfZeroAndUnlimited checks that a quota of 0 refuses every request and the word unlimited
// refuses none, without a call and whatever the zone's other options. Other texts that are no
// number get the fallback.
func TestQuotaOfZeroAndUnlimited(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	var names []string
	zones := ""
	add := func(name string, options ...string) {
		names = append(names, name)
		zones += quotaZone(name, options...)
	}
	for algorithm, mode := range ways {
		add(algorithm+"."+mode, "algorithm "+algorithm, "charge "+mode)
		add(algorithm+"."+mode+".waiting", "algorithm "+algorithm, "charge "+mode, "max_wait 10000h")
		add(algorithm+"."+mode+".reserve", "algorithm "+algorithm, "charge "+mode, "reserve 20 {\nheader X-Staff yes\n}")
		add(algorithm+"."+mode+".cost", "algorithm "+algorithm, "charge "+mode, "cost {header.X-Cost}")
		if algorithm != "sliding_log" {
			add(algorithm+"."+mode+".penalty", "algorithm "+algorithm, "charge "+mode, "penalty 1h")
		}
	}
	for _, mode := range modes {
		add("burst."+mode, "algorithm gcra", "burst 7", "charge "+mode)
	}
	add("batch", "charge before", "batch auto")
	add("concurrency", "algorithm concurrency", "window 1h")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		before := scriptsRun(t, servers)
		for _, zone := range names {
			for _, quota := range []string{"0", " 0 ", "00"} {
				must(t, zone+", quota "+quota, isRefusedOutright(c.Probe("/"+zone, "X-Key: alice", "X-Staff: yes", "X-Cost: 0", "X-Quota: "+quota), zone))
			}
			for _, quota := range []string{"unlimited", "\tunlimited "} {
				must(t, zone+", quota "+quota, isUnlimited(c.Probe("/"+zone, "X-Key: alice", "X-Quota: "+quota)))
			}
		}
		must(t, "Redis", want("scripts run for them", scriptsRun(t, servers)-before, 0))
		must(t, "log", errors.Join(want("lines about the fallback", strings.Count(c.Logs.String(), "using the fallback"), 0),
			want("lines about costs", strings.Count(c.Logs.String(), "costs more than its zone ever admits"), 0)))
		series := seriesOf(c)
		for _, zone := range names {
			must(t, zone, errors.Join(
				want("declined requests", series[`caddy_rate_limit_declined_requests_total{zone="`+zone+`"}`], "3"),
				want("counted requests", series[`caddy_rate_limit_requests_total{zone="`+zone+`"}`], "3")))
			// Neither refused nor unlimited requests leave a trace.
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

// TestQuotaBeyondTheCountableRange checks that a number that the algorithm cannot count becomes the
// nearest one that it can, and that the log says so.
func TestQuotaBeyondTheCountableRange(t *testing.T) {
	t.Parallel()
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
	must(t, "log", want("lines about the fallback", strings.Count(c.Logs.String(), "using the fallback"), 0))
}

// TestQuotaBesideOtherZones checks that an enforced zone with the limit 0 refuses before any other
// zone is asked, and that an unlimited one does not affect the others.
func TestQuotaBesideOtherZones(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range bothStores(servers, "max_new_buckets 1000000") {
		for _, mode := range modes {
			t.Run(name+", "+mode, func(t *testing.T) {
				flush(t, servers)
				zones := zoneWith("other", "charge "+mode) + zoneWith("plan", "charge "+mode, "algorithm gcra", "burst 9", "events {header.X-Quota} 100", "max_wait 1s") +
					zoneWith("trial", "charge "+mode, "algorithm gcra", "events {header.X-Trial} 200", "enforce 0") + "}\nrate_limit {\n" +
					zoneWith("inner", "charge "+mode, "events {header.X-Inner} 300")
				c := startWith(t, store, zones, `respond "{http.rate_limit.trial.outcome} {http.rate_limit.trial.limit} {http.rate_limit.other.used}"`)
				// with returns the headers of a request of alice, whose quotas are 5 unless given.
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
					awaitUsed(t, servers, store, "other", "alice", used)
				}
				other := func() int64 { // as of the check, before the charge
					if mode == "before" {
						return used + 1
					}
					return used
				}
				passes("all limits", fmt.Sprint("allowed 5 ", other()), 5)
				awaitNothingHeld(t, servers)
				before := scriptsRun(t, servers)
				must(t, "limit 0", isRefusedOutright(c.Probe("/", with("X-Quota: 0")...), "plan"))
				must(t, "Redis", want("scripts run for it", scriptsRun(t, servers)-before, 0))
				must(t, "limit 0 behind others", isRefusedOutright(c.Probe("/", with("X-Inner: 0")...), "inner"))
				awaitUsed(t, servers, store, "other", "alice", used)
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

// TestQuotaWithoutAStore checks that neither a limit of 0 nor an unlimited quota needs the store.
func TestQuotaWithoutAStore(t *testing.T) {
	t.Parallel()
	statuses := map[string]int{"allow": http.StatusOK, "deny": http.StatusServiceUnavailable, "local": http.StatusOK}
	zones := ""
	for onError := range statuses {
		for _, mode := range modes {
			zones += quotaZone(onError+"."+mode, "charge "+mode, "on_error "+onError)
		}
	}
	c := startWith(t, caddytest.RedisStore("shard a {\nprimary "+caddytest.FreeAddr(t)+"\n}"), zones, "respond ok")
	for onError, status := range statuses {
		for _, mode := range modes {
			zone := onError + "." + mode
			for range 3 {
				must(t, zone+", limit 0", isRefusedOutright(c.Probe("/"+zone, "X-Key: alice", "X-Quota: 0"), zone))
				must(t, zone+", unlimited", isUnlimited(c.Probe("/"+zone, "X-Key: alice", "X-Quota: unlimited")))
				must(t, zone+", limit 5", want("status", c.Probe("/"+zone, "X-Key: alice", "X-Quota: 5").Status, status))
			}
		}
	}
}

// TestQuotaIsReported in the fields of the draft and in the body of a refusal.
func TestQuotaIsReported(t *testing.T) {
	t.Parallel()
	c := startWith(t, "", zoneWith("plan", "events {header.X-Quota} 100", "algorithm gcra", "burst 9", "window 60s")+"headers ietf\nproblem\n", "respond ok")
	a := c.Probe("/", "X-Key: alice", "X-Quota: 0")
	var body struct {
		Type     string
		Violated []string `json:"violated-policies"`
	}
	must(t, "body", json.Unmarshal([]byte(a.Body), &body))
	must(t, "limit 0", errors.Join(want("status", a.Status, http.StatusTooManyRequests), want("policy", a.Header.Get("RateLimit-Policy"), `"plan";q=0;w=60`),
		want("limit", a.Header.Get("RateLimit"), `"plan";r=0;t=60`), want("type", body.Type, "https://iana.org/assignments/http-problem-types#quota-exceeded"),
		want("zones", fmt.Sprint(body.Violated), "[plan]")))
	a = c.Probe("/", "X-Key: alice", "X-Quota: unlimited")
	must(t, "unlimited", errors.Join(want("status", a.Status, http.StatusOK), want("policy", a.Header.Get("RateLimit-Policy"), ""), want("limit", a.Header.Get("RateLimit"), "")))
}

// TestReserve checks that requests cannot use what is reserved for more important ones.
func TestReserve(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	names, zones := zonesPerWay("events 10",
		"reserve 20 {\nheader X-Tier gold\n}", "reserve 30 {\nheader X-Tier silver\n}")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		for _, zone := range names {
			used := int64(0)
			admitted := func(n int, tier string, limit int64) {
				t.Helper()
				for range n {
					used++
					must(t, fmt.Sprintf("%s, %s, request %d", zone, tier, used), c.Probe("/"+zone, "X-Key: alice", "X-Tier: "+tier).Shows(http.StatusOK, limit, used))
					awaitUsed(t, servers, store, zone, "alice", used)
				}
			}
			refused := func(tier string, limit int64) {
				t.Helper()
				a := c.Probe("/"+zone, "X-Key: alice", "X-Tier: "+tier)
				must(t, fmt.Sprintf("%s, %s, a request too many", zone, tier), errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, limit, used)))
			}
			admitted(2, "none", 5)
			admitted(1, "gold", 10)
			admitted(1, "silver", 8)
			admitted(1, "none", 5)
			refused("none", 5)
			admitted(1, "silver", 8)
			refused("none", 5)
			admitted(2, "silver", 8)
			refused("silver", 8)
			refused("none", 5)
			admitted(2, "gold", 10)
			refused("gold", 10)
			refused("silver", 8)
			refused("none", 5)
		}
	})
}

// TestReserveOfBurstsAndSlots reserves parts of a burst and of the slots.
func TestReserveOfBurstsAndSlots(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	zones := pathZone("slots", "algorithm concurrency", "events 3", "reserve 34 {\nheader X-Tier gold\n}")
	for _, mode := range modes {
		zones += pathZone("bursts."+mode, "algorithm gcra", "events 1000", "burst 4", "charge "+mode, "reserve 100 {\nheader X-Tier gold\n}")
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, proxyTo("/slots "+backend.Server.Listener.Addr().String())+"\nrespond ok")
		for _, mode := range modes {
			// The whole burst is reserved, so that other requests never fit.
			zone := "bursts." + mode
			must(t, zone, probeNever(c, "/"+zone, "X-Key: alice").Shows(http.StatusTooManyRequests, 0, 0))
			for used := range int64(4) {
				must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Tier: gold").Shows(http.StatusOK, 4, used+1))
				awaitUsed(t, servers, store, zone, "alice", used+1)
			}
			must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Tier: gold").Refuses(zone))
		}
		// 34 percent of three slots are two, and one is left.
		held := []caddytest.Running{backend.Hold(t, c, "/slots", "X-Key: alice")}
		must(t, "slots", c.Probe("/slots", "X-Key: alice").Shows(http.StatusTooManyRequests, 1, 1))
		held = append(held, backend.Hold(t, c, "/slots", "X-Key: alice", "X-Tier: gold"), backend.Hold(t, c, "/slots", "X-Key: alice", "X-Tier: gold"))
		must(t, "slots", c.Probe("/slots", "X-Key: alice", "X-Tier: gold").Shows(http.StatusTooManyRequests, 3, 3))
		for i, a := range backend.Finish(t, held...) {
			must(t, "slots", a.Shows(http.StatusOK, []int64{1, 3, 3}[i], int64(i)+1))
		}
	})
}
