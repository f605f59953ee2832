package caddytest

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard" // what cmd/caddy has

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/history"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// asCaddy, set in the environment, makes the test binary be Caddy, so that it
// has what tests need: their own modules, and the race detector.
const asCaddy = "SHARDLIMIT_TEST_AS_CADDY"

// gcPercent is GOGC of the tests and of their Caddys: the heaps are small, and collecting them often would
// take a tenth of the time.
const gcPercent = 400

var gcSetting = fmt.Sprint("GOGC=", gcPercent)

// Main runs the tests of a package or, in a process that [Command] describes,
// Caddy. TestMain calls it.
func Main(m *testing.M) { MainIn(".", m) }

// MainIn is [Main], with dir as the working directory of the tests.
func MainIn(dir string, m *testing.M) {
	if os.Getenv(asCaddy) != "" {
		caddycmd.Main()
		return
	}
	if err := os.Chdir(dir); err != nil {
		panic(err)
	}
	debug.SetGCPercent(gcPercent)
	code := redistest.RunTests(m)
	if err := endIdle(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// Command returns a call of Caddy's command line in the folder dir.
func Command(dir string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asCaddy+"=1", "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir,
		// With the race detector a process otherwise sleeps a second at its end.
		"GORACE=atexit_sleep_ms=0",
		gcSetting)
	cmd.Dir = dir
	process.EndWithParent(cmd)
	return cmd
}

// instance is a Caddy process, which one test has at a time.
type instance struct {
	cmd *exec.Cmd
	// env is what a test has added to its environment.
	env []string
	// admin is the address of its admin API, and dir its folder.
	admin, dir string
	release    func() error
	// output passes on what the process writes.
	output sink
	ended  chan struct{}
}

// sink passes on to the log of the test that has the process.
type sink struct {
	to atomic.Pointer[caddyproc.Logs]
}

// Write implements [io.Writer].
func (s *sink) Write(p []byte) (int, error) { return s.to.Load().Write(p) }

// idle are the processes that no test has. They run no config, and pass to the next test,
// so that not every test starts one.
var idle struct {
	sync.Mutex
	instances []*instance
}

// takeInstance returns an idle Caddy, or starts one, with env in its environment. What it writes
// goes to logs.
func takeInstance(t *testing.T, env []string, logs *caddyproc.Logs) *instance {
	t.Helper()
	idle.Lock()
	if last := len(idle.instances) - 1; last >= 0 && len(env) == 0 {
		p := idle.instances[last]
		idle.instances = idle.instances[:last]
		idle.Unlock()
		before := p.output.to.Swap(logs)
		Must(t, "a Caddy without a config", raceIn(before))
		if !p.hasEnded() {
			return p
		}
		p.kill()
	} else {
		idle.Unlock()
	}
	p, err := startInstance(env, logs)
	Must(t, "start Caddy", err)
	return p
}

func startInstance(env []string, logs *caddyproc.Logs) (*instance, error) {
	port, release, err := process.ReservePort()
	if err != nil {
		return nil, err
	}
	p := &instance{env: env, admin: fmt.Sprintf("127.0.0.1:%d", port), release: release, ended: make(chan struct{})}
	p.output.to.Store(logs)
	if p.dir, err = os.MkdirTemp("", "caddytest-"); err != nil {
		return nil, errors.Join(err, release())
	}
	p.cmd = Command(p.dir, "run")
	p.cmd.Env = append(append(p.cmd.Env, "CADDY_ADMIN="+p.admin), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir), release())
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// hasEnded reports whether the process has ended.
func (p *instance) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// kill ends the process at once, waits for it and removes its files.
func (p *instance) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
	_ = os.RemoveAll(p.dir)
	_ = p.release()
}

// giveBack makes the process idle. One in which anything of the test's config is left is killed.
func (p *instance) giveBack() error {
	// No other test has the same environment.
	if p.hasEnded() || len(p.env) > 0 {
		p.kill()
		return nil
	}
	if err := p.unload(unloadTimeout); err != nil {
		p.kill()
		return err
	}
	idle.Lock()
	defer idle.Unlock()
	idle.instances = append(idle.instances, p)
	return nil
}

// raceIn returns an error if the race detector has reported something.
func raceIn(logs *caddyproc.Logs) error {
	if text := logs.String(); strings.Contains(text, "DATA RACE") {
		return fmt.Errorf("a data race in Caddy:\n%s", text)
	}
	return nil
}

