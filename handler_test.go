package shardlimit_test

import (
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func TestAllowsUntilTheLimitThenRefuses(t *testing.T) {
	c := caddytest.Start(t, `
{
	{{global}}
}
{{site}} {
	rate_limit {header.X-Key} 3 1h api
	respond ok
}
`)
	for i, want := range []string{"2", "1", "0"} {
		resp := c.Get("/", "X-Key: a")
		if resp.StatusCode != http.StatusOK || caddytest.Remaining(resp) != want {
			t.Fatalf("request %d: status %d, remaining %s, want 200 and %s", i+1, resp.StatusCode, caddytest.Remaining(resp), want)
		}
	}
	resp := c.Get("/", "X-Key: a")
	if resp.StatusCode != http.StatusTooManyRequests || caddytest.Remaining(resp) != "0" || resp.Header.Get("Retry-After") == "" {
		t.Fatalf("refusal has status %d and headers %v", resp.StatusCode, resp.Header)
	}
	if resp := c.Get("/", "X-Key: b"); resp.StatusCode != http.StatusOK {
		t.Fatalf("another client has status %d", resp.StatusCode)
	}
}
