package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// loading is held while a command loads a config: all stores of a process are in one pool.
var loading sync.Mutex

// command runs `caddy rate-limit` and returns what it printed and its exit code. One that names
// the address of the admin API needs nothing of a process of its own, and runs in this one, as do those that
// load stores.
func command(t *testing.T, args ...string) (out, errOut string, code int) {
	t.Helper()
	switch loads := args[0] == "check" || args[0] == "replay"; {
	case loads:
		loading.Lock()
		defer loading.Unlock()
	case !slices.Contains(args, "--address"):
		return commandProcess(t, args...)
	}
	caddy := &cobra.Command{Use: "caddy", SilenceUsage: true}
	cmd := &cobra.Command{Use: "rate-limit"}
	caddycmd.Commands()[cmd.Use].CobraFunc(cmd)
	caddy.AddCommand(cmd)
	caddy.SetArgs(append([]string{cmd.Use}, args...))
	var stdout, stderr bytes.Buffer
	caddy.SetOut(&stdout)
	caddy.SetErr(&stderr)
	if err := caddy.ExecuteContext(t.Context()); err != nil {
		// Caddy's own type of this error is not exported.
		if _, unknown := fmt.Sscanf(err.Error(), "exiting with status %d", &code); unknown != nil {
			code = 1
		}
	}
	return stdout.String(), stderr.String(), code
}

