//go:build check

package examples

import (
	"errors"
	"fmt"
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
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// TestNginxBeforeMigrating checks that nginx with the old config and Caddy with the new one admit the same.
func TestNginxBeforeMigrating(t *testing.T) {
	for name, start := range map[string]func(t *testing.T) (url string){
		"before": func(t *testing.T) string {
			t.Helper()
			site := caddytest.FreeAddr(t)
			return startNginx(t, "examples/migrating/nginx_before.conf", site, "listen 8080", "listen "+site)
		},
		"after": func(t *testing.T) string {
			t.Helper()
			return startExample(t, "migrating/nginx_after").URL
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			url := start(t)
			// An event comes back every ten seconds: a slow machine begins anew from another address.
			for path, statuses := range map[string]string{"/plain": "200 429 429", "/burst": many(5, 200) + " 429 429"} {
				for try := 1; ; try++ {
					from, begun := clientAt(fmt.Sprint("127.0.2.", try)), time.Now()
					got := repeated(strings.Count(statuses, " ")+1, func() *http.Response { return send(t, from, http.MethodGet, url+path) })
					if got == statuses || time.Since(begun) < 10*time.Second || try == 20 {
						must(t, path, want("statuses", got, statuses))
						break
					}
				}
			}
			// The last one waits for a second and a half in both.
			for path, served := range map[string]int{"/queue": 4, "/both": 6} {
				queued(t, url+path, served)
			}
		})
	}
}

// queued sends three requests more than are served at two a second, all at once. If a slow machine
// delivers them so late that another one fits, or wakes one so late that the last one of the queue
// does not, it tries again from another address.
func queued(t *testing.T, url string, served int) {
	t.Helper()
	for try := 1; ; try++ {
		from := clientAt(fmt.Sprint("127.0.1.", try))
		var passed, refused atomic.Int64
		begun := time.Now()
		caddytest.Together(t, served+3, func(int) error {
			resp, err := from.Get(url)
			if err != nil {
				return err
			}
			switch resp.StatusCode {
			case http.StatusOK:
				passed.Add(1)
			case http.StatusTooManyRequests:
				refused.Add(1)
			}
			return resp.Body.Close()
		})
		took := time.Since(begun)
		// The last of all that are served waits for a second and a half, each before it half a
		// second less.
		due := 1500*time.Millisecond - time.Duration(int64(served)-passed.Load())*500*time.Millisecond
		isLate := took > due+100*time.Millisecond
		if (refused.Load() < 3 || refused.Load() > 3 && isLate) && try < 20 {
			continue
		}
		must(t, url, errors.Join(want("served", int(passed.Load()), served), want("refused", refused.Load(), 3),
			want(fmt.Sprintf("%v being a second and a half", took), took > 1400*time.Millisecond, true)))
		return
	}
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

// TestProxiesShowStatuses of zones: the proxies pass on other statuses than 429 too, and forbid caches to store them.
func TestProxiesShowStatuses(t *testing.T) {
	t.Parallel()
	for status, byHAProxy := range map[int]int{http.StatusPaymentRequired: http.StatusPaymentRequired, http.StatusForbidden: http.StatusBadRequest} {
		limiter := startExample(t, "limiter_service", "\tcharge before", "\tcharge before\n\t\t\tstatus "+strconv.Itoa(status), "events 5", "events 2")
		site, backend := caddytest.FreeAddr(t), caddytest.FreeAddr(t)
		nginx := startNginx(t, "examples/auth_request.nginx.conf", site, "localhost:8080", limiter.Addr, "listen 8081", "listen "+site,
			"localhost:8082", backend, "listen 8082", "listen "+backend)
		haproxy := startHAProxy(t, limiter.Addr)
		for _, url := range []string{nginx, haproxy} {
			passed := send(t, caddytest.Client, http.MethodGet, url)
			must(t, "what passes", errors.Join(want("status", passed.StatusCode, http.StatusOK), want("caches", passed.Header.Get("Cache-Control"), "")))
		}
		for url, shown := range map[string]int{nginx: status, haproxy: byHAProxy} {
			refused := send(t, caddytest.Client, http.MethodGet, url)
			must(t, "refusal", errors.Join(want("status", refused.StatusCode, shown), want("caches", strings.Join(refused.Header["Cache-Control"], "|"), "no-store"),
				want("having Retry-After", refused.Header.Get("Retry-After") != "", true)))
		}
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
