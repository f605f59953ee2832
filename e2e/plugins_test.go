package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	_ "github.com/shardlimit/caddy-shardlimit/internal/caddytest/plugins"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
)

// logins are ways to ask for a login, each with the global options that it needs.
var logins = map[string]struct{ global, directive, right string }{
	"basic_auth":                           {"", "basic_auth {\nalice " + hashOfSecret + "\n}", basic("secret")},
	"basicauth, the old spelling":          {"", "basicauth {\nalice " + hashOfSecret + "\n}", basic("secret")},
	"authorize of caddy-security":          {"", "authorize with mine", "Bearer token-alice"},
	"jwtauth, ordered by the old spelling": {"order jwtauth before basicauth", "jwtauth", "Bearer token-alice"},
	"jwtauth, ordered by the new spelling": {"order jwtauth before basic_auth", "jwtauth", "Bearer token-alice"},
	"jwtauth, ordered after authorize":     {"order jwtauth after authorize", "jwtauth", "Bearer token-alice"},
	"jwtauth, ordered after the limit":     {"order jwtauth after rate_limit", "jwtauth", "Bearer token-alice"},
}

// hashOfSecret is made with caddy hash-password.
const hashOfSecret = "$2a$10$HqUtFVo8WflbJ8Nk3Hfm6ua6mUqUUz9iwvJC7ey9idiNOB1KdxQLi"

func basic(password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte("alice:"+password))
}

// TestFailedLoginsReachTheLimiter without a route, whatever asks for the login.
func TestFailedLoginsReachTheLimiter(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, caddytest.Site("", "respond ok"))
	n := 0
	for name, login := range logins {
		n++
		c.MustLoad(caddytest.Site(login.global, login.directive+"\nrate_limit {\n"+
			zoneWith(fmt.Sprint("login", n), "key {client_ip}", "events 3", "count_status 401")+"}\nrespond ok"))
		ask := func(authorization string) int { return c.Get("/", "Authorization: "+authorization).StatusCode }
		must(t, name, want("right login", ask(login.right), http.StatusOK))
		for range 3 {
			must(t, name, want("wrong login", ask("Bearer guess"), http.StatusUnauthorized))
		}
		must(t, name, want("wrong login at the limit", ask("Bearer guess"), http.StatusTooManyRequests))
		must(t, name+" has no warning", want("warnings", warningsOf(c), ""))
	}
}

// warningsOf returns the problems of the running config's routes.
func warningsOf(c *caddytest.Caddy) string {
	c.T.Helper()
	return strings.Join(problemsOf(c)["doubtful_config"], "\n")
}

