package shardlimit_test

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// exampleFiles are all Caddyfiles in examples.
func exampleFiles(t *testing.T) (files []string) {
	t.Helper()
	for _, pattern := range []string{"examples/*.caddyfile", "examples/*/*.caddyfile"} {
		found, err := filepath.Glob(pattern)
		must(t, "find examples", err)
		files = append(files, found...)
	}
	if len(files) == 0 {
		t.Fatal("there are no examples")
	}
	return files
}

// TestExamplesAreFormattedAndLoad: `caddy validate` has nothing to warn of,
// which it does of a file that `caddy fmt` would change.
func TestExamplesAreFormattedAndLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, file := range exampleFiles(t) {
		path, err := filepath.Abs(file)
		must(t, "path", err)
		out, err := caddytest.Command(dir, "validate", "--config", path).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "Valid configuration") {
			t.Errorf("%s: %v\n%s", file, err, out)
		}
		if strings.Contains(string(out), `"level":"warn"`) {
			t.Errorf("%s: Caddy warns:\n%s", file, out)
		}
		if out, err := caddytest.Command(dir, "fmt", "--diff", path).CombinedOutput(); err != nil {
			t.Errorf("%s is not formatted: %v\n%s", file, err, out)
		}
	}
}

// TestExamplesSayHowToTryThem: each begins with a comment, which has the
// commands, and a test drives it.
func TestExamplesSayHowToTryThem(t *testing.T) {
	tests := ""
	files, err := filepath.Glob("examples*_test.go")
	must(t, "find tests", err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		tests += string(text)
	}
	for _, file := range exampleFiles(t) {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		comment := ""
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "#") {
				break
			}
			comment += line
		}
		if !strings.Contains(comment, "caddy run --config "+file) && !strings.Contains(file, "migrating") || !strings.Contains(comment, "curl ") {
			t.Errorf("the comment at the top of %s does not say how to run it and try it with curl", file)
		}
		if name := strings.TrimSuffix(strings.TrimPrefix(file, "examples/"), ".caddyfile"); !strings.Contains(tests, `"`+name+`"`) {
			t.Errorf("no test drives %s", file)
		}
	}
}

var (
	sitePort    = regexp.MustCompile(`(?m)^:80\d\d \{`)
	standInPort = regexp.MustCompile(`(?m)^:9000 \{`)
	adminLine   = regexp.MustCompile(`(?m)^\tadmin .*\n`)
	globalBlock = regexp.MustCompile(`(?m)^\{\n`)
)

// startExample runs Caddy with an example, on ports that are free. What is to
// be replaced besides comes in pairs.
func startExample(t *testing.T, name string, replace ...string) *caddytest.Caddy {
	t.Helper()
	b, err := os.ReadFile("examples/" + name + ".caddyfile")
	must(t, "read", err)
	text := adminLine.ReplaceAllString(string(b), "")
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(text, replace[i]) {
			t.Fatalf("example %s has no %s", name, replace[i])
		}
		text = strings.ReplaceAll(text, replace[i], replace[i+1])
	}
	text = sitePort.ReplaceAllString(text, "{{site}} {")
	standIn := ""
	if standInPort.MatchString(text) {
		standIn = caddytest.FreeAddr(t)
		text = standInPort.ReplaceAllString(text, "http://"+standIn+" {")
		text = strings.ReplaceAll(text, "localhost:9000", standIn)
	}
	if globalBlock.MatchString(text) {
		text = globalBlock.ReplaceAllString(text, "{\n\t{{global}}\n")
	} else {
		text = "{\n\t{{global}}\n}\n" + text
	}
	c := caddytest.Start(t, text)
	if standIn != "" {
		caddytest.AwaitListening(t, standIn)
	}
	return c
}

// statuses are those of n requests, as text: "200 200 429".
func statuses(c *caddytest.Caddy, n int, path string, headers ...string) string {
	c.T.Helper()
	return repeated(n, func() *http.Response { return c.Get(path, headers...) })
}

// repeated are the statuses of n requests.
func repeated(n int, send func() *http.Response) string {
	texts := make([]string, n)
	for i := range texts {
		texts[i] = fmt.Sprint(send().StatusCode)
	}
	return strings.Join(texts, " ")
}

// many is a text of n times a status.
func many(n, status int) string { return strings.TrimSpace(strings.Repeat(fmt.Sprint(status, " "), n)) }

// clientAt is a client with another address of this machine.
func clientAt(ip string) *http.Client {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	return &http.Client{Timeout: caddytest.Client.Timeout, Transport: &http.Transport{
		DialContext: dialer.DialContext, DisableKeepAlives: true,
	}}
}

// send sends a request with headers given as "Name: value". The body of the
// response is not read.
func send(t *testing.T, from *http.Client, method, url string, headers ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, http.NoBody)
	must(t, "request", err)
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	resp, err := from.Do(req)
	must(t, method+" "+url, err)
	must(t, "close", resp.Body.Close())
	return resp
}
