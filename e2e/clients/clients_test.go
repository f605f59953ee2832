//go:build build

// Package clients tries refusals with HTTP clients of npm and of Go that people use. Its build tag
// keeps it out of `go test ./...`, because it loads the clients; `make contrib` runs it. It needs node
// and npm. The Go clients are in a module of their own.
package clients

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	_ "github.com/shardlimit/caddy-shardlimit/redisstore"
)

var must = caddytest.Must

func want[T comparable](what string, got, want T) error { return caddytest.Want(what, got, want) }

// modes are the values of the option headers.
var modes = []string{"github", "ietf", "both", "none"}

// clients are those that call.mjs knows, and the command in call.
var clients = []struct {
	name string
	// obeys are the modes in which it comes again until it is served.
	obeys []string
	// gets are the statuses that it gets in the other modes, in which it does not know when.
	gets string
	// early is how often it comes too early, because it reads no header.
	early int
}{
	{"octokit throttling", []string{"github", "both"}, "429", 0},
	// The plugin retry waits for 1, 4 and 9 seconds, also where the other would know the time.
	{"octokit retry, throttling", modes, "", 2},
	{"got", modes, "", 0},
	{"ky", modes, "", 0},
	{"axios", modes, "", 0},
	{"undici", modes, "", 0},
	{"p-retry", modes, "", 0},
	// It reads RateLimit before X-RateLimit-*, but not in the form of the draft since version 8.
	{"ratelimit-header-parser", []string{"github"}, "429", 0},
	{"go-github", []string{"github", "both"}, "429 429 429", 0},
	{"go-retryablehttp", modes, "", 0},
}

var goClients = []string{"go-github", "go-retryablehttp"}

func TestMain(m *testing.M) { caddytest.Main(m) }

// install loads the clients into a directory of its own, in the versions of package-lock.json and
// go.sum.
func install(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, file := range []string{"package.json", "package-lock.json", "call.mjs"} {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		must(t, "write", os.WriteFile(dir+"/"+file, text, 0o600))
	}
	npm := exec.CommandContext(t.Context(), "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
	npm.Dir = dir
	out, err := npm.CombinedOutput()
	must(t, string(out), err)
	build := exec.CommandContext(t.Context(), "go", "build", "-o", dir+"/call", ".")
	build.Dir = "call"
	out, err = build.CombinedOutput()
	must(t, string(out), err)
	return dir
}

// recorder is a proxy that notes the answers that each client gets, and when.
type recorder struct {
	*httptest.Server
	// before, which may be nil, is called with the name of a client that comes for the first time.
	before  func(client string)
	mu      sync.Mutex
	answers map[string][]answer
}

type answer struct {
	status int
	at     time.Time
}

func record(t *testing.T, to string) *recorder {
	t.Helper()
	target, err := url.Parse(to)
	must(t, "parse", err)
	r := &recorder{answers: map[string][]answer{}}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ModifyResponse = func(resp *http.Response) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		name := resp.Request.Header.Get("X-Key")
		r.answers[name] = append(r.answers[name], answer{resp.StatusCode, time.Now()})
		return nil
	}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		client := req.Header.Get("X-Key")
		r.mu.Lock()
		isFirst := len(r.answers[client]) == 0
		r.mu.Unlock()
		if isFirst && r.before != nil {
			r.before(client)
		}
		proxy.ServeHTTP(w, req)
	}))
	t.Cleanup(r.Close)
	return r
}

// of returns the answers to a client, and the shortest time between two of them.
func (r *recorder) of(client string) (statuses string, pause time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pause = time.Hour
	for i, a := range r.answers[client] {
		statuses += fmt.Sprint(a.status, " ")
		if i > 0 {
			pause = min(pause, a.at.Sub(r.answers[client][i-1].at))
		}
	}
	return strings.TrimSpace(statuses), pause
}

// calls runs a client, and returns the status with which it ends.
func calls(t *testing.T, dir, client, to string, headers ...string) string {
	t.Helper()
	command := []string{"node", dir + "/call.mjs"}
	if slices.Contains(goClients, client) {
		command = []string{dir + "/call"}
	}
	command = append(append(command, client, to), headers...)
	call := exec.CommandContext(t.Context(), command[0], command[1:]...)
	var complaints strings.Builder
	call.Stderr = &complaints
	out, err := call.Output()
	must(t, client+": "+complaints.String(), err)
	return strings.TrimSpace(string(out))
}

