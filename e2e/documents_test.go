package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// documentedSession is what a document shows of commands and what they print.
type documentedSession []struct{ command, output string }

// readDocument returns the text of a document.
func readDocument(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", file))
	must(t, "read the document", err)
	return string(text)
}

// sessionOf returns the block of a document whose first command begins so.
func sessionOf(t *testing.T, file, first string) (session documentedSession) {
	t.Helper()
	_, block, found := strings.Cut(readDocument(t, file), "```\n$ "+first)
	if block, _, _ = strings.Cut(first+block, "\n```"); !found {
		t.Fatalf("%s shows no %s", file, first)
	}
	for step := range strings.SplitSeq(block, "\n$ ") {
		command, output, _ := strings.Cut(step, "\n")
		session = append(session, struct{ command, output string }{command, output})
	}
	return session
}

// words splits a command line into its words. Quotes join what is between them.
func words(line string) (found []string) {
	for _, m := range regexp.MustCompile(`'([^']*)'|(\S+)`).FindAllStringSubmatch(line, -1) {
		found = append(found, m[1]+m[2])
	}
	return found
}

// What differs between two runs of a command, in the order in which it is recognised.
var variable = []struct {
	pattern *regexp.Regexp
	name    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?Z?`), "<instant>"},
	{regexp.MustCompile(`\S+@\S+ \(127\.0\.0\.1:\d+\)`), "<caller>"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "<address>"},
	{regexp.MustCompile(`[+-]\d+\.\d{3}s`), "<lead>"},
	{regexp.MustCompile(`\b(\d+(\.\d+)?(ns|µs|ms|h|m|s))+\b`), "<duration>"},
	{regexp.MustCompile(` \d+\.\d+\.\d+ `), " <version> "},
	// They depend on whether the machine takes longer than ledger_trust.
	{regexp.MustCompile(`\d+ refused and \d+ admitted without a call`), "<n> refused and <n> admitted without a call"},
	{regexp.MustCompile(` +`), " "},
}

// shape returns a text without what differs between two runs.
func shape(text string) string {
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.name)
	}
	return strings.TrimSpace(text)
}

// counts hides numbers too, where a document shows those of a log that nobody has.
func counts(text string) string {
	return regexp.MustCompile(`[\d.]+%?`).ReplaceAllString(shape(text), "<n>")
}

// replays runs the commands of a session and requires outputs of the documented shape. Addresses of
// servers are replaced by those of the document; a line of dots leaves the rest out.
func (session documentedSession) replays(t *testing.T, addresses *strings.Replacer, shape func(string) string, more ...string) {
	t.Helper()
	code := 0
	files := t.TempDir()
	for _, step := range session {
		if step.command == "echo $?" {
			must(t, "the exit code", want("exit code", strconv.Itoa(code), step.output))
			continue
		}
		line, file, toFile := strings.Cut(step.command, " > ")
		args := words(line)
		must(t, "the command", want(line, strings.Join(args[:2], " "), "caddy rate-limit"))
		for i, arg := range args {
			if strings.HasSuffix(arg, ".json") {
				args[i] = filepath.Join(files, arg)
			}
		}
		var out, errOut string
		documented := step.output
		// A replica may lag, and a busy machine be late.
		eventually(t, step.command, func() error {
			out, errOut, code = command(t, append(args[2:], more...)...)
			if toFile {
				return errors.Join(os.WriteFile(filepath.Join(files, file), []byte(out), 0o600), want(errOut+"exit code", code, 0))
			}
			printed := addresses.Replace(out)
			if shown, _, cut := strings.Cut(documented, "\n..."); cut {
				documented = shown
				printed = strings.Join(strings.Split(printed, "\n")[:strings.Count(shown, "\n")+1], "\n")
			}
			return want(errOut+step.command, shape(printed), shape(documented))
		})
	}
}

// servedAs returns the addresses of servers as documents write them: 10.0.0.1:6379 and so on.
func servedAs(servers caddytest.Shards) *strings.Replacer {
	var pairs []string
	for _, shard := range servers {
		for _, server := range append([]*redistest.Server{shard.Primary}, shard.Replicas...) {
			pairs = append(pairs, server.Addr(), fmt.Sprintf("10.0.0.%d:6379", len(pairs)/2+1))
		}
	}
	return strings.NewReplacer(pairs...)
}

// operatedSite has the zones of docs/operating.md.
func operatedSite(store string) string {
	return `{
	{{global}}
	` + store + `
	servers {
		trusted_proxies static 127.0.0.1/32
	}
}
{{site}} {
	rate_limit {
		zone api {
			key {header.X-Api-Key} {client_ip}
			events 100
			window 1m
		}
		zone login {
			match {
				path /login
			}
			key {client_ip}
			events 5
			window 10m
		}
	}
	respond ok
}
`
}

// TestDocumentedCommands runs the commands that docs/operating.md shows, each group as it stands
// there, and requires their outputs to be of the shape that is shown.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	const document = "docs/operating.md"
	// start returns a Caddy with the zones of the document and one shard.
	start := func(t *testing.T) (c *caddytest.Caddy, addresses *strings.Replacer) {
		t.Helper()
		servers := caddytest.StartShards(t, 1, 1)
		c = caddytest.Start(t, operatedSite(servers.Store()))
		awaitCommands(c, "--address", c.Admin)
		c.AwaitServers()
		return c, servedAs(servers)
	}
	// send makes requests one after the other, and requires that the last has a status.
	send := func(t *testing.T, c *caddytest.Caddy, n, status int, path string, headers ...string) {
		t.Helper()
		for i := range n {
			a := c.Ask(path, headers...)
			if i == n-1 {
				must(t, path, want("status", a.Status, status))
			}
		}
	}
	t.Run("refused", func(t *testing.T) {
		c, addresses := start(t)
		send(t, c, 140, http.StatusTooManyRequests, "/", "X-Api-Key: k1")
		send(t, c, 7, http.StatusTooManyRequests, "/login", "X-Api-Key: k3", "X-Forwarded-For: 203.0.113.7")
		send(t, c, 93, http.StatusOK, "/", "X-Api-Key: k3")
		for _, first := range []string{"top", "get", "simulate", "status"} {
			session := sessionOf(t, document, "caddy rate-limit "+first)
			session[0].command = strings.Replace(session[0].command, "https://example.com", c.URL, 1)
			session.replays(t, addresses, shape, "--address", c.Admin)
		}
		answersAs(t, c, document, "GET", "/rate_limit/buckets/login?key={client_ip}&key=203.0.113.7", "/rate_limit/buckets/api?key={client_ip}&key=203.0.113.7'")
		answersAs(t, c, document, "GET", "/rate_limit/top?zone=login&n=2", "")
		answersAs(t, c, document, "GET", "/rate_limit/", "")
		answersAs(t, c, document, "GET", "/rate_limit/history?zone=api&zone=login&range=1h", "")
		answersAs(t, c, document, "POST", "/rate_limit/simulate", "")
		sessionOf(t, document, "caddy rate-limit reset").replays(t, addresses, shape, "--address", c.Admin)
	})
	t.Run("blocks", func(t *testing.T) {
		c, addresses := start(t)
		sessionOf(t, document, "caddy rate-limit block").replays(t, addresses, shape, "--address", c.Admin)
	})
	t.Run("set", func(t *testing.T) {
		c, addresses := start(t)
		send(t, c, 2, http.StatusOK, "/", "X-Api-Key: k9")
		sessionOf(t, document, "caddy rate-limit set").replays(t, addresses, shape, "--address", c.Admin)
	})
	t.Run("check", func(t *testing.T) {
		servers := caddytest.StartShards(t, 2, 1, redistest.Args("--appendonly", "yes"))
		must(t, "configure", servers[1].Primary.Client().ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err())
		must(t, "take rights", servers[1].Primary.Client().Do(t.Context(), "ACL", "SETUSER", "default", "-hincrby", "-del").Err())
		must(t, "kill", servers[1].Replicas[0].Kill())
		session := sessionOf(t, document, "caddy rate-limit check Caddyfile")
		session[0].command = "caddy rate-limit check " + configOf(t, servers.Store())
		session.replays(t, servedAs(servers), shape)
	})
	t.Run("replay", func(t *testing.T) {
		session := sessionOf(t, document, "caddy rate-limit replay")
		dir := t.TempDir()
		config, log := filepath.Join(dir, "Caddyfile"), filepath.Join(dir, "access.log")
		must(t, "write the config", os.WriteFile(config, []byte(`:80 {
	rate_limit {
		zone all {
			key {client_ip}
			events 60
			window 1m
		}
		zone login {
			key {header.Authorization}
			events 5
			window 1m
		}
	}
	respond ok
}
`), 0o600))
		var lines strings.Builder
		for minute := range 125 {
			for n := range 200 {
				client := fmt.Sprint("203.0.0.", 1+n%2)
				if n%50 == 0 {
					client = fmt.Sprint("198.51.100.", n/50+minute)
				}
				fmt.Fprintf(&lines, `{"ts":%d.5,"request":{"remote_ip":%[2]q,"client_ip":%[2]q,"proto":"HTTP/1.1","method":"GET","host":"localhost","uri":"/","headers":{"Authorization":["REDACTED"]}},"duration":0.001,"status":200}`+"\n",
					1772355600+60*minute, client)
			}
		}
		must(t, "write the log", os.WriteFile(log, []byte(lines.String()), 0o600))
		session[0].command = "caddy rate-limit replay --config " + config + " --suggest 0.1% " + log
		session.replays(t, strings.NewReplacer(), counts)
	})
}

// answersAs makes a call of the admin API, and requires the names in the answer to be those of the
// document's example of that call, or in its text. The example shows another call if one is given.
func answersAs(t *testing.T, c *caddytest.Caddy, document, method, call, example string) {
	t.Helper()
	text := readDocument(t, document)
	if example == "" {
		example = call
	}
	_, rest, found := strings.Cut(text, "localhost:2019"+example)
	request, rest, isJSON := strings.Cut(rest, "```json\n")
	shown, _, _ := strings.Cut(rest, "\n```")
	if !found || !isJSON {
		t.Errorf("%s has no answer of %s", document, call)
		return
	}
	body := ""
	if method == "POST" {
		_, body, _ = strings.Cut(request, "-d '")
		body, _, _ = strings.Cut(body, "'")
		body = strings.Replace(body, "https://example.com", c.URL, 1)
	}
	status, answer := c.AdminCall(method, call, "application/json", body)
	must(t, call+" "+answer, want("status", status, http.StatusOK))
	var documented, answered any
	must(t, "the document's answer", json.Unmarshal([]byte(shown), &documented))
	must(t, "the answer", json.Unmarshal([]byte(answer), &answered))
	is, has := map[string]bool{}, map[string]bool{}
	names("", documented, is)
	names("", answered, has)
	for name := range is {
		if !has[name] {
			t.Errorf("%s: %s shows %s, which is not in %s", call, document, name, answer)
		}
	}
	for name := range has {
		last := name[strings.LastIndex(name, ".")+1:]
		if !is[name] && !strings.Contains(text, "`"+last+"`") {
			t.Errorf("%s: %s does not know %s", call, document, name)
		}
	}
}

