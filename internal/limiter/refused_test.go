package limiter

import (
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// refusedWith answers a request that does not fit, with the header that handlers before wrote.
func refusedWith(t *testing.T, configure func(l *Limiter), r *http.Request, before http.Header) (w *httptest.ResponseRecorder, err error) {
	t.Helper()
	l := newTestHandler(t, &Zone{}, memory.New(memory.NewBuckets(), memory.Options{}))
	l.Zones[0].Events.Number = 0
	configure(l)
	w = httptest.NewRecorder()
	maps.Copy(w.Header(), before)
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
	return w, l.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		t.Error("the request passed")
		return nil
	}))
}

// TestRefusalForgetsWhatCachesRead, and what makes proxies send another response: handlers before may have
// written it in any case.
func TestRefusalForgetsWhatCachesRead(t *testing.T) {
	before := http.Header{"Cache-Control": {"public", "max-age=600"}}
	for _, name := range []string{
		"cache-control", "CACHE-CONTROL", "Cdn-Cache-Control", "CDN-Cache-Control", "Cloudflare-Cdn-Cache-Control", "x-litespeed-cache-control",
		"Expires", "expires", "ETag", "Etag", "Last-Modified", "last-modified", "X-Accel-Expires", "Surrogate-Control", "Edge-Control",
		"X-Accel-Redirect", "x-accel-redirect", "X-Sendfile", "X-SENDFILE", "X-Sendfile2", "X-Lighttpd-Send-File", "X-LIGHTTPD-send-file",
		"X-Lighttpd-Send-Tempfile", "X-Reproxy-Url", "X-REPROXY-URL",
	} {
		before[name] = []string{"max-age=600"}
	}
	kept := []string{"Set-Cookie", "Vary", "X-Cache-Controls", "X-Accel-Buffering", "Xcache-Control", "Expires-In"}
	for _, name := range kept {
		before[name] = []string{"kept"}
	}
	want := append(slices.Clone(kept), "Cache-Control", "X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset", "X-Ratelimit-Resource", "X-Ratelimit-Used")
	slices.Sort(want)
	w, err := refusedWith(t, func(*Limiter) {}, httptest.NewRequest(http.MethodGet, "/", nil), before)
	if status := statusOf(err); status != http.StatusTooManyRequests {
		t.Errorf("the status is %d", status)
	}
	if got := slices.Sorted(maps.Keys(w.Header())); !slices.Equal(got, want) {
		t.Errorf("the header has %v, want %v", got, want)
	}
	if got := w.Header()["Cache-Control"]; !slices.Equal(got, []string{"no-store"}) {
		t.Errorf("Cache-Control is %q", got)
	}
}

// TestOnlyCallsOfGRPCGetItsStatus, and only from handlers with the option: status 200 is permission to a
// proxy that asks.
func TestOnlyCallsOfGRPCGetItsStatus(t *testing.T) {
	for name, test := range map[string]struct {
		method, contentType, te string
		major                   int
		is                      bool
	}{
		"gRPC":                {http.MethodPost, "application/grpc", "trailers", 2, true},
		"with a codec":        {http.MethodPost, "application/grpc+proto", "trailers", 2, true},
		"with a parameter":    {http.MethodPost, "application/grpc;charset=utf-8", "trailers", 2, true},
		"HTTP/3":              {http.MethodPost, "application/grpc", "trailers", 3, true},
		"HTTP/1":              {http.MethodPost, "application/grpc", "trailers", 1, false},
		"GET":                 {http.MethodGet, "application/grpc", "trailers", 2, false},
		"without te":          {http.MethodPost, "application/grpc", "", 2, false},
		"another te":          {http.MethodPost, "application/grpc", "gzip, trailers", 2, false},
		"gRPC-Web":            {http.MethodPost, "application/grpc-web", "trailers", 2, false},
		"gRPC-Web with codec": {http.MethodPost, "application/grpc-web+proto", "trailers", 2, false},
		"gRPC-Web as text":    {http.MethodPost, "application/grpc-web-text", "trailers", 2, false},
		"another type":        {http.MethodPost, "application/grpcx", "trailers", 2, false},
		"Connect":             {http.MethodPost, "application/connect+proto", "trailers", 2, false},
	} {
		for _, problem := range []bool{false, true} {
			for _, on := range []bool{false, true} {
				r := httptest.NewRequest(test.method, "/", nil)
				r.ProtoMajor = test.major
				r.Header.Set("Content-Type", test.contentType)
				r.Header.Set("Te", test.te)
				w, err := refusedWith(t, func(l *Limiter) { l.GRPC, l.Problem = on, problem }, r, nil)
				status := w.Code
				if err != nil {
					status = statusOf(err)
				}
				want, code := http.StatusTooManyRequests, ""
				if on && test.is {
					want, code = http.StatusOK, "8"
				}
				if got := w.Header().Get("Grpc-Status"); status != want || got != code {
					t.Errorf("%s, grpc %t, problem %t: status %d and %q of gRPC, want %d and %q", name, on, problem, status, got, want, code)
				}
			}
		}
	}
}

// TestStatusOfRefusals: the zone with the longest wait gives the status, which means the same to gRPC.
func TestStatusOfRefusals(t *testing.T) {
	for o, codes := range map[telemetry.Outcome]map[int]string{
		telemetry.Refused: {429: "8", 402: "8"}, telemetry.Blocked: {429: "8", 402: "7", 403: "7"}, telemetry.ErrorRefused: {503: "14"},
	} {
		for status, want := range codes {
			if got := grpcStatus(o, status); got != want {
				t.Errorf("%v with %d is %s, want %s", o, status, got, want)
			}
		}
	}
	var why caddyhttp.HandlerError
	w, err := refusedWith(t, func(l *Limiter) { l.Zones[0].Status = http.StatusPaymentRequired }, httptest.NewRequest(http.MethodGet, "/", nil), nil)
	if !errors.As(err, &why) || why.StatusCode != http.StatusPaymentRequired || w.Header().Get("X-RateLimit-Remaining") != "0" {
		t.Errorf("%v, %v", err, w.Header())
	}
}
