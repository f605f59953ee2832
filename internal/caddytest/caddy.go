// Package caddytest runs Caddy with this module as processes of their own, for
// tests: the test binary, whose TestMain calls [Main], is that Caddy.
//
// [Start] gives a test one, with a Caddyfile; its methods load configs, send requests, read
// metrics and the log, and stop it. [StartShards] starts the Redis servers that a
// config names, and [Shards] reads what they hold. [StartSlowBackend] is a server
// behind Caddy that answers on command. Nothing depends on the machine's speed:
// [Eventually] and all that waits do so for a condition, for [Patience] at most.
package caddytest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// Caddy is a Caddy with this module, in a process that no other test uses at the same time.
type Caddy struct {
	// T is the test that has started it, which its methods fail.
	T *testing.T
	// Admin is the address, host:port, of the admin API, and Addr that of the
	// site that the config calls {{site}}. URL begins that site's URLs.
	Admin, Addr, URL string
	// Client sends the requests. No two Caddys share one: closing idle connections can
	// break a request whose response is arriving.
	Client *http.Client
	// Dir has the Caddyfile that it was started with.
	Dir string
	// Logs is all of its output so far, since the test has it.
	Logs *caddyproc.Logs
	// Ended is closed when the process has ended.
	Ended   chan struct{}
	process *instance
}

// Start makes a Caddy of its own for the test, whose environment has env as well, and loads a
// Caddyfile. In the text, {{site}} stands for the address of a free port and {{global}} for the global
// options that the harness needs. When the test ends, the process passes to another test, unless something
// of the config is left in it.
func Start(t *testing.T, caddyfile string, env ...string) *Caddy {
	t.Helper()
	c := &Caddy{T: t, Addr: FreeAddr(t), Dir: t.TempDir(), Client: newClient(), Logs: new(caddyproc.Logs)}
	c.URL = "http://" + c.Addr
	c.process = takeInstance(t, env, c.Logs)
	c.Admin, c.Ended = c.process.admin, c.process.ended
	t.Cleanup(func() {
		c.Client.CloseIdleConnections()
		switch {
		case t.Failed():
			c.process.kill()
			t.Logf("caddy %s:\n%s", c.Addr, c.Logs)
		default:
			if err := c.process.giveBack(); err != nil {
				t.Logf("caddy %s is not used again: %v", c.Addr, err)
			}
		}
		if err := raceIn(c.Logs); err != nil {
			t.Error(err)
		}
	})
	caddyfile = c.Expand(caddyfile)
	if err := os.WriteFile(c.Dir+"/Caddyfile", []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, text := c.Load(caddyfile); status != http.StatusOK {
		t.Fatalf("load: status %d: %s", status, text)
	}
	Eventually(t, "caddy listens", func() error { return dials(c.Addr) })
	// The limits look only after the answer whether Caddy has accepted their first config, or when they are asked.
	_, _, _ = c.TryAdminCall(http.MethodGet, "/rate_limit/history", "", "") // the config may have another endpoint
	return c
}

// StartMany runs n Caddys with the same config.
func StartMany(t *testing.T, n int, caddyfile string) []*Caddy {
	t.Helper()
	caddys := make([]*Caddy, n)
	for i := range caddys {
		caddys[i] = Start(t, caddyfile)
	}
	return caddys
}

// AwaitListening waits until a process listens at an address.
func AwaitListening(t *testing.T, addr string) {
	t.Helper()
	Eventually(t, "a process listens at "+addr, func() error { return dials(addr) })
}

// dials returns an error unless a connection to addr can be opened.
func dials(addr string) error {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		_ = conn.Close()
	}
	return err
}

// FreeAddr returns a loopback address that belongs to the test until it ends.
func FreeAddr(t *testing.T) string {
	t.Helper()
	port, release, err := process.ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = release() })
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// Site returns a Caddyfile of one site, with global options besides those of the
// harness.
func Site(global, body string) string {
	return "{\n\t{{global}}\n\t" + global + "\n}\n{{site}} {\n" + body + "\n}\n"
}

// Expand replaces the placeholders of [Start].
func (c *Caddy) Expand(caddyfile string) string {
	return strings.NewReplacer(
		"{{site}}", "http://"+c.Addr,
		"{{global}}", "admin "+c.Admin+"\n\tpersist_config off\n\tdefault_bind 127.0.0.1",
	).Replace(caddyfile)
}

// Load posts a Caddyfile to the admin API and returns the response's status
// and body.
func (c *Caddy) Load(caddyfile string) (int, string) {
	c.T.Helper()
	return c.AdminCall(http.MethodPost, "/load", "text/caddyfile", c.Expand(caddyfile))
}

// MustLoad loads a config that is to be accepted and waits for it.
func (c *Caddy) MustLoad(caddyfile string) {
	c.T.Helper()
	if status, body := c.Load(caddyfile); status != http.StatusOK {
		c.T.Fatalf("load: status %d: %s", status, body)
	}
	c.AwaitServers()
}

// AwaitServers waits until only the servers of the running config take
// requests. Caddy answers /load, successful or not, before it shuts the others
// down.
func (c *Caddy) AwaitServers() {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/config/apps/http/servers", "", "")
	var servers map[string]any
	if err := json.Unmarshal([]byte(text), &servers); err != nil {
		c.T.Fatalf("servers: %v: %s", err, text)
	}
	Eventually(c.T, "other servers are shut down", func() error {
		return Want("number of servers", len(c.Stacks("net/http.(*Server).Serve(", "caddyhttp.(*App).Start")), len(servers))
	})
	c.Client.CloseIdleConnections()
}

