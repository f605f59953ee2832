package examples

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestMigratingFromCaddyRatelimit checks that a config for caddy-ratelimit runs unchanged, and that
// its migrated form does the same.
func TestMigratingFromCaddyRatelimit(t *testing.T) {
	drive := func(t *testing.T, c *caddytest.Caddy) {
		t.Helper()
		must(t, "requests", want("statuses", statuses(c, 5, "/"), "200 200 200 429 429"))
		refused := c.Get("/")
		must(t, "refusal", errors.Join(want("zone", refused.Header.Get("X-RateLimit-Resource"), "each"),
			want("having Retry-After", refused.Header.Get("Retry-After") != "", true)))
		must(t, "another address", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL).StatusCode, 200))
		for _, zone := range []string{"everybody", "each"} {
			name := `caddy_rate_limit_requests_total{zone="` + zone + `"}`
			must(t, name, want("being counted", c.Metric(name) != "", true))
		}
	}
	for _, name := range []string{"migrating/caddy_ratelimit_before", "migrating/caddy_ratelimit_after"} {
		t.Run(name, func(t *testing.T) { drive(t, startExample(t, name)) })
	}
	t.Run("JSON", func(t *testing.T) {
		c := caddytest.Start(t, "{\n\t{{global}}\n}\n{{site}} {\n\trespond none\n}\n")
		text, err := os.ReadFile("examples/migrating/caddy_ratelimit_before.json")
		must(t, "read", err)
		var config map[string]any
		must(t, "unmarshal", json.Unmarshal([]byte(strings.Replace(string(text), ":8080", c.Addr, 1)), &config))
		config["admin"] = map[string]any{"listen": c.Admin, "config": map[string]any{"persist": false}}
		text, err = json.Marshal(config)
		must(t, "marshal", err)
		if status, answer := c.AdminCall(http.MethodPost, "/load", "application/json", string(text)); status != http.StatusOK {
			t.Fatalf("load: %d %s", status, answer)
		}
		c.AwaitServers()
		drive(t, c)
	})
}

// refusal waits for a refusal for that reason in the log of a Caddy.
func refusal(t *testing.T, c *caddytest.Caddy, reason string) (line string) {
	t.Helper()
	eventually(t, "a refusal is in the log", func() error {
		for l := range strings.Lines(c.Logs.String()) {
			if strings.Contains(l, `"msg":"rate limit exceeded"`) && strings.Contains(l, `"reason":"`+reason+`"`) {
				line = strings.TrimSpace(l)
			}
		}
		return want("a refusal being in the log", line != "", true)
	})
	return line
}

// TestFiltersReadRefusals checks the filter for fail2ban and the parser for CrowdSec against refusals in
// Caddy's log: both find the client's address, and no key makes another of it. Debian's fail2ban 1.0.2 and
// CrowdSec 1.4.6 read these logs with them, and ban; the test does not run them. A penalty may be for
// what others did, so neither filter takes its refusals.
func TestFiltersReadRefusals(t *testing.T) {
	t.Parallel()
	filter, err := os.ReadFile("examples/migrating/fail2ban_filter.conf")
	must(t, "read", err)
	expression := regexp.MustCompile(`(?m)^failregex = (.*)$`).FindStringSubmatch(string(filter))
	must(t, "the filter", want("having an expression", expression != nil, true))
	failregex, err := regexp.Compile(strings.Replace(expression[1], "<ADDR>", `([0-9A-Fa-f:.]+)`, 1))
	must(t, "compile", err)
	parser, err := os.ReadFile("examples/migrating/crowdsec_parser.yaml")
	must(t, "read", err)
	fields := regexp.MustCompile(`JsonExtract\(evt\.Line\.Raw, '(\w+)'\)`).FindAllStringSubmatch(string(parser), -1)
	must(t, "the parser", want("fields", len(fields), 5))

	var documented map[string]any
	for _, block := range codeBlocks(t, "docs/migrating.md") {
		if json.Valid([]byte(block)) {
			must(t, block, errors.Join(json.Unmarshal([]byte(block), &documented), want("being found", failregex.MatchString(block), true)))
		}
	}

	must(t, "the parser", want("taking those over the limit only", strings.Contains(string(parser), `JsonExtract(evt.Line.Raw, 'reason') == 'over_limit'`), true))

	const (
		example = "migrating/refusals_for_fail2ban"
		file    = "\tlog refusals {\n\t\toutput file refusals.log\n\t\tinclude http.handlers.rate_limit.refusals\n\t}\n"
	)
	made := `","remote_ip":"192.0.2.1","x":"`
	for name, c := range map[string]*caddytest.Caddy{
		"by address": startExample(t, example, file, ""),
		"by a key":   startExample(t, example, file, "", "key {client_ip}", "key {header.X-Api-Key}"),
	} {
		must(t, name, want("statuses", statuses(c, 4, "/", "X-Api-Key: "+made), "200 200 200 429"))
		line := refusal(t, c, "over_limit")
		found := failregex.FindStringSubmatch(line)
		must(t, name+": "+line, want("being found", found != nil, true))
		must(t, name+": "+line, want("address", found[1], "127.0.0.1"))
		var entry map[string]any
		must(t, name, json.Unmarshal([]byte(line), &entry))
		for _, field := range fields {
			must(t, name+": "+line, want("having "+field[1], entry[field[1]] != nil, true))
		}
		must(t, name, want("address", entry["remote_ip"].(string), "127.0.0.1"))
		must(t, name, want("logger", entry["logger"].(string), "http.handlers.rate_limit.refusals"))
		must(t, name, want("fields", fmt.Sprint(slices.Sorted(maps.Keys(entry))), fmt.Sprint(slices.Sorted(maps.Keys(documented)))))
	}
	penalized := startExample(t, example, file, "", "events 3", "events 3\n\t\t\tpenalty 1h")
	must(t, "penalty", want("statuses", statuses(penalized, 4, "/"), "200 200 200 429"))
	line := refusal(t, penalized, "penalty")
	must(t, line, want("being found", failregex.MatchString(line), false))
}

