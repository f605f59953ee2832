package shardlimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// caddyProcess is a Caddy with this module, run as a process of its own.
type caddyProcess struct {
	t     *testing.T
	cmd   *exec.Cmd
	admin string
	// URL is where the site that the config calls {{site}} listens.
	URL  string
	site string
	dir  string
	logs *lockedBuffer
	done chan struct{}
}

// waitLimit bounds every wait for a condition. A machine that is merely slow
// meets the condition before.
const waitLimit = time.Minute

// client keeps enough connections for tests with many workers, and gives up on
// a Caddy that hangs.
var client = &http.Client{
	Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true},
	Timeout:   waitLimit,
}

// adminClient keeps no connections, lest one lead to the admin endpoint of an
// older config.
var adminClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: waitLimit}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startCaddy runs Caddy with a Caddyfile, and with more in its environment, and
// stops it when the test ends. In the text, {{site}} stands for the address of a
// free port and {{global}} for the global options that the harness needs.
func startCaddy(t *testing.T, caddyfile string, env ...string) *caddyProcess {
	t.Helper()
	c := &caddyProcess{
		t: t, admin: freeAddr(t), site: freeAddr(t), dir: t.TempDir(), logs: new(lockedBuffer), done: make(chan struct{}),
	}
	c.URL = "http://" + c.site
	file := c.dir + "/Caddyfile"
	if err := os.WriteFile(file, []byte(c.expand(caddyfile)), 0o600); err != nil {
		t.Fatal(err)
	}
	c.cmd = caddyCommand(c.dir, "run", "--config", file, "--adapter", "caddyfile")
	c.cmd.Env = append(c.cmd.Env, env...)
	c.cmd.Stdout, c.cmd.Stderr = c.logs, c.logs
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = c.cmd.Wait()
		close(c.done)
	}()
	t.Cleanup(func() {
		c.kill()
		if t.Failed() {
			t.Logf("caddy %s:\n%s", c.site, c.logs)
		}
		if strings.Contains(c.logs.String(), "DATA RACE") {
			t.Errorf("data race in caddy:\n%s", c.logs)
		}
	})
	eventually(t, "caddy listens", func() error {
		select {
		case <-c.done:
			t.Fatalf("caddy ended:\n%s", c.logs)
		default:
		}
		return dials(c.site)
	})
	return c
}

// awaitListening waits until somebody listens at an address.
func awaitListening(t *testing.T, addr string) {
	t.Helper()
	eventually(t, "somebody listens at "+addr, func() error { return dials(addr) })
}

func dials(addr string) error {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		_ = conn.Close()
	}
	return err
}

// caddyCommand is a call of Caddy's command line.
func caddyCommand(dir string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asCaddy+"=1", "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir,
		// With the race detector a process otherwise sleeps a second at its end.
		"GORACE=atexit_sleep_ms=0")
	cmd.Dir = dir
	process.EndWithParent(cmd)
	return cmd
}

func (c *caddyProcess) expand(caddyfile string) string {
	return strings.NewReplacer(
		"{{site}}", "http://"+c.site,
		"{{global}}", "admin "+c.admin+"\n\tpersist_config off\n\tdefault_bind 127.0.0.1",
	).Replace(caddyfile)
}

// load posts a Caddyfile to the admin API and returns the response's status
// and body.
func (c *caddyProcess) load(caddyfile string) (int, string) {
	c.t.Helper()
	return c.adminCall(http.MethodPost, "/load", "text/caddyfile", c.expand(caddyfile))
}

// mustLoad loads a config that is to be accepted and waits for it.
func (c *caddyProcess) mustLoad(caddyfile string) {
	c.t.Helper()
	if status, body := c.load(caddyfile); status != http.StatusOK {
		c.t.Fatalf("load: status %d: %s", status, body)
	}
	c.awaitServers()
}

// awaitServers waits until only the servers of the running config take
// requests. Caddy answers /load, successful or not, when the other servers
// are about to be shut down.
func (c *caddyProcess) awaitServers() {
	c.t.Helper()
	_, text := c.adminCall(http.MethodGet, "/config/apps/http/servers", "", "")
	var servers map[string]any
	if err := json.Unmarshal([]byte(text), &servers); err != nil {
		c.t.Fatalf("servers: %v: %s", err, text)
	}
	eventually(c.t, "other servers are shut down", func() error {
		_, stacks := c.adminCall(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", "")
		serving := 0
		for stack := range strings.SplitSeq(stacks, "\n\n") {
			if strings.Contains(stack, "net/http.(*Server).Serve(") && strings.Contains(stack, "caddyhttp.(*App).Start") {
				serving++
			}
		}
		return want("number of servers", serving, len(servers))
	})
	client.CloseIdleConnections()
}

// adminCall calls the admin API, again where the connection breaks: it may
// wait at the endpoint of an older config that is about to be closed. Caddy
// listens a moment before its config is the running one; that is waited for.
func (c *caddyProcess) adminCall(method, path, contentType, body string) (status int, text string) {
	c.t.Helper()
	eventually(c.t, "the admin endpoint answers", func() error {
		req, err := http.NewRequest(method, "http://"+c.admin+path, strings.NewReader(body))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", contentType)
		resp, err := adminClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		status, text = resp.StatusCode, string(b)
		if status == http.StatusNotFound && strings.Contains(text, "the running config has no rate_limit") &&
			!strings.Contains(c.logs.String(), "serving initial configuration") {
			return errors.New(text)
		}
		return err
	})
	return status, text
}

// metric returns the value of a line of /metrics, such as
// `caddy_rate_limit_requests_total{zone="api"}`, and "" if there is none.
func (c *caddyProcess) metric(name string) string {
	c.t.Helper()
	_, text := c.adminCall(http.MethodGet, "/metrics", "", "")
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// get requests a path with headers given as "Name: value".
func (c *caddyProcess) get(path string, headers ...string) *http.Response {
	c.t.Helper()
	resp, err := c.try(path, headers...)
	if err != nil {
		c.t.Fatal(err)
	}
	return resp
}

func (c *caddyProcess) try(path string, headers ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.URL+path, nil)
	if err != nil {
		return nil, err
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, err
}

// stop ends Caddy as an operator would and waits for it.
func (c *caddyProcess) stop() {
	c.t.Helper()
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.done:
	case <-time.After(waitLimit):
		c.t.Fatal("caddy does not stop")
	}
}

func (c *caddyProcess) kill() {
	_ = c.cmd.Process.Kill()
	<-c.done
}

// eventually polls until f returns nil, for waitLimit at most.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(waitLimit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// want returns an error unless got is want.
func want[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, want %v", what, got, want)
	}
	return nil
}

// freeAddr returns a loopback address that belongs to the test until it ends.
func freeAddr(t *testing.T) string {
	t.Helper()
	port, release, err := process.ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = release() })
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// remaining is the header that says how much is left, or "".
func remaining(resp *http.Response) string { return resp.Header.Get("X-RateLimit-Remaining") }

// metricSum is the sum of a metric's values over all labels.
func (c *caddyProcess) metricSum(name string) (sum float64) {
	c.t.Helper()
	_, text := c.adminCall(http.MethodGet, "/metrics", "", "")
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+"{"); ok {
			value, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, '}')+1:]), 64)
			must(c.t, name, err)
			sum += value
		}
	}
	return sum
}
