package examples

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// exampleFiles returns all Caddyfiles in examples.
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

// TestExamplesAreFormattedAndLoad without a warning.
func TestExamplesAreFormattedAndLoad(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	for _, file := range exampleFiles(t) {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		isFormattedAndLoads(t, file, string(text))
	}
}

// isFormattedAndLoads checks a whole Caddyfile.
func isFormattedAndLoads(t *testing.T, name, text string) {
	t.Helper()
	config, adaptWarnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": name})
	must(t, name, err)
	warnings, err := caddytest.Warnings(t, config)
	if err != nil || warnings != "" || len(adaptWarnings) > 0 {
		t.Errorf("%s: %v, warnings %v\n%s", name, err, adaptWarnings, warnings)
	}
	if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
		t.Errorf("%s is not formatted: want\n%s", name, formatted)
	}
}

// TestExamplesSayHowToTryThem checks that each example begins with a comment that has the commands,
// and that a test drives it.
func TestExamplesSayHowToTryThem(t *testing.T) {
	tests := ""
	files, err := filepath.Glob("examples/*_test.go")
	must(t, "find the tests", err)
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

// startExample runs Caddy with an example on free ports. replace has pairs of old and new texts.
func startExample(t *testing.T, name string, replace ...string) *caddytest.Caddy {
	t.Helper()
	b, err := os.ReadFile("examples/" + name + ".caddyfile")
	must(t, "read", err)
	text := hash.ReplaceAllLiteralString(adminLine.ReplaceAllString(string(b), ""), cheapHash)
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

// hash matches those of passwords in shipped configs, all of which are "secret".
var hash = regexp.MustCompile(`\$2a\$10\$[^\s"]+`)

// cheapHash is a hash of that, which costs a sixtieth of theirs: they would take most of the tests' time.
const cheapHash = "$2a$04$kMqg4f0UHb4lJgHjb4Qlc.7iTnK6Uha49.FmnFtUFQyUFt37Ktmpm"

// statuses returns those of n requests, as text: "200 200 429".
func statuses(c *caddytest.Caddy, n int, path string, headers ...string) string {
	c.T.Helper()
	return repeated(n, func() *http.Response { return c.Get(path, headers...) })
}

// repeated returns the statuses of n requests.
func repeated(n int, send func() *http.Response) string {
	texts := make([]string, n)
	for i := range texts {
		texts[i] = fmt.Sprint(send().StatusCode)
	}
	return strings.Join(texts, " ")
}

// many repeats a status n times.
func many(n, status int) string { return strings.TrimSpace(strings.Repeat(fmt.Sprint(status, " "), n)) }

// clientAt returns a client with this local address.
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
		req.Header.Add(name, value)
	}
	resp, err := from.Do(req)
	must(t, method+" "+url, err)
	must(t, "close", resp.Body.Close())
	return resp
}

func loginAs(user, password string) string {
	return "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// body reads the body of a response to get.
func body(t *testing.T, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	must(t, "read", err)
	return string(b)
}

func TestExamplePerUser(t *testing.T) {
	c := startExample(t, "per_user")
	alice, bob := loginAs("alice", "secret"), loginAs("bob", "secret")
	must(t, "alice", want("statuses", statuses(c, 6, "/", alice), many(5, 200)+" 429"))
	resp := c.Get("/", bob)
	must(t, "bob", errors.Join(want("status", resp.StatusCode, 200), want("remaining", caddytest.Remaining(resp), "4"), want("body", body(t, resp), "Hello, bob.")))
	must(t, "no login", want("statuses", statuses(c, 6, "/"), many(6, 401)))
	must(t, "alice from elsewhere", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL, alice).StatusCode, 429))
}

func TestExamplePerPlan(t *testing.T) {
	c := startExample(t, "per_plan")
	for _, test := range []struct {
		header string
		events int
	}{{"X-Api-Key: key-of-alice", 20}, {"X-Api-Key: key-of-bob", 10}, {"X-Api-Key: made-up", 3}} {
		must(t, test.header, want("statuses", statuses(c, test.events+1, "/", test.header), many(test.events, 200)+" 429"))
	}
	must(t, "another made-up key", want("status", c.Get("/", "X-Api-Key: other").StatusCode, 429))
	must(t, "no key", want("status", c.Get("/").StatusCode, 429))
	must(t, "another address", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL).StatusCode, 200))
}