// endIdle ends all idle processes, and returns an error if one had a fault.
func endIdle() (err error) {
	idle.Lock()
	defer idle.Unlock()
	for _, p := range idle.instances {
		p.kill()
		err = errors.Join(err, raceIn(p.output.to.Load()))
	}
	idle.instances = nil
	return err
}

// unloadTimeout bounds how long a process may take to be without the test's config, to pass to another
// test. One that waits for the charges of a dead shard takes longer.
const unloadTimeout = 2 * time.Second

// unload makes the process run no config, and returns an error if something of the last one
// goes on after that time.
func (p *instance) unload(limit time.Duration) error {
	empty := fmt.Sprintf(`{"admin": {"listen": %q, "config": {"persist": false}}}`, p.admin)
	// The endpoint of an older config may close while the call waits there.
	if err := redistest.Poll(limit, func() error { return p.call(http.MethodPost, "/load", empty) }); err != nil {
		return err
	}
	line := fmt.Sprintf("-- %s has no config", rand.Text())
	if err := redistest.Poll(limit, func() error { return p.call(http.MethodPost, idlePath, line) }); err != nil {
		return err
	}
	// All that the last config wrote comes before this line.
	return redistest.Poll(limit, func() error {
		return Want("the end of its output being read", strings.Contains(p.output.to.Load().String(), line), true)
	})
}

func (p *instance) call(method, path, body string) error {
	status, text, err := callAdmin(p.admin, method, path, "application/json", body)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %s", path, status, text)
	}
	return err
}

const idlePath = "/test/idle"

// idleAPI makes a Caddy without a config be as after its start, at idlePath. It then writes the body of
// the request to the log.
type idleAPI struct{}

func init() { caddy.RegisterModule(idleAPI{}) }

// CaddyModule implements [caddy.Module].
func (idleAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.test_idle", New: func() caddy.Module { return idleAPI{} }}
}

// stacksPath answers with the stacks of goroutines that have all texts of the query's "has". Those of pprof
// are all stacks, which cost as much as some requests.
const stacksPath = "/test/stacks"

// historyPath drops the history, which outlives the zones of a config.
const historyPath = "/test/history"

// Routes implements [caddy.AdminRouter].
func (idleAPI) Routes() []caddy.AdminRoute {
	stacks := caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		_, err := io.WriteString(w, strings.Join(stacksWith(r.URL.Query()["has"]), "\n\n"))
		return err
	})
	forget := caddy.AdminHandlerFunc(func(http.ResponseWriter, *http.Request) error {
		history.Default.Forget()
		return nil
	})
	return []caddy.AdminRoute{{Pattern: stacksPath, Handler: stacks}, {Pattern: historyPath, Handler: forget}, {Pattern: idlePath, Handler: caddy.AdminHandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		left := Goroutines("shardlimit/caddy-shardlimit", "redis/go-redis", "modules/caddyhttp")
		stores.Pool.Range(func(key, _ any) bool {
			left = append(left, fmt.Sprintf("%v is in the pool of stores", key))
			return true
		})
		if len(left) > 0 {
			return caddy.APIError{HTTPStatus: http.StatusConflict, Err: errors.New(left[len(left)-1])}
		}
		telemetry.Default.Reset()
		history.Default.Forget()
		_, err := io.Copy(os.Stderr, r.Body)
		return err
	})}}
}

// Goroutines returns the stacks of those that run code of packages that a config begins, by parts of
// their paths, besides the caller's and that which runs Caddy.
func Goroutines(packages ...string) (found []string) {
	_, others, _ := strings.Cut(allStacks(), "\n\n") // the first is the caller's
	for stack := range strings.SplitSeq(others, "\n\n") {
		isOf := func(path string) bool { return strings.Contains(stack, path) }
		if slices.ContainsFunc(packages, isOf) && !isOf("TestMain") {
			found = append(found, stack)
		}
	}
	return found
}

// stacksWith returns the stacks of goroutines that have all of the texts.
func stacksWith(texts []string) (found []string) {
	for stack := range strings.SplitSeq(allStacks(), "\n\n") {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(stack, text) }) {
			found = append(found, stack)
		}
	}
	return found
}

// room is for stacks. To clear it again for each call takes longer than to fill it.
var room struct {
	sync.Mutex
	bytes []byte
}

// allStacks returns the stacks of all goroutines, the caller's first.
func allStacks() string {
	room.Lock()
	defer room.Unlock()
	for ; ; room.bytes = make([]byte, max(2*len(room.bytes), 64<<10)) {
		if n := runtime.Stack(room.bytes, true); n < len(room.bytes) {
			return string(room.bytes[:n])
		}
	}
}

var _ caddy.AdminRouter = idleAPI{}
