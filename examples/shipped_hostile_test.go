package examples

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// shippedAsk is what a request looks like that a zone of a shipped config limits.
type shippedAsk struct {
	// line is method and target, "" for GET /.
	line string
	// headers say who the client is, where the zone's key does not name a header.
	headers []string
	// passes is the status of a request that is admitted, 0 for 200.
	passes int
	// limit is how many fit, 0 for the zone's burst or events.
	limit int
	// events in a window, 0 for the zone's.
	events float64
}

// shippedAsks has the zones of each shipped config, "" those that it does not name. A config of a document is
// known by its zones.
var shippedAsks = map[string]map[string]shippedAsk{
	"Caddyfile.example":                               {},
	"README.md api address":                           {},
	"contrib/docker/caddy/Caddyfile":                  {},
	"contrib/kubernetes/caddy.yaml":                   {},
	"docs/behind-proxies.md address":                  {},
	"docs/choosing.md login api":                      {"login": {line: "POST /login"}},
	"docs/configuration.md api":                       {},
	"docs/configuration.md capacity":                  {},
	"docs/configuration.md downloads":                 {},
	"docs/configuration.md scrapers":                  {},
	"docs/from-other-gateways.md second hour address": {},
	"docs/getting-started.md hello":                   {},
	"docs/grpc.md calls streams address":              {"": {line: "POST /shop.Orders/List"}},
	"docs/llm-gateway.md user team provider": {
		"user": {headers: []string{"Authorization: Bearer key-of-alice"}, limit: 50},
		"team": {headers: []string{"Authorization: Bearer key-of-carol"}, limit: 50},
		"":     {headers: []string{"Authorization: Bearer key-of-bob"}},
	},
	"examples/allowlist.caddyfile":       {},
	"examples/browser_clients.caddyfile": {},
	"examples/brute_force.caddyfile":     {"": {line: "GET /login", headers: []string{loginAs("alice", "guess")}, passes: 401}},
	"examples/burst_and_quota.caddyfile": {},
	"examples/error_page.caddyfile":      {},
	"examples/graphql_cost.caddyfile":    {"points": {line: "GET /graphql", limit: 3}, "address": {line: "GET /graphql", limit: 9}},
	"examples/ipv6.caddyfile":            {},
	"examples/limiter_service.caddyfile": {},
	"examples/llm_gateway.caddyfile":     {"": {line: "GET /v1/chat", headers: []string{"Authorization: Bearer client-%r"}, limit: 3}},
	"examples/near_limit.caddyfile":      {"trial": {limit: 10}},
	"examples/outgoing.caddyfile":        {},
	"examples/per_plan.caddyfile":        {"": {headers: []string{"X-Api-Key: key-of-alice"}, limit: 20}},
	"examples/per_user.caddyfile":        {"": {headers: []string{loginAs("alice", "secret")}}},
	"examples/plan_from_auth.caddyfile":  {"": {headers: []string{"X-Api-Key: key-of-alice"}, limit: 3}},
	"examples/plan_of_user.caddyfile":    {"": {headers: []string{loginAs("bob", "secret")}, limit: 5, events: 60}},

	"examples/migrating/caddy_ratelimit_after.caddyfile":  {},
	"examples/migrating/caddy_ratelimit_before.caddyfile": {},
	"examples/migrating/envoy_after.caddyfile":            {"login": {line: "GET /login"}, "api_key": {limit: 5}},
	"examples/migrating/nginx_after.caddyfile":            {"plain": {line: "GET /plain"}, "burst": {line: "GET /burst"}},
	"examples/migrating/refusals_for_fail2ban.caddyfile":  {},
	"examples/migrating/traefik_after.caddyfile":          {},
}

// shippedWithoutZones are configs that ask another limiter, and the test that drives each.
var shippedWithoutZones = map[string]string{"examples/forward_auth.caddyfile": "TestExampleForwardAuth"}

// shippedName returns the name of a config in shippedAsks.
func shippedName(key string, zones []shippedZone) string {
	file, _, isBlock := strings.Cut(key, ": ")
	if isBlock {
		for _, z := range zones {
			file += " " + z.Name
		}
	}
	return file
}

