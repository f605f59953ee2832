package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// simulated is what POST /rate_limit/simulate answers.
type simulated struct {
	Decision string
	Zone     string
	Wait     float64
	Zones    []struct {
		Name, Store, Outcome, Reason, Error string
		ClientKey                           string `json:"client_key"`
		Template                            string
		Values                              []string
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

// TestSimulatePredicts the answer to the next request, and counts nothing, with all algorithms and
// ways of charging, in memory and in Redis.
func TestSimulatePredicts(t *testing.T) {
	t.Parallel()
	const events = 3
	servers := caddytest.StartShards(t, 2, 1)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		_, zones := zonesPerWay(fmt.Sprintf("events %d", events))
		c := caddytest.Start(t, zonesSite(store, zones, "respond ok"))
		for algorithm, mode := range ways {
			zone := algorithm + "." + mode
			for used := range int64(events + 2) {
				eventually(t, "what requests held is settled", func() error {
					sets := 0
					for _, shard := range servers {
						keys, err := shard.Primary.Client().Keys(t.Context(), "* held").Result()
						must(t, "keys", err)
						sets += len(keys)
					}
					return want("number of sets", sets, 0)
				})
				before := dumpOf(t, servers)
				s := simulate(c, "/"+zone, "X-Key: alice")
				must(t, zone+", Redis", want("unchanged", maps.Equal(before, dumpOf(t, servers)), true))
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
				awaitUsed(t, servers, store, zone, "alice", min(used+1, events))
			}
		}
	})
}

