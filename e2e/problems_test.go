package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// problemsOf returns the problems that the status lists, by kind.
func problemsOf(c *caddytest.Caddy) map[string][]string {
	c.T.Helper()
	var status struct{ Problems []struct{ Kind, Text string } }
	c.AdminJSON(http.MethodGet, "/rate_limit/", "", &status)
	byKind := map[string][]string{}
	for _, p := range status.Problems {
		byKind[p.Kind] = append(byKind[p.Kind], p.Text)
	}
	return byKind
}

// awaitProblem waits until there is a problem of a kind with a text, or none of the kind if that is empty.
func awaitProblem(c *caddytest.Caddy, kind, text string) {
	c.T.Helper()
	eventually(c.T, fmt.Sprintf("problems of kind %s with %q", kind, text), func() error {
		all := strings.Join(problemsOf(c)[kind], "; ")
		return want(all+" being as it should", strings.Contains(all, text) && (all == "") == (text == ""), true)
	})
}

// TestProxyThatIsNotTrusted is a problem of the status, a metric, a line of the log and the command,
// until the config trusts it.
func TestProxyThatIsNotTrusted(t *testing.T) {
	t.Parallel()
	site := func(trust string, more string) string {
		return caddytest.Site(trust, "route {\nrate_limit {\n"+zoneWith("api", "key {client_ip}", "events 1000")+more+"}\nrespond ok\n}")
	}
	c := caddytest.Start(t, site("", ""))
	ask := func(header string) {
		for i := range 30 {
			must(t, "a request", want("status", c.Get("/", fmt.Sprintf("%s: 203.0.113.%d", header, i)).StatusCode, http.StatusOK))
		}
	}
	ask("X-Forwarded-For")
	awaitProblem(c, "proxy_address", "add trusted_proxies static with the proxy's address to the global option servers")
	must(t, "metric", want("problems", c.Metric(`caddy_rate_limit_problems{kind="proxy_address"}`), "1"))
	prints(t, 0, []string{"problem of store default: zone api: 100 % of the requests come through a proxy"}, "status", "--address", c.Admin)
	ask("X-Forwarded-For")
	awaitProblem(c, "proxy_address", "does not trust")
	c.AwaitLines(t, 1, "a problem began", `"kind":"proxy_address"`, `"level":"warn"`)
	// The problem of another zone shows that the requests were looked at.
	c.MustLoad(site("servers {\ntrusted_proxies static 127.0.0.1\n}", zoneWith("other", "events 1000")))
	ask("X-Forwarded-For")
	awaitProblem(c, "empty_key", "zone other: the key is empty in 100 % of the requests")
	must(t, "a trusted proxy", want("problems", len(problemsOf(c)["proxy_address"]), 0))
	must(t, "metric", want("problems", c.Metric(`caddy_rate_limit_problems{kind="proxy_address"}`), "0"))
}

// TestProxyAtASocketThatIsNotTrusted: no address could be named for it.
func TestProxyAtASocketThatIsNotTrusted(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "rl")
	must(t, "make a folder", err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	site := func(trust, zone string) string {
		return caddytest.Site(trust, "respond ok") + "http:// {\nbind unix/" + socket + "\nrate_limit {\n" + zoneWith(zone, "key {client_ip}", "events 1000") + "}\nrespond ok\n}\n"
	}
	c := caddytest.Start(t, site("", "api"))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	remaining := func(address string) string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://site.example/", http.NoBody)
		must(t, "make a request", err)
		req.Header.Set("X-Forwarded-For", address)
		resp, err := client.Do(req)
		must(t, "send it", err)
		must(t, "close it", resp.Body.Close())
		return resp.Header.Get("X-RateLimit-Remaining")
	}
	for i := range 30 {
		must(t, "a shared bucket", want("remaining", remaining(fmt.Sprint("203.0.113.", i)), fmt.Sprint(999-i)))
	}
	awaitProblem(c, "proxy_address", "add trusted_proxies_unix to the global option servers, because the proxy uses a Unix socket")
	c.MustLoad(site("servers {\ntrusted_proxies_unix\n}", "other"))
	for i := range 30 {
		must(t, "a bucket each", want("remaining", remaining(fmt.Sprint("203.0.113.", i)), "999"))
	}
}