// TestShippedConfigsKnowTheirClients runs each shipped config, and sends it requests of one client in all
// spellings that it can think of: together they are admitted no more often than the limit says, and simulate says
// the same of the first and of one that is refused.
func TestShippedConfigsKnowTheirClients(t *testing.T) {
	t.Parallel()
	found, shards := map[string]bool{}, caddytest.StartShards(t, 2, 1)
	tried := swept(t, maps.Keys(shippedAsks), "docs/choosing.md login api", "examples/ipv6.caddyfile", "examples/per_user.caddyfile")
	for key, text := range shippedConfigs(t) {
		zones := slices.Concat(zonesOf(t, key, text)...)
		name := shippedName(key, zones)
		found[name] = true
		if shippedWithoutZones[name] != "" && zones == nil {
			continue
		}
		asks, ok := shippedAsks[name]
		if !ok {
			t.Errorf("shippedAsks has no row %q", name)
			continue
		}
		if !slices.Contains(tried, name) {
			continue
		}
		t.Run(strings.ReplaceAll(name, "/", "."), func(t *testing.T) {
			t.Parallel()
			s := startShipped(t, text, startBackend(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = w.Write([]byte(`{"usage": {"prompt_tokens": 1000, "completion_tokens": 7000, "total_tokens": 8000}}`))
			}), shards)
			run := 0
			// A zone that all clients share refuses them all at its end.
			slices.SortStableFunc(zones, func(a, b shippedZone) int { return len(b.Key[0]) - len(a.Key[0]) })
			for _, z := range zones {
				a, ok := asks[z.Name]
				if !ok {
					a = asks[""]
				}
				if z.holds() {
					continue // shippedSlots and shippedLines have it
				}
				for text := range z.Key {
					for _, way := range s.ways(z, a, text) {
						run++
						what := fmt.Sprintf("zone %s by %s, %s", z.Name, z.Key[text], way.name)
						s.exhaust(t, what, z, a, s.attack(t, z, a, text, way, run))
					}
				}
			}
		})
	}
	for name := range shippedAsks {
		if !found[name] {
			t.Errorf("no shipped config is %q", name)
		}
	}
}

// zonesOf returns the zones of each handler in a Caddyfile.
func zonesOf(t *testing.T, name, text string) [][]shippedZone {
	t.Helper()
	adapted, err := adapt(text)
	must(t, name, err)
	var config any
	must(t, name, json.Unmarshal(adapted, &config))
	return zonesIn(config)
}

// shippedWay is a way by which an address reaches the site. from returns the addresses of PROXY headers, and
// a header or "", for the request with that number in that run.
type shippedWay struct {
	name      string
	isTrusted bool
	from      func(run, n int) (source []string, header string)
}

// ways are those in which a client may come that is known by that text of a key. One whose limit is too great to
// be used up has the same address, or network, in all: what it then has in other zones is one client's too.
func (s *shippedSite) ways(z shippedZone, a shippedAsk, text int) []shippedWay {
	if !isAddress(z.Key[text]) && z.capacity(a) <= mostAsked {
		return []shippedWay{{"from anywhere", false, func(run, n int) ([]string, string) {
			return []string{fmt.Sprintf("198.18.%d.%d", run, 1+n%250)}, ""
		}}}
	}
	network := func(run, n int) string { return fmt.Sprintf("2001:db8:0:%x::%x", run, 1+n%50) }
	all := []shippedWay{{"from one network", false, func(run, n int) ([]string, string) { return []string{network(run, n)}, "" }}}
	if s.sender != "" {
		all = append(all, shippedWay{"from one network behind a sender of PROXY headers", true, func(run, n int) ([]string, string) {
			return []string{s.sender, network(run, n)}, ""
		}}, shippedWay{"from one network, with PROXY headers", false, func(run, n int) ([]string, string) {
			return []string{network(run, n), fmt.Sprintf("198.51.100.%d", 1+n%250)}, ""
		}})
	}
	if s.proxy == "" {
		return all
	}
	through := func(name string, client func(run, n int) string) shippedWay {
		return shippedWay{name + " through a proxy", true, func(run, n int) ([]string, string) {
			address := client(run, n)
			if s.isStrict {
				address = fmt.Sprintf("198.51.100.%d, %s", n%250, address)
			}
			return []string{s.proxy}, s.forwards + ": " + address
		}}
	}
	return append(all, through("from one network", network), through("in all notations", func(run, n int) string {
		notations := []string{
			"203.0.113.%[1]d", "::ffff:203.0.113.%[1]d", "::FFFF:cb00:71%02[1]x", "0:0:0:0:0:ffff:203.0.113.%[1]d", "64:ff9b::cb00:71%02[1]x", "64:ff9b::203.0.113.%[1]d",
		}
		return fmt.Sprintf(notations[n%len(notations)], run)
	}))
}

