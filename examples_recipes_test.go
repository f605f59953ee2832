package shardlimit_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func loginAs(user, password string) string {
	return "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// body reads the body of a response to get.
func body(t *testing.T, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	must(t, "read", err)
	return string(b)
}

func TestExamplePerUser(t *testing.T) {
	c := startExample(t, "per_user")
	alice, bob := loginAs("alice", "secret"), loginAs("bob", "secret")
	must(t, "alice", want("statuses", statuses(c, 6, "/", alice), many(5, 200)+" 429"))
	resp := c.Get("/", bob)
	must(t, "bob", errors.Join(want("status", resp.StatusCode, 200), want("remaining", caddytest.Remaining(resp), "4"), want("body", body(t, resp), "Hello, bob.")))
	must(t, "nobody", want("statuses", statuses(c, 6, "/"), many(6, 401)))
	must(t, "alice from elsewhere", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL, alice).StatusCode, 429))
}

func TestExamplePerPlan(t *testing.T) {
	c := startExample(t, "per_plan")
	for _, test := range []struct {
		header string
		events int
	}{{"X-Api-Key: key-of-alice", 20}, {"X-Api-Key: key-of-bob", 10}, {"X-Api-Key: made-up", 3}} {
		must(t, test.header, want("statuses", statuses(c, test.events+1, "/", test.header), many(test.events, 200)+" 429"))
	}
	must(t, "another made-up key", want("status", c.Get("/", "X-Api-Key: other").StatusCode, 429))
	must(t, "no key", want("status", c.Get("/").StatusCode, 429))
	must(t, "another address", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL).StatusCode, 200))
}

func TestExampleBruteForce(t *testing.T) {
	c := startExample(t, "brute_force")
	good, bad := loginAs("alice", "secret"), loginAs("alice", "guess")
	must(t, "good logins", want("statuses", statuses(c, 7, "/login", good), many(7, 200)))
	must(t, "browsers that ask", want("statuses", statuses(c, 7, "/login"), many(7, 401)))
	must(t, "guesses", want("statuses", statuses(c, 6, "/login", bad), many(5, 401)+" 429"))
	must(t, "a good login from there", want("status", c.Get("/login", good).StatusCode, 429))
	must(t, "a good login from elsewhere", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL+"/login", good).StatusCode, 200))
	must(t, "other pages", want("statuses", statuses(c, 7, "/"), many(7, 200)))
}

func TestExampleIPv6(t *testing.T) {
	c := startExample(t, "ipv6")
	for _, address := range []string{"::1", "::2", "aaaa::1", "ffff:ffff:ffff:ffff", "::3"} {
		address = strings.Replace("X-Forwarded-For: 2001:db8:0:1:"+address, ":::", "::", 1)
		must(t, address, want("status", c.Get("/", address).StatusCode, 200))
	}
	must(t, "the sixth of the network", want("status", c.Get("/", "X-Forwarded-For: 2001:db8:0:1::4").StatusCode, 429))
	must(t, "another network", want("remaining", caddytest.Remaining(c.Get("/", "X-Forwarded-For: 2001:db8:0:2::1")), "4"))
	must(t, "IPv4", want("remaining", caddytest.Remaining(c.Get("/", "X-Forwarded-For: 192.0.2.1")), "4"))
	must(t, "its neighbour", want("remaining", caddytest.Remaining(c.Get("/", "X-Forwarded-For: 192.0.2.2")), "4"))
}

func TestExampleBurstAndQuota(t *testing.T) {
	t.Parallel() // it spends its time waiting
	// The day may end in between.
	for day := -1; day != time.Now().UTC().YearDay(); {
		day = time.Now().UTC().YearDay()
		c := startExample(t, "burst_and_quota")
		served, refusedBy := 0, map[string]int{}
		eventually(t, "the quota is used up", func() error {
			resp := c.Get("/", "X-Api-Key: k")
			zone := resp.Header.Get("X-RateLimit-Resource")
			switch resp.StatusCode {
			case 200:
				served++
				if served > 15 {
					t.Fatalf("%d were served", served)
				}
			case 429:
				if refusedBy[zone]++; zone == "burst" && served < 5 {
					t.Fatalf("a burst of %d is refused", served)
				}
			}
			return want("being refused by day", zone == "day" && resp.StatusCode == 429, true)
		})
		if day != time.Now().UTC().YearDay() {
			continue
		}
		must(t, "all", errors.Join(want("served", served, 15), want("refused by the burst", refusedBy["burst"] > 0, true)))
		must(t, "another key", want("status", c.Get("/", "X-Api-Key: other").StatusCode, 200))
	}
}

