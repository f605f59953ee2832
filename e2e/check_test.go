package e2e

import (
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
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// lasting makes servers keep their data, so that sound ones yield no finding.
var lasting = redistest.Args("--appendonly", "yes", "--appendfsync", "no")

// configOf writes a Caddyfile with these global options and a zone.
func configOf(t *testing.T, global string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "Caddyfile")
	text := "{\n\tadmin off\n\t" + global + "\n}\nhttp://localhost:8080 {\n\trate_limit {header.X-Key} 10 1m api\n\trespond ok\n}\n"
	must(t, "write a config", os.WriteFile(file, []byte(text), 0o600))
	return file
}

// checks runs `caddy rate-limit check`, patiently, and requires its exit code and words in what it
// prints.
func checks(t *testing.T, code int, words []string, args ...string) (out string) {
	t.Helper()
	out, errOut, got := command(t, append([]string{"check", "--timeout", caddytest.WaitLimit.String()}, args...)...)
	err := want("exit code", got, code)
	for _, word := range words {
		if !strings.Contains(out, word) {
			err = errors.Join(err, fmt.Errorf("the output lacks %q", word))
		}
	}
	if err != nil {
		t.Errorf("%v: %v\nstdout: %s\nstderr: %s", args, err, out, errOut)
	}
	return out
}

// TestCheck checks shards of every kind, of a user with the documented rights and no others.
func TestCheck(t *testing.T) {
	t.Parallel()
	kept := map[string]redistest.Option{"static": lasting, "watched": lasting, "cluster": lasting}
	static, watched, sentinels, cluster := startKinds(t, kept, redistest.SentinelOptions{})
	must(t, "find the replica", sentinels.WaitForReplicas(t.Context(), 1))
	rules := append(documentedRules(t, "limiter", "on >secret ~rl:* "), append(documentedRules(t, "limiter", "+del"), documentedRules(t, "limiter", "+hscan ")...)...)
	setUser(t, "limiter", rules, static.Primary, static.Replicas[0], watched.Primary, watched.Replicas[0])
	setUser(t, "limiter", append(documentedRules(t, "limiter", "+cluster|shards "), rules...), cluster.Nodes...)
	setUser(t, "watcher", documentedRules(t, "watcher", "on >secret "), sentinels.Nodes...)
	file := configOf(t, caddytest.RedisStore(
		caddytest.ShardOf("static", static), caddytest.ShardWith("watched", sentinelLine(sentinels), "sentinel_username watcher", "sentinel_password secret"),
		caddytest.ShardWith("cluster", "cluster "+cluster.Addrs()[0]), "username limiter", "password {file."+writeFile(t, "secret\n")+"}",
	))
	words := []string{
		"store default (redis)", static.Primary.Addr(), static.Replicas[0].Addr(), watched.Primary.Addr(), watched.Replicas[0].Addr(), sentinels.Addrs()[0], cluster.Addrs()[2],
		// The cluster has no replicas.
		"has no replica", "0 errors, 3 warnings",
	}
	out := checks(t, 0, words, file)
	if strings.Contains(out, "secret") || strings.Contains(out, "missing") {
		t.Errorf("the output has a secret or a missing right: %s", out)
	}
	checks(t, 1, words, file, "--strict")
	checks(t, 0, words, "--config", file, "--adapter", "caddyfile")
	adapted, err := caddytest.Command(t.TempDir(), "adapt", "--config", file, "--adapter", "caddyfile").Output()
	must(t, "adapt", err)
	asJSON := filepath.Join(t.TempDir(), "caddy.json")
	must(t, "write a config", os.WriteFile(asJSON, adapted, 0o600))
	checks(t, 0, words, asJSON)

	setUser(t, "limiter", append(rules, "-hincrby"), static.Primary)
	checks(t, 1, []string{"error: shard static, " + static.Primary.Addr() + ": its user may not run hincrby", "remedy: ACL SETUSER <user> +hincrby", "1 missing", "1 error, 3 warnings"}, file)
}