func isAddress(text string) bool {
	return text == "{http.vars.client_ip}" || text == "{http.request.remote.host}"
}

// headerIn returns the name of the header that a text of a key is, or "".
func headerIn(text string) string {
	name, ok := strings.CutPrefix(text, "{http.request.header.")
	if !ok || strings.Count(text, "{") > 1 {
		return ""
	}
	return strings.TrimSuffix(name, "}")
}

// attack returns the requests of one client that is known by that text of a zone's key, each by its number. The
// first is as it is meant to be.
func (s *shippedSite) attack(t *testing.T, z shippedZone, a shippedAsk, text int, way shippedWay, run int) (all []func(n int) rawRequest) {
	t.Helper()
	key, who := z.Key[text], slices.Clone(a.headers)
	has := func(name string) bool {
		return slices.ContainsFunc(who, func(header string) bool { return strings.HasPrefix(header, name+": ") })
	}
	switch {
	case isAddress(key), !strings.Contains(key, "{"):
		if text > 0 {
			who = nil // they would be the client
		}
	case headerIn(key) != "" && !has(headerIn(key)):
		who = append(who, headerIn(key)+": one-client-%r")
	case key == "{http.request.host}":
	case len(who) == 0:
		t.Fatalf("nothing is known of %s: say in shippedAsks who the client is", key)
	}
	var madeUp []string
	for _, other := range s.zones {
		for _, text := range other.Key {
			if name := headerIn(text); name != "" && !slices.Contains(z.Key, text) && !has(name) && z.capacity(a) <= mostAsked {
				madeUp = append(madeUp, name+": made-up-%r-%d")
			}
		}
	}
	add := func(line, host string, headers ...string) {
		all = append(all, func(n int) rawRequest {
			r := rawRequest{line: line, host: host, headers: slices.Concat(headers, madeUp)}
			var header string
			if r.source, header = way.from(run, n); header != "" {
				r.headers = append(r.headers, header)
			}
			for i := range r.headers {
				r.headers[i] = strings.NewReplacer("%d", strconv.Itoa(n), "%r", strconv.Itoa(run)).Replace(r.headers[i])
			}
			return r
		})
	}
	line := a.line
	if line == "" {
		line = "GET /"
	}
	add(line, "", who...)
	for i, header := range who {
		for _, other := range spelled(header) {
			add(line, "", slices.Concat(who[:i], other, who[i+1:])...)
		}
	}
	for _, header := range spoofs {
		if name, _, _ := strings.Cut(header, ": "); s.forwards == "" || !strings.EqualFold(name, s.forwards) || !way.isTrusted {
			add(line, "", append(slices.Clone(who), header)...)
		}
	}
	if slices.ContainsFunc(z.Match, func(m map[string]json.RawMessage) bool { return m["path"] != nil }) {
		method, target, _ := strings.Cut(line, " ")
		for _, other := range spelledTargets(target) {
			add(method+" "+other, "", who...)
		}
	}
	if key == "{http.request.host}" {
		for _, other := range []string{strings.ToUpper(s.host), s.host + ".", s.host + ":80", strings.ToUpper(s.host) + ".:8080"} {
			add(line, other, who...)
		}
	}
	return all
}

// spoofs are headers by which clients claim to be others. Where no proxy is trusted they change nothing.
var spoofs = []string{
	"X-Forwarded-For: 198.51.100.%d", "x-forwarded-for: 127.0.0.1, 10.0.0.%d", "Forwarded: for=198.51.100.%d", "X-Real-IP: 198.51.100.%d",
	"CF-Connecting-IP: 198.51.100.%d", "True-Client-IP: 198.51.100.%d", "X-Client-IP: 198.51.100.%d", "X-Forwarded-Host: other-%d.example",
	"X-Client: made-up-%d", "X-Quota: 100000", "X-HTTP-Method-Override: OPTIONS", "X-Original-URL: /health",
}

