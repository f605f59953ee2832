package examples

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
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
	must(t, "sixth request", showsLimits(send(t, caddytest.Client, http.MethodGet, url), http.StatusTooManyRequests, "0"))
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
	c := startExample(t, "forward_auth", "localhost:8080", limiter.Addr)
	drivesLimiterService(t, c.URL)
	limiter.Stop()
	must(t, "without the limiter", want("status", c.Get("/").StatusCode, http.StatusBadGateway))
}

func TestExampleAuthRequest(t *testing.T) {
	t.Parallel()
	for _, passes := range []bool{false, true} {
		limiter := startExample(t, "limiter_service")
		site, backend := caddytest.FreeAddr(t), caddytest.FreeAddr(t)
		replace := []string{
			"localhost:8080", limiter.Addr, "listen 8081", "listen " + site,
			"localhost:8082", backend, "listen 8082", "listen " + backend,
		}
		lost := http.StatusInternalServerError
		if passes {
			replace, lost = append(replace, "#error_page", "error_page", "#location @open", "location @open", "#\treturn", "\treturn", "\t#}", "\t}"), http.StatusOK
		}
		url := startNginx(t, "examples/auth_request.nginx.conf", site, replace...)
		drivesLimiterService(t, url)
		limiter.Stop()
		resp := send(t, caddytest.Client, http.MethodGet, url)
		must(t, "without the limiter", errors.Join(want("status", resp.StatusCode, lost), want("Retry-After", resp.Header.Get("Retry-After"), "")))
	}
}

func TestExampleHAProxy(t *testing.T) {
	t.Parallel()
	limiter := startExample(t, "limiter_service")
	url := startHAProxy(t, limiter.Addr)
	drivesLimiterService(t, url)
	limiter.Stop()
	resp := send(t, caddytest.Client, http.MethodGet, url)
	must(t, "without the limiter", errors.Join(want("status", resp.StatusCode, http.StatusServiceUnavailable), want("Retry-After", resp.Header.Get("Retry-After"), "")))
}

// haproxyRefusal is the line without which requests pass while no limiter answers.
const haproxyRefusal = "\thttp-request return status 503 content-type text/plain string \"Try again.\" unless { var(txn.limiter_status) -m int 200 }\n"

// TestExampleHAProxyPasses: without the line of the status, requests pass while no limiter answers, be it gone
// or silent.
func TestExampleHAProxyPasses(t *testing.T) {
	t.Parallel()
	limiter := startExample(t, "limiter_service")
	url := startHAProxy(t, limiter.Addr, haproxyRefusal, "")
	drivesLimiterService(t, url)
	limiter.Stop()
	must(t, "without the limiter", want("status", send(t, caddytest.Client, http.MethodGet, url).StatusCode, http.StatusOK))

	silent := caddytest.StartSlowBackend(t)
	addr := strings.TrimPrefix(silent.Server.URL, "http://")
	must(t, "a silent limiter", want("status", send(t, caddytest.Client, http.MethodGet, startHAProxy(t, addr, haproxyRefusal, "")).StatusCode, http.StatusOK))
	must(t, "a silent limiter", want("status", send(t, caddytest.Client, http.MethodGet, startHAProxy(t, addr)).StatusCode, http.StatusServiceUnavailable))
}

// TestHAProxyByKey: a key sent twice reaches the limiter twice, which refuses it, also where requests pass
// without a limiter.
func TestHAProxyByKey(t *testing.T) {
	t.Parallel()
	for _, replace := range [][]string{nil, {haproxyRefusal, ""}} {
		limiter := startExample(t, "limiter_service", "key {client_ip}", "key {header.X-Api-Key} {client_ip}")
		lua := replaced(t, "examples/haproxy.lua", `-- ["x-api-key"]`, `["x-api-key"]`)
		url := runHAProxy(t, limiter.Addr, lua, replace...)
		ask := func(status int, headers ...string) {
			t.Helper()
			must(t, strings.Join(headers, ", "), want("status", send(t, caddytest.Client, http.MethodGet, url, headers...).StatusCode, status))
		}
		for range 5 {
			ask(200, "X-Api-Key: a")
		}
		ask(429, "X-Api-Key: a")
		ask(400, "X-Api-Key: a", "X-Api-Key: b")
		ask(400, "X-Api-Key: a", "x-api-key: c")
		ask(429, "X-Api-Key: a", "X-Api-Key: a")
		ask(200, "X-Api-Key: b")
		ask(200)
	}
}

