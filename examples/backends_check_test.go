//go:build check

package examples

import (
	"cmp"
	"errors"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// backendsDir has backends that do not read a request as Caddy does, and proxies that pass it on as it comes.
const backendsDir = "examples/testdata/backends/"

// limitedAnswers are the answers of a backend that a shipped config limits.
type limitedAnswers struct {
	// zone is the one that limits them, "" for the one that admits fewest.
	zone string
	shippedAsk
	// names are what the backend says it has served, nil for all.
	names []string
	// status of the answers that count, 0 for all.
	status int
	// most answers get to one client by any spelling, 0 for as many as fit.
	most int
	// free is a path that the config leaves out, "" for /health.
	free string
}

// limitedByPath are the configs that limit some paths, or all but some.
var limitedByPath = map[string]limitedAnswers{
	"examples/allowlist.caddyfile": {shippedAsk: shippedAsk{line: "GET /api/report"}, names: []string{"work"}},
	"examples/brute_force.caddyfile": {
		zone: "login", shippedAsk: shippedAsk{line: "GET /login", headers: []string{loginAs("alice", "guess")}},
		names: []string{"login"}, status: http.StatusUnauthorized, most: 20,
	},
	"examples/graphql_cost.caddyfile":          {zone: "points", shippedAsk: shippedAsk{line: "POST /graphql", limit: 3}, names: []string{"graphql"}},
	"examples/migrating/envoy_after.caddyfile": {zone: "login", shippedAsk: shippedAsk{line: "GET /login"}, names: []string{"login", "form"}},
	"examples/migrating/nginx_after.caddyfile": {zone: "burst", shippedAsk: shippedAsk{line: "GET /burst"}, names: []string{"burst"}},
	"examples/llm_gateway.caddyfile": {
		zone: "tokens_per_minute", shippedAsk: shippedAsk{line: "GET /v1/chat", headers: []string{"Authorization: Bearer one"}, limit: 1}, names: []string{"work"},
	},
	"docs/llm-gateway.md user team provider": {
		zone: "user", shippedAsk: shippedAsk{line: "POST /v1/chat/completions", headers: []string{"Authorization: Bearer key-of-alice"}, limit: 50},
		names: []string{"work"}, free: "/v1/models",
	},
	"docs/choosing.md login api": {zone: "login", shippedAsk: shippedAsk{line: "POST /login"}, names: []string{"login"}},
}

// TestShippedConfigsBeforeBackends runs each shipped config before backends that read paths, methods and headers
// otherwise than Caddy, and behind proxies that pass them on as they come. Twelve requests of an honest client at a time
// are served up to the limit. No spelling of a request gets its client more answers.
func TestShippedConfigsBeforeBackends(t *testing.T) {
	t.Parallel()
	backends := startBackends(t)
	limitsHold(t, backends)
	slotsHold(t, backends)
	askingProxiesHold(t, backends["express"])
}

// limitsHold checks the zones that count requests.
func limitsHold(t *testing.T, backends map[string]string) {
	t.Helper()
	shards, left := caddytest.StartShards(t, 2, 1), maps.Clone(limitedByPath)
	for key, text := range shippedConfigs(t) {
		zones := slices.Concat(zonesOf(t, key, text)...)
		name := shippedName(key, zones)
		limited, isByPath := limitedByPath[name]
		delete(left, name)
		if !isByPath {
			limited.shippedAsk = shippedAsks[name][""]
		}
		if name == "examples/limiter_service.caddyfile" {
			continue // askingProxiesHold has it
		}
		z, ok := limited.zoneOf(name, zones)
		if !ok {
			continue // it limits what runs, or more than a test asks
		}
		for backend, addr := range backends {
			for _, front := range []string{"", "nginx", "haproxy"} {
				if !isByPath && (backend != "express" || front == "haproxy") || front != "" && backend != "express" {
					continue
				}
				t.Run(strings.ReplaceAll(name+" before "+backend+" behind "+front, "/", "."), func(t *testing.T) {
					t.Parallel()
					s := startShipped(t, text, addr, shards, asksBackend(addr, limited))
					s.front = startFront(t, front, s.c.Addr)
					s.counts(t, z, limited)
				})
			}
		}
	}
	must(t, "limitedByPath", want("rows without a config", len(left), 0))
}

// slotsHold checks zones of concurrency: while as many requests of one client run as may, none of another spelling
// runs beside them, nor takes a place that is kept for others.
func slotsHold(t *testing.T, backends map[string]string) {
	t.Helper()
	for key, text := range shippedConfigs(t) {
		row, ok := map[string]struct{ line, name, free, kept string }{
			"docs/configuration.md downloads": {line: "GET /files/a", name: "files", free: "/health"},
			"docs/configuration.md capacity":  {line: "GET /report", name: "work", free: "/checkout", kept: "GET /checkout/cart?from=shop"},
		}[shippedName(key, slices.Concat(zonesOf(t, key, text)...))]
		if !ok {
			continue
		}
		for _, backend := range []string{"express", "python"} {
			t.Run(row.name+" of "+backend, func(t *testing.T) {
				t.Parallel()
				s := startShipped(t, strings.Replace(text, "events 200\n", "events 10\n", 1), backends[backend], nil)
				fit := map[string]int{"files": 3, "work": 7}[row.name] // a tenth of 10 is kept for staff, and a fifth
				for range fit {
					conn, err := s.dial(rawRequest{source: []string{"192.0.2.1"}, line: row.line, headers: []string{"X-Hold: yes"}})
					must(t, "begin", err)
					t.Cleanup(func() { _ = conn.Close() })
				}
				eventually(t, "they run", func() error { return want("requests in the limiter", s.inLimiter(), fit) })
				for _, r := range append(otherSpellings(shippedAsk{line: row.line}, row.free), rawRequest{line: row.line}) {
					r.source = []string{"192.0.2.1"}
					// What a server does not take for a request may end the connection.
					if resp, err := s.send(r); err == nil && resp.Header.Get("X-Served") == row.name {
						t.Errorf("%v runs beside as many as may", r)
					}
				}
				if row.kept != "" {
					resp := s.must(rawRequest{source: []string{"192.0.2.1"}, line: row.kept})
					must(t, "what has a place", want("served", resp.Header.Get("X-Served"), "checkout"))
				}
			})
		}
	}
}

// askingProxiesHold checks the proxies that ask the limiter.
func askingProxiesHold(t *testing.T, backend string) {
	t.Helper()
	nginx := func(replace ...string) func(t *testing.T, limiter string) string {
		return func(t *testing.T, limiter string) string {
			t.Helper()
			site := caddytest.FreeAddr(t)
			startNginx(t, "examples/auth_request.nginx.conf", site, append([]string{
				"listen 8082", "listen " + caddytest.FreeAddr(t), "localhost:8080", limiter, "listen 8081", "listen " + site, "localhost:8082", backend,
			}, replace...)...)
			return site
		}
	}
	for name, start := range map[string]func(t *testing.T, limiter string) string{
		"nginx":                nginx(),
		"nginx that keeps all": nginx("access_log off;", "access_log off;\n\tmerge_slashes off;", "internal;", "internal;\n\t\t\tproxy_method $request_method;"),
		"haproxy": func(t *testing.T, limiter string) string {
			t.Helper()
			url := startHAProxy(t, limiter, "\thttp-request return status 200 content-type text/plain string \"Hello.\"\n", "\tserver app "+backend+"\n")
			return strings.TrimPrefix(url, "http://")
		},
		"caddy": func(t *testing.T, limiter string) string {
			t.Helper()
			return startExample(t, "forward_auth", "localhost:8080", limiter, `respond "Hello."`, "reverse_proxy "+backend).Addr
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startShipped(t, shippedConfigs(t)["examples/limiter_service.caddyfile"], "", nil)
			s.front, s.host = start(t, s.c.Addr), "127.0.0.1"
			s.counts(t, s.zones[0], limitedAnswers{shippedAsk: shippedAsk{line: "GET /some/path"}})
		})
	}
}