// TestWarningsStayInTheDefaultLog: Caddy takes what a log includes out of its default log.
func TestWarningsStayInTheDefaultLog(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("examples/migrating/refusals_for_fail2ban.caddyfile")
	must(t, "read", err)
	config, err := adapt(string(text))
	must(t, "adapt", err)
	var adapted struct {
		Logging struct {
			Logs map[string]struct{ Exclude []string }
		}
	}
	must(t, "unmarshal", json.Unmarshal(config, &adapted))
	must(t, "the default log", want("excluded", fmt.Sprint(adapted.Logging.Logs["default"].Exclude), "[http.handlers.rate_limit.refusals]"))
}

// TestHandlersBehindOneAnother: what a later handler refuses, an earlier one has not counted.
func TestHandlersBehindOneAnother(t *testing.T) {
	t.Parallel()
	for _, charge := range []string{"after", "before"} {
		c := caddytest.Start(t, `{
	{{global}}
}
{{site}} {
	route {
		rate_limit {
			zone first {
				key {client_ip}
				events 10
				window 1h
				charge `+charge+`
				count_status all
			}
		}
		rate_limit {
			zone second {
				key {client_ip}
				events 3
				window 1h
			}
			headers none
		}
		respond "Hello."
	}
}
`)
		must(t, charge, want("statuses", statuses(c, 5, "/"), "200 200 200 429 429"))
		eventually(t, "the refused are given back", func() error {
			status, answer := c.AdminCall(http.MethodGet, "/rate_limit/buckets/first?key=127.0.0.1", "", "")
			return errors.Join(want("status", status, http.StatusOK), want(charge+": being 3: "+answer, strings.Contains(answer, `"used":3`), true))
		})
	}
}