// TestProblemsOfSetup: a server that is set up wrongly, and a Caddy with another key_secret, which can
// read no rules of clients either, are problems as long as they are.
func TestProblemsOfSetup(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	site := func(secret string) string {
		return zonesSite(caddytest.RedisStore(caddytest.ShardWith("a", "primary "+server.Addr()), "key_secret "+secret+strings.Repeat("x", 32)), zoneWith("api"), "respond ok")
	}
	one := caddytest.Start(t, site("one"))
	awaitProblem(one, "misconfigured", "maxmemory-policy is allkeys-lru")
	must(t, "set", server.Client().ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
	awaitProblem(one, "misconfigured", "")
	must(t, "alone", want("problems", len(problemsOf(one)), 0))

	other := caddytest.Start(t, site("other"))
	awaitProblem(one, "disagreement", "has another key_secret")
	awaitProblem(other, "disagreement", "has another key_secret, so each counts the same clients by itself: give both the same one")
	prints(t, 0, nil, "block", "api", "alice", "1h", "--address", other.Admin)
	awaitProblem(one, "damaged_overrides", "unblock, ungrant or unset with its client key removes what is damaged")
	one.AwaitLines(t, 1, "a problem began", `"kind":"damaged_overrides"`)
	must(t, "the one that set it", want("problems", len(problemsOf(other)["damaged_overrides"]), 0))
	prints(t, 0, nil, "unblock", "api", "alice", "--address", other.Admin)
	awaitProblem(one, "damaged_overrides", "")
	one.AwaitLines(t, 1, "a problem is over", `"kind":"damaged_overrides"`, `"level":"info"`)
	other.MustLoad(site("one"))
	awaitProblem(one, "disagreement", "")
	awaitProblem(other, "disagreement", "")
}

// TestServersThatAnswerAndRefuse: calls that a server refuses leave it up, and are a problem with the cause, the
// remedy and what becomes of requests.
func TestServersThatAnswerAndRefuse(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// lacks is the right that the user lacks; else the server is full after the first request.
		lacks  string
		zone   []string
		status int
		kind   string
		texts  []string
	}{
		"takes of a full server":    {"", []string{"charge before"}, http.StatusServiceUnavailable, "store_errors", []string{"OOM command not allowed", "give Redis more memory", "requests are refused with 503: on_error deny (zone api)"}},
		"charges to a full server":  {"", nil, http.StatusOK, "charges_wait", []string{"charges wait for shard a: redis ", "OOM command not allowed", "give Redis more memory"}},
		"a right to scripts":        {"evalsha", []string{"charge before"}, http.StatusServiceUnavailable, "store_errors", []string{"NOPERM", "caddy rate-limit check", "refused with 503"}},
		"a right that charges need": {"zadd", []string{"algorithm sliding_log"}, http.StatusOK, "store_errors", []string{"charges, refunds or penalties of shard a are lost", "caddy rate-limit check"}},
		"a right, counted on alone": {"evalsha", []string{"charge before", "on_error local"}, http.StatusOK, "store_errors", []string{"this Caddy counts on alone: on_error local (zone api)"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			lines := []string{caddytest.ShardWith("a", "primary "+server.Addr()), "charge_timeout 100ms"}
			if c.lacks != "" {
				must(t, "user", server.Client().Do(t.Context(), "acl", "setuser", "lim", "on", ">s", "~*", "&*", "+@all", "-"+c.lacks).Err())
				lines = append(lines, "username lim", "password s")
			}
			caddy := caddytest.Start(t, zonesSite(caddytest.RedisStore(lines...), zoneWith("api", append(c.zone, "on_error deny")...), "respond ok"))
			must(t, "before", want("problems", len(problemsOf(caddy)[c.kind]), 0))
			if c.lacks == "" {
				must(t, "a request before", want("status", caddy.Get("/", "X-Key: k").StatusCode, http.StatusOK))
				must(t, "full", server.Client().ConfigSet(t.Context(), "maxmemory", "1mb").Err())
			}
			must(t, "a request", want("status", caddy.Get("/", "X-Key: k").StatusCode, c.status))
			for _, text := range c.texts {
				awaitProblem(caddy, c.kind, text)
			}
			// Charges may be lost as well.
			must(t, "metric", want("no problem", caddy.Metric(`caddy_rate_limit_problems{kind="`+c.kind+`"}`) == "0", false))
			if c.kind == "charges_wait" {
				must(t, "more memory", server.Client().ConfigSet(t.Context(), "maxmemory", "0").Err())
				awaitProblem(caddy, c.kind, "")
			}
		})
	}
}

// TestShardsAtOneServer are a problem, and no disagreement of configs.
func TestShardsAtOneServer(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	store := caddytest.RedisStore(caddytest.ShardWith("a", "primary "+server.Addr()), caddytest.ShardWith("b", "primary "+proxy.Addr()))
	c := caddytest.Start(t, zonesSite(store, zoneWith("api"), "respond ok"))
	awaitProblem(c, "misconfigured", "are the same server: give each its own, or remove one of the shards")
	must(t, "names", want("disagreements", len(problemsOf(c)["disagreement"]), 0))
	c.MustLoad(zonesSite(caddytest.RedisStore(caddytest.ShardWith("a", "primary "+server.Addr())), zoneWith("api"), "respond ok"))
	awaitProblem(c, "misconfigured", "")
}