// spelled returns other spellings of a header, some of which say that it is not this one.
func spelled(header string) (all [][]string) {
	name, value, _ := strings.Cut(header, ": ")
	all = [][]string{
		{strings.ToLower(name) + ":" + value},
		{strings.ToUpper(name) + ": \t " + value + " \t"},
		{header, header},
		{header, name + ": made-up-%d"},
		{name + ": made-up-%d", header},
		{header, name + ":"},
		{name + ":", header},
		{header, strings.ReplaceAll(name, "-", "_") + ": made-up-%d"},
	}
	if scheme, token, ok := strings.Cut(value, " "); ok {
		for _, other := range []string{
			strings.ToLower(scheme) + " " + token, strings.ToUpper(scheme) + " " + token, scheme + "  " + token,
			strings.ToLower(scheme) + " \t " + token + " ", scheme + "\t" + token,
		} {
			all = append(all, []string{name + ": " + other})
		}
	}
	return all
}

// spelledTargets returns other spellings of a path, each of which some backend takes for the same.
func spelledTargets(target string) []string {
	return []string{
		"/" + target, "/." + target, "/x/.." + target, fmt.Sprintf("/%%%x%s", target[1], target[2:]), strings.ToUpper(target), target + "?x=1",
		target + "/", target + "//", target + "/.", target + "%2f", target + ";x=1", target + "%00", target + ".", "http://localhost" + target,
	}
}

// holds reports whether the zone limits requests that run, or lets them wait.
func (z shippedZone) holds() bool { return z.Algorithm == "concurrency" || z.MaxWait > 0 }

// mostAsked is the greatest limit that the test uses up.
const mostAsked = 300

// capacity returns how many requests a zone admits at once.
func (z shippedZone) capacity(a shippedAsk) int {
	if a.limit > 0 {
		return a.limit
	}
	if burst, ok := z.Burst.(float64); ok {
		return int(burst)
	}
	events, _ := z.Events.(float64)
	return int(events)
}

// allowed returns how many requests the zone may have admitted since then.
func (z shippedZone) allowed(a shippedAsk, begun time.Time) int {
	capacity, events, elapsed := z.capacity(a), a.events, time.Since(begun)
	if figure, ok := z.Events.(float64); ok {
		events = figure
	}
	switch {
	case z.Calendar != "": // all begin at midnight
		return capacity * (1 + int(begun.Add(elapsed).Truncate(24*time.Hour).Sub(begun.Truncate(24*time.Hour))/(24*time.Hour)))
	case z.Algorithm == "gcra":
		return capacity + 1 + int(elapsed.Seconds()*events/z.Window.Seconds())
	case z.Align:
		return capacity * (1 + int(begun.Add(elapsed).Truncate(z.Window).Sub(begun.Truncate(z.Window))/z.Window))
	default:
		return capacity * (1 + int(elapsed/z.Window))
	}
}