func TestExampleGraphQLCost(t *testing.T) {
	c := startExample(t, "graphql_cost")
	for _, left := range []string{"13", "6", "0"} {
		resp := c.Get("/graphql")
		must(t, "query", errors.Join(want("status", resp.StatusCode, 200), want("remaining", caddytest.Remaining(resp), left), want("X-Cost", resp.Header.Get("X-Cost"), "")))
	}
	must(t, "a query without points", want("status", c.Get("/graphql").StatusCode, 429))
	must(t, "another key", want("remaining", caddytest.Remaining(c.Get("/graphql", "X-Api-Key: k")), "13"))
	must(t, "another path", want("remaining", caddytest.Remaining(c.Get("/")), ""))
}

func TestExampleAllowlist(t *testing.T) {
	c := startExample(t, "allowlist")
	must(t, "others", want("statuses", statuses(c, 6, "/"), many(5, 200)+" 429"))
	must(t, "health checks", want("statuses", statuses(c, 7, "/health"), many(7, 200)))
	listed := clientAt("127.0.0.2")
	must(t, "listed", want("statuses", repeated(7, func() *http.Response { return send(t, listed, http.MethodGet, c.URL) }), many(7, 200)))
	must(t, "listed", want("remaining", caddytest.Remaining(send(t, listed, http.MethodGet, c.URL)), ""))
}

func TestExampleErrorPage(t *testing.T) {
	c := startExample(t, "error_page")
	must(t, "requests that fit", want("statuses", statuses(c, 2, "/"), "200 200"))
	resp := c.Get("/", "Accept: text/html,application/xhtml+xml")
	wait := resp.Header.Get("Retry-After")
	page := body(t, resp)
	must(t, "page", errors.Join(
		want("status", resp.StatusCode, 429),
		want("type", resp.Header.Get("Content-Type"), "text/html; charset=utf-8"),
		want("saying how long to wait", wait != "" && strings.Contains(page, "again in "+wait+" seconds"), true),
		want("zone", resp.Header.Get("X-RateLimit-Resource"), "page"),
	))
	if !strings.HasPrefix(page, "<!doctype html>") {
		t.Errorf("the page is %s", page)
	}
	resp = c.Get("/")
	var told struct {
		Error, Zone string
		Wait        int
	}
	must(t, "JSON", json.Unmarshal([]byte(body(t, resp)), &told))
	must(t, "JSON", errors.Join(want("status", resp.StatusCode, 429), want("type", resp.Header.Get("Content-Type"), "application/json"),
		want("error", told.Error, "rate_limited"), want("zone", told.Zone, "page"), want("wait", fmt.Sprint(told.Wait), resp.Header.Get("Retry-After"))))
}

func TestExampleBrowserClients(t *testing.T) {
	c := startExample(t, "browser_clients")
	origin := "Origin: https://app.example.com"
	for range 7 {
		resp := send(t, caddytest.Client, http.MethodOptions, c.URL, origin, "Access-Control-Request-Method: GET")
		must(t, "preflight", errors.Join(want("status", resp.StatusCode, 204), want("remaining", caddytest.Remaining(resp), ""),
			want("origin", resp.Header.Get("Access-Control-Allow-Origin"), "https://app.example.com"),
			want("methods", resp.Header.Get("Access-Control-Allow-Methods"), "GET, POST, PUT, DELETE")))
	}
	for _, status := range []int{200, 200, 200, 200, 200, 429} {
		resp := c.Get("/", origin)
		must(t, "request", want("status", resp.StatusCode, status))
		exposed := strings.Split(resp.Header.Get("Access-Control-Expose-Headers"), ", ")
		for name := range resp.Header {
			if name = http.CanonicalHeaderKey(name); strings.HasPrefix(name, "X-Ratelimit-") || name == "Retry-After" {
				found := false
				for _, e := range exposed {
					found = found || http.CanonicalHeaderKey(e) == name
				}
				must(t, name, want("being exposed", found, true))
			}
		}
		must(t, "request", want("origin", resp.Header.Get("Access-Control-Allow-Origin"), "https://app.example.com"))
	}
	must(t, "OPTIONS that is no preflight", want("status", send(t, caddytest.Client, http.MethodOptions, c.URL, origin).StatusCode, 429))
}
