package e2e

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/limit"
)

// cached are headers that let caches keep a response, as sites write them.
const cached = `header {
	Cache-Control "public, max-age=600"
	CDN-Cache-Control max-age=600
	Surrogate-Control max-age=600
	Expires "Thu, 01 Jan 2099 00:00:00 GMT"
	ETag "\"1\""
	Last-Modified "Thu, 01 Jan 2026 00:00:00 GMT"
	X-Accel-Expires 600
	Vary X-Key
}
`

// keeps returns what a response says to caches.
func keeps(h http.Header) string {
	var all []string
	for _, name := range []string{"Cache-Control", "CDN-Cache-Control", "Surrogate-Control", "Expires", "ETag", "Last-Modified", "X-Accel-Expires"} {
		if value := h.Get(name); value != "" {
			all = append(all, name+": "+value)
		}
	}
	return strings.Join(all, "; ")
}

const noStore = "Cache-Control: no-store"

// TestRefusalsAreNotStored by caches, whatever the site says of what is refused, unless its error route says
// it of the refusal.
func TestRefusalsAreNotStored(t *testing.T) {
	t.Parallel()
	one := zoneWith("api", "events 1", "window 1h", "block_status 403")
	limits := func(zones string) string { return "rate_limit {\n" + zones + "}\n" }
	for name, test := range map[string]struct {
		site   string
		status int
		keeps  string
	}{
		"plain":                  {limits(one) + "respond ok\n", 429, noStore},
		"problem":                {limits(one+"problem\n") + "respond ok\n", 429, noStore},
		"status":                 {limits(zoneWith("api", "events 1", "window 1h", "status 402")) + "respond ok\n", 402, noStore},
		"an outer limiter too":   {limits(zoneWith("outer", "events 9", "window 1h")) + limits(one) + "respond ok\n", 429, noStore},
		"an error route":         {limits(one) + "respond ok\n}\nhandle_errors {\nrespond refused\n", 429, noStore},
		"one with its own":       {limits(one) + "respond ok\n}\nhandle_errors {\nheader Cache-Control private\nrespond refused\n", 429, "Cache-Control: private"},
		"one with another error": {limits(one) + "respond ok\n}\nhandle_errors 404 {\nheader Cache-Control private\nrespond refused\n", 429, noStore},
		"a wait too long":        {limits(zoneWith("api", "events 1", "window 1h", "max_wait 1s")) + "respond ok\n", 429, noStore},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := caddytest.Start(t, caddytest.Site("", "route {\n"+cached+test.site+"}"))
			passed := c.Get("/", "X-Key: a")
			must(t, "what passes", errors.Join(want("status", passed.StatusCode, http.StatusOK), want("being kept", strings.Contains(keeps(passed.Header), "max-age=600"), true)))
			resp := c.Get("/", "X-Key: a")
			must(t, "refusal", errors.Join(want("status", resp.StatusCode, test.status), want("caches", keeps(resp.Header), test.keeps),
				want("Vary", resp.Header.Get("Vary"), "X-Key"), want("having Retry-After", resp.Header.Get("Retry-After") != "", true)))
			twice := c.Get("/", "X-Key: a", "X-Key: b")
			must(t, "two keys", errors.Join(want("status", twice.StatusCode, http.StatusBadRequest), want("caches", keeps(twice.Header), test.keeps)))
		})
	}
}

// TestBlocksAndOutagesAreNotStored, and what is only observed is as the site says.
func TestBlocksAndOutagesAreNotStored(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	zones := pathZone("api", "events 1", "window 1h", "block_status 403") + pathZone("seen", "events 1", "window 1h", "enforce 0")
	c := caddytest.Start(t, caddytest.Site(servers.Store("on_error deny"), "route {\n"+cached+"rate_limit {\n"+zones+"}\nrespond ok\n}"))
	asked := func(path, key string, status int, says string) {
		t.Helper()
		resp := c.Get(path, "X-Key: "+key)
		must(t, path, errors.Join(want("status", resp.StatusCode, status), want("caches", keeps(resp.Header), says)))
	}
	kept := keeps(c.Get("/other").Header)
	asked("/seen", "a", http.StatusOK, kept)
	servers.AwaitCount(t, "seen", "a", 1)
	asked("/seen", "a", http.StatusOK, kept)
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?key=a&for=1h", "", "")
	must(t, text, want("status", code, http.StatusOK))
	asked("/api", "a", http.StatusForbidden, noStore)
	must(t, "kill", servers[0].Primary.Kill())
	asked("/api", "b", http.StatusServiceUnavailable, noStore)
}

// TestStatusIsThatOfTheZone that refuses the request.
func TestStatusIsThatOfTheZone(t *testing.T) {
	t.Parallel()
	c := startWith(t, "", zoneWith("burst", "events 1", "window 1m")+zoneWith("budget", "key static", "events 2", "window 1h", "status 402")+"problem\n", "respond ok")
	for _, x := range []struct {
		key    string
		status int
	}{{"a", 200}, {"a", 429}, {"b", 200}, {"c", 402}, {"a", 402}} {
		resp := c.Get("/", "X-Key: "+x.key)
		must(t, x.key, errors.Join(want("status", resp.StatusCode, x.status), want("having Retry-After", resp.Header.Get("Retry-After") != "", x.status != 200)))
	}
	must(t, "metric", want("refused", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="budget"}`), "2"))
}

// TestStatusIsObeyed by limits of ours that stand before a limiter with it.
func TestStatusIsObeyed(t *testing.T) {
	t.Parallel()
	budget := startWith(t, "", zoneWith("budget", "key static", "events 2", "window 1h", "status 402"), "respond ok")
	front := startWith(t, "", zoneWith("front", "events 100", "window 1h", "obey_upstream"), proxyTo(budget.Addr))
	for i, status := range []int{200, 200, 402, 429} {
		resp := front.Get("/", "X-Key: a")
		must(t, "request "+strconv.Itoa(i), want("status", resp.StatusCode, status))
	}
	provider, err := limit.OpenMemory(limit.Memory{}).Limit(limit.Config{Name: "provider", Events: 100, Window: time.Hour})
	must(t, "limit", err)
	client := http.Client{Transport: &limit.Transport{Limit: provider}}
	resp, err := client.Get(budget.URL)
	must(t, "the first", err)
	must(t, "close", resp.Body.Close())
	must(t, "the first", want("status", resp.StatusCode, 402))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, budget.URL, nil)
	must(t, "request", err)
	if resp, err = client.Do(req); err == nil {
		resp.Body.Close()
		t.Errorf("the next got %d from the provider, want it to be held back", resp.StatusCode)
	}
}