// dumpOf returns all keys of Redis with their values.
func dumpOf(t *testing.T, s caddytest.Shards) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, shard := range s {
		client := shard.Primary.Client()
		keys, err := client.Keys(t.Context(), "*").Result()
		must(t, "keys", err)
		for _, key := range keys {
			if !strings.Contains(key, ":3:") {
				continue // no bucket
			}
			if all[key], err = client.Dump(t.Context(), key).Result(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// TestSimulateWaitsOnlyWhereAllWould has two full zones: one holds requests, the other refuses them
// at once.
func TestSimulateWaitsOnlyWhereAllWould(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("",
		zoneWith("fast", "events 1", "window 20s")+zoneWith("patient", "events 1", "window 30s", "charge before", "max_wait 1m"), "respond ok"))
	c.Probe("/", "X-Key: alice")
	a, s := c.Probe("/", "X-Key: alice"), simulate(c, "/", "X-Key: alice")
	must(t, fmt.Sprintf("%+v", s), errors.Join(
		want("status", a.Status, http.StatusTooManyRequests), want("decision", s.Decision, "refused")))

	// A request that waits earns no penalty.
	c.MustLoad(zonesSite("", zoneWith("patient", "events 1", "window 30s", "charge before", "max_wait 1m", "penalty 1h"), "respond ok"))
	c.Probe("/", "X-Key: bob")
	s = simulate(c, "/", "X-Key: bob")
	must(t, fmt.Sprintf("%+v", s), errors.Join(want("decision", s.Decision, "allowed"), want("wait", s.Wait > 0 && s.Wait <= 30, true),
		want("zone", s.Zone, "patient"), want("outcome", s.Zones[0].Outcome, "allowed"), want("reason", s.Zones[0].Reason, "")))
}

// TestSimulateRightAfterAResponse: what a request spends or gives back is on its way, and counts for a simulation as
// it does for the request after it.
func TestSimulateRightAfterAResponse(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	_, zones := zonesPerWay("events 1")
	c := caddytest.Start(t, zonesSite(servers.Store(), zones, "@free header X-Free 1\nrespond @free 304\nrespond ok"))
	decisions := map[int]string{http.StatusOK: "allowed", http.StatusNotModified: "allowed", http.StatusTooManyRequests: "refused"}
	for algorithm, mode := range ways {
		path := "/" + algorithm + "." + mode
		for client := range 5 {
			for free, decision := range map[string]string{"X-Free: 1": "allowed", "X-Free: 0": "refused"} {
				if algorithm == "concurrency" {
					decision = "allowed"
				}
				headers := []string{free, fmt.Sprintf("X-Key: %s %d", free, client)}
				c.Probe(path, headers...)
				s := simulate(c, path, headers...)
				a := c.Probe(path, headers...)
				must(t, fmt.Sprintf("%s, %s: %+v", path, free, s), errors.Join(want("foreseen", s.Decision, decision), want("served", decisions[a.Status], decision)))
			}
		}
	}
}

// TestOneZoneDecides: of several zones, headers, placeholders and a simulation speak of the same
// one.
func TestOneZoneDecides(t *testing.T) {
	t.Parallel()
	blocks := zoneWith("blocks", "events 100", "window 1h", "block_status 403")
	for _, k := range []struct {
		name, zones, block string
		status             int
		decision, zone     string
	}{
		{"one blocks, one is full", zoneWith("full", "events 1", "window 1h") + blocks, "blocks", 403, "blocked", "blocks"},
		{"both block, the second for longer", zoneWith("first", "block_status 403") + blocks, "first blocks", 403, "blocked", "blocks"},
		{"limit 0 beside a full one", zoneWith("full", "events 1", "window 24h") + zoneWith("none", "events {header.X-Events} 1", "window 1h"), "", 429, "refused", "none"},
		{"two full ones", zoneWith("short", "events 1", "window 1m") + zoneWith("long", "events 1", "window 1h"), "", 429, "refused", "long"},
		{"a penalty is longer", zoneWith("short", "events 1", "window 1m", "penalty 2h") + zoneWith("long", "events 1", "window 1h"), "", 429, "refused", "short"},
		{"one observes", zoneWith("seen", "events 1", "window 1h", "enforce 0") + zoneWith("short", "events 1", "window 1m"), "", 429, "refused", "short"},
		{"both observe", zoneWith("short", "events 1", "window 1m", "enforce 0") + zoneWith("long", "events 1", "window 1h", "enforce 0"), "", 200, "allowed", "long"},
		{"one has less left", zoneWith("more", "events 9", "window 1h") + zoneWith("less", "events 5", "window 1m"), "", 200, "allowed", "less"},
	} {
		t.Run(k.name, func(t *testing.T) {
			const shows = "header >X-Zone {http.rate_limit.zone}\nheader >X-By {http.rate_limit.exceeded.name}\nrespond shown\n"
			c := caddytest.Start(t, caddytest.Site("", "route {\nrate_limit {\n"+k.zones+"}\n"+shows+"}\nhandle_errors {\n"+shows+"}"))
			c.Probe("/", "X-Key: alice")
			for i, zone := range strings.Fields(k.block) {
				code, text := c.AdminCall(http.MethodPost, fmt.Sprintf("/rate_limit/blocks/%s?key=alice&for=%dm", zone, i+1), "", "")
				must(t, text, want("status", code, http.StatusOK))
			}
			s, a := simulate(c, "/", "X-Key: alice", "X-Events: 0"), c.Probe("/", "X-Key: alice", "X-Events: 0")
			by := ""
			if k.status != http.StatusOK {
				by = k.zone
			}
			must(t, fmt.Sprintf("%+v, %v", s, a.Header), errors.Join(
				want("status", a.Status, k.status), want("decision", s.Decision, k.decision), want("decides", s.Zone, by),
				want("X-RateLimit-Resource", a.Header.Get("X-RateLimit-Resource"), k.zone),
				want("placeholder", a.Header.Get("X-Zone"), k.zone), want("exceeded", a.Header.Get("X-By"), by)))
			if wait, err := strconv.ParseFloat(a.Header.Get("Retry-After"), 64); err == nil && math.Abs(wait-s.Wait) > 30 {
				t.Errorf("a wait of %v was foreseen, and is %v", s.Wait, wait)
			}
		})
	}
}

// TestSimulationIsWhatIsServed goes through random sites, in which a simulation before each request
// foretells its status and, if a zone refuses, which, and for how long: with ways of charging mixed, with blocks
// and grants and, in the second half of the requests, with a shard that is down.
func TestSimulationIsWhatIsServed(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	// No answer grows too old between a simulation and its request.
	forStores(t, bothStores(servers, "check_timeout 5s", "ledger_trust 1h"), func(t *testing.T, store string) {
		const requests = 8
		random := rand.New(rand.NewPCG(sweep.Seed(), 36))
		oneOf := func(texts ...string) string { return texts[random.IntN(len(texts))] }
		type zone struct{ name, header, value, text string }
		sites, routes := make([][]zone, sweep.Size(10, 300)), ""
		for n := range sites {
			zones := ""
			for i := range 1 + random.IntN(3) {
				z := zone{name: fmt.Sprintf("z%d.%d", n, i), header: oneOf("X-A", "X-B")}
				z.value = fmt.Sprint(z.header, n)
				algorithm := oneOf(counting...)
				options := []string{
					"key {header." + z.header + "}", fmt.Sprintf("events %d", 2+random.IntN(5)), "window " + []string{"601s", "3607s", "10007s"}[i], "block_status 403",
					"algorithm " + algorithm, "charge " + oneOf(modes...), "on_error " + oneOf("deny", "allow", "local"), "cost " + oneOf("1", "1", "2"),
				}
				if random.IntN(5) == 0 {
					options = append(options, "enforce 0")
				}
				if random.IntN(4) == 0 && algorithm != "sliding_log" {
					options = append(options, "penalty 2h")
				}
				z.text = zoneWith(z.name, options...)
				zones += z.text
				sites[n] = append(sites[n], z)
			}
			routes += fmt.Sprintf("handle /%d {\nrate_limit {\n%s}\nheader >X-By {http.rate_limit.exceeded.name}\nrespond ok\n}\n", n, zones)
		}
		c := caddytest.Start(t, caddytest.Site(store, routes+"handle_errors {\nheader >X-By {http.rate_limit.exceeded.name}\nrespond refused\n}"))
		override := func(zones []zone) {
			z := zones[random.IntN(len(zones))]
			what := fmt.Sprintf("blocks/%s?key=%s&for=%dm", z.name, z.value, 1+random.IntN(90))
			if random.IntN(2) == 0 {
				what = fmt.Sprintf("grants/%s?key=%s&events=%d", z.name, z.value, 1+random.IntN(3))
			}
			code, text := c.AdminCall(http.MethodPost, "/rate_limit/"+what, "", "")
			must(t, what+": "+text, want("status", code, http.StatusOK))
		}
		statuses := map[string]int{"allowed": 200, "error_allowed": 200, "refused": 429, "blocked": 403, "error_refused": 503}
		for request := range requests {
			if request == requests/2 && store != "" {
				must(t, "stop a shard", servers[0].Primary.Kill())
			}
			for n, zones := range sites {
				if request < requests/2 && random.IntN(10) == 0 {
					override(zones)
				}
				path, headers := fmt.Sprintf("/%d", n), []string{fmt.Sprintf("X-A: X-A%d", n), fmt.Sprintf("X-B: X-B%d", n)}
				var s simulated
				var began time.Time
				eventually(t, "what is in flight has landed", func() error {
					began = time.Now()
					s = simulate(c, path, headers...)
					for _, z := range s.Zones {
						if z.Reason == "in_flight" {
							return errors.New("some is in flight")
						}
					}
					return nil
				})
				a := c.Probe(path, headers...)
				passed := time.Since(began).Seconds()
				err := want("status", a.Status, statuses[s.Decision])
				if s.Decision == "refused" || s.Decision == "blocked" {
					wait, _ := strconv.ParseFloat(a.Header.Get("Retry-After"), 64)
					by, resets := a.Header.Get("X-By"), map[string]float64{}
					for _, z := range s.Zones {
						resets[z.Name] = z.Reset
					}
					// Two penalties of one request begin within microseconds of each other, so either may
					// end last.
					if other, isZone := resets[by]; isZone && math.Abs(other-resets[s.Zone]) < 0.01 {
						s.Zone = by
					}
					err = errors.Join(err, want("exceeded", by, s.Zone), want("resource", a.Resource, s.Zone),
						want("wait as foreseen", wait >= s.Wait-passed && wait <= s.Wait+1, true))
				}
				if err != nil {
					t.Errorf("request %d of %s, foreseen %+v, served %d %v:\n%v\n%+v", request, path, s, a.Status, a.Header, err, zones)
				}
			}
		}
	})
}

// TestSimulateRefusesAsRequests predicts the refusal of a client that an operator has blocked, and of a
// request that has two values for its key.
func TestSimulateRefusesAsRequests(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("", zoneWith("api", "events 10", "window 1h"), "respond ok"))
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?key=alice&for=1h", "", "")
	must(t, text, want("status", code, http.StatusOK))
	a := c.Get("/", "X-Key: alice", "X-Key: bob")
	must(t, "two values", want("status", a.StatusCode, http.StatusBadRequest))
	for _, test := range []struct {
		code  int
		words []string
		flags []string
	}{
		{0, []string{"allowed\n"}, []string{"-H", "X-Key: bob"}},
		{2, []string{"blocked by zone api, wait "}, []string{"-H", "X-Key: alice"}},
		{2, []string{"refused\n", "several values of"}, []string{"-H", "X-Key: bob", "-H", "X-Key: carol"}},
	} {
		prints(t, test.code, test.words, append([]string{"simulate", c.URL + "/", "--address", c.Admin}, test.flags...)...)
	}
}

// simulatedSite has the routes that a request can take.
var simulatedSite = `{
	{{global}}
	servers {
		trusted_proxies static 10.0.0.0/8
	}
}
&(shared) {
	rate_limit {header.X-Key} 100 1h shared
}
{{site}} {
	handle_path /stripped/* {
		rate_limit {
			` + zoneWith("stripped", "match {\npath /inner\n}", "key {uri}") + `
		}
		respond ok
	}
	handle /invoked {
		invoke shared
		respond ok
	}
	handle /nested {
		route {
			rate_limit {client_ip} 10 1h outer
			rate_limit {header.X-Key} 1 1h inner
			rate_limit {header.X-Key} 100 1h behind
			respond ok
		}
	}
	handle /answered {
		route {
			respond early
			rate_limit {header.X-Key} 100 1h unreachable
		}
	}
	handle /unknown {
		route {
			rate_limit {header.X-Key} 100 1h first
			basic_auth {
				bob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG
			}
			rate_limit {http.auth.user.id} 100 1h user
			respond ok
		}
	}
	handle /tiers {
		rate_limit {
			` + zoneWith("tiers", "events {header.X-Events} 10", "cost {header.X-Cost}", "reserve 50 {\nheader X-Tier gold\n}") + `
		}
		respond ok
	}
	handle /held {
		rate_limit {
			` + zoneWith("held", "events 1", "window 10s", "charge before", "max_wait 1m") + `
		}
		respond ok
	}
	handle /observed {
		rate_limit {
			` + zoneWith("observed", "events 1", "enforce 0") + `
		}
		respond ok
	}
	respond "none"
}
`

// TestSimulateTakesTheRoutes that a request takes, and meets the zones that it
// meets.
func TestSimulateTakesTheRoutes(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, simulatedSite)
	for _, k := range []struct {
		path    string
		headers []string
		zones   string
		keys    []string // ends of the client keys
	}{
		{"/", nil, "", nil},
		{"/stripped/inner", nil, "stripped", []string{":/inner"}},
		{"/stripped/other", nil, "", nil},
		{"/invoked", []string{"X-Key: alice"}, "shared", []string{":alice"}},
		{"/invoked", nil, "shared", []string{":127.0.0.1"}},
		{"/nested", []string{"X-Key: alice"}, "outer inner behind", []string{":127.0.0.1", ":alice", ":alice"}},
		{"/answered", []string{"X-Key: alice"}, "", nil},
		{"/unknown", []string{"X-Key: alice"}, "first user", []string{":alice", ":127.0.0.1"}},
	} {
		s := simulate(c, k.path, k.headers...)
		must(t, k.path, errors.Join(want("zones", s.names(), k.zones), want("decision", s.Decision, "allowed"), want("error", s.Error, "")))
		for i, end := range k.keys {
			if !strings.HasSuffix(s.Zones[i].ClientKey, end) {
				t.Errorf("%s: client key %d is %s, want ...%s", k.path, i, s.Zones[i].ClientKey, end)
			}
		}
		if passed := strings.Join(s.PassedOver, " "); (k.path == "/unknown") != (passed == "http.handlers.authentication") {
			t.Errorf("%s: passed over %q", k.path, passed)
		}
	}

	c.Probe("/nested", "X-Key: alice")
	s := simulate(c, "/nested", "X-Key: alice")
	must(t, "a handler behind the one that refuses", errors.Join(want("zones", s.names(), "outer inner"),
		want("decision", s.Decision, "refused"), want("zone", s.Zone, "inner")))

	s = simulate(c, "/tiers", "X-Key: alice", "X-Cost: 4", "X-Events: 6")
	must(t, "a tier without the reserve", errors.Join(want("limit", s.Zones[0].Limit, 3), want("cost", s.Zones[0].Cost, 4),
		want("decision", s.Decision, "refused"), want("reason", s.Zones[0].Reason, "reserved")))
	s = simulate(c, "/tiers", "X-Key: alice", "X-Cost: 4", "X-Events: 6", "X-Tier: gold")
	must(t, "a tier with the reserve", errors.Join(want("limit", s.Zones[0].Limit, 6), want("decision", s.Decision, "allowed")))

	c.Probe("/held", "X-Key: alice")
	s = simulate(c, "/held", "X-Key: alice")
	if s.Decision != "allowed" || s.Wait <= 0 || s.Wait > 10 || !s.Zones[0].Allowed || s.Zone != s.Zones[0].Name {
		t.Errorf("held: %+v", s)
	}
	c.Probe("/observed", "X-Key: alice")
	s = simulate(c, "/observed", "X-Key: alice")
	must(t, "observed", errors.Join(want("decision", s.Decision, "allowed"), want("outcome", s.Zones[0].Outcome, "would_refuse")))
	if strings.Contains(c.Logs.String(), "key is empty") {
		t.Error("a simulation is in the log")
	}
}

