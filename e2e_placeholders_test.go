package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// placeholderSite uses the placeholders wherever configs commonly do. The
// header directive that comes first sees the request after it was charged.
const placeholderSite = `
{
	{{global}}
	%s
}
{{site}} {
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
			header_up X-Told "{http.rate_limit.api.limit} {http.rate_limit.api.used} {http.rate_limit.api.remaining} {http.rate_limit.api.reset}"
		}
	}
	handle_errors 429 {
		header X-Refused-By {http.rate_limit.exceeded.name}
		respond "{http.error.status_code} by {http.rate_limit.exceeded.name}: {http.rate_limit.api.used} of {http.rate_limit.api.limit}, {http.error.message}"
	}
}
`

func TestPlaceholders(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(r.Header.Get("X-Told")))
	}))
	defer backend.Close()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
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
				if store != "" {
					servers.AwaitCount(t, "api", "alice", int64(used+1))
				}
			}
			a := c.Ask("/direct", "X-Key: alice")
			must(t, "refusal", errors.Join(
				a.Is(http.StatusTooManyRequests, 3), want("header", a.Header.Get("X-Refused-By"), "api"),
				want("body", a.Body, "429 by api: 3 of 3, rate limit api exceeded")))
		})
	}
}

// TestOnlyOurLimitHeadersRemain has a backend that limits as well, and tells so
// under the same names.
func TestOnlyOurLimitHeadersRemain(t *testing.T) {
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
	// The backend's own refusal is a response like others, and its advice
	// stays; tryAsk knows Retry-After as ours only.
	resp := c.Get("/busy", "X-Key: alice")
	must(t, "the backend's refusal", errors.Join(
		want("status", resp.StatusCode, http.StatusTooManyRequests), want("remaining", caddytest.Remaining(resp), "0"),
		want("Retry-After", resp.Header.Get("Retry-After"), "120"), want("zone", resp.Header.Get("X-RateLimit-Resource"), "api")))
	servers.AwaitCount(t, "api", "alice", 4)
	a := c.Ask("/", "X-Key: alice")
	must(t, "our refusal", errors.Join(a.Is(http.StatusTooManyRequests, 4), want("header of the backend", a.Header.Get("X-Other"), "")))
}