// zoneOf returns the zone that limits a client's answers.
func (l *limitedAnswers) zoneOf(name string, zones []shippedZone) (found shippedZone, ok bool) {
	for _, z := range zones {
		a := l.shippedAsk
		if row, isNamed := shippedAsks[name][z.Name]; isNamed && l.zone == "" {
			a = row
		}
		switch capacity := z.capacity(a); {
		case l.zone != "" && z.Name != l.zone, z.holds(), capacity == 0, capacity > mostAsked:
		case !ok, capacity < found.capacity(l.shippedAsk):
			found, ok, l.shippedAsk = z, true, a
		}
	}
	return found, ok
}

// asksBackend puts the backend in place of what an example answers by itself.
func asksBackend(addr string, limited limitedAnswers) func(config map[string]any) {
	return func(config map[string]any) {
		within(config, func(object map[string]any) {
			text, _ := object["body"].(string)
			switch {
			case object["handler"] == "static_response" && (strings.HasPrefix(text, "Hello") || text == "Welcome."):
				clear(object)
				object["handler"], object["upstreams"] = "reverse_proxy", []any{map[string]any{"dial": addr}}
			case object["handler"] == "authentication" && limited.status == http.StatusUnauthorized:
				clear(object) // the backend asks for the password
				object["handler"] = "vars"
			case object["handler"] == "reverse_proxy" && object["handle_response"] == nil:
				object["upstreams"] = []any{map[string]any{"dial": addr}} // in place of a stand-in too
			}
		})
	}
}