// TestRulesBesidePlugins: where a plugin that comes first makes a limit ineffective, the config has a warning, and
// none once its remedy is applied.
func TestRulesBesidePlugins(t *testing.T) {
	t.Parallel()
	limiter := func(name string, options ...string) string {
		return "rate_limit {\n" + zoneWith(name, options...) + "}\n"
	}
	address := func(options ...string) string { return limiter("z", append(options, "key {client_ip}", "events 3")...) }
	user := limiter("u", "key {http.auth.user.id}", "events 3")
	const before, first = "write its rate_limit before ", "order jwtauth before rate_limit\norder coraza_waf first\norder crowdsec first\norder appsec after crowdsec"
	for name, test := range map[string]struct {
		global, site string
		// want is in the warning, or empty for none. mended is the config with its remedy.
		want                       string
		mendedGlobal, mendedInSite string
	}{
		"a cache":                     {"", "cache\n" + address() + "respond ok", "write the global option order cache after rate_limit, or in a route put rate_limit before cache", "order cache after rate_limit", ""},
		"a cache in a route":          {"", "route {\ncache\n" + address() + "respond ok\n}", "in a route put rate_limit before cache", "", "route {\n" + address() + "cache\nrespond ok\n}"},
		"a cache of other pages":      {"", "cache /static/*\nhandle /api/* {\n" + address() + "respond ok\n}", "", "", ""},
		"a WAF":                       {first, "coraza_waf\n" + address("count_status 403") + "respond ok", before + "waf, in a route", first, "route {\n" + address("count_status 403") + "coraza_waf\nrespond ok\n}"},
		"a WAF, and all counts":       {first, "coraza_waf\n" + address() + "respond ok", "", "", ""},
		"a bouncer":                   {first, "crowdsec\n" + address("count_status 401 403") + "respond ok", before + "crowdsec", first, "route {\n" + address("count_status 401 403") + "crowdsec\nrespond ok\n}"},
		"a bouncer, and a WAF behind": {"order crowdsec first\norder coraza_waf after rate_limit", "crowdsec\n" + address("count_status 403") + "coraza_waf\nrespond ok", "", "", ""},
		"a WAF, and tokens behind":    {first, "route {\ncoraza_waf\n" + address("count_status 401 403") + "jwtauth\nrespond ok\n}", "", "", ""},
		"passwords, and a WAF behind": {first, "route {\n" + basicAuth + address("count_status 401") + "coraza_waf\nrespond ok\n}", "it counts the status 401", "", "route {\n" + address("count_status 401") + basicAuth + "coraza_waf\nrespond ok\n}"},
		"a bouncer's WAF":             {first, "appsec\n" + address("count_status 403") + "respond ok", before + "appsec", first, "route {\n" + address("count_status 403") + "appsec\nrespond ok\n}"},
		"tokens, failures":            {first, "jwtauth\n" + address("count_status 401") + "respond ok", "it counts the status 401, but authentication comes before it", "", "route {\n" + address("count_status 401") + "jwtauth\nrespond ok\n}"},
		"tokens, all of an address":   {first, "jwtauth\n" + address() + "respond ok", "so nothing limits failed logins: " + before + "authentication", "order jwtauth after rate_limit", ""},
		"passwords in a route":        {"", "route {\n" + basicAuth + address("count_status 401") + "respond ok\n}", before + "authentication", "", "route {\n" + address("count_status 401") + basicAuth + "respond ok\n}"},
		"forward_auth in a route":     {"", "route {\n" + forwardAuth + address("count_status 401") + "respond ok\n}", before + "forward_auth", "", "route {\n" + address("count_status 401") + forwardAuth + "respond ok\n}"},
		"forward_auth, and its user":  {"", "route {\n" + forwardAuth + limiter("z", "key {header.X-Client}", "events 3") + "respond ok\n}", "", "", ""},
		"forward_auth, an address":    {"", "route {\n" + forwardAuth + address() + "respond ok\n}", "", "", ""},
		"users":                       {"", "route {\n" + basicAuth + user + "respond ok\n}", "", "", ""},
		"users who are refused":       {"", "route {\n" + basicAuth + limiter("u", "key {http.auth.user.id}", "events 3", "count_status 403") + "respond ok\n}", "", "", ""},
		"both sides":                  {"", "route {\n" + limiter("first", "key {client_ip}", "events 9", "count_status 401") + basicAuth + address() + user + "respond ok\n}", "", "", ""},
		"other paths":                 {"", "route {\nbasic_auth /admin/* {\nalice " + hashOfSecret + "\n}\nrate_limit /api/* {\n" + zoneWith("z", "key {client_ip}", "events 3") + "}\nrespond ok\n}", "", "", ""},
		"a zone of other paths":       {"", "route {\nbasic_auth /admin/* {\nalice " + hashOfSecret + "\n}\n" + address("match {\npath /login*\n}", "count_status 401") + "respond ok\n}", "", "", ""},
		"statuses of a backend":       {"", "route {\n" + basicAuth + address("count_status 5xx") + "respond ok\n}", "", "", ""},
		"ignored":                     {"", "route {\ncache\n" + basicAuth + "rate_limit {\nignore behind_cache unseen_refusal\n" + zoneWith("z", "key {client_ip}", "events 3") + "}\nrespond ok\n}", "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			found := warningsIn(t, caddytest.Site(test.global, test.site))
			if !strings.Contains(found, test.want) || (test.want == "") != (found == "") {
				t.Errorf("warnings are %q, want %q", found, test.want)
			}
			if test.want == "" {
				return
			}
			site := test.mendedInSite
			if site == "" {
				site = test.site
			}
			if found := warningsIn(t, caddytest.Site(test.mendedGlobal, site)); found != "" {
				t.Errorf("mended: %s", found)
			}
		})
	}
}

// warningsIn returns the warnings about the routes of a Caddyfile.
func warningsIn(t *testing.T, caddyfile string) (found string) {
	t.Helper()
	caddyfile = strings.NewReplacer("{{global}}", "admin off", "{{site}}", "http://localhost:1").Replace(caddyfile)
	config, err := caddytest.Adapt(caddyfile)
	must(t, "adapt "+caddyfile, err)
	read := ""
	for _, w := range lint.Config(config) {
		read += w.Text() + "\n"
	}
	log, err := caddytest.Warnings(t, config)
	must(t, "validate", err)
	for line := range strings.Lines(log) {
		var entry struct{ Rule, Problem string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Rule != "" {
			found += entry.Problem + "\n"
		}
	}
	must(t, caddyfile, want("warnings of its JSON", read, found))
	return found
}

// TestCacheBehindTheLimiter stores no refusal and no headers of a limit.
func TestCacheBehindTheLimiter(t *testing.T) {
	t.Parallel()
	site := func(global string) string {
		return caddytest.Site(global, "cache\nrate_limit {\n"+zoneWith("z", "events 1")+"}\nrespond ok")
	}
	c := caddytest.Start(t, site(""))
	get := func(path, key string) int { return c.Get(path, "X-Key: "+key).StatusCode }
	must(t, "before it", want("first", get("/a", "one"), http.StatusOK))
	must(t, "before it", want("at its limit", get("/b", "one"), http.StatusTooManyRequests))
	must(t, "before it", want("another client", get("/b", "other"), http.StatusTooManyRequests))
	c.MustLoad(site("order cache after rate_limit"))
	must(t, "behind it", want("at its limit", get("/b", "one"), http.StatusTooManyRequests))
	must(t, "behind it", want("another client", get("/b", "third"), http.StatusOK))
	must(t, "behind it", want("a stored answer", get("/b", "fourth"), http.StatusOK))
	must(t, "behind it", want("its limit", get("/b", "fourth"), http.StatusTooManyRequests))
}