// TestCheckUsesTheConnectionsOfTheStore: TLS with a client certificate, a name for the
// certificate, a password that a command prints, and a URL.
func TestCheckUsesTheConnectionsOfTheStore(t *testing.T) {
	t.Parallel()
	const password = "marker-of-a-secret"
	ca, other := redistest.StartAuthority(t), redistest.StartAuthority(t)
	client := issueClient(t, ca)
	secure := redistest.StartShard(t, 1, lasting, redistest.TLS(issueServer(t, ca, "redis.internal")), redistest.Args("--requirepass", password))
	plain := redistest.StartShard(t, 1, lasting, redistest.Args("--requirepass", password))
	store := func(tls, url string) string {
		return configOf(t, caddytest.RedisStore(
			caddytest.ShardOf("secure", secure, tls, "password_command cat "+writeFile(t, password)),
			caddytest.ShardWith("plain", "url "+url, "replica "+plain.Replicas[0].Addr()),
		))
	}
	url := "redis://:" + password + "@" + plain.Primary.Addr() + "/2"
	out := checks(t, 0, []string{"0 errors, 0 warnings"}, store(tlsBlock(ca, client, "server_name redis.internal"), url), "--strict")
	out += checks(t, 1, []string{"unknown authority", "remedy: add the authority's certificate to the file of ca"}, store(tlsBlock(other, client, "server_name redis.internal"), url))
	out += checks(t, 1, []string{"cannot validate certificate for 127.0.0.1", "set server_name in tls"}, store(tlsBlock(ca, client), url))
	wrong := "redis://:marker-of-another@" + plain.Primary.Addr()
	out += checks(t, 1, []string{"it refuses the login: WRONGPASS"}, store(tlsBlock(ca, client, "server_name redis.internal"), wrong))
	if strings.Contains(out, "marker") {
		t.Errorf("the output has a secret: %s", out)
	}
}