// commandProcess is command in a process of its own.
func commandProcess(t *testing.T, args ...string) (out, errOut string, code int) {
	t.Helper()
	cmd := caddytest.Command(t.TempDir(), append([]string{"rate-limit"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if strings.Contains(stderr.String(), "DATA RACE") {
		t.Errorf("data race: %s", &stderr)
	}
	return stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
}

// prints runs a command and requires its exit code and words in its output.
func prints(t *testing.T, code int, words []string, args ...string) string {
	t.Helper()
	out, err := printed(t, code, words, args...)
	if err != nil {
		t.Error(err)
	}
	return out
}

// printed runs a command, and returns how its exit code and output differ from those wanted.
func printed(t *testing.T, code int, words []string, args ...string) (out string, err error) {
	t.Helper()
	out, errOut, got := command(t, args...)
	err = want("exit code", got, code)
	for _, word := range words {
		if !strings.Contains(out+errOut, word) {
			err = errors.Join(err, fmt.Errorf("the output lacks %q", word))
		}
	}
	if code == 1 || code > 2 {
		if !strings.HasPrefix(errOut, "Error: ") || out != "" {
			err = errors.Join(err, errors.New("an error is not alone"))
		}
	} else if errOut != "" {
		err = errors.Join(err, errors.New("there is an error"))
	}
	if err != nil {
		err = fmt.Errorf("%v: %w\nstdout: %s\nstderr: %s", args, err, out, errOut)
	}
	return out, err
}

// awaitCommands waits until the config runs: Caddy listens before that.
func awaitCommands(c *caddytest.Caddy, where ...string) {
	c.T.Helper()
	eventually(c.T, "the config runs", func() error {
		_, errOut, code := command(c.T, append([]string{"status"}, where...)...)
		if code != 0 {
			return errors.New(errOut)
		}
		return nil
	})
}

// cliSite limits by a header, and by a header and the address.
func cliSite(store string) string {
	return zonesSite(store, pathZone("api", "events 2")+pathZone("pair", "key {header.X-Key}{client_ip}", "events 5"), "respond ok")
}

// TestCLI runs the commands over TCP and over a unix socket, as a script does.
func TestCLI(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	dir, err := os.MkdirTemp("", "cli") // short enough for a socket
	must(t, "make a directory", err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "admin.sock")
	c := caddytest.Start(t, cliSite(servers.Store()))
	config := strings.Replace(cliSite(servers.Store("key_prefix unix")), "{{global}}", "admin unix/"+socket+"|0600\n\tpersist_config off\n\tdefault_bind 127.0.0.1", 1)
	unix := caddytest.Start(t, config)
	awaitCommands(c, "--address", c.Admin)
	awaitCommands(unix, "--address", "unix/"+socket)
	file := filepath.Join(dir, "Caddyfile")
	must(t, "write a config", os.WriteFile(file, []byte(unix.Expand(config)), 0o600))
	wheres := map[string]struct {
		*caddytest.Caddy
		where []string
	}{
		"tcp":            {c, []string{"--address", c.Admin}},
		"unix":           {unix, []string{"--address", "unix/" + socket}},
		"unix by config": {unix, []string{"--config", file, "--adapter", "caddyfile"}},
	}
	for _, name := range append(sweep.Of(t, []string{"unix", "unix by config"}, 1), "tcp") {
		t.Run(name, func(t *testing.T) {
			k := wheres[name]
			client := strings.ReplaceAll(name, " ", "-")
			try := func(code int, words []string, args ...string) (string, error) {
				args = append(args, k.where...)
				if !strings.Contains(name, "config") {
					return printed(t, code, words, args...)
				}
				// Caddy logs which file it reads.
				out, errOut, got := command(t, args...)
				return out, want(errOut+"exit code", got, code)
			}
			run := func(code int, words []string, args ...string) string {
				t.Helper()
				out, err := try(code, words, args...)
				if err != nil {
					t.Error(err)
				}
				return out
			}
			run(0, []string{"allowed\n", "ZONE", "api", "{header.X-Key} " + client}, "simulate", k.URL+"/api", "-H", "X-Key: "+client)
			for range 4 {
				k.Get("/api", "X-Key: "+client)
			}
			run(2, []string{"refused by zone api, wait ", "over_limit"}, "simulate", k.URL+"/api", "-H", "X-Key: "+client)
			var s simulated
			must(t, "simulate as JSON", json.Unmarshal([]byte(run(2, nil, "simulate", k.URL+"/api", "-H", "X-Key: "+client, "--json")), &s))
			must(t, "simulate as JSON", want("decision", s.Decision, "refused"))

			out := run(0, []string{"ZONE", "ALLOWED", "LAST REFUSAL", "s ago", "api", "pair", "store default (redis)", "SHARD", "primary", "replica", servers[0].Primary.Addr(), "up", "ledger: "}, "status")
			if strings.Contains(out, "\x1b") {
				t.Errorf("escape sequences outside of a terminal: %q", out)
			}
			var st struct{ Zones []struct{ Name string } }
			must(t, "status as JSON", json.Unmarshal([]byte(run(0, nil, "status", "--json")), &st))
			must(t, "status as JSON", want("zones", len(st.Zones), 2))
			out = run(0, nil, "status", "--watch", "--count", "2", "--interval", "100ms")
			must(t, "status --watch", want("views", strings.Count(out, "ALGORITHM"), 2))

			run(0, []string{"REFUSED", "s ago", "{header.X-Key} " + client, "in the last "}, "top", "api", "--count", "1")
			out = run(0, nil, "top", "--count", "2", "--interval", "100ms", "-n", "1")
			must(t, "top", want("views", strings.Count(out, "ZONE"), 2))
			var top topAnswer
			must(t, "top as JSON", json.Unmarshal([]byte(run(0, nil, "top", "api", "--json")), &top))
			must(t, "top as JSON", want("zone", top.Zone, "api"))

			// On a busy machine a server may be late.
			eventually(t, "the servers' copies are printed", func() error {
				_, err := try(0, []string{"{header.X-Key} " + client + " in zone api of store default, shard a", "primary", "replica", " 2 ", "last refused "}, "get", "api", client)
				return err
			})
			run(0, []string{"deleted: ", "{header.X-Key} " + client, "shard a"}, "reset", "api", "{header.X-Key}", client)
			must(t, "after the reset", want("status", k.Get("/api", "X-Key: "+client).StatusCode, http.StatusOK))
			k.Get("/pair", "X-Key: "+client)
			run(0, []string{"{header.X-Key}{client_ip} " + client + " 127.0.0.1 in zone pair"}, "get", "pair", client, "127.0.0.1")
			run(0, []string{"{header.X-Key}{client_ip} " + client + " 127.0.0.1 in zone pair"}, "get", "pair", "{header.X-Key}{client_ip}", client, "127.0.0.1")
			run(0, []string{"deleted: "}, "reset", "pair", "--client-key", s.clientKeyOf(k.Caddy, "/pair", client))

			if name != "tcp" {
				run(3, []string{"nope"}, "get", "nope", "x")
				return
			}
			for _, bad := range []struct {
				code int
				word string
				args []string
			}{
				{3, "nope", []string{"get", "nope", "x"}},
				{3, "nope", []string{"reset", "nope", "x"}},
				{3, "nope", []string{"top", "nope"}},
				{3, "nope", []string{"simulate", "/", "--server", "nope"}},
				{3, "no server listens at 127.0.0.1:1; there is", []string{"simulate", "http://127.0.0.1:1/"}},
				{1, "url", []string{"simulate", "nope"}},
				{1, "must be a name and a value", []string{"simulate", "/", "-H", "nope"}},
				{1, "from 1 to 100", []string{"top", "-n", "1000", "--count", "1"}},
				{1, "--interval", []string{"top", "--interval", "1ms"}},
				{1, "", []string{"get", "pair", "x", "y", "z"}},
				{1, "", []string{"get", "api"}},
			} {
				run(bad.code, []string{bad.word}, bad.args...)
			}
		})
	}
	prints(t, 1, []string{"127.0.0.1:1", "is Caddy running"}, "status", "--address", "127.0.0.1:1")
	prints(t, 1, []string{"nowhere.sock"}, "status", "--address", "unix//nowhere.sock")
	for _, args := range [][]string{{"nope"}, {"status", "x"}, {"get"}, {"reset"}, {"simulate"}, {"status", "--nope"}} {
		if out, errOut, code := command(t, args...); code != 1 || errOut == "" {
			t.Errorf("%v: exit code %d, %s%s", args, code, out, errOut)
		}
	}
	if out, _, code := command(t, "schema"); code != 0 || !json.Valid([]byte(out)) || !strings.Contains(out, `"max_wait_queue": {`) {
		t.Errorf("schema: %d, %s", code, out)
	}
	if out, _, code := command(t, "--help"); code != 0 || !strings.Contains(out, "simulate") {
		t.Errorf("help: %d, %s", code, out)
	}
}

// clientKeyOf returns the client key of a request to a path.
func (simulated) clientKeyOf(c *caddytest.Caddy, path, client string) string {
	out, _, _ := command(c.T, "simulate", c.URL+path, "-H", "X-Key: "+client, "--json", "--address", adminAddress(c))
	var s simulated
	must(c.T, "simulate "+out, json.Unmarshal([]byte(out), &s))
	return s.Zones[0].ClientKey
}

// adminAddress returns the address that the config gives to the admin API.
func adminAddress(c *caddytest.Caddy) string {
	b, err := os.ReadFile(filepath.Join(c.Dir, "Caddyfile"))
	must(c.T, "read the config", err)
	_, rest, _ := strings.Cut(string(b), "admin ")
	address, _, _ := strings.Cut(rest, "\n")
	address, _, _ = strings.Cut(address, "|")
	return strings.TrimSpace(address)
}

// TestCLIShardDown checks the commands while a shard is unreachable.
func TestCLIShardDown(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, cliSite(servers.Store("on_error allow")))
	awaitCommands(c, "--address", c.Admin)
	c.Get("/api", "X-Key: alice")
	must(t, "kill", servers[0].Primary.Kill())
	prints(t, 4, nil, "reset", "api", "alice", "--address", c.Admin)
	_, _, code := commandProcess(t, "reset", "api", "alice", "--address", c.Admin)
	must(t, "a process", want("exit code", code, 4))
	out, _, code := command(t, "get", "api", "alice", "--address", c.Admin)
	must(t, out, errors.Join(want("exit code", code, 4), want("having the error", strings.Contains(out, "error: "), true)))
	prints(t, 0, []string{"error_allowed"}, "simulate", c.URL+"/api", "-H", "X-Key: alice", "--address", c.Admin)
}

// TestCLILive checks that live views refresh until an interrupt, which is no failure.
func TestCLILive(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, cliSite(""))
	awaitCommands(c, "--address", c.Admin)
	out := prints(t, 0, []string{"ZONE"}, "top", "--address", c.Admin)
	must(t, "top in a pipe", want("views", strings.Count(out, "ZONE"), 1))
	for _, args := range [][]string{{"top", "--count", "1000"}, {"status", "--watch"}} {
		cmd := caddytest.Command(t.TempDir(), append(append([]string{"rate-limit"}, args...), "--address", c.Admin, "--interval", "100ms")...)
		out, err := cmd.StdoutPipe()
		must(t, "pipe", err)
		must(t, "start", cmd.Start())
		lines, views := bufio.NewScanner(out), 0
		for views < 3 && lines.Scan() {
			if strings.HasPrefix(lines.Text(), "ZONE") {
				views++
			}
		}
		must(t, fmt.Sprint(args), want("views", views, 3))
		must(t, "interrupt", cmd.Process.Signal(syscall.SIGINT))
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			must(t, fmt.Sprint(args, " after an interrupt"), err)
		case <-time.After(caddytest.Patience):
			_ = cmd.Process.Kill()
			t.Fatalf("%v does not end", args)
		}
	}
}

