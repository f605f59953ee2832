package examples

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// showsLimits returns how a proxy's response differs from the limiter's.
func showsLimits(resp *http.Response, status int, left string) error {
	return errors.Join(
		want("status", resp.StatusCode, status),
		want("limit", resp.Header.Get("X-RateLimit-Limit"), "5"),
		want("remaining", caddytest.Remaining(resp), left),
		want("having a reset", resp.Header.Get("X-RateLimit-Reset") != "", true),
		want("having Retry-After", resp.Header.Get("Retry-After") != "", status == http.StatusTooManyRequests),
	)
}

// drivesLimiterService sends requests to a proxy that asks the limiter.
func drivesLimiterService(t *testing.T, url string) {
	t.Helper()
	for _, left := range []string{"4", "3", "2", "1", "0"} {
		must(t, "request that fits", showsLimits(send(t, caddytest.Client, http.MethodPost, url+"/some/path?x=1"), http.StatusOK, left))
	}
	sixth := send(t, caddytest.Client, http.MethodGet, url)
	must(t, "sixth request", errors.Join(showsLimits(sixth, http.StatusTooManyRequests, "0"), want("caches", sixth.Header.Get("Cache-Control"), "no-store")))
	for _, kind := range []string{"application/grpc", "application/grpc-web", "application/grpc-web+proto"} {
		must(t, kind, want("status", send(t, caddytest.Client, http.MethodPost, url, "Content-Type: "+kind, "TE: trailers").StatusCode, http.StatusTooManyRequests))
	}
	must(t, "another address", showsLimits(send(t, clientAt("127.0.0.2"), http.MethodGet, url), http.StatusOK, "4"))
	must(t, "a made-up key", showsLimits(send(t, caddytest.Client, http.MethodGet, url, "X-Api-Key: k"), http.StatusTooManyRequests, "0"))
	must(t, "a made-up address", showsLimits(send(t, caddytest.Client, http.MethodGet, url, "X-Forwarded-For: 203.0.113.9"), http.StatusTooManyRequests, "0"))
	must(t, "two of them", showsLimits(send(t, caddytest.Client, http.MethodGet, url, "X-Forwarded-For: 203.0.113.9", "x-forwarded-for: 203.0.113.8"), http.StatusTooManyRequests, "0"))
}

func TestExampleLimiterService(t *testing.T) {
	c := startExample(t, "limiter_service")
	address := "X-Forwarded-For: 192.0.2.7"
	must(t, "questions", want("statuses", statuses(c, 6, "/", address), many(5, 200)+" 429"))
	must(t, "another address", want("status", c.Get("/", "X-Forwarded-For: 192.0.2.8").StatusCode, 200))
}

// TestLimiterServiceByKey counts by the header that its comment names.
func TestLimiterServiceByKey(t *testing.T) {
	c := startExample(t, "limiter_service", "key {client_ip}", "key {header.X-Api-Key} {client_ip}")
	address := "X-Forwarded-For: 192.0.2.7"
	must(t, "a key", want("statuses", statuses(c, 6, "/", address, "X-Api-Key: a"), many(5, 200)+" 429"))
	must(t, "another key", want("status", c.Get("/", address, "X-Api-Key: b").StatusCode, 200))
	must(t, "none", want("status", c.Get("/", address).StatusCode, 200))
	must(t, "two", want("status", c.Get("/", address, "X-Api-Key: a", "X-Api-Key: b").StatusCode, 400))
}

// TestExternalAuthorizationOfEnvoy asks as Envoy's ext_authz does over HTTP: with the method, path and host of
// the client's request, without its body, and with its address behind those that the client made up and
// before Envoy's own.
func TestExternalAuthorizationOfEnvoy(t *testing.T) {
	const envoy = "10.0.0.5"
	c := startExample(t, "limiter_service", "trusted_proxies static private_ranges", "trusted_proxies static 127.0.0.1 "+envoy+"\n\t\ttrusted_proxies_strict",
		"\tcharge before", "\tcharge before\n\t\t\tmatch {\n\t\t\t\tmethod POST\n\t\t\t\tpath /orders/*\n\t\t\t}")
	ask := func(method, path, addresses string) *http.Response {
		t.Helper()
		return send(t, c.Client, method, c.URL+path, "X-Forwarded-For: "+addresses+","+envoy, "X-Envoy-Internal: true", "X-Envoy-Expected-Rq-Timeout-Ms: 200")
	}
	for _, left := range []string{"4", "3", "2", "1", "0"} {
		must(t, "request that fits", showsLimits(ask(http.MethodPost, "/orders/1?from=shop", "192.0.2.7"), http.StatusOK, left))
	}
	must(t, "sixth request", showsLimits(ask(http.MethodPost, "/orders/2", "192.0.2.7"), http.StatusTooManyRequests, "0"))
	must(t, "a made-up address", showsLimits(ask(http.MethodPost, "/orders/2", "203.0.113.9,192.0.2.7"), http.StatusTooManyRequests, "0"))
	must(t, "one that is trusted", showsLimits(ask(http.MethodPost, "/orders/2", envoy+",192.0.2.7"), http.StatusTooManyRequests, "0"))
	must(t, "another address", showsLimits(ask(http.MethodPost, "/orders/2", "192.0.2.8"), http.StatusOK, "4"))
	must(t, "another method", want("status", ask(http.MethodGet, "/orders/2", "192.0.2.7").StatusCode, 200))
	must(t, "another path", want("status", ask(http.MethodPost, "/health", "192.0.2.7").StatusCode, 200))
}

func TestExampleForwardAuth(t *testing.T) {
	limiter := startExample(t, "limiter_service")
	c := startExample(t, "forward_auth", "localhost:8080", limiter.Addr, "respond \"Hello.\"",
		"header {\nCache-Control max-age=600\nExpires 600\nCDN-Cache-Control max-age=600\n}\nrespond \"Hello.\"")
	drivesLimiterService(t, c.URL)
	refused := c.Get("/").Header
	must(t, "headers for caches behind it", want("caches", strings.Join(refused["Cache-Control"], "|")+refused.Get("Expires")+refused.Get("CDN-Cache-Control"), "no-store"))
	limiter.Stop()
	must(t, "without the limiter", want("status", c.Get("/").StatusCode, http.StatusBadGateway))
}