func TestCheckFindsFaults(t *testing.T) {
	t.Parallel()
	shard := redistest.StartShard(t, 1, lasting)
	evicting := redistest.Start(t, lasting, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	down := redistest.Start(t)
	must(t, "stop", down.Kill())
	for name, c := range map[string]struct {
		code, strict int
		lines        []string
		words        []string
	}{
		"all well":      {0, 0, []string{caddytest.ShardOf("a", shard)}, []string{"0 errors, 0 warnings"}},
		"eviction":      {0, 1, []string{caddytest.ShardWith("a", "primary "+evicting.Addr())}, []string{"warning: shard a, " + evicting.Addr() + ": its maxmemory-policy is allkeys-lru", "remedy: set it to noeviction", "0 errors, 2 warnings"}},
		"a server down": {1, 1, []string{caddytest.ShardOf("a", shard, "replica "+down.Addr())}, []string{"error: shard a, " + down.Addr() + ": it cannot be reached: ", "remedy: see that it runs", "1 error, 0 warnings"}},
		"roles swapped": {1, 1, []string{caddytest.ShardWith("a", "primary "+shard.Replicas[0].Addr(), "replica "+shard.Primary.Addr())}, []string{"given as a replica, and the given primary is its replica", "given as a primary and is a replica", "2 errors"}},
		"no sentinel":   {1, 1, []string{caddytest.ShardWith("a", "sentinel nobody "+down.Addr())}, []string{"error: shard a: no sentinel names the servers", "2 errors"}},
	} {
		t.Run(name, func(t *testing.T) {
			file := configOf(t, caddytest.RedisStore(c.lines...))
			checks(t, c.code, c.words, file)
			if c.strict != c.code {
				checks(t, c.strict, c.words, file, "--strict")
			}
		})
	}
}

// TestCheckFindsSharedServers: two shards are one server, or two stores have equal keys.
func TestCheckFindsSharedServers(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	proxy := redistest.StartProxy(t, server.Addr())
	shard := func(name, addr string, more ...string) string {
		return caddytest.ShardWith(name, append([]string{"primary " + addr}, more...)...)
	}
	twins := configOf(t, caddytest.RedisStore(shard("a", server.Addr()), shard("b", proxy.Addr()), "read_from primary"))
	checks(t, 1, []string{"error: shard b, " + proxy.Addr() + ": it is the same server as " + server.Addr() + " of shard a", "remedy: give each shard servers of its own, or remove one of the shards", "1 error, 0 warnings"}, twins)
	checks(t, 0, []string{"0 errors, 0 warnings"}, configOf(t, caddytest.RedisStore(shard("a", server.Addr()), "read_from primary")))
	patient := strings.Join(caddytest.Patient, "\n") + "\n"
	for more, words := range map[string][]string{
		"":                 {"store two", "warning: shard b, " + proxy.Addr() + ": store one has its counts there under the same keys", "remedy: give one of the stores another key_prefix, or use one store for both", "0 errors, 1 warning\n"},
		"key_prefix other": {"0 errors, 0 warnings"},
		"db 1":             {"0 errors, 0 warnings"},
	} {
		global := "rate_limit {\nstore one redis {\n" + shard("a", server.Addr()) + "\nread_from primary\n" + patient + "}\nstore two redis {\n" + shard("b", proxy.Addr()) + "\nread_from primary\n" + patient + more + "\n}\n}"
		file := filepath.Join(t.TempDir(), "Caddyfile")
		must(t, "write a config", os.WriteFile(file, []byte("{\nadmin off\n"+global+"\n}\n"), 0o600))
		checks(t, 0, words, file)
	}
}

// TestCheckLoadsStoresAlone, those of single handlers included: what else a config has
// neither calls anybody nor leaves anything behind.
func TestCheckLoadsStoresAlone(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	var calls atomic.Int64
	backend := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { calls.Add(1) }))
	t.Cleanup(backend.Close)
	config := `{
		"admin": {"disabled": true},
		"apps": {
			"pki": {"certificate_authorities": {"local": {}}},
			"tls": {"automation": {"policies": [{"subjects": ["localhost"], "issuers": [{"module": "internal"}]}]}},
			"http": {"servers": {"s": {"listen": [":8443"], "routes": [{"handle": [{"handler": "subroute", "routes": [{"handle": [
				{
					"handler": "rate_limit", "zones": [{"name": "api", "key": ["{header.X-Key}"], "events": 10, "window": "1m"}],
					"store": {"module": "redis", "read_from": "primary", "check_timeout": "1m", "shards": [{"name": "a", "primary": "` + server.Addr() + `"}]}
				},
				{
					"handler": "reverse_proxy", "upstreams": [{"dial": "` + backend.Listener.Addr().String() + `"}],
					"health_checks": {"active": {"uri": "/health", "interval": "1ms"}}
				}
			]}]}]}]}}}
		}
	}`
	file := filepath.Join(t.TempDir(), "caddy.json")
	must(t, "write a config", os.WriteFile(file, []byte(config), 0o600))
	folder := t.TempDir()
	out, err := caddytest.Command(folder, "rate-limit", "check", file, "--timeout", caddytest.WaitLimit.String()).CombinedOutput()
	must(t, "check", err)
	for _, word := range []string{"store default (memory)", "store inline-", server.Addr(), "0 errors, 0 warnings"} {
		if !strings.Contains(string(out), word) {
			t.Errorf("the output lacks %q: %s", word, out)
		}
	}
	left, err := os.ReadDir(folder)
	if must(t, "read the folder", err); len(left) > 0 {
		t.Errorf("Caddy's folder has %v", left)
	}
	if n := calls.Load(); n > 0 {
		t.Errorf("the backend was called %d times", n)
	}
}