// TestSimulateRequest checks that simulated requests are prepared as the server does it, or refused
// with a reason.
func TestSimulateRequest(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, simulatedSite)
	var s simulated
	c.AdminJSON(http.MethodPost, "/rate_limit/simulate", `{"url": "/nested", "remote_addr": "10.1.2.3:5", "headers": {"X-Forwarded-For": ["7.7.7.7"]}}`, &s)
	if s.names() != "outer inner behind" || !strings.HasSuffix(s.Zones[0].ClientKey, ":7.7.7.7") {
		t.Errorf("behind a trusted proxy: %+v", s)
	}
	c.AdminJSON(http.MethodPost, "/rate_limit/simulate", `{"url": "/nested", "remote_addr": "::1", "headers": {"X-Forwarded-For": ["7.7.7.7"]}}`, &s)
	if !strings.HasSuffix(s.Zones[0].ClientKey, ":::1") {
		t.Errorf("not behind a trusted proxy: %+v", s)
	}
	c.AdminJSON(http.MethodPost, "/rate_limit/simulate", `{"method": "POST", "url": "http://other.example/nested", "server": "srv0"}`, &s)
	must(t, "another site", want("zones", s.names(), ""))
	for _, bad := range []struct {
		body   string
		status int
		word   string
	}{
		{``, http.StatusBadRequest, "EOF"},
		{`{}`, http.StatusBadRequest, "url is missing"},
		{`{"url": "/", "path": "/"}`, http.StatusBadRequest, `unknown field "path"`},
		{`{"url": "/"} {}`, http.StatusBadRequest, "after top-level value"},
		{`{"url": "api"}`, http.StatusBadRequest, "must begin with"},
		{`{"url": "ftp://example.com/"}`, http.StatusBadRequest, "must begin with"},
		{`{"url": "http://%zz/"}`, http.StatusBadRequest, "invalid URL escape"},
		{`{"url": "/", "method": "GE T"}`, http.StatusBadRequest, "invalid method"},
		{`{"url": "/", "remote_addr": "example.com:1"}`, http.StatusBadRequest, "must be an IP address"},
		{`{"url": "http://127.0.0.1:1/"}`, http.StatusNotFound, "no server listens at 127.0.0.1:1; there is srv0 at "},
		{`{"url": "/", "server": "nope"}`, http.StatusNotFound, "there is srv0"},
		{`{"url": "/", "headers": {"a b": ["c"]}}`, http.StatusBadRequest, "no name of a header"},
		{`{"url": "/", "headers": {"a": ["c\n"]}}`, http.StatusBadRequest, "not allowed"},
		{`{"url": "/` + strings.Repeat("x", 300_000) + `"}`, http.StatusRequestEntityTooLarge, "too large"},
	} {
		adminRefuses(c, http.MethodPost, "/rate_limit/simulate", bad.body, bad.status, bad.word)
	}
	adminRefuses(c, http.MethodGet, "/rate_limit/simulate", "", http.StatusMethodNotAllowed)
}