// counts sends one client's requests, first twelve honest ones at a time, then all that spell them otherwise.
func (s *shippedSite) counts(t *testing.T, z shippedZone, limited limitedAnswers) {
	t.Helper()
	a := limited.shippedAsk
	if name := headerIn(z.Key[0]); name != "" && a.headers == nil {
		a.headers = []string{name + ": one-client"}
	}
	if a.line == "" {
		a.line = "GET /"
	}
	var served atomic.Int64
	send := func(r rawRequest) (status int, err error) {
		if s.front == "" {
			r.source = []string{"192.0.2.1"}
		}
		resp, err := s.send(r)
		if err != nil {
			return 0, err
		}
		name := resp.Header.Get("X-Served")
		if name != "" && (limited.names == nil || slices.Contains(limited.names, name)) && (limited.status == 0 || limited.status == resp.StatusCode) {
			served.Add(1)
		}
		return resp.StatusCode, nil
	}
	begun := time.Now()
	honest := rawRequest{line: a.line, headers: a.headers}
	together := min(12, z.capacity(a))
	caddytest.Together(t, together, func(int) error {
		status, err := send(honest)
		return errors.Join(err, want("an honest request being refused", status == http.StatusTooManyRequests, false))
	})
	must(t, "honest requests", want("served", int(served.Load()), together))
	s.settle(t)
	most := func() int { return max(limited.most, z.allowed(a, begun)) }
	for status := 0; status != http.StatusTooManyRequests && int(served.Load()) <= most(); {
		var err error
		status, err = send(honest)
		must(t, honest.String(), err)
		s.settle(t)
	}
	var others []string
	for _, r := range otherSpellings(a, cmp.Or(limited.free, "/health")) {
		before := served.Load()
		// What a server does not take for a request may end the connection.
		if _, err := send(r); err == nil && served.Load() > before {
			others = append(others, r.String())
		}
	}
	if got := int(served.Load()); got > most() {
		t.Errorf("zone %s: %d answers, at most %d should be; after the first refusal, these are:\n%s", z.Name, got, most(), strings.Join(others, "\n"))
	}
}

// otherSpellings returns requests that some backend takes for the one that is limited.
func otherSpellings(a shippedAsk, free string) (all []rawRequest) {
	method, target, _ := strings.Cut(a.line, " ")
	add := func(line string, headers ...string) {
		all = append(all, rawRequest{line: line, headers: append(slices.Clone(a.headers), headers...)})
	}
	var targets []string
	if target != "/" {
		targets = spelledTargets(target)
	}
	for _, before := range []string{
		"/%2e", "/x/%2e%2e", "/x/%2E.", "/;x=1", "/x;y=1/..", "/x/..;", "/%2f", "//x/..", "/health/..", "/health/%2e%2e", "/health;", "/health%2f..", "/health/..;", "/%5c", "/x\\..", "a:http://h", "http:http://h", "a:", "/x\\..\\", "/x%5c..%5c", "/%5c..%5c",
		"http://other.example", "HTTP://localhost:80", "/health?", "/health#", "/health%00", "/health%3f", "/health%23", "//localhost", "/%252e%252e",
	} {
		targets = append(targets, before+target)
		if strings.HasSuffix(before, "\\") || strings.HasSuffix(before, "%5c") {
			targets = append(targets, before+strings.TrimPrefix(target, "/"))
		}
	}
	for _, after := range []string{
		"?", "%20", "%3f", "%23", "#x", "\\", "%5c", "%5c..%5chealth", "/../health", "/../../health", "/../../../health", "%2f..%2f../health", "%2f..%2f..%2fhealth", "/%2e%2e/%2e%2e/health", "/..;/..;/health",
		"/../x", "%2f..%2fx", "/..;/x", "/./../health", "?/../../health", ";/../../health", "%0a", "%ff", "%c0%af", "/%252e%252e/health", "%252f", "?api.key=x&api[key=x&API_KEY=x",
	} {
		targets = append(targets, target+after)
	}
	targets = append(targets, strings.ToUpper(target[:1])+strings.ToUpper(target[1:]), "/HEALTH", "/health/", "//health", "/./health", "/%68ealth", "/health?", "/health?x", "/health.", "/health;x", "/health%20", "/health/x", "/x/../health")
	for _, other := range targets {
		add(method + " " + strings.ReplaceAll(other, "/health", free))
	}
	for _, other := range []string{"get", "Get", "post", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "QUERY", "FOO"} {
		add(other + " " + target)
		for _, override := range []string{"GET", "POST", "HEAD", "OPTIONS"} {
			add(other+" "+target, "X-HTTP-Method-Override: "+override, "X-HTTP-Method: "+override, "X-Method-Override: "+override)
		}
		add(other+" "+target, "Origin: https://x.example", "Access-Control-Request-Method: GET")
	}
	for _, line := range []string{a.line, "POST " + target} {
		for _, header := range []string{
			"Content-Type: application/grpc", "Content-Type: application/grpc-web", "Content-Type: application/grpc-web-text+proto", "Content-Type: application/json; charset=utf-8",
			"Content-Type: multipart/form-data; boundary=x", "TE: trailers", "Accept: text/event-stream", "Accept: text/html", "Accept-Encoding: gzip;q=0", "Cookie: a=1; a=2",
			`Cookie: a="\061"; a=1`, "Cookie: a=\"1\"", "X-Original-URL: " + free, "X-Rewrite-URL: " + free, "X-Forwarded-Uri: " + free, "X-Forwarded-Prefix: " + free, "Upgrade: websocket",
			"Range: bytes=0-0", "Cache-Control: no-cache", "Purpose: prefetch", "Expect: 100-continue",
		} {
			add(line, header)
		}
	}
	for _, other := range []string{"get", "HEAD", "POST", "OPTIONS"} {
		add(other+" "+free, "X-HTTP-Method-Override: "+method, "X-Original-URL: "+target, "X-Rewrite-URL: "+target)
	}
	for _, header := range spoofs {
		add(a.line, strings.ReplaceAll(header, "%d", "7"))
	}
	return all
}

