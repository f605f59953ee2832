package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
)

// twice is a limiter whose zone admits two requests of a client and has more lines.
func twice(lines ...string) string {
	return limiterOf(append([]string{"key {client_ip}"}, lines...)...)
}

// limiterOf is a limiter whose zone admits two requests a client, which the lines tell.
func limiterOf(lines ...string) string {
	text := strings.Join(lines, "\n")
	if !strings.Contains(text, "events") {
		text += "\nevents 2"
	}
	return "rate_limit {\nzone z {\n" + text + "\nwindow 10m\n}\n}\n"
}

func inRoute(parts ...string) string { return "route {\n" + strings.Join(parts, "") + "}\n" }

const (
	basicAuth   = "basic_auth {\nalice $2a$10$HqUtFVo8WflbJ8Nk3Hfm6ua6mUqUUz9iwvJC7ey9idiNOB1KdxQLi\n}\n"
	planMap     = "map {header.X-Plan} {quota} {\nfree 2\ndefault 9\n}\n"
	forwardAuth = "forward_auth 127.0.0.1:1 {\nuri /\ncopy_headers X-Client X-Plan\n}\n"
	toBackend   = "reverse_proxy 127.0.0.1:1\n"
	inPath      = "match {\npath /api/*\n}"
)

// rulesAbout returns the names of the rules that warn about a site: when its JSON is read, and when it is loaded.
func rulesAbout(t *testing.T, site string) (read, loaded []string) {
	t.Helper()
	config, err := caddytest.Adapt(site)
	must(t, "adapt\n"+site, err)
	for _, w := range lint.Config(config) {
		read = append(read, w.Rule)
	}
	log, err := caddytest.Warnings(t, config)
	must(t, "load\n"+site, err)
	for line := range strings.Lines(log) {
		var entry struct{ Rule string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Rule != "" {
			loaded = append(loaded, entry.Rule)
		}
	}
	return read, loaded
}

// TestRulesAboutRoutes: the first site of each rule trips it, and its remedy, applied in the others, ends the warning and
// protects what the first one does not.
func TestRulesAboutRoutes(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Client", "alice")
		w.Header().Set("X-Plan", "free")
	}))
	t.Cleanup(backend.Close)
	atBackend := strings.NewReplacer("127.0.0.1:1", strings.TrimPrefix(backend.URL, "http://")).Replace
	// refusesThird sends requests that differ in a header, of which the third is refused.
	refusesThird := func(path, header string) func(c *caddytest.Caddy) error {
		return func(c *caddytest.Caddy) error {
			for i := range 2 {
				if status := c.Get(path, fmt.Sprintf(header, i)).StatusCode; status == http.StatusTooManyRequests {
					return fmt.Errorf("request %d is refused", i+1)
				}
			}
			return want("status", c.Get(path, fmt.Sprintf(header, 2)).StatusCode, http.StatusTooManyRequests)
		}
	}
	errorPage := func(statuses, value string) string {
		return twice() + "respond ok\nhandle_errors " + statuses + " {\nheader Cache-Control \"" + value + "\"\nrespond sorry\n}\n"
	}
	withProblem := func(header string) string {
		return header + strings.Replace(twice(), "rate_limit {", "rate_limit {\nproblem", 1) + "respond ok\n"
	}
	isNotStored := func(c *caddytest.Caddy) error {
		for range 2 {
			c.Get("/")
		}
		refused := c.Get("/")
		must(t, "refused", want("status", refused.StatusCode, http.StatusTooManyRequests))
		return want("caches", refused.Header.Get("Cache-Control"), "no-store")
	}
	exempt := func(matcher string) string { return twice("match {\nnot "+matcher+"\n}") + toBackend }
	for _, r := range []struct {
		rule, remedy string
		site         string
		remedied     []string
		protects     func(c *caddytest.Caddy) error
	}{
		{
			"error_route", "write a rate_limit before the handler that fails, with count_status, such as count_status 401",
			basicAuth + "respond ok\nhandle_errors 401 {\n" + twice() + "respond no 401\n}\n",
			[]string{twice("count_status 401") + basicAuth + "respond ok\nhandle_errors 401 {\nrespond no 401\n}\n"},
			refusesThird("/", "Authorization: Basic YWxpY2U6%d"),
		},
		{
			"late_source", "write them in a route block, in the order forward_auth, map, rate_limit",
			forwardAuth + planMap + limiterOf("key {header.X-Client} {client_ip}", "events {quota} 1") + "respond ok\n",
			[]string{inRoute(forwardAuth, planMap, limiterOf("key {header.X-Client} {client_ip}", "events {quota} 1"), "respond ok\n")},
			refusesThird("/", "X-Client: %d"),
		},
		{
			"moved_path", "write path /*, or move rate_limit before it, in a route block",
			"handle_path /api/* {\n" + twice(inPath) + "respond ok\n}\n",
			[]string{
				"handle_path /api/* {\n" + twice("match {\npath /*\n}") + "respond ok\n}\n",
				inRoute(twice(inPath), "uri strip_prefix /api\n", "respond ok\n"),
			},
			refusesThird("/api/x", "X-N: %d"),
		},
		{
			"forwarded_key", "write {client_ip} in its place, and trusted_proxies static with the proxy's address in the global option servers",
			limiterOf("key {header.X-Forwarded-For} {client_ip}") + "respond ok\n", []string{twice() + "respond ok\n"},
			refusesThird("/", "X-Forwarded-For: 192.0.2.%d"),
		},
		{
			"cached_refusal", "write no-store there, or leave out 429, as in handle_errors 404 5xx",
			errorPage("", "public, max-age=60"), []string{errorPage("", "no-store"), errorPage("404 5xx", "public, max-age=60")}, isNotStored,
		},
		{
			"cached_refusal", "write it without >, so that the limiter's no-store replaces it",
			withProblem("header >Cache-Control public\n"), []string{withProblem("header Cache-Control public\n")}, isNotStored,
		},
		{
			"literal_header", "and for refusals write it in handle_errors as well",
			"header X-Left {http.rate_limit.remaining}\n" + twice() + "respond ok\n", []string{"header >X-Left {http.rate_limit.remaining}\n" + twice() + "respond ok\n"},
			func(c *caddytest.Caddy) error { return want("X-Left", c.Get("/").Header.Get("X-Left"), "1") },
		},
		{
			"path_exempt", "write vars {uri} /health in place of path /health, which compares what the backend gets",
			exempt("path /health"), []string{exempt("vars {uri} /health")}, refusesThird("/report/../health", "X-N: %d"),
		},
		{
			"path_exempt", `write vars_regexp {uri} ^/public(/\w[\w.-]*)*(\?|$) in place of path /public/*`,
			exempt("path /public/*"), []string{exempt(`vars_regexp {uri} ^/public(/\w[\w.-]*)*(\?|$)`)}, refusesThird("/report/../public/x", "X-N: %d"),
		},
	} {
		t.Run(r.rule, func(t *testing.T) {
			t.Parallel()
			const servers = "servers {\ntrusted_proxies static 192.0.2.1\n}"
			site := func(body string) string { return caddytest.Site(servers, atBackend(body)) }
			c := caddytest.Start(t, site(r.site))
			texts := problemsOf(c)["doubtful_config"]
			if len(texts) == 0 || !slices.ContainsFunc(texts, func(text string) bool {
				return strings.Contains(text, r.remedy) && strings.HasSuffix(text, "or write ignore "+r.rule+" if it is meant")
			}) {
				t.Fatalf("problems are %q, want one with %s", texts, r.remedy)
			}
			if err := r.protects(c); err == nil {
				t.Error("the first site protects too")
			}
			for i, body := range r.remedied {
				c.MustLoad(strings.ReplaceAll(site(body), "zone z", fmt.Sprint("zone z", i)))
				must(t, body, want("number of problems", len(problemsOf(c)["doubtful_config"]), 0))
				must(t, body, r.protects(c))
			}
			c.MustLoad(site(strings.ReplaceAll(r.site, "rate_limit {", "rate_limit {\nignore "+r.rule)))
			must(t, "ignore", want("number of problems", len(problemsOf(c)["doubtful_config"]), 0))
		})
	}
}