func TestExamplePlanOfUser(t *testing.T) {
	// Nothing comes back meanwhile.
	c := startExample(t, "plan_of_user", "window 1h", "window 1000h")
	for user, test := range map[string]struct {
		requests int
		want     string
	}{
		"alice": {21, many(20, 200) + " 429"},
		"bob":   {6, many(5, 200) + " 429"},
		"carol": {30, many(30, 200)},
		"dave":  {2, many(2, 429)},
	} {
		must(t, user, want("statuses", statuses(c, test.requests, "/", loginAs(user, "secret")), test.want))
	}
	must(t, "no login", want("status", c.Get("/").StatusCode, 401))
}

func TestExamplePlanFromAuth(t *testing.T) {
	c := startExample(t, "plan_from_auth")
	must(t, "alice", want("statuses", statuses(c, 4, "/", "X-Api-Key: key-of-alice"), many(3, 200)+" 429"))
	must(t, "alice, who claims to be another", want("status", c.Get("/", "X-Api-Key: key-of-alice", "X-Client: carol", "X-Quota: 100").StatusCode, 429))
	must(t, "bob", want("statuses", statuses(c, 30, "/", "X-Api-Key: key-of-bob"), many(30, 200)))
	must(t, "a made-up key", want("status", c.Get("/", "X-Api-Key: made-up").StatusCode, 401))
}

func TestExampleBruteForce(t *testing.T) {
	c := startExample(t, "brute_force")
	good, bad := loginAs("alice", "secret"), loginAs("alice", "guess")
	must(t, "good logins", want("statuses", statuses(c, 7, "/login", good), many(7, 200)))
	must(t, "browsers that ask", want("statuses", statuses(c, 7, "/login"), many(7, 401)))
	must(t, "guesses", want("statuses", statuses(c, 4, "/login", bad), many(4, 401)))
	must(t, "a good login that forgives them", want("status", c.Get("/login", good).StatusCode, 200))
	must(t, "guesses", want("statuses", statuses(c, 6, "/login", bad), many(5, 401)+" 429"))
	must(t, "a good login from there", want("status", c.Get("/login", good).StatusCode, 429))
	must(t, "a good login from elsewhere", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL+"/login", good).StatusCode, 200))
	must(t, "other pages", want("statuses", statuses(c, 7, "/"), many(7, 200)))
	patient := clientAt("127.0.0.3")
	ask := func(user string) int {
		return send(t, patient, http.MethodGet, c.URL+"/login", user).StatusCode
	}
	for i := range 20 {
		must(t, "a guess of somebody with an account", want("status", ask(bad), 401))
		if i%4 == 3 && i < 19 {
			must(t, "a login of the same person", want("status", ask(good), 200))
		}
	}
	must(t, "the next guess", want("status", ask(bad), 429))
}

func TestExampleIPv6(t *testing.T) {
	c := startExample(t, "ipv6")
	for _, address := range []string{"::1", "::2", "aaaa::1", "ffff:ffff:ffff:ffff", "::3"} {
		address = strings.Replace("X-Forwarded-For: 2001:db8:0:1:"+address, ":::", "::", 1)
		must(t, address, want("status", c.Get("/", address).StatusCode, 200))
	}
	must(t, "the sixth of the network", want("status", c.Get("/", "X-Forwarded-For: 2001:db8:0:1::4").StatusCode, 429))
	must(t, "another network", want("remaining", caddytest.Remaining(c.Get("/", "X-Forwarded-For: 2001:db8:0:2::1")), "4"))
	must(t, "IPv4", want("remaining", caddytest.Remaining(c.Get("/", "X-Forwarded-For: 192.0.2.1")), "4"))
	must(t, "its neighbour", want("remaining", caddytest.Remaining(c.Get("/", "X-Forwarded-For: 192.0.2.2")), "4"))
}

func TestExampleBurstAndQuota(t *testing.T) {
	// Nothing of the burst comes back meanwhile.
	c := startExample(t, "burst_and_quota", "window 1s", "window 1000h")
	must(t, "a burst", want("statuses", statuses(c, 5, "/", "X-Api-Key: k"), many(5, 200)))
	resp := c.Get("/", "X-Api-Key: k")
	must(t, "one more", errors.Join(want("status", resp.StatusCode, 429), want("zone", resp.Header.Get("X-RateLimit-Resource"), "burst")))
	must(t, "another key", want("status", c.Get("/", "X-Api-Key: other").StatusCode, 200))

	// The day may end in between.
	for day := -1; day != time.Now().UTC().YearDay(); {
		day = time.Now().UTC().YearDay()
		c := startExample(t, "burst_and_quota", "burst 5", "burst 500")
		got := statuses(c, 15, "/", "X-Api-Key: k")
		resp := c.Get("/", "X-Api-Key: k")
		if day == time.Now().UTC().YearDay() {
			must(t, "a day", errors.Join(want("statuses", got, many(15, 200)), want("the next", resp.StatusCode, 429), want("zone", resp.Header.Get("X-RateLimit-Resource"), "day")))
			must(t, "another key", want("status", c.Get("/", "X-Api-Key: other").StatusCode, 200))
		}
	}
}

