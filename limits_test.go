package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestEventsOfAPlaceholder(t *testing.T) {
	c := caddytest.Start(t, `
{
	{{global}}
}
{{site}} {
	rate_limit {
		zone plan {
			key {header.X-Key}
			events {header.X-Plan} 5
			window 1h
		}
	}
	respond ok
}
`)
	for i, step := range []struct{ plan, limit, remaining string }{
		{"10", "10", "9"},
		// A larger plan keeps the count, and so does a smaller one.
		{"100", "100", "98"},
		{"4", "4", "1"},
		// The fallback counts for whatever is no whole number.
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
	c := caddytest.Start(t, `
{
	{{global}}
}
{{site}} {
	rate_limit {
		zone api {
			key static
			events 1
			window 1h
		}
		headers none
	}
	respond ok
}
`)
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
	c := caddytest.Start(t, `
{
	{{global}}
	debug
}
{{site}} {
	rate_limit {
		zone api {
			key {header.X-Key}
			events 1
			window 1000000s
		}
		log_refusals all
		`+options+`
	}
	respond ok
}
`)
	for range n + 1 {
		resp := c.Get("/", "X-Key: very-secret")
		if resp.StatusCode == http.StatusTooManyRequests {
			s, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			if err != nil {
				t.Fatal(err)
			}
			seconds = append(seconds, s)
		}
	}
	if len(seconds) != n {
		t.Fatalf("%d refusals, want %d", len(seconds), n)
	}
	// What is written last may take a moment to arrive.
	c.Stop()
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

func TestKeysAreLoggedOnlyIfWanted(t *testing.T) {
	if _, logs := refusals(t, "", 1); strings.Contains(logs, "very-secret") {
		t.Errorf("the key is logged: %s", logs)
	}
	if _, logs := refusals(t, "log_key", 1); !strings.Contains(logs, "very-secret") || !strings.Contains(logs, `"zone":"api"`) {
		t.Errorf("log_key does not log the key: %s", logs)
	}
}

// TestClientThatLeavesDuringTheCheck: it is not charged, and the backend does
// not see it.
func TestClientThatLeavesDuringTheCheck(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := caddytest.Start(t, fmt.Sprintf(`
{
	{{global}}
	rate_limit {
		store redis {
			shard a {
				primary %s
			}
			check_timeout 30s
			charge_timeout 30s
		}
	}
}
{{site}} {
	log
	rate_limit {header.X-Key} 100 1h
	header X-Reached yes
	respond ok
}
`, server.Addr()))
	if got := caddytest.Remaining(c.Get("/", "X-Key: k")); got != "99" {
		t.Fatalf("remaining is %s", got)
	}
	if err := server.Pause(); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	gone := c.Begin(ctx, "/", "X-Key: k")
	eventually(t, "the request is in the limiter", func() error {
		_, stacks := c.AdminCall(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", "")
		return want("it being so", strings.Contains(stacks, "shardlimit.(*Handler).ServeHTTP("), true)
	})
	leave()
	gone.Leaves(t)
	c.AwaitLog(`"status":499`)
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	if got := caddytest.Remaining(c.Get("/", "X-Key: k")); got != "98" {
		t.Errorf("remaining is %s, want 98: the request that was given up is not charged", got)
	}
	_, metrics := c.AdminCall(http.MethodGet, "/metrics", "", "")
	if strings.Contains(metrics, "\ncaddy_rate_limit_store_errors_total{") {
		t.Error("a client that left counts as an error of the store")
	}
}