// TestReplicaWithoutItsDataIsShown, in a check and in the status, while it copies them.
func TestReplicaWithoutItsDataIsShown(t *testing.T) {
	t.Parallel()
	// The copy does not begin.
	primary := redistest.Start(t, lasting, redistest.Args("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "3600"))
	attached := redistest.Start(t, lasting)
	host, port, err := net.SplitHostPort(primary.Addr())
	must(t, "split the address", err)
	must(t, "attach", attached.Client().Do(t.Context(), "REPLICAOF", host, port).Err())
	redis := caddytest.RedisStore(caddytest.ShardWith("a", "primary "+primary.Addr(), "replica "+attached.Addr()))
	checks(t, 0, []string{"warning: shard a, " + attached.Addr() + ": its link to its primary is down", "a copy of all data that is under way", "0 errors, 1 warning\n"}, configOf(t, redis))
	c := caddytest.Start(t, apiSite(redis, 100, "1h"))
	must(t, "ask", c.Ask("/", "X-Key: alice").Is(http.StatusOK, 1))
	eventually(t, "the status shows it", func() error {
		_, err := printed(t, 0, []string{"the replica " + attached.Addr() + " of shard a does not have its primary's data yet, so it is not asked", "lagging"}, "status", "--address", c.Admin)
		return err
	})
}

// TestCheckEndsInTime although a server does not answer and the timeouts of the config are
// long.
func TestCheckEndsInTime(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	must(t, "pause", server.Pause())
	t.Cleanup(func() { must(t, "resume", server.Resume()) })
	file := configOf(t, caddytest.RedisStore(caddytest.ShardWith("a", "primary "+server.Addr()), "check_timeout 10m"))
	cmd := caddytest.Command(t.TempDir(), "rate-limit", "check", file, "--timeout", "300ms")
	limit := time.AfterFunc(caddytest.Patience, func() { _ = cmd.Process.Kill() })
	out, _ := cmd.CombinedOutput()
	if !limit.Stop() || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "it cannot be reached") {
		t.Errorf("the check ends with %v, want exit status 1 in time: %s", cmd.ProcessState, out)
	}
}

// TestCheckLeavesNoCommand: one that prints a password, and its children, end with the check.
func TestCheckLeavesNoCommand(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "pipe")
	must(t, "make a pipe", exec.Command("mkfifo", path).Run())
	script := writeFile(t, "sleep 1000 >"+path+" &\nwait\n")
	file := configOf(t, caddytest.RedisStore(caddytest.ShardWith("a", "primary localhost:1", "password_command sh "+script)))
	cmd := caddytest.Command(t.TempDir(), "rate-limit", "check", file, "--timeout", "10m")
	must(t, "start", cmd.Start())
	limit := time.AfterFunc(caddytest.Patience, func() { _ = cmd.Process.Kill() })
	// The pipe opens when the command runs, and ends when no process has it any more.
	pipe, err := os.OpenFile(path, os.O_RDONLY, 0)
	must(t, "open the pipe", err)
	defer pipe.Close()
	must(t, "interrupt", cmd.Process.Signal(os.Interrupt))
	_ = cmd.Wait()
	if !limit.Stop() || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("the check ends with %v, want exit status 1 in time", cmd.ProcessState)
	}
	must(t, "bound the wait", pipe.SetReadDeadline(time.Now().Add(caddytest.Patience)))
	if _, err := io.ReadAll(pipe); err != nil {
		t.Errorf("the command still runs: %v", err)
	}
}

// TestCheckAsJSON compares the report with what is documented for programs.
func TestCheckAsJSON(t *testing.T) {
	t.Parallel()
	shard := redistest.StartShard(t, 1, lasting)
	down := redistest.Start(t)
	must(t, "stop", down.Kill())
	// The log of the config is not touched, wherever it goes.
	logged := filepath.Join(t.TempDir(), "log")
	file := configOf(t, "log {\noutput stdout\n}\nlog other {\noutput file "+logged+"\n}\n"+caddytest.RedisStore(caddytest.ShardOf("a", shard, "replica "+down.Addr()), "max_replica_lag 1m"))
	out := checks(t, 1, nil, file, "--json")
	if _, err := os.Stat(logged); err == nil {
		t.Error("the log of the config was opened")
	}
	if !json.Valid([]byte(out)) {
		t.Fatalf("the output is no JSON: %s", out)
	}
	for addr, name := range map[string]string{shard.Primary.Addr(): "PRIMARY", shard.Replicas[0].Addr(): "REPLICA", down.Addr(): "DOWN"} {
		out = strings.ReplaceAll(out, addr, name)
	}
	out = regexp.MustCompile(`_seconds": -?[0-9.e-]+`).ReplaceAllString(out, `_seconds": N`)
	out = regexp.MustCompile(`"version": "[^"]+"`).ReplaceAllString(out, `"version": "7.0.N"`)
	golden, err := os.ReadFile("testdata/check.json")
	must(t, "read the golden", err)
	if out != string(golden) {
		t.Errorf("the report is\n%s\nwant\n%s", out, golden)
	}
}

