package shardlimit_test

import (
	"net/http"
	"testing"
)

func TestAllowsUntilTheLimitThenRefuses(t *testing.T) {
	c := startCaddy(t, `
{
	{{global}}
}
{{site}} {
	rate_limit {header.X-Key} 3 1h api
	respond ok
}
`)
	for i, want := range []string{"2", "1", "0"} {
		resp := c.get("/", "X-Key: a")
		if resp.StatusCode != http.StatusOK || remaining(resp) != want {
			t.Fatalf("request %d: status %d, remaining %s, want 200 and %s", i+1, resp.StatusCode, remaining(resp), want)
		}
	}
	resp := c.get("/", "X-Key: a")
	if resp.StatusCode != http.StatusTooManyRequests || remaining(resp) != "0" || resp.Header.Get("Retry-After") == "" {
		t.Fatalf("refusal has status %d and headers %v", resp.StatusCode, resp.Header)
	}
	if resp := c.get("/", "X-Key: b"); resp.StatusCode != http.StatusOK {
		t.Fatalf("another client has status %d", resp.StatusCode)
	}
}