// commandHandler stands in for exec of github.com/mholt/caddy-events-exec, which is no dependency of
// this module: it runs a command, with placeholders in its arguments.
type commandHandler struct {
	Command string   `json:"command"`
	Args    []string `json:"args"`
}

func init() { caddy.RegisterModule(commandHandler{}) }

// CaddyModule implements [caddy.Module].
func (commandHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.exec", New: func() caddy.Module { return new(commandHandler) }}
}

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler].
func (h *commandHandler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&h.Command) {
		return d.ArgErr()
	}
	h.Args = d.RemainingArgs()
	return nil
}

// Handle implements caddyevents.Handler.
func (h *commandHandler) Handle(ctx context.Context, _ caddy.Event) error {
	repl := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	args := slices.Clone(h.Args)
	for i := range args {
		args[i] = repl.ReplaceAll(args[i], "")
	}
	return exec.Command(h.Command, args...).Run()
}

// TestExampleNearLimit runs the command of the example, which writes its arguments to a file here.
func TestExampleNearLimit(t *testing.T) {
	dir := t.TempDir()
	command, told := filepath.Join(dir, "notify"), filepath.Join(dir, "told")
	must(t, "write the command", os.WriteFile(command, []byte("#!/bin/sh\necho \"$@\" >>"+told+"\n"), 0o700))
	c := startExample(t, "near_limit", "/usr/local/bin/notify", command)
	must(t, "requests", want("statuses", statuses(c, 10, "/"), many(10, 200)))
	eventually(t, "it is told", func() error {
		text, _ := os.ReadFile(told)
		return errors.Join(
			want("near", strings.Count(string(text), "near api 127.0.0.1 8 of 10\n"), 1),
			want("would refuse", strings.Count(string(text), "would_refuse trial 127.0.0.1\n"), 5), want("lines", strings.Count(string(text), "\n"), 6))
	})
}

func TestExampleLLMGateway(t *testing.T) {
	c := startExample(t, "llm_gateway")
	alice, bob := "Authorization: Bearer alice", "Authorization: Bearer bob"
	// charged waits until the end of a response has been charged.
	charged := func(client string, used int) {
		t.Helper()
		eventually(t, "it is charged", func() error {
			_, text := c.AdminCall(http.MethodGet, "/rate_limit/buckets/tokens_per_minute?key=Bearer+"+client, "", "")
			return want("charged in "+text, strings.Contains(text, fmt.Sprintf(`"used":%d,`, used)), true)
		})
	}
	for i, left := range []string{"4000", "3100", "2200"} {
		resp := c.Get("/v1/chat", alice)
		must(t, "a chat", errors.Join(want("status", resp.StatusCode, 200), want("remaining before it", caddytest.Remaining(resp), left)))
		charged("alice", 900*(i+1))
	}
	// 1300 are left, and a request counts as 1500 until its response has ended.
	resp := c.Get("/v1/chat", alice)
	must(t, "a chat too many", errors.Join(want("status", resp.StatusCode, 429), want("zone", resp.Header.Get("X-RateLimit-Resource"), "tokens_per_minute")))
	for i, left := range []string{"4000", "2790", "1580"} {
		resp := c.Get("/v1/stream", bob)
		must(t, "a stream", errors.Join(want("status", resp.StatusCode, 200), want("remaining before it", caddytest.Remaining(resp), left)))
		charged("bob", 1210*(i+1))
	}
	must(t, "a stream too many", want("status", c.Get("/v1/stream", bob).StatusCode, 429))
}

func TestExampleGraphQLCost(t *testing.T) {
	c := startExample(t, "graphql_cost")
	for _, left := range []string{"14", "7", "0"} {
		resp := c.Get("/graphql")
		must(t, "query", errors.Join(want("status", resp.StatusCode, 200), want("remaining", caddytest.Remaining(resp), left), want("X-Cost", resp.Header.Get("X-Cost"), "")))
	}
	must(t, "a query without points", want("status", c.Get("/graphql").StatusCode, 429))
	must(t, "another key", want("remaining", caddytest.Remaining(c.Get("/graphql", "X-Api-Key: k")), "14"))
	must(t, "another path", want("remaining", caddytest.Remaining(c.Get("/")), ""))
}