// TestHAProxyPassesNoErrors: where requests pass without a limiter, only a failure of it lets them.
func TestHAProxyPassesNoErrors(t *testing.T) {
	t.Parallel()
	var status atomic.Int64
	limiter := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(status.Load())) }))
	t.Cleanup(limiter.Close)
	url := startHAProxy(t, strings.TrimPrefix(limiter.URL, "http://"), haproxyRefusal, "")
	for answer, shown := range map[int64]int{200: 200, 302: 400, 400: 400, 404: 400, 431: 400, 429: 429, 500: 200, 502: 200, 503: 200} {
		status.Store(answer)
		must(t, strconv.FormatInt(answer, 10), want("status", send(t, caddytest.Client, http.MethodGet, url).StatusCode, shown))
	}
}

// TestHAProxyKeepsConnections to the limiter, and sends it the client's address alone.
func TestHAProxyKeepsConnections(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	asked := make(chan http.Header, 100)
	limiter := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r.Header }))
	limiter.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	limiter.Start()
	t.Cleanup(limiter.Close)
	url := startHAProxy(t, strings.TrimPrefix(limiter.URL, "http://"))
	const requests = 40
	for range requests {
		must(t, "request", want("status", send(t, caddytest.Client, http.MethodGet, url, "X-Forwarded-For: 203.0.113.9", "Cookie: secret").StatusCode, http.StatusOK))
		header := <-asked
		must(t, "question", errors.Join(want("addresses", strings.Join(header["X-Forwarded-For"], "|"), "127.0.0.1"), want("cookie", header.Get("Cookie"), "")))
	}
	// Each of its threads may have some.
	must(t, "connections", want("few of them", opened.Load() <= requests/4, true))
}

// installed finds a program that make test installs.
func installed(t *testing.T, program string) string {
	t.Helper()
	path, err := process.Find(program)
	must(t, "find", err)
	return path
}

// replaced returns a file's text, in which it replaces pairs of texts.
func replaced(t *testing.T, file string, replace ...string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, "read", err)
	text := string(b)
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(text, replace[i]) {
			t.Fatalf("%s has no %s", file, replace[i])
		}
		text = strings.ReplaceAll(text, replace[i], replace[i+1])
	}
	return text
}

// startProxy runs another proxy until the test ends, and waits until it listens on site.
func startProxy(t *testing.T, site string, cmd *exec.Cmd) (url string) {
	t.Helper()
	logs := new(caddyproc.Logs)
	cmd.Stdout, cmd.Stderr = logs, logs
	process.EndWithParent(cmd)
	must(t, "start", cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(cmd.Path), logs)
		}
	})
	caddytest.AwaitListening(t, site)
	return "http://" + site
}

// startNginx runs nginx with a config, in which it replaces pairs of texts.
func startNginx(t *testing.T, config, site string, replace ...string) (url string) {
	t.Helper()
	dir := t.TempDir()
	// The system's folders may not be writable.
	text := strings.Replace(replaced(t, config, replace...), "http {\n", "http {\n"+strings.Join(nginxFolders, dir+";\n")+dir+";\n", 1)
	file := dir + "/nginx.conf"
	must(t, "write", os.WriteFile(file, []byte(text), 0o600))
	return startProxy(t, site, exec.CommandContext(t.Context(), installed(t, "nginx"), "-p", dir, "-c", file, "-g", "daemon off; master_process off;"))
}

var nginxFolders = []string{"client_body_temp_path ", "proxy_temp_path ", "fastcgi_temp_path ", "uwsgi_temp_path ", "scgi_temp_path "}

// startHAProxy runs HAProxy with the example, which asks the limiter at an address.
func startHAProxy(t *testing.T, limiter string, replace ...string) (url string) {
	t.Helper()
	return runHAProxy(t, limiter, replaced(t, "examples/haproxy.lua"), replace...)
}

// runHAProxy does so with another text of haproxy.lua.
func runHAProxy(t *testing.T, limiter, lua string, replace ...string) (url string) {
	t.Helper()
	dir, site, way := t.TempDir(), caddytest.FreeAddr(t), caddytest.FreeAddr(t)
	replace = append(replace, "localhost:8080", limiter, "bind :8081", "bind "+site, "127.0.0.1:8083", way)
	for name, text := range map[string]string{
		"haproxy.cfg": replaced(t, "examples/haproxy.cfg", replace...), "haproxy.lua": lua,
	} {
		must(t, "write", os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return startProxy(t, site, exec.CommandContext(t.Context(), installed(t, "haproxy"), "-C", dir, "-f", "haproxy.cfg", "-db"))
}
