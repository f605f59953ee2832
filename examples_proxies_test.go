package shardlimit_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// TestExampleOutgoing: calls made at the same time leave one after the other,
// half a second apart, and those that would wait for too long are refused at
// once.
func TestExampleOutgoing(t *testing.T) {
	t.Parallel() // it spends its time waiting
	var mu sync.Mutex
	var arrived []time.Time
	partner := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		arrived = append(arrived, time.Now())
	}))
	t.Cleanup(partner.Close)
	c := startExample(t, "outgoing", "https://api.github.com", partner.URL)
	begun := time.Now()
	caddytest.Together(t, 4, func(int) error {
		resp, err := c.Try("/zen")
		if err != nil {
			return err
		}
		return want("status", resp.StatusCode, 200)
	})
	must(t, "partner", want("calls", len(arrived), 4))
	for i, at := range arrived {
		// The first left at some time after begun.
		if earliest := begun.Add(time.Duration(i) * time.Second / 2); at.Before(earliest) {
			t.Errorf("call %d left %v too early", i, earliest.Sub(at))
		}
	}

	// Sixty fit into the thirty seconds.
	ctx, leave := context.WithCancel(t.Context())
	refused := make(chan string, 100)
	var clients sync.WaitGroup
	for range 100 {
		clients.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/zen", http.NoBody)
			if err != nil {
				return
			}
			if resp, err := caddytest.Client.Do(req); err == nil {
				_ = resp.Body.Close()
				if resp.StatusCode == http.StatusTooManyRequests {
					refused <- resp.Header.Get("Retry-After")
				}
			}
		})
	}
	for range 30 {
		select {
		case wait := <-refused:
			seconds, err := strconv.Atoi(wait)
			must(t, "refusal", errors.Join(err, want("Retry-After being more than half a minute", seconds > 30, true)))
		case <-time.After(caddytest.WaitLimit):
			t.Fatal("calls that would wait for more than 30 seconds are not refused")
		}
	}
	leave()
	clients.Wait()
}

// showsLimits tells how what a proxy passes on differs from what the limiter
// says.
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
	must(t, "sixth request", showsLimits(send(t, caddytest.Client, http.MethodGet, url), http.StatusTooManyRequests, "0"))
	must(t, "another address", showsLimits(send(t, clientAt("127.0.0.2"), http.MethodGet, url), http.StatusOK, "4"))
	must(t, "a made-up key", showsLimits(send(t, caddytest.Client, http.MethodGet, url, "X-Api-Key: k"), http.StatusTooManyRequests, "0"))
}

func TestExampleLimiterService(t *testing.T) {
	c := startExample(t, "limiter_service")
	address := "X-Forwarded-For: 192.0.2.7"
	must(t, "questions", want("statuses", statuses(c, 6, "/", address), many(5, 204)+" 429"))
	must(t, "another address", want("status", c.Get("/", "X-Forwarded-For: 192.0.2.8").StatusCode, 204))
}

func TestExampleForwardAuth(t *testing.T) {
	limiter := startExample(t, "limiter_service")
	c := startExample(t, "forward_auth", "localhost:8080", limiter.Addr)
	drivesLimiterService(t, c.URL)
	limiter.Stop()
	must(t, "without the limiter", want("status", c.Get("/").StatusCode, http.StatusBadGateway))
}

func TestExampleAuthRequest(t *testing.T) {
	limiter := startExample(t, "limiter_service")
	site, backend := caddytest.FreeAddr(t), caddytest.FreeAddr(t)
	url := startNginx(t, "examples/auth_request.nginx.conf", site, "localhost:8080", limiter.Addr, "listen 8081", "listen "+site,
		"localhost:8082", backend, "listen 8082", "listen "+backend)
	drivesLimiterService(t, url)
	limiter.Stop()
	resp := send(t, caddytest.Client, http.MethodGet, url)
	must(t, "without the limiter", errors.Join(want("status", resp.StatusCode, 500), want("Retry-After", resp.Header.Get("Retry-After"), "")))
}

// installed finds a program that make test installs.
func installed(t *testing.T, program string) string {
	t.Helper()
	path, err := process.Find(program)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// startNginx runs nginx with a config, of which is to be replaced what comes in
// pairs, and waits until it listens on site.
func startNginx(t *testing.T, config, site string, replace ...string) (url string) {
	t.Helper()
	b, err := os.ReadFile(config)
	must(t, "read", err)
	dir, text := t.TempDir(), string(b)
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(text, replace[i]) {
			t.Fatalf("%s has no %s", config, replace[i])
		}
		text = strings.ReplaceAll(text, replace[i], replace[i+1])
	}
	// The system's folders belong to somebody else.
	text = strings.Replace(text, "http {\n", "http {\n"+strings.Join(nginxFolders, dir+";\n")+dir+";\n", 1)
	file := dir + "/nginx.conf"
	must(t, "write", os.WriteFile(file, []byte(text), 0o600))
	logs := new(caddyproc.Logs)
	cmd := exec.CommandContext(t.Context(), installed(t, "nginx"), "-p", dir, "-c", file, "-g", "daemon off; master_process off;")
	cmd.Stdout, cmd.Stderr = logs, logs
	process.EndWithParent(cmd)
	must(t, "start nginx", cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("nginx:\n%s", logs)
		}
	})
	caddytest.AwaitListening(t, site)
	return "http://" + site
}

var nginxFolders = []string{"client_body_temp_path ", "proxy_temp_path ", "fastcgi_temp_path ", "uwsgi_temp_path ", "scgi_temp_path "}
