package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// fieldsSite is a site with zones of every kind that a policy can describe.
func fieldsSite(store, headers, backend string) string {
	return zonesSite(store, zoneWith("minute", "events 2", "window 1m")+
		"zone running {\nkey {header.X-Key}\nevents 7\nalgorithm concurrency\n}\n"+
		zoneWith("smooth", "events 10", "window 1s", "algorithm gcra", "burst 25")+
		zoneWith("short", "events 500", "window 500ms")+"headers "+headers+"\n", proxyTo(backend))
}

// limits parses a RateLimit field into r and t of each zone, in order.
func limits(t *testing.T, field string) (zones []string, r, reset map[string]int64) {
	t.Helper()
	list, err := httpsfv.UnmarshalList([]string{field})
	must(t, field, err)
	r, reset = map[string]int64{}, map[string]int64{}
	for _, member := range list {
		item := member.(httpsfv.Item)
		zone := item.Value.(string)
		zones = append(zones, zone)
		left, _ := item.Params.Get("r")
		r[zone] = left.(int64)
		if seconds, ok := item.Params.Get("t"); ok {
			reset[zone] = seconds.(int64)
		}
	}
	return zones, r, reset
}

// TestFields checks that the draft's fields list the policies and limits of all zones in order, in
// place of a backend's fields.
func TestFields(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("RateLimit", `"backend";r=1`)
		w.Header().Set("RateLimit-Policy", `"backend";q=1`)
	}))
	defer backend.Close()
	const policies = `"minute";q=2;w=60, "running";q=7;qu="concurrent-requests", "smooth";q=25;w=3, "short";q=500`
	forStores(t, bothStores(caddytest.StartShards(t, 2, 1)), func(t *testing.T, store string) {
		for _, headers := range []string{"ietf", "both"} {
			t.Run(headers, func(t *testing.T) {
				c := caddytest.Start(t, fieldsSite(store, headers, backend.Listener.Addr().String()))
				var opened time.Time
				for n := range 3 {
					a := c.Ask("/", "X-Key: "+headers)
					if n == 0 {
						opened = a.Sent
					}
					github := int64(-1)
					if headers == "both" {
						github = int64(max(1-n, 0))
					}
					must(t, fmt.Sprintf("request %d", n), errors.Join(
						want("policies", a.Header.Get("RateLimit-Policy"), policies),
						want("fields", len(a.Header.Values("RateLimit")), 1),
						want("X-RateLimit-Remaining", a.Remaining, github)))
					zones, left, reset := limits(t, a.Header.Get("RateLimit"))
					if n < 2 {
						must(t, a.Header.Get("RateLimit"), errors.Join(
							want("zones", fmt.Sprint(zones), "[minute running smooth short]"),
							want("minute's r", left["minute"], int64(1-n)),
							want("minute's t", reset["minute"] <= 60 && !a.Received.Add(time.Duration(reset["minute"])*time.Second).Before(opened.Add(time.Minute)), true),
							// The previous request may free its slot a moment later.
							want("running's r", left["running"] == 6 || left["running"] == 5 && n > 0, true),
							want("running's t", reset["running"], 0),
							want("smooth's r", left["smooth"] >= 23, true)))
						continue
					}
					// A refused request does not change what other zones have left.
					must(t, a.Header.Get("RateLimit"), errors.Join(
						want("status", a.Status, http.StatusTooManyRequests),
						want("first zone", zones[0], "minute"),
						want("minute's r", left["minute"], 0),
						want("minute's t and Retry-After", strconv.FormatInt(reset["minute"], 10), a.Header.Get("Retry-After"))))
				}
			})
		}
	})
}