// startBackends starts Express, PHP's server, Python's and nginx, and returns their addresses.
func startBackends(t *testing.T) (addrs map[string]string) {
	t.Helper()
	dir, addrs := t.TempDir(), map[string]string{}
	for _, file := range []string{"package.json", "package-lock.json", "express.cjs"} {
		must(t, "write", os.WriteFile(filepath.Join(dir, file), []byte(replaced(t, backendsDir+file)), 0o600))
	}
	npm := exec.CommandContext(t.Context(), "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
	npm.Dir = dir
	out, err := npm.CombinedOutput()
	must(t, string(out), err)
	start := func(name string, command func(host, port string) *exec.Cmd) {
		addrs[name] = caddytest.FreeAddr(t)
		host, port, err := net.SplitHostPort(addrs[name])
		must(t, name, err)
		startProxy(t, addrs[name], command(host, port))
	}
	start("express", func(_, port string) *exec.Cmd {
		return exec.CommandContext(t.Context(), installed(t, "node"), filepath.Join(dir, "express.cjs"), port)
	})
	start("php", func(host, port string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), installed(t, "php"), "-S", net.JoinHostPort(host, port), backendsDir+"router.php")
		cmd.Env = append(os.Environ(), "PHP_CLI_SERVER_WORKERS=")
		return cmd
	})
	start("python", func(_, port string) *exec.Cmd {
		return exec.CommandContext(t.Context(), installed(t, "python3"), backendsDir+"raw.py", port)
	})
	addrs["nginx"] = caddytest.FreeAddr(t)
	startNginx(t, backendsDir+"nginx.conf", addrs["nginx"], "backend:1", addrs["nginx"], "proxy:1", caddytest.FreeAddr(t), "site:1", addrs["nginx"])
	return addrs
}

// startFront starts a proxy before a site, and returns its address, or "" without one.
func startFront(t *testing.T, name, site string) (addr string) {
	t.Helper()
	if name == "" {
		return ""
	}
	addr = caddytest.FreeAddr(t)
	replace := []string{"proxy:1", addr, "site:1", site}
	if name == "nginx" {
		startNginx(t, backendsDir+"nginx.conf", addr, append(replace, "backend:1", caddytest.FreeAddr(t))...)
		return addr
	}
	file := filepath.Join(t.TempDir(), "haproxy.cfg")
	must(t, "write", os.WriteFile(file, []byte(replaced(t, backendsDir+"haproxy.cfg", replace...)), 0o600))
	startProxy(t, addr, exec.CommandContext(t.Context(), installed(t, "haproxy"), "-f", file, "-db"))
	return addr
}