func TestSimulateCountsRequestsInFlight(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		backend := caddytest.StartSlowBackend(t)
		c := caddytest.Start(t, zonesSite(store, zoneWith("api", "events 1"), proxyTo(backend.Server.Listener.Addr().String())))
		request := backend.Start(t, c, "/", "X-Key: alice")
		s := simulate(c, "/", "X-Key: alice")
		must(t, "while a request runs", errors.Join(want("decision", s.Decision, "refused"),
			want("reason", s.Zones[0].Reason, "in_flight"), want("used", s.Zones[0].Used, 1)))
		must(t, "another client", want("decision", simulate(c, "/", "X-Key: bob").Decision, "allowed"))
		backend.Finish(t, request)

		c.MustLoad(zonesSite(store, zoneWith("slots", "events 1", "algorithm concurrency", "window 1m"), proxyTo(backend.Server.Listener.Addr().String())))
		must(t, "a free slot", want("decision", simulate(c, "/", "X-Key: alice").Decision, "allowed"))
		held := backend.Hold(t, c, "/", "X-Key: alice")
		s = simulate(c, "/", "X-Key: alice")
		must(t, "while the slot is taken", errors.Join(want("decision", s.Decision, "refused"), want("used", s.Zones[0].Used, 1)))
		backend.Finish(t, held)
	})
}