// TestProblem checks that a refusal has a problem as its body, unless an error route matches.
func TestProblem(t *testing.T) {
	t.Parallel()
	zones := zoneWith("api", "events 4", "window 1h", "charge before", "reserve 50 {\nheader X-Important yes\n}") +
		pathZone("burst", "events 1", "window 1s") + "problem\n"
	type problem struct {
		Type     string   `json:"type"`
		Title    string   `json:"title"`
		Status   int      `json:"status"`
		Violated []string `json:"violated-policies"`
	}
	ask := func(c *caddytest.Caddy, headers ...string) (a caddytest.Answer, p problem) {
		a = c.Ask("/", headers...)
		if a.Header.Get("Content-Type") == "application/problem+json" {
			must(t, a.Body, json.Unmarshal([]byte(a.Body), &p))
		}
		return a, p
	}
	const types = "https://iana.org/assignments/http-problem-types#"
	for routes, answers := range map[string]bool{
		"": true, "handle_errors 404 {\n\t\trespond other\n\t}": true,
		"handle_errors 429 {\n\t\trespond mine\n\t}": false, "handle_errors {\n\t\trespond mine\n\t}": false,
	} {
		t.Run(routes, func(t *testing.T) {
			c := caddytest.Start(t, caddytest.Site("", "route {\nrate_limit {\n"+zones+"}\nrespond ok\n}\n"+routes))
			for range 2 {
				c.Get("/", "X-Key: alice")
			}
			a, p := ask(c, "X-Key: alice")
			must(t, "refusal", errors.Join(want("status", a.Status, http.StatusTooManyRequests),
				want("having the wait", a.RetryAfter > 3000, true), want("remaining", a.Remaining, 0)))
			if !answers {
				must(t, "body", want("of the error route", a.Body, "mine"))
				return
			}
			// What is left is reserved.
			must(t, a.Body, errors.Join(want("type", p.Type, types+"temporary-reduced-capacity"), want("status", p.Status, 429),
				want("zones", fmt.Sprint(p.Violated), "[api]"), want("a title", p.Title != "", true)))
			for range 2 {
				c.Get("/", "X-Key: alice", "X-Important: yes")
			}
			_, p = ask(c, "X-Key: alice", "X-Important: yes")
			must(t, "nothing left", want("type", p.Type, types+"quota-exceeded"))
			req, err := http.NewRequest(http.MethodHead, c.URL, nil)
			must(t, "request", err)
			req.Header.Set("X-Key", "alice")
			resp, err := c.Client.Do(req)
			must(t, "HEAD", err)
			must(t, "HEAD", errors.Join(resp.Body.Close(), want("status", resp.StatusCode, http.StatusTooManyRequests),
				want("type", resp.Header.Get("Content-Type"), "application/problem+json")))
			must(t, "metric", want("refused", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="api"}`), "3"))
		})
	}
}

// TestProblemWithoutAStore checks that a denial because of the store does not blame the client.
func TestProblemWithoutAStore(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := startWith(t, servers.Store("on_error deny"), zoneWith("api", "key static", "events 1", "window 1h")+"problem\n", "respond ok")
	must(t, "kill", servers[0].Primary.Kill())
	a := c.Ask("/")
	must(t, "without a store", errors.Join(
		want("status", a.Status, http.StatusServiceUnavailable),
		want("type", a.Header.Get("Content-Type"), "application/problem+json"),
		want("problem", strings.Contains(a.Body, "#temporary-reduced-capacity"), true)))
}

// TestProblemMatchesErrorRoutesAgainstTheOriginalRequest, which Caddy restores before it looks for
// an error route.
func TestProblemMatchesErrorRoutesAgainstTheOriginalRequest(t *testing.T) {
	t.Parallel()
	for matcher, friendly := range map[string]bool{"path /api/*": true, "not path /api/*": false} {
		t.Run(matcher, func(t *testing.T) {
			c := caddytest.Start(t, fmt.Sprintf(caddytest.Site("", `
handle_path /api/* {
	rate_limit {
		zone api {
			key static
			events 1
			window 1h
		}
		problem
	}
	respond ok
}
handle_errors {
	@some %s
	respond @some friendly
}
`), matcher))
			c.Get("/api/x")
			a := c.Ask("/api/x")
			must(t, a.Body, errors.Join(want("status", a.Status, http.StatusTooManyRequests),
				want("of the error route", a.Body == "friendly", friendly),
				want("problem", strings.Contains(a.Body, "quota-exceeded"), !friendly)))
		})
	}
}

// placeholderSite uses the placeholders wherever configs commonly do. The
// header directive that comes first sees the request after it was charged.
var placeholderSite = caddytest.Site("%s", `
route {
	header >X-After "{http.rate_limit.api.limit} {http.rate_limit.api.used} {http.rate_limit.api.remaining} {http.rate_limit.api.reset}"
	rate_limit {
		zone api {
			key {header.X-Key}
			events 3
			window 1h
		}
		zone never {
			match {
				path /never
			}
			key static
			events 1
			window 1h
		}
	}
	header X-Before "{http.rate_limit.api.limit} {http.rate_limit.api.used} {http.rate_limit.api.remaining} {http.rate_limit.api.reset}"
	respond /direct "used {http.rate_limit.api.used}, other zone {http.rate_limit.never.used}, refused by {http.rate_limit.exceeded.name}."
	reverse_proxy %s {
		transport http {
			dial_timeout 10m
		}
		header_up X-Told "{http.rate_limit.api.limit} {http.rate_limit.api.used} {http.rate_limit.api.remaining} {http.rate_limit.api.reset}"
	}
}
handle_errors 429 {
	header X-Refused-By {http.rate_limit.exceeded.name}
	respond "{http.error.status_code} by {http.rate_limit.exceeded.name}: {http.rate_limit.api.used} of {http.rate_limit.api.limit}, {http.error.message}"
}
`)

func TestPlaceholders(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(r.Header.Get("X-Told")))
	}))
	defer backend.Close()
	servers := caddytest.StartShards(t, 1, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := caddytest.Start(t, fmt.Sprintf(placeholderSite, store, backend.Listener.Addr()))
		for used, path := range []string{"/direct", "/proxied", "/proxied"} {
			a := c.Ask(path, "X-Key: alice")
			before := fmt.Sprintf("3 %d %d %d", used, 3-used, a.Reset)
			body := before
			if path == "/direct" {
				body = "used 0, other zone , refused by ."
			}
			must(t, path, errors.Join(
				a.Is(http.StatusOK, int64(used+1)), want("body", a.Body, body),
				want("header set before the charge", a.Header.Get("X-Before"), before),
				want("header set after the charge", a.Header.Get("X-After"), fmt.Sprintf("3 %d %d %d", used+1, 2-used, a.Reset))))
			awaitUsed(t, servers, store, "api", "alice", int64(used+1))
		}
		a := c.Ask("/direct", "X-Key: alice")
		must(t, "refusal", errors.Join(
			a.Is(http.StatusTooManyRequests, 3), want("header", a.Header.Get("X-Refused-By"), "api"),
			want("body", a.Body, "429 by api: 3 of 3, rate limit api exceeded")))
	})
}

// TestOnlyOurLimitHeadersRemain has a backend that sends limit headers of the same names.
func TestOnlyOurLimitHeadersRemain(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h["X-RateLimit-Limit"] = []string{"1", "2"}
		h["x-ratelimit-remaining"] = []string{"77"}
		h["X-RATELIMIT-USED"] = []string{"88", "99"}
		h.Set("X-RateLimit-Reset", "1")
		h.Set("X-RateLimit-Resource", "theirs")
		h.Set("X-Other", "kept")
		if r.URL.Path == "/busy" {
			h.Set("Retry-After", "120")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.WriteHeader(http.StatusEarlyHints)
		_, _ = w.Write([]byte("ok"))
	}))
	defer backend.Close()
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, proxySite(servers.Store(), 4, backend.Listener.Addr().String()))
	for used := int64(1); used <= 3; used++ {
		a := c.Ask("/", "X-Key: alice")
		must(t, "proxied response", errors.Join(
			a.Is(http.StatusOK, used), want("limit", a.Limit, 4), want("zone", a.Resource, "api"), want("other header", a.Header.Get("X-Other"), "kept")))
		servers.AwaitCount(t, "api", "alice", used)
		must(t, "reset", want("header", a.Reset, ceilSeconds(servers.Buckets(t, "api")["alice"].Reset)))
	}
	// The backend's own refusal is a response like others and keeps its Retry-After, which TryAsk
	// would take for ours.
	resp := c.Get("/busy", "X-Key: alice")
	must(t, "the backend's refusal", errors.Join(
		want("status", resp.StatusCode, http.StatusTooManyRequests), want("remaining", caddytest.Remaining(resp), "0"),
		want("Retry-After", resp.Header.Get("Retry-After"), "120"), want("zone", resp.Header.Get("X-RateLimit-Resource"), "api")))
	servers.AwaitCount(t, "api", "alice", 4)
	a := c.Ask("/", "X-Key: alice")
	must(t, "our refusal", errors.Join(a.Is(http.StatusTooManyRequests, 4), want("header of the backend", a.Header.Get("X-Other"), "")))
}

func TestEventsOfAPlaceholder(t *testing.T) {
	t.Parallel()
	c := startWith(t, "", zoneWith("plan", "events {header.X-Plan} 5"), "respond ok")
	for i, step := range []struct{ plan, limit, remaining string }{
		{"10", "10", "9"},
		// A larger plan keeps the count, and so does a smaller one.
		{"100", "100", "98"},
		{"4", "4", "1"},
		// Anything but a whole number gets the fallback.
		{"", "5", "1"},
		{"-1", "5", "0"},
	} {
		resp := c.Get("/", "X-Key: k", "X-Plan: "+step.plan)
		if got := resp.Header.Get("X-RateLimit-Limit"); got != step.limit || caddytest.Remaining(resp) != step.remaining {
			t.Errorf("step %d, plan %q: limit %s, remaining %s, want %s and %s", i, step.plan, got, caddytest.Remaining(resp), step.limit, step.remaining)
		}
	}
	if resp := c.Get("/", "X-Key: k", "X-Plan: none"); resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("beyond the fallback the status is %d", resp.StatusCode)
	}
	if n := strings.Count(c.Logs.String(), "using the fallback"); n != 1 {
		t.Errorf("the fallback is logged %d times, want once a minute", n)
	}
}

func TestHeadersNone(t *testing.T) {
	t.Parallel()
	c := startWith(t, "", zoneWith("api", "key static", "events 1")+"headers none\n", "respond ok")
	for _, status := range []int{200, 429} {
		resp := c.Get("/")
		if resp.StatusCode != status {
			t.Fatalf("status is %d, want %d", resp.StatusCode, status)
		}
		for _, name := range limitHeaders {
			if resp.Header.Get(name) != "" {
				t.Errorf("status %d has %s", status, name)
			}
		}
		if (resp.Header.Get("Retry-After") != "") != (status == 429) {
			t.Errorf("status %d has Retry-After %q", status, resp.Header.Get("Retry-After"))
		}
	}
}

// refusals returns the Retry-After values of n refusals, and the log.
func refusals(t *testing.T, options string, n int) (seconds []int, logs string) {
	t.Helper()
	c := startWith(t, "debug", zoneWith("api", "events 1", "window 1000000s")+"log_refusals all\n"+options+"\n", "respond ok")
	for range n + 1 {
		resp := c.Get("/", "X-Key: very-secret")
		if resp.StatusCode == http.StatusTooManyRequests {
			s, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			must(t, "Retry-After", err)
			seconds = append(seconds, s)
		}
	}
	if len(seconds) != n {
		t.Fatalf("%d refusals, want %d", len(seconds), n)
	}
	// The last lines may take a moment to arrive.
	c.Unload()
	var lines []string
	for line := range strings.Lines(c.Logs.String()) {
		if strings.Contains(line, `"rate limit exceeded"`) {
			lines = append(lines, line)
		}
	}
	if len(lines) != n {
		t.Errorf("%d refusals are logged, want %d", len(lines), n)
	}
	return seconds, strings.Join(lines, "")
}

func TestJitterOnlyLengthens(t *testing.T) {
	t.Parallel()
	plain, _ := refusals(t, "", 5)
	for _, s := range plain {
		if s < 999_000 || s > 1_000_000 {
			t.Errorf("without jitter Retry-After is %d, want the rest of the window", s)
		}
	}
	jittered, _ := refusals(t, "jitter 0.5", 30)
	distinct := map[int]bool{}
	for _, s := range jittered {
		distinct[s] = true
		if s < 999_000 || s > 1_500_001 {
			t.Errorf("with jitter Retry-After is %d, want the rest of the window and up to half as much more", s)
		}
	}
	if len(distinct) < 10 {
		t.Errorf("30 refusals have the values %v", jittered)
	}
}

func TestKeysAreLoggedOnlyWithLogKey(t *testing.T) {
	t.Parallel()
	if _, logs := refusals(t, "", 1); strings.Contains(logs, "very-secret") {
		t.Errorf("the key is logged: %s", logs)
	}
	if _, logs := refusals(t, "log_key", 1); !strings.Contains(logs, "very-secret") || !strings.Contains(logs, `"zone":"api"`) {
		t.Errorf("log_key does not log the key: %s", logs)
	}
}

// TestClientThatLeavesDuringTheCheck is not charged, and the backend does not see its request.
func TestClientThatLeavesDuringTheCheck(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := caddytest.Start(t, caddytest.Site(caddytest.Shards{{Primary: server}}.Store(), "log\nrate_limit {header.X-Key} 100 1h\nrespond ok"))
	if got := caddytest.Remaining(c.Get("/", "X-Key: k")); got != "99" {
		t.Fatalf("remaining is %s", got)
	}
	must(t, "pause", server.Pause())
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	gone := c.Begin(ctx, "/", "X-Key: k")
	eventually(t, "the request is in the limiter", func() error {
		return want("stacks in ServeHTTP", len(c.Stacks("shardlimit.(*Handler).ServeHTTP(")), 1)
	})
	leave()
	gone.Leaves(t)
	c.AwaitLog(`"status":499`)
	must(t, "resume", server.Resume())
	if got := caddytest.Remaining(c.Get("/", "X-Key: k")); got != "98" {
		t.Errorf("remaining is %s, want 98: the request that was given up is not charged", got)
	}
	_, metrics := c.AdminCall(http.MethodGet, "/metrics", "", "")
	if strings.Contains(metrics, "\ncaddy_rate_limit_store_errors_total{") {
		t.Error("a client that left counts as an error of the store")
	}
}
