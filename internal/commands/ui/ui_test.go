package ui_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/ui"
)

// calls records the calls that are passed on.
type calls struct {
	made []string
	err  error
}

func (c *calls) Call(_ context.Context, method, path string, body []byte) (int, []byte, error) {
	c.made = append(c.made, method+" "+path+string(body))
	return http.StatusTeapot, []byte(`{"a":1}`), c.err
}

// request sends a request to the page's server, as from the page. Headers, "Name:
// value", override that; an empty value removes one.
func request(api ui.API, method, target, host string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, nil)
	r.Host = host
	r.Header.Set("X-Rate-Limit-Page", "1")
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if r.Header.Set(name, value); value == "" {
			r.Header.Del(name)
		}
	}
	w := httptest.NewRecorder()
	ui.Handler(api, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 2020}).ServeHTTP(w, r)
	return w
}

// TestCallsOfThePage are passed on, and their answers come back.
func TestCallsOfThePage(t *testing.T) {
	for _, host := range []string{"127.0.0.1:2020", "localhost:2020", "[::1]:2020"} {
		for target, passed := range map[string]string{
			"GET /rate_limit/":                                       "GET /rate_limit/",
			"GET /rate_limit/top?n=10":                               "GET /rate_limit/top?n=10",
			"GET /rate_limit/near?n=10":                              "GET /rate_limit/near?n=10",
			"GET /rate_limit/history?range=1h&zone=a&zone=b":         "GET /rate_limit/history?range=1h&zone=a&zone=b",
			"GET /rate_limit/clients?prefix=a":                       "GET /rate_limit/clients?prefix=a",
			"GET /rate_limit/clients?name=a+b":                       "GET /rate_limit/clients?name=a+b",
			"GET /rate_limit/buckets/a.b?key=%26":                    "GET /rate_limit/buckets/a.b?key=%26",
			"DELETE /rate_limit/buckets/api?client_key=x&store=main": "DELETE /rate_limit/buckets/api?client_key=x&store=main",
			"GET /rate_limit/overrides":                              "GET /rate_limit/overrides",
			"POST /rate_limit/blocks/a.b?client_key=x&for=1h":        "POST /rate_limit/blocks/a.b?client_key=x&for=1h",
			"DELETE /rate_limit/blocks/api?client_key=x":             "DELETE /rate_limit/blocks/api?client_key=x",
			"POST /rate_limit/grants/api?client_key=x&events=5":      "POST /rate_limit/grants/api?client_key=x&events=5",
			"DELETE /rate_limit/grants/api?client_key=x":             "DELETE /rate_limit/grants/api?client_key=x",
		} {
			method, path, _ := strings.Cut(target, " ")
			api := new(calls)
			w := request(api, method, path, host, "Origin: http://"+host)
			if w.Code != http.StatusTeapot || w.Body.String() != `{"a":1}` || strings.Join(api.made, "") != passed {
				t.Errorf("%s at %s: %d %s, passed on as %v", target, host, w.Code, w.Body, api.made)
			}
		}
	}
	w := request(&calls{err: errors.New("no Caddy there")}, http.MethodGet, "/rate_limit/", "localhost:2020")
	if w.Code != http.StatusBadGateway || !strings.Contains(w.Body.String(), "no Caddy there") {
		t.Errorf("without Caddy: %d %s", w.Code, w.Body)
	}
}

// TestNoOtherCalls than those of the page are passed on.
func TestNoOtherCalls(t *testing.T) {
	for _, target := range []string{
		"POST /load", "GET /config/", "POST /stop", "POST /rate_limit/", "DELETE /rate_limit/", "POST /rate_limit/buckets/api?key=x",
		"POST /rate_limit/overrides", "GET /rate_limit/blocks/api?key=x", "PUT /rate_limit/blocks/api?key=x", "POST /rate_limit/blocks/..%2fx",
		"PUT /rate_limit/top", "DELETE /rate_limit/clients?name=x", "POST /rate_limit/near", "GET /rate_limit/buckets/api/config", "GET /rate_limit/buckets/..", "GET /rate_limit/buckets/%2e%2e",
		"GET /rate_limit/buckets/a%2fb", "DELETE /rate_limit/buckets/..%2f..%2fconfig", "GET /rate_limit/top?a=%zz", "GET //load",
		"GET /rate_limit/../config/", "POST /", "CONNECT /rate_limit/",
	} {
		method, path, _ := strings.Cut(target, " ")
		api := new(calls)
		w := request(api, method, path, "localhost:2020")
		if len(api.made) > 0 || w.Code == http.StatusOK || w.Code == http.StatusTeapot {
			t.Errorf("%s: %d, passed on as %v", target, w.Code, api.made)
		}
	}
}