// TestClientsObeyRefusals: a client that is refused comes again once, when the request fits, whichever
// header it obeys; and one that reads none, as often as its patience needs. On a busy machine one that comes
// late is refused fewer times, but not each time. Clients do not see the algorithm: each mode has another one,
// and all of them with `make check-all`.
func TestClientsObeyRefusals(t *testing.T) {
	t.Parallel()
	dir := install(t)
	var asExpected sync.Map // the clients that got as many refusals as they can
	// More clients at a time would delay each other's requests.
	slots := make(chan struct{}, 16)
	t.Cleanup(func() {
		for _, client := range clients {
			if _, is := asExpected.Load(client.name); !is {
				t.Errorf("%s was never refused %d times", client.name, 1+client.early)
			}
		}
	})
	for i, headers := range modes {
		algorithms := []string{"fixed_window", "sliding_window", "sliding_log", "gcra"}
		if !sweep.IsWhole() {
			algorithms = algorithms[i : i+1]
		}
		for _, algorithm := range algorithms {
			t.Run(headers+", "+algorithm, func(t *testing.T) {
				t.Parallel()
				c := caddytest.Start(t, fmt.Sprintf("{\n{{global}}\n}\n{{site}} {\nrate_limit {\nzone api {\nkey {header.X-Key}\nevents 3\nwindow 8s\nalgorithm %s\n}\nheaders %s\n}\nrespond ok\n}\n", algorithm, headers))
				r := record(t, c.URL)
				// However long a client takes to start, its window is open and full when its first request arrives.
				r.before = func(client string) {
					for status := http.StatusOK; status == http.StatusOK; {
						resp, err := c.Try("/", "X-Key: "+client)
						if err != nil {
							t.Error(err)
							return
						}
						status = resp.StatusCode
					}
				}
				for _, client := range clients {
					if !slices.Contains(client.obeys, headers) {
						continue
					}
					t.Run(client.name, func(t *testing.T) {
						t.Parallel() // it spends its time waiting
						slots <- struct{}{}
						defer func() { <-slots }()
						must(t, client.name, want("status", calls(t, dir, client.name, r.URL, "X-Key", client.name), "200"))
						statuses, _ := r.of(client.name)
						refused := strings.Count(statuses, "429 ")
						if refused > 1+client.early || statuses != strings.Repeat("429 ", refused)+"200" {
							t.Errorf("%s gets %s", client.name, statuses)
						}
						if refused > client.early {
							asExpected.Store(client.name, true)
						}
					})
				}
			})
		}
	}
}

// TestClientsInEachMode: in each mode of headers each client gets what is left at once, the last event
// too, and one that does not understand the refusal says 429. ratelimit-header-parser understands
// `github` alone.
func TestClientsInEachMode(t *testing.T) {
	t.Parallel()
	dir := install(t)
	for _, headers := range modes {
		t.Run(headers, func(t *testing.T) {
			t.Parallel()
			c := caddytest.Start(t, fmt.Sprintf("{\n{{global}}\n}\n{{site}} {\nrate_limit {\nzone api {\nkey {header.X-Key}\nevents 2\nwindow 1h\nalgorithm fixed_window\n}\nheaders %s\n}\nrespond ok\n}\n", headers))
			reads(t, dir, c, headers)
			r := record(t, c.URL)
			for _, client := range clients {
				for _, got := range []string{"200", "200 200"} {
					must(t, client.name, want("status", calls(t, dir, client.name, r.URL, "X-Key", client.name), "200"))
					answers, _ := r.of(client.name)
					must(t, client.name, want("answers", answers, got))
				}
				if slices.Contains(client.obeys, headers) {
					continue
				}
				must(t, client.name, want("status", calls(t, dir, client.name, r.URL, "X-Key", client.name), "429"))
				refused, _ := r.of(client.name)
				must(t, client.name, want("answers", refused, "200 200 "+client.gets))
			}
		})
	}
}

// reads checks what ratelimit-header-parser reads from allowed and refused answers. From RateLimit,
// which it prefers to X-RateLimit-*, it reads no number.
func reads(t *testing.T, dir string, c *caddytest.Caddy, headers string) {
	t.Helper()
	first := c.Get("/", "X-Key: parsed")
	want := map[string]string{"github": "2 2 0 " + first.Header.Get("X-RateLimit-Reset"), "none": "nothing", "ietf": "NaN NaN NaN NaN", "both": "NaN NaN NaN NaN"}[headers]
	for _, answer := range []string{"allowed", "refused"} {
		if got := calls(t, dir, "parsed", c.URL, "X-Key", "parsed"); got != want {
			t.Errorf("%s: reads %s, want %s", answer, got, want)
		}
	}
	if status := c.Get("/", "X-Key: parsed").StatusCode; status != http.StatusTooManyRequests {
		t.Errorf("status %d", status)
	}
}

// hold holds a slot until the test ends. The request of [caddytest.SlowBackend.Hold] would be given up after
// [caddytest.Patience].
func hold(t *testing.T, backend *caddytest.SlowBackend, c *caddytest.Caddy) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.URL+"/held", nil)
	must(t, "request", err)
	go func() {
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	backend.Await(t)
}

// TestClientsDoNotSpin while a slot is taken, or where the limit is 0.
func TestClientsDoNotSpin(t *testing.T) {
	t.Parallel()
	dir := install(t)
	for name, test := range map[string]struct {
		zone  string
		quota string
		pause time.Duration
	}{
		"concurrency": {"events 1\nalgorithm concurrency", "1", 900 * time.Millisecond},
		"limit of 0":  {"events {header.X-Quota} 1\nwindow 3s", "0", 100 * time.Millisecond},
	} {
		for _, headers := range []string{"github", "both"} {
			t.Run(name+", "+headers, func(t *testing.T) {
				t.Parallel()
				backend := caddytest.StartSlowBackend(t)
				c := caddytest.Start(t, fmt.Sprintf("{\n{{global}}\n}\n{{site}} {\nrate_limit {\nzone api {\nkey static\n%s\n}\nheaders %s\n}\nreverse_proxy %s\n}\n", test.zone, headers, backend.Server.Listener.Addr()))
				if name == "concurrency" {
					hold(t, backend, c)
				}
				r := record(t, c.URL)
				for _, client := range clients {
					if !slices.Contains(client.obeys, headers) {
						continue
					}
					t.Run(client.name, func(t *testing.T) {
						t.Parallel() // it spends its time waiting
						must(t, client.name, want("status", calls(t, dir, client.name, r.URL, "X-Key", client.name, "X-Quota", test.quota), "429"))
						if statuses, pause := r.of(client.name); pause < test.pause || strings.Trim(statuses, "429 ") != "" {
							t.Errorf("%s gets %s, at least %v apart", client.name, statuses, pause)
						}
					})
				}
			})
		}
	}
}