// TestCommandsNeedNoRedis checks a config while one of its addresses refuses connections, and
// another one counts them.
// TestShellsCompleteZones of the Caddy that runs, and nothing if none does.
func TestShellsCompleteZones(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("", zoneWith("api", "key static", "events 1")+"\n"+zoneWith("all", "key static", "events 9"), "respond ok"))
	for address, words := range map[string]string{adminAddress(c): "all api", "http://" + adminAddress(c): "all api", caddytest.FreeAddr(t): ""} {
		out, err := caddytest.Command(t.TempDir(), "__completeNoDesc", "rate-limit", "get", "--address", address, "a").Output()
		must(t, "complete", err)
		names, _, _ := strings.Cut(string(out), ":")
		must(t, address, want("words", strings.Join(strings.Fields(names), " "), words))
	}
}

func TestCommandsNeedNoRedis(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	defer listener.Close()
	var connections atomic.Int64
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			_ = conn.Close()
		}
	}()
	dir := t.TempDir()
	file := dir + "/Caddyfile"
	text := "{\nadmin off\n" + caddytest.RedisStore(
		caddytest.ShardWith("a", "primary "+caddytest.FreeAddr(t), "replica "+caddytest.FreeAddr(t)),
		caddytest.ShardWith("b", "primary "+listener.Addr().String(), "replica redis.invalid:6379"),
	) + "\n}\nhttp://localhost:8080 {\nrate_limit {header.X-Key} 10 1m api\nrespond ok\n}\n"
	must(t, "write", os.WriteFile(file, []byte(text), 0o600))
	for command, expected := range map[string]string{
		"validate": "Valid configuration",
		"adapt":    `"module":"redis"`,
	} {
		output, err := caddytest.Command(dir, command, "--config", file, "--adapter", "caddyfile").CombinedOutput()
		if err != nil || !strings.Contains(string(output), expected) {
			t.Errorf("caddy %s: %v, output without %s:\n%s", command, err, expected, output)
		}
	}
	must(t, "validate and adapt", want("number of connections to Redis", connections.Load(), 0))
	// The default address is another Caddy's.
	_, errOut, code := commandProcess(t, "status", "--config", file)
	must(t, errOut, errors.Join(want("exit code", code, 1), want("the reason being told", strings.Contains(errOut, "has admin off"), true)))
}

func TestModulesAreListed(t *testing.T) {
	t.Parallel()
	output, err := caddytest.Command(t.TempDir(), "list-modules").CombinedOutput()
	must(t, "list-modules", err)
	for _, module := range []string{
		"rate_limit", "http.handlers.rate_limit", "admin.api.rate_limit", "rate_limit.stores.memory", "rate_limit.stores.redis",
	} {
		must(t, "list-modules", want(module+" listed", strings.Contains("\n"+string(output), "\n"+module+"\n"), true))
	}
}

// TestCommandsCallAgain where the connection was reset before an answer, as Linux does at a reload to those that wait
// at the endpoint of the old config.
func TestCommandsCallAgain(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	admin := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") })}
	t.Cleanup(func() { _ = admin.Close() })
	calls := make(chan struct{}, 2)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		calls <- struct{}{}
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
		_ = admin.Serve(listener)
	}()
	text, errOut, code := command(t, "blocks", "--json", "--address", listener.Addr().String())
	must(t, text+errOut, errors.Join(want("exit code", code, 0), want("connections that were reset", len(calls), 1)))
}