// TestSimulateRollout asks the store in which a client is counted.
func TestSimulateRollout(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	site := zonesSite(twoStores(servers), zoneWith("api", "events 1"), "respond ok")
	c := caddytest.Start(t, strings.Replace(site, "rate_limit {\nzone", "rate_limit {\nrollout other 50\nzone", 1))
	stores := map[string]bool{}
	for _, client := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"} {
		must(t, "before", want("decision", simulate(c, "/", "X-Key: "+client).Decision, "allowed"))
		c.Get("/", "X-Key: "+client)
		s := simulate(c, "/", "X-Key: "+client)
		must(t, "after", want("decision", s.Decision, "refused"))
		stores[s.Zones[0].Store] = true
	}
	must(t, "stores", want("number", len(stores), 2))
}

// TestSimulateWithoutStore predicts what on_error does.
func TestSimulateWithoutStore(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, onErrorSite(servers.Store()))
	c.Get("/local", "X-Key: alice")
	must(t, "kill", servers[0].Primary.Kill())
	for path, decision := range map[string]string{"/default": "allowed", "/allow": "error_allowed", "/deny": "error_refused", "/local": "allowed"} {
		s := simulate(c, path, "X-Key: alice")
		must(t, path, want("decision", s.Decision, decision))
		if z := s.Zones[0]; (decision != "allowed") != (z.Error != "" && z.Reason == "store_error") {
			t.Errorf("%s: %+v", path, s)
		}
	}
	// A store of another plugin that does no more than each store.
	c = caddytest.Start(t, zonesSite("rate_limit {\nstore guest {\n}\n}", zoneWith("api", "events 1"), "respond ok"))
	_, config := c.AdminCall(http.MethodGet, "/config/", "", "")
	config = strings.Replace(config, `"module":"guest"`, `"module":"guest","plain":true`, 1)
	status, text := c.AdminCall(http.MethodPost, "/load", "application/json", config)
	must(t, text, want("status", status, http.StatusOK))
	c.AwaitServers()
	s := simulate(c, "/")
	if s.Zones[0].Error != "" || s.Decision != "allowed" {
		t.Errorf("a guest's store: %+v", s)
	}
}