// TestOtherSites cannot drive the page, by whatever name they reach it.
func TestOtherSites(t *testing.T) {
	for name, k := range map[string]struct {
		host    string
		headers []string
	}{
		"a name bound to the address":           {"evil.example:2020", nil},
		"that name, without the port":           {"evil.example", nil},
		"a loopback name of another port":       {"localhost:2019", nil},
		"no port":                               {"localhost", nil},
		"a name that begins like loopback":      {"127.0.0.1.evil.example:2020", nil},
		"an empty host":                         {"", nil},
		"another origin":                        {"localhost:2020", []string{"Origin: http://evil.example"}},
		"another port's origin":                 {"localhost:2020", []string{"Origin: http://localhost:3000"}},
		"another scheme's origin":               {"localhost:2020", []string{"Origin: https://localhost:2020"}},
		"another loopback name's origin":        {"localhost:2020", []string{"Origin: http://127.0.0.1:2020"}},
		"an opaque origin":                      {"localhost:2020", []string{"Origin: null"}},
		"a request of another site":             {"localhost:2020", []string{"Sec-Fetch-Site: cross-site"}},
		"a request of another port":             {"localhost:2020", []string{"Sec-Fetch-Site: same-site"}},
		"a call that was typed in":              {"localhost:2020", []string{"Sec-Fetch-Site: none"}},
		"a call of an old browser's other site": {"localhost:2020", []string{"Sec-Fetch-Site: ", "X-Rate-Limit-Page: "}},
	} {
		for _, method := range []string{http.MethodGet, http.MethodDelete} {
			api := new(calls)
			w := request(api, method, "/rate_limit/buckets/api?key=x", k.host, k.headers...)
			var text string
			if b, err := io.ReadAll(w.Body); err == nil {
				text = string(b)
			}
			if w.Code != http.StatusForbidden || len(api.made) > 0 || !strings.Contains(text, `"error"`) {
				t.Errorf("%s: %s answered with %d %s, passed on as %v", name, method, w.Code, text, api.made)
			}
			if w.Header().Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s: other sites may read the answer", name)
			}
		}
	}
	// The preflight of another site is not allowed.
	w := request(new(calls), http.MethodOptions, "/rate_limit/buckets/api", "localhost:2020", "Origin: http://evil.example",
		"Sec-Fetch-Site: cross-site", "Access-Control-Request-Method: DELETE")
	if w.Code != http.StatusForbidden {
		t.Errorf("preflight: %d", w.Code)
	}
}

// TestPage is served to a user who types its address, with a policy that allows only
// what it needs.
func TestPage(t *testing.T) {
	for _, site := range []string{"Sec-Fetch-Site: none", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: "} {
		w := request(new(calls), http.MethodGet, "/", "localhost:2020", site, "X-Rate-Limit-Page: ")
		if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "<title>Rate limits</title>") {
			t.Errorf("%s: %d", site, w.Code)
		}
		policy := w.Header().Get("Content-Security-Policy")
		for _, part := range []string{"default-src 'none'", "connect-src 'self'", "script-src 'sha256-", "style-src 'sha256-", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} {
			if !strings.Contains(policy, part) {
				t.Errorf("policy %q lacks %s", policy, part)
			}
		}
		if strings.Contains(policy, "unsafe") || strings.Contains(policy, "http:") {
			t.Errorf("policy is %q", policy)
		}
	}
	page := request(new(calls), http.MethodGet, "/", "localhost:2020").Body.String()
	page = strings.Replace(page, "/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "", 1) // whose the charts are
	for _, word := range []string{"http://", "https://", "src=", "@import", "url("} {
		if strings.Contains(page, word) {
			t.Errorf("the page has %q in it", word)
		}
	}
	if w := request(new(calls), http.MethodGet, "/", "localhost:2020", "Sec-Fetch-Site: cross-site"); w.Code != http.StatusForbidden {
		t.Errorf("a link on another site leads to it: %d", w.Code)
	}
}

// TestListen only on loopback addresses.
func TestListen(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", ":0", "[::]:0", "192.0.2.1:0", "example.com:0", "[::ffff:127.0.0.1]:0", "127.0.0.1", "localhost.evil.example:0", ""} {
		if l, err := ui.Listen(t.Context(), address); err == nil {
			_ = l.Close()
			t.Errorf("it listens on %q", address)
		}
	}
	for _, address := range []string{"127.0.0.1:0", "localhost:0", "127.1.2.3:0"} {
		l, err := ui.Listen(t.Context(), address)
		if err != nil {
			t.Errorf("%s: %v", address, err)
			continue
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := ui.Serve(ctx, l, ui.Handler(new(calls), l.Addr().(*net.TCPAddr))); err != nil {
			t.Errorf("serve: %v", err)
		}
	}
}