// Stacks returns the stacks of Caddy's goroutines that have all of the texts.
func (c *Caddy) Stacks(texts ...string) []string {
	c.T.Helper()
	_, stacks := c.AdminCall(http.MethodGet, stacksPath+"?"+url.Values{"has": texts}.Encode(), "", "")
	if stacks == "" {
		return nil
	}
	return strings.Split(stacks, "\n\n")
}

// ForgetHistory drops what Caddy's history keeps, also of zones that no config has any more.
func (c *Caddy) ForgetHistory() {
	c.T.Helper()
	c.AdminCall(http.MethodDelete, historyPath, "", "")
}

// adminClient keeps no connections: a kept one could lead to the admin endpoint
// of an older config.
var adminClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}, Timeout: Patience}

// AdminCall calls the admin API, and calls again where the connection breaks:
// the endpoint of an older config may close while the call waits there. Caddy
// listens a moment before it runs; AdminCall waits for that.
func (c *Caddy) AdminCall(method, path, contentType, body string) (status int, text string) {
	c.T.Helper()
	Eventually(c.T, "the admin endpoint answers", func() (err error) {
		status, text, err = c.TryAdminCall(method, path, contentType, body)
		return err
	})
	return status, text
}

// TryAdminCall is AdminCall for any goroutine: it calls once.
func (c *Caddy) TryAdminCall(method, path, contentType, body string) (status int, text string, err error) {
	return callAdmin(c.Admin, method, path, contentType, body)
}

// callAdmin calls the admin API at an address once.
func callAdmin(addr, method, path, contentType, body string) (status int, text string, err error) {
	req, err := http.NewRequest(method, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := adminClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// AdminJSON calls the admin API and decodes its answer.
func (c *Caddy) AdminJSON(method, path, body string, answer any) {
	c.T.Helper()
	status, text := c.AdminCall(method, path, "application/json", body)
	Must(c.T, method+" "+path, Want("status", status, http.StatusOK))
	Must(c.T, "answer "+text, json.Unmarshal([]byte(text), answer))
}

// Metric returns the value of a line of /metrics, such as
// `caddy_rate_limit_requests_total{zone="api"}`, and "" if there is none.
func (c *Caddy) Metric(name string) string {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// MetricSum returns the sum of a metric's values over all labels.
func (c *Caddy) MetricSum(name string) float64 {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
	metrics, err := caddyproc.ParseMetrics(text)
	Must(c.T, "metrics", err)
	return metrics.Sum(name)
}

// AwaitLog waits until Caddy has logged a text.
func (c *Caddy) AwaitLog(text string) {
	c.T.Helper()
	Eventually(c.T, "caddy logs "+text, func() error {
		return Want("the text being in the log", strings.Contains(c.Logs.String(), text), true)
	})
}

// AwaitLines waits until n lines of the log contain all of the texts.
func (c *Caddy) AwaitLines(t *testing.T, n int, texts ...string) (lines []string) {
	t.Helper()
	Eventually(t, fmt.Sprint("Caddy logs ", texts), func() error {
		lines = nil
		for line := range strings.Lines(c.Logs.String()) {
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
				lines = append(lines, line)
			}
		}
		return Want("number of lines", len(lines), n)
	})
	return lines
}

// Unload removes the config, as a reload without one would, and waits until all that it has begun has
// ended. No call to a store is in flight then, and the log is complete.
func (c *Caddy) Unload() {
	c.T.Helper()
	c.Client.CloseIdleConnections()
	Must(c.T, "unload", c.process.unload(Patience))
}

// Terminate ends Caddy as an operator would, and does not wait.
func (c *Caddy) Terminate() {
	c.T.Helper()
	Must(c.T, "terminate", c.process.cmd.Process.Signal(syscall.SIGTERM))
}

// AwaitEnd waits until Caddy has ended.
func (c *Caddy) AwaitEnd() {
	c.T.Helper()
	select {
	case <-c.Ended:
	case <-time.After(Patience):
		c.T.Fatal("caddy does not end")
	}
}

// Stop ends Caddy as an operator would and waits for it.
func (c *Caddy) Stop() {
	c.T.Helper()
	_ = c.process.cmd.Process.Signal(syscall.SIGTERM)
	c.AwaitEnd()
}

// Kill ends Caddy at once and waits for it. It returns the time after which Caddy did nothing.
func (c *Caddy) Kill() time.Time {
	_ = c.process.cmd.Process.Kill()
	killed := time.Now()
	<-c.Ended
	return killed
}

// Adapt returns the JSON that a Caddyfile adapts to, indented.
func Adapt(text string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		return nil, err
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, config, "", "\t"); err != nil {
		return nil, err
	}
	return append(indented.Bytes(), '\n'), nil
}

// validating is held while a config is validated: all configs of a process share a cache of certificates,
// which Caddy closes twice if two end at the same time.
var validating sync.Mutex

// Validate loads a config in JSON as far as it goes without running it.
func Validate(config []byte) error { return validate(config, `{"output":"discard"}`) }

// Warnings validates a config as [Validate] does, and returns the log entries at level warn and above.
func Warnings(t *testing.T, config []byte) (string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "log")
	err := validate(config, fmt.Sprintf(`{"output":"file","filename":%q}`, file))
	text, readErr := os.ReadFile(file)
	if errors.Is(readErr, os.ErrNotExist) {
		readErr = nil // nothing was logged
	}
	Must(t, "read the log", readErr)
	return string(text), err
}

func validate(config []byte, writer string) error {
	validating.Lock()
	defer validating.Unlock()
	parsed := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(config, parsed); err != nil {
		return err
	}
	// Validation needs no admin endpoint, which would take a port.
	parsed.Admin = &caddy.AdminConfig{Disabled: true}
	parsed.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{WriterRaw: []byte(writer), Level: "WARN"}},
	}}
	return caddy.Validate(parsed)
}