// exhaust sends the requests of a client again and again until all are refused.
func (s *shippedSite) exhaust(t *testing.T, what string, z shippedZone, a shippedAsk, requests []func(n int) rawRequest) {
	t.Helper()
	passes, capacity := a.passes, z.capacity(a)
	if passes == 0 {
		passes = http.StatusOK
	}
	must(t, what, want("its limit being known", capacity > 0, true))
	begun, n, served, refused := time.Now(), 0, 0, 0
	var wait time.Duration
	isCounted, status, refusedBy := false, 0, ""
	// ask reports whether the request is admitted.
	ask := func(i int) bool {
		t.Helper()
		r, sent := requests[i](n), time.Now()
		n++
		resp := s.must(r)
		if z.chargesByResponse() {
			s.settle(t) // the cost is known a moment after the client has the response
		}
		isCounted, status = isLimited(resp), resp.StatusCode
		switch {
		case resp.StatusCode == passes:
			served++
		case resp.StatusCode == http.StatusTooManyRequests:
			refused++
			if resp.Header.Get("Retry-After") == "" && i > 0 {
				break // it will never fit
			}
			seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			must(t, r.String(), errors.Join(err, sameInstant(resp.Header, seconds, sent)))
			refusedBy = resp.Header.Get("X-RateLimit-Resource")
			wait = time.Duration(seconds) * time.Second
		case i > 0 && (resp.StatusCode == http.StatusBadRequest || resp.StatusCode == http.StatusUnauthorized):
		default:
			t.Fatalf("%s: %v: status %d", what, r, resp.StatusCode)
		}
		return resp.StatusCode == passes
	}
	foreseen := s.foresee(requests[0](n))
	must(t, what, want("the first request being admitted", ask(0), true))
	must(t, what, want("it being counted", isCounted, true))
	must(t, what, want("what simulate says of it", foreseen.Decision, "allowed"))
	if capacity > mostAsked {
		before := s.buckets()
		must(t, what, want("having buckets", before > 0, true))
		for i := range requests {
			ask(i)
		}
		must(t, what, want("buckets of one client", s.buckets(), before))
		return
	}
	for isAdmitted := true; isAdmitted && served <= z.allowed(a, begun); {
		isAdmitted = ask(0)
	}
	var others []string
	for rounds, more := 0, true; more && rounds < 5 && served <= z.allowed(a, begun); rounds++ {
		more = false
		for i := range requests {
			if ask(i) {
				more, others = true, append(others, requests[i](n-1).String())
			}
		}
	}
	if most := z.allowed(a, begun); served > most {
		t.Errorf("%s: %d of %d requests are admitted, at most %d should be; after the first refusal, these are:\n%s", what, served, n, most, strings.Join(others, "\n"))
		return
	}
	must(t, what, want("some being refused", refused > 0 || time.Since(begun) > z.Window, true))
	// Where there is room again in a moment, a request may find it that simulate did not; where simulate passes over a
	// handler, it does not know who the client is.
	if refused > 0 && wait > time.Second && foreseen.PassedOver == nil {
		// Between the two, room may be made all the same, and another zone refuse longest.
		for try := 1; ; try++ {
			foreseen := s.foresee(requests[0](n))
			isAdmitted := ask(0)
			zone := cmp.Or(refusedBy, foreseen.Zone) // not all responses name it
			err := errors.Join(want("being admitted", isAdmitted, false), want("what simulate says of a refused one", foreseen.Decision, "refused"), want("its zone", foreseen.Zone, zone))
			if err == nil {
				break
			}
			if try > 10 {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	if refused > 0 && wait <= time.Second {
		// Meanwhile another zone may be full.
		obeyed := refusedBy
		time.Sleep(wait) // as a client that obeys does
		ask(0)
		must(t, what, want("a request that obeys Retry-After being refused again", status == http.StatusTooManyRequests && refusedBy == obeyed, false))
	}
}

// foresee returns what simulate says of a request.
func (s *shippedSite) foresee(r rawRequest) (answer adminapi.Simulation) {
	s.c.T.Helper()
	method, target, _ := strings.Cut(r.line, " ")
	asked := adminapi.SimulatedRequest{Method: method, URL: s.c.URL + target, RemoteAddr: r.source[0], Headers: http.Header{"Host": {cmp.Or(r.host, s.host)}}}
	if s.sender == r.source[0] {
		asked.RemoteAddr = r.source[1]
	}
	for _, header := range r.headers {
		name, value, _ := strings.Cut(header, ": ")
		asked.Headers.Add(name, value)
	}
	body, err := json.Marshal(asked)
	must(s.c.T, "marshal", err)
	s.c.AdminJSON(http.MethodPost, "/rate_limit/simulate", string(body), &answer)
	return answer
}

// isLimited reports whether a zone limits the request of a response.
func isLimited(resp *http.Response) bool {
	return resp.Header.Get("X-RateLimit-Limit")+resp.Header.Get("RateLimit") != ""
}

// sameInstant returns an error unless the headers of a refusal name the same instant.
func sameInstant(header http.Header, seconds int, sent time.Time) error {
	if reset := header.Get("X-RateLimit-Reset"); reset != "" {
		at, err := strconv.ParseInt(reset, 10, 64)
		// Both are rounded up. A second more or less is no defect that a test can tell from a clock that is set.
		if answered := at - int64(seconds); err != nil || answered < sent.Unix()-1 || answered > time.Now().Unix()+2 {
			return fmt.Errorf("X-RateLimit-Reset is %s, and Retry-After %d, from %v to %v: %v", reset, seconds, sent, time.Now(), header)
		}
	}
	for _, limit := range header.Values("RateLimit") {
		if !strings.Contains(limit+",", fmt.Sprintf(";t=%d,", seconds)) { // of the zone that refuses longest
			return fmt.Errorf("RateLimit is %s, and Retry-After %d", limit, seconds)
		}
	}
	return nil
}