// TestMigratingFromNginx checks how many requests Caddy with the new config serves at once, keeps waiting, and
// refuses, with windows in which nothing comes back meanwhile. TestNginxBeforeMigrating compares it with nginx.
func TestMigratingFromNginx(t *testing.T) {
	c := startExample(t, "migrating/nginx_after", "window 1m", "window 1000h", "window 1s", "window 1000h", "max_wait 1750ms", "max_wait 1750h")
	must(t, "plain", want("statuses", statuses(c, 3, "/plain"), "200 429 429"))
	must(t, "burst", want("statuses", statuses(c, 7, "/burst"), many(5, 200)+" 429 429"))
	must(t, "another address", want("status", send(t, clientAt("127.0.0.2"), http.MethodGet, c.URL+"/burst").StatusCode, 200))
	for path, atOnce := range map[string]int{"/queue": 1, "/both": 3} {
		ctx, leave := context.WithCancel(t.Context())
		answers := make(chan int, atOnce+6)
		var clients sync.WaitGroup
		for i := range cap(answers) {
			clients.Go(func() {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+path, http.NoBody)
				if err != nil {
					return
				}
				if resp, err := c.Client.Do(req); err == nil {
					answers <- resp.StatusCode
					_ = resp.Body.Close()
				}
			})
			// One after the other: requests that arrive together may each count the line before the others stand.
			eventually(t, "each is answered or waits", func() error {
				return want("requests", len(answers)+len(c.Stacks("internal/limiter.(*tracker).awaitTurn(")), i+1)
			})
		}
		served, refused := 0, 0
		for range len(answers) {
			switch status := <-answers; status {
			case http.StatusOK:
				served++
			case http.StatusTooManyRequests:
				refused++
			}
		}
		must(t, path, errors.Join(want("served at once", served, atOnce), want("refused", refused, 3)))
		eventually(t, "the others wait", func() error { return want("requests that wait", inLimiter(c), 3) })
		leave()
		clients.Wait()
	}
}

// inOneMinute repeats f with a new Caddy until it runs within one minute, and so within one aligned
// window.
func inOneMinute(t *testing.T, name string, f func(c *caddytest.Caddy) error) {
	t.Helper()
	for {
		c := startExample(t, name)
		minute := time.Now().Truncate(time.Minute)
		err := f(c)
		if minute.Equal(time.Now().Truncate(time.Minute)) {
			must(t, name, err)
			return
		}
	}
}

func TestMigratingFromEnvoy(t *testing.T) {
	inOneMinute(t, "migrating/envoy_after", func(c *caddytest.Caddy) error {
		alice, other := "X-Api-Key: key-of-alice", "X-Api-Key: k"
		return errors.Join(
			want("logins", statuses(c, 4, "/login"), "200 200 200 429"),
			want("another page", c.Get("/").StatusCode, 200),
			want("a key", statuses(c, 6, "/", other), many(5, 200)+" 429"),
			want("a key with a value of its own", statuses(c, 11, "/", alice), many(10, 200)+" 429"),
			// No zone charges what another one refuses: 3+1+5+10 of 20.
			want("what is left of the address", statuses(c, 2, "/"), "200 429"),
		)
	})
}

func TestMigratingFromTraefik(t *testing.T) {
	from := func(n int) string { return fmt.Sprint("X-Forwarded-For: 192.0.2.", n) }
	// Nothing comes back meanwhile.
	c := startExample(t, "migrating/traefik_after", "window 1m", "window 1000h")
	must(t, "all", errors.Join(
		want("alice", statuses(c, 3, "/", "X-User: alice", from(1)), "200 200 429"),
		want("bob", statuses(c, 3, "/", "X-User: bob", from(1)), "200 200 429"),
		want("no user", statuses(c, 3, "/", from(2)), "200 200 429"),
		want("no user from elsewhere", statuses(c, 1, "/", from(3)), "429"),
		want("carol, the fifth from there", statuses(c, 2, "/", "X-User: carol", from(1)), "200 429"),
		want("carol from elsewhere", statuses(c, 1, "/", "X-User: carol", from(3)), "200"),
	))
}

// TestDocumentedMigrationsAreTheExamples: what docs/migrating.md shows is what
// the files have.
func TestDocumentedMigrationsAreTheExamples(t *testing.T) {
	trim := func(text string) string {
		lines := []string{}
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); line != "" {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "\n")
	}
	files, err := filepath.Glob("examples/migrating/*")
	must(t, "find", err)
	texts := map[string]string{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		must(t, "read", err)
		texts[file] = trim(string(b))
	}
	shown := map[string]bool{}
	for _, block := range codeBlocks(t, "docs/migrating.md") {
		if json.Valid([]byte(block)) {
			continue // a line of the log, which TestFiltersReadRefusals compares
		}
		found := false
		for file, text := range texts {
			if strings.Contains(text, trim(block)) {
				found, shown[file] = true, true
			}
		}
		if _, err := adapt(block + "\n"); !found && err != nil {
			t.Errorf("it is in no file of examples/migrating, and does not adapt: %v\n%s", err, block)
		}
	}
	for file := range texts {
		if !shown[file] && !strings.HasSuffix(file, ".json") {
			t.Errorf("docs/migrating.md shows nothing of %s", file)
		}
	}
}