// TestCheckOfStoresWithoutServers: memory, and modules of other plugins.
func TestCheckOfStoresWithoutServers(t *testing.T) {
	t.Parallel()
	checks(t, 0, []string{"store default (memory)", "note: it counts in the memory of each Caddy process", "lost when the process exits", "remedy: use a redis store if several Caddys should share counts", "0 errors, 0 warnings"}, configOf(t, ""), "--strict")
	if out := checks(t, 0, nil, configOf(t, caddytest.RedisStore(caddytest.ShardWith("a", "primary "+redistest.Start(t, lasting).Addr())))); strings.Contains(out, "use a redis store") {
		t.Errorf("by the remedy: %s", out)
	}
	guest := configOf(t, "rate_limit {\nstore default memory\nstore other guest {\nunsure\n}\n}")
	words := []string{"store default (memory)", "store other (guest)", "warning: it cannot be checked", "0 errors, 1 warning\n"}
	checks(t, 0, words, guest)
	checks(t, 1, words, guest, "--strict")
	none := filepath.Join(t.TempDir(), "Caddyfile")
	must(t, "write a config", os.WriteFile(none, []byte("http://localhost:8080 {\nrespond ok\n}\n"), 0o600))
	checks(t, 0, []string{"the config has no rate_limit"}, none, "--strict")
}

// TestCheckOfBrokenConfigs checks that an error is alone on standard error, and says where it is.
func TestCheckOfBrokenConfigs(t *testing.T) {
	t.Parallel()
	misspelt := configOf(t, caddytest.RedisStore(caddytest.ShardWith("a", "primary localhost:1"), "pool_sice 3"))
	missing := configOf(t, caddytest.RedisStore(caddytest.ShardWith("a", "primary localhost:1"), "password {env.NO_SUCH_VARIABLE}"))
	broken := filepath.Join(t.TempDir(), "caddy.json")
	must(t, "write a config", os.WriteFile(broken, []byte(`{"apps": {`), 0o600))
	unknown := filepath.Join(t.TempDir(), "caddy.json")
	must(t, "write a config", os.WriteFile(unknown, []byte(`{"apps": {"rate_limit": {"stores": {"default": {"module": "redis", "shardz": []}}}}}`), 0o600))
	for name, c := range map[string]struct{ args, words []string }{
		"an unknown option":   {[]string{misspelt}, []string{misspelt + ":8", "pool_sice", "did you mean pool_size?"}},
		"a missing secret":    {[]string{missing}, []string{"{env.NO_SUCH_VARIABLE} is empty"}},
		"broken JSON":         {[]string{broken}, []string{"not valid JSON"}},
		"an unknown field":    {[]string{unknown}, []string{"shardz"}},
		"a missing file":      {[]string{"nowhere/Caddyfile"}, []string{"nowhere/Caddyfile"}},
		"no config":           {nil, []string{"there is no config"}},
		"two configs":         {[]string{misspelt, "--config", misspelt}, []string{"twice"}},
		"no time":             {[]string{misspelt, "--timeout", "0s"}, []string{"--timeout"}},
		"an unknown adapter":  {[]string{misspelt, "--adapter", "nope"}, []string{"nope"}},
		"too many arguments":  {[]string{misspelt, misspelt}, []string{"2 arguments: write caddy rate-limit check [CONFIG]"}},
		"an unknown flag too": {[]string{misspelt, "--nope"}, []string{"nope"}},
	} {
		out, errOut, code := command(t, append([]string{"check"}, c.args...)...)
		err := errors.Join(want("exit code", code, 1), want("output", out, ""))
		for _, word := range append(c.words, "Error: ") {
			if !strings.Contains(errOut, word) {
				err = errors.Join(err, fmt.Errorf("the error lacks %q", word))
			}
		}
		if err != nil {
			t.Errorf("%s: %v\nstdout: %s\nstderr: %s", name, err, out, errOut)
		}
	}
}