// TestSitesThatRulesKnow trip a rule in other spellings, or none although they look alike.
func TestSitesThatRulesKnow(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	byClient := func(lines ...string) string { return limiterOf(append([]string{"key {header.X-Client}"}, lines...)...) }
	zones := func(text string) string { return strings.ReplaceAll(text, "zone z", "zone other") }
	for name, c := range map[string]struct {
		site  string
		rules string
	}{
		"all errors":                        {toBackend + "handle_errors {\n" + twice() + "}\n", "error_route"},
		"errors of a backend":               {toBackend + "handle_errors 404 {\n" + twice() + "reverse_proxy 127.0.0.1:2\n}\n", ""},
		"errors, and an invoked page":       {basicAuth + "handle_errors 401 {\n" + twice() + "root * /srv\nrewrite * /401.html\nfile_server\n}\n", "error_route"},
		"another handler's errors":          {basicAuth + "handle_errors 401 {\n" + twice() + "templates\nacme_server\n}\n", ""},
		"a user before authentication":      {limiterOf("key {http.auth.user.id}") + basicAuth, "late_source"},
		"a user behind authentication":      {inRoute(basicAuth, limiterOf("key {http.auth.user.id}")), ""},
		"a map behind":                      {inRoute(limiterOf("key {client_ip}", "events {quota} 1"), planMap), "late_source"},
		"a burst from a map behind":         {inRoute(limiterOf("key {client_ip}", "algorithm gcra", "burst {quota} 1"), planMap), "late_source"},
		"a cost from a header behind":       {byClient("cost {header.X-Plan}") + forwardAuth, "late_source late_source"},
		"a cost that is known at the end":   {limiterOf("key {client_ip}", "cost {http.response.header.X-Cost}") + toBackend, ""},
		"a cost from vars behind":           {inRoute(limiterOf("key {client_ip}", "cost {vars.cost}"), "vars cost 2\n", toBackend), ""},
		"vars of a header that is set late": {inRoute("vars client {header.X-Client}\n", forwardAuth, limiterOf("key {vars.client}")), "late_source"},
		"vars behind":                       {inRoute(limiterOf("key {vars.client}"), "vars client alice\n"), "late_source"},
		"a header of a header":              {inRoute("request_header X-Key {header.X-Client}\n", forwardAuth, limiterOf("key {header.X-Key}")), "late_source"},
		"a map of a header set before":      {inRoute("map {header.X-Plan} {quota} {\ndefault 9\n}\n", forwardAuth, limiterOf("key {client_ip}", "events {quota} 1")), ""},
		"a header removed before":           {inRoute("request_header -X-Client\n", limiterOf("key {header.X-Client} {client_ip}"), forwardAuth), ""},
		"a header removed behind":           {inRoute(byClient(), "request_header -X-Client\n"), ""},
		"a header for the backend":          {byClient() + "reverse_proxy 127.0.0.1:1 {\nheader_up X-Client secret\n}\n", ""},
		"a header made longer":              {inRoute(byClient(), "request_header X-Client \"{header.X-Client} x\"\n"), ""},
		"credentials":                       {limiterOf("key {header.X-Api-Key} {client_ip}") + "forward_auth 127.0.0.1:1 {\nuri /\ncopy_headers X-Api-Key\n}\n", ""},
		"in a snippet's route":              {"handle /api/* {\n" + byClient() + forwardAuth + "}\nhandle {\nrespond ok\n}\n", "late_source"},
		"for other paths":                   {"route /a/* {\n" + byClient() + "respond ok\n}\nroute /b/* {\n" + forwardAuth + "}\n", ""},
		"for a zone's other paths":          {inRoute(byClient(inPath), "route /admin/* {\n"+forwardAuth+"}\n"), ""},
		"in exclusive handles":              {"handle /a/* {\n" + byClient() + "}\nhandle {\n" + forwardAuth + "}\n", ""},
		"behind an answer":                  {inRoute(byClient(), "respond ok\n", forwardAuth), ""},
		"strip_prefix":                      {"uri strip_prefix /api\n" + twice(inPath), "moved_path"},
		"replaced":                          {"uri replace /api /v1\n" + twice(inPath), "moved_path"},
		"replaced by an expression":         {"uri path_regexp ^/api/(.*) /$1\n" + twice(inPath), "moved_path"},
		"rewritten to a page":               {"rewrite * /index.php\n" + twice(inPath), "moved_path"},
		"moved under a prefix":              {"rewrite * /v1{uri}\n" + twice(inPath), "moved_path"},
		"by an expression":                  {"uri strip_prefix /api\n" + twice("match {\nexpression path('/api/*') && method('POST')\n}"), "moved_path"},
		"by a regular expression":           {"uri strip_prefix /api\n" + twice("match {\npath_regexp ^/api/\n}"), "moved_path"},
		"the limiter's route":               {inRoute("uri strip_prefix /api\n", strings.Replace(twice(), "rate_limit", "rate_limit /api/*", 1)), "moved_path"},
		"an exemption":                      {"handle_path /api/* {\n" + twice("match {\nnot path /api/free/*\n}") + "respond ok\n}\n", "moved_path"},
		"no path":                           {"handle_path /api/* {\n" + twice() + toBackend + "}\n", ""},
		"the path that is left":             {"handle_path /api/* {\n" + twice("match {\npath /login*\n}") + toBackend + "}\n", ""},
		"another path is moved":             {"rewrite /old/* /new{uri}\n" + twice(inPath), ""},
		"the path is left out":              {"@spa not path /api/*\nrewrite @spa /index.html\n" + twice(inPath), ""},
		"a query":                           {"uri query +a b\nrewrite * ?x=1\n" + twice(inPath), ""},
		"a header decides":                  {"@old header X-Old *\nrewrite @old /old{uri}\n" + twice(inPath), ""},
		"a suffix":                          {"rewrite * {path}.json\n" + twice(inPath), ""},
		"files that are there":              {"root * /srv\ntry_files {path} /index.html\n" + twice("match {\npath /downloads/*\n}") + "file_server\n", ""},
		"files before a backend":            {"root * /srv\ntry_files {path} /index.html\n" + twice(inPath) + toBackend, "moved_path"},
		"X-Real-Ip through a map":           {"map {header.X-Real-IP} {who} {\ndefault {header.X-Real-IP}\n}\n" + limiterOf("key {who}"), "forwarded_key"},
		"X-Real-Ip of a proxy":              {"@proxy remote_ip 10.0.0.1\n" + strings.Replace(limiterOf("key {header.X-Real-IP}"), "rate_limit", "rate_limit @proxy", 1), ""},
		"X-Real-Ip that is set before":      {inRoute("request_header X-Real-IP {client_ip}\n", limiterOf("key {header.X-Real-IP}")), ""},
		"a deferred header":                 {"header >Cache-Control \"max-age=60\"\n" + strings.Replace(twice(), "rate_limit {", "rate_limit {\nproblem", 1), "cached_refusal"},
		"a header of passed requests":       {"header Cache-Control \"max-age=60\"\n" + twice(), ""},
		"an error page for 429":             {twice() + "handle_errors 429 {\nrespond wait\n}\nhandle_errors {\nheader Cache-Control \"max-age=60\"\nrespond no\n}\n", ""},
		"an error page for 4xx":             {twice() + "handle_errors 4xx {\nheader Cache-Control \"s-maxage=60\"\nrespond no\n}\n", "cached_refusal"},
		"a private error page":              {twice() + "handle_errors {\nheader Cache-Control \"private, max-age=60\"\nrespond no\n}\n", ""},
		"a request's header":                {inRoute("request_header X-Left {http.rate_limit.remaining}\n", twice()), "literal_header"},
		"a header behind":                   {inRoute(twice(), "header X-Left {http.rate_limit.remaining}\n"), ""},
		"an exempt path that is answered":   {twice("match {\nnot path /health\n}") + "respond /health OK\n" + toBackend, ""},
		"an exempt path of one's network":   {twice("match {\nnot {\npath /health\nremote_ip 10.0.0.0/8\n}\n}") + toBackend, ""},
		"an exempt path without a backend":  {twice("match {\nnot path /health\n}") + "file_server\n", ""},
		"an exempt path of the route":       {"@limited not path /health\n" + strings.Replace(twice(), "rate_limit", "rate_limit @limited", 1) + toBackend, "path_exempt"},
		"room for a path":                   {twice("reserve 50 {\npath /checkout\n}") + toBackend, "path_exempt"},
		"a warning for each of two":         {byClient() + zones(byClient()) + forwardAuth, "late_source late_source"},
	} {
		read, loaded := rulesAbout(t, "http://example.com {\n"+c.site+"}\n")
		if got := strings.Join(read, " "); got != c.rules {
			t.Errorf("%s: JSON trips %q, want %q", name, got, c.rules)
		}
		if got := strings.Join(loaded, " "); got != c.rules {
			t.Errorf("%s: loaded, it trips %q, want %q", name, got, c.rules)
		}
	}
}