func TestExampleAllowlist(t *testing.T) {
	c := startExample(t, "allowlist")
	must(t, "others", want("statuses", statuses(c, 6, "/"), many(5, 200)+" 429"))
	must(t, "health checks", want("statuses", statuses(c, 7, "/health"), many(7, 200)))
	listed := clientAt("127.0.0.2")
	must(t, "listed", want("statuses", repeated(7, func() *http.Response { return send(t, listed, http.MethodGet, c.URL) }), many(7, 200)))
	must(t, "listed", want("remaining", caddytest.Remaining(send(t, listed, http.MethodGet, c.URL)), ""))
}

func TestExampleErrorPage(t *testing.T) {
	c := startExample(t, "error_page")
	must(t, "requests that fit", want("statuses", statuses(c, 2, "/"), "200 200"))
	resp := c.Get("/", "Accept: text/html,application/xhtml+xml")
	wait := resp.Header.Get("Retry-After")
	page := body(t, resp)
	must(t, "page", errors.Join(
		want("status", resp.StatusCode, 429),
		want("type", resp.Header.Get("Content-Type"), "text/html; charset=utf-8"),
		want("saying how long to wait", wait != "" && strings.Contains(page, "again in "+wait+" seconds"), true),
		want("zone", resp.Header.Get("X-RateLimit-Resource"), "page"),
	))
	if !strings.HasPrefix(page, "<!doctype html>") {
		t.Errorf("the page is %s", page)
	}
	resp = c.Get("/")
	var answer struct {
		Error, Zone string
		Wait        int
	}
	must(t, "JSON", json.Unmarshal([]byte(body(t, resp)), &answer))
	must(t, "JSON", errors.Join(want("status", resp.StatusCode, 429), want("type", resp.Header.Get("Content-Type"), "application/json"),
		want("error", answer.Error, "rate_limited"), want("zone", answer.Zone, "page"), want("wait", fmt.Sprint(answer.Wait), resp.Header.Get("Retry-After"))))
}

func TestExampleBrowserClients(t *testing.T) {
	c := startExample(t, "browser_clients")
	origin := "Origin: https://app.example.com"
	for range 7 {
		resp := send(t, c.Client, http.MethodOptions, c.URL, origin, "Access-Control-Request-Method: GET")
		must(t, "preflight", errors.Join(want("status", resp.StatusCode, 204), want("remaining", caddytest.Remaining(resp), ""),
			want("origin", resp.Header.Get("Access-Control-Allow-Origin"), "https://app.example.com"),
			want("methods", resp.Header.Get("Access-Control-Allow-Methods"), "GET, POST, PUT, DELETE")))
	}
	for _, status := range []int{200, 200, 200, 200, 200, 429} {
		resp := c.Get("/", origin)
		must(t, "request", want("status", resp.StatusCode, status))
		exposed := strings.Split(resp.Header.Get("Access-Control-Expose-Headers"), ", ")
		for name := range resp.Header {
			if name = http.CanonicalHeaderKey(name); strings.HasPrefix(name, "X-Ratelimit-") || name == "Retry-After" {
				found := false
				for _, e := range exposed {
					found = found || http.CanonicalHeaderKey(e) == name
				}
				must(t, name, want("being exposed", found, true))
			}
		}
		must(t, "request", want("origin", resp.Header.Get("Access-Control-Allow-Origin"), "https://app.example.com"))
	}
	must(t, "OPTIONS that is no preflight", want("status", send(t, c.Client, http.MethodOptions, c.URL, origin).StatusCode, 429))
}

// TestExampleOutgoing checks that concurrent calls leave half a second apart, and that those that
// would wait too long are refused at once.
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
	c := startExample(t, "outgoing", "https://api.github.com", partner.URL, "max_wait 30s", "max_wait 3s")
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

	// Six fit into three seconds.
	ctx, leave := context.WithCancel(t.Context())
	type refusal struct {
		retryAfter string
		after      time.Duration
	}
	refused := make(chan refusal, 20)
	var clients sync.WaitGroup
	for range cap(refused) {
		clients.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/zen", http.NoBody)
			if err != nil {
				return
			}
			sent := time.Now()
			if resp, err := c.Client.Do(req); err == nil {
				_ = resp.Body.Close()
				if resp.StatusCode == http.StatusTooManyRequests {
					refused <- refusal{resp.Header.Get("Retry-After"), time.Since(sent)}
				}
			}
		})
	}
	for range 5 {
		select {
		case r := <-refused:
			// A call may be refused when some of its three seconds are over.
			seconds, err := strconv.Atoi(r.retryAfter)
			whole := time.Duration(seconds)*time.Second + r.after
			must(t, "refusal", errors.Join(err, want("waiting for more than three seconds", whole > 3*time.Second, true)))
		case <-time.After(caddytest.Patience):
			t.Fatal("calls that would wait for more than three seconds are not refused")
		}
	}
	leave()
	clients.Wait()
}