// names collects the paths of all names in a value of JSON.
func names(path string, value any, found map[string]bool) {
	switch value := value.(type) {
	case []any:
		for _, element := range value {
			names(path, element, found)
		}
	case map[string]any:
		for name, element := range value {
			found[path+"."+name] = true
			names(path+"."+name, element, found)
		}
	}
}

// TestGettingStarted follows docs/getting-started.md from its file on.
func TestGettingStarted(t *testing.T) {
	t.Parallel()
	const document = "docs/getting-started.md"
	server := redistest.Start(t)
	text := readDocument(t, document)
	block := func(after string) string {
		_, rest, found := strings.Cut(text, after)
		must(t, document, want("naming "+after, found, true))
		_, rest, _ = strings.Cut(rest, "```\n")
		rest, _, _ = strings.Cut(rest, "\n```")
		return rest
	}
	config := block("Save this as `hello.caddyfile`")
	config = strings.Replace(config, "{\n", "{\n\t{{global}}\n", 1)
	config = strings.Replace(config, "store redis {\n", "store redis {\n"+strings.Join(caddytest.Patient, "\n")+"\n", 1)
	config = strings.NewReplacer(":8080 {", "{{site}} {", "127.0.0.1:6380", server.Addr()).Replace(config)
	c := caddytest.Start(t, config)
	c.AwaitServers()
	// response writes a response as curl -i does, without what differs.
	response := func() string {
		r := c.Get("/")
		body, err := io.ReadAll(r.Body)
		must(t, "read", err)
		lines := []string{"HTTP/1.1 " + r.Status}
		for name, values := range r.Header {
			lines = append(lines, name+": "+values[0])
		}
		if len(body) == 0 {
			lines = append(lines, "Content-Length: 0")
		}
		slices.Sort(lines)
		return strings.Join(slices.Compact(append(lines, strings.Split(string(body), "\n")...)), "\n")
	}
	passing := regexp.MustCompile(`(X-Ratelimit-Reset|Date|Retry-After): .*`)
	compare := func(after string) {
		t.Helper()
		documented := strings.Split(block(after+"\n```\n\n"), "\n")
		body := slices.Index(documented, "")
		if body < 0 {
			body = len(documented)
		}
		slices.Sort(documented[:body])
		shown := slices.DeleteFunc(documented, func(line string) bool { return line == "" })
		got := slices.DeleteFunc(strings.Split(response(), "\n"), func(line string) bool { return line == "" })
		must(t, after, want("response",
			passing.ReplaceAllString(strings.Join(got, "\n"), "$1"), passing.ReplaceAllString(strings.Join(shown, "\n"), "$1")))
	}
	compare("## 7. Send a request\n\n```\ncurl -i http://127.0.0.1:8080/")
	for range 4 {
		c.Get("/")
	}
	compare("because it has the same address:\n\n```\ncurl -i http://127.0.0.1:8080/")
	for _, command := range []string{"get hello 127.0.0.1", "reset hello 127.0.0.1"} {
		session := documentedSession{{"caddy rate-limit " + command, block("bin/caddy rate-limit " + command + "\n```\n\n")}}
		session.replays(t, strings.NewReplacer(server.Addr(), "127.0.0.1:6380"), shape, "--address", c.Admin)
	}
	must(t, "after the reset", c.Probe("/").Is(http.StatusOK, 1))
}

// TestDocumentedReservations makes the calls of docs/service.md, whose answers hide how much of the
// window is left.
func TestDocumentedReservations(t *testing.T) {
	t.Parallel()
	const document = "docs/service.md"
	servers := caddytest.StartShards(t, 1, 0)
	text := readDocument(t, document)
	_, config, _ := strings.Cut(text, "```\n")
	config, _, _ = strings.Cut(config, "\n```")
	c := caddytest.Start(t, "{\n\t{{global}}\n"+servers.Store()+"\n}\n{{site}} {\n"+config+"\n}\n")
	c.AwaitServers()
	calls := 0
	for _, step := range sessionOf(t, document, "call() {")[1:] {
		args := words(step.command)
		must(t, "the command", want("its beginning", args[0], "call"))
		r, err := c.Client.Post(c.URL+"/shardlimit.limit.v1.LimitService/"+args[1], "application/json", strings.NewReader(args[2]))
		must(t, step.command, err)
		answer, err := io.ReadAll(r.Body)
		must(t, step.command, errors.Join(err, r.Body.Close()))
		// Generated code varies the spaces in its JSON on purpose.
		plain := func(text string) string { return strings.ReplaceAll(shape(text), " ", "") }
		must(t, step.command, want("answer", plain(string(answer)), plain(step.output)))
		calls++
	}
	must(t, document, want("having calls", calls >= 6, true))
}
