// Package caddyproc builds Caddy with this module and runs it as a process of
// its own, for tests and the laboratory: Build makes the binary, Start a Process,
// and ParseMetrics reads its metrics. Run makes other servers a Process. The package
// does not know Redis.
package caddyproc

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

const module = "github.com/shardlimit/caddy-shardlimit"

// Root returns the folder of the module. It is to be called somewhere in it, or
// in a module that has it replaced by that folder.
func Root() (string, error) { return describe("", "{{.Dir}}", module) }

// Version returns the version of Caddy that the module requires.
func Version() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	return describe(root, "{{.Version}}", "github.com/caddyserver/caddy/v2")
}

// describe returns what go list says of a module, in a folder.
func describe(dir, format, module string) (string, error) {
	list := exec.Command("go", "list", "-m", "-f", format, module)
	list.Dir, list.Stderr = dir, os.Stderr
	out, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("find the module %s: %w", module, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Build builds cmd/caddy into dir, with flags for go build such as "-race", and
// returns the path of the binary. It is to be called where [Root] is.
func Build(dir string, flags ...string) (string, error) {
	binary, err := filepath.Abs(filepath.Join(dir, "caddy"))
	if err != nil {
		return "", fmt.Errorf("build caddy: %w", err)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	// go run, unlike go build, keeps the binary that it has linked, without debug information.
	// Linking takes longer than a copy.
	args := append([]string{"run", "-exec", "cp"}, flags...)
	build := exec.Command("go", append(args, module+"/cmd/caddy", binary)...)
	build.Dir = root
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("build caddy: %w", err)
	}
	return binary, nil
}

// Process is a running Caddy, or another server.
type Process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// Start runs Caddy with a Caddyfile, in a folder of its own, and waits until it
// listens on addrs. Its log goes to logs.
func Start(binary, dir, caddyfile string, logs io.Writer, addrs ...string) (*Process, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a folder for caddy: %w", err)
	}
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(caddyfile), 0o600); err != nil {
		return nil, fmt.Errorf("write the config: %w", err)
	}
	cmd := exec.Command(binary, "run", "--config", file)
	cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	return Run(cmd, dir, logs, addrs...)
}

// Run runs the command of a server in a folder, and waits until it listens on addrs. What it writes to
// stderr goes to logs.
func Run(cmd *exec.Cmd, dir string, logs io.Writer, addrs ...string) (*Process, error) {
	p := &Process{cmd: cmd, ended: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stderr = dir, logs
	process.EndWithParent(p.cmd)
	process.OwnGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(p.cmd.Path), err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	if err := awaitListening(addrs, p.ended); err != nil {
		p.Stop()
		return nil, err
	}
	return p, nil
}

// Logs is what a process has written. The zero value is ready for use.
type Logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements [io.Writer].
func (l *Logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *Logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Fault is an error if there was a panic or a data race.
func (l *Logs) Fault() error {
	if text := l.String(); strings.Contains(text, "panic") || strings.Contains(text, "DATA RACE") {
		return fmt.Errorf("a panic or a data race in Caddy:\n%s", text)
	}
	return nil
}

// stopTimeout is how long a server may take to end.
const stopTimeout = time.Minute

// Stop ends the server gracefully and waits for it. One that does not end is
// killed.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// CPU is the user and system time of the process so far, in steps of 10 ms.
func (p *Process) CPU() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	// The second field, in parentheses, can contain spaces.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

// awaitListening waits until all of the addresses accept connections.
func awaitListening(addrs []string, ended <-chan struct{}) error {
	deadline := time.Now().Add(time.Minute)
	for _, addr := range addrs {
		for {
			conn, err := net.Dial("tcp", addr)
			if err == nil {
				_ = conn.Close()
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("wait until it listens: %w", err)
			}
			select {
			case <-ended:
				return fmt.Errorf("it ended before it listened on %s", addr)
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// Metrics are the figures of a Caddy, by name and labels as it writes them.
type Metrics map[string]float64

// ParseMetrics reads lines such as name{label="value"} 1.
func ParseMetrics(text string) (Metrics, error) {
	m := Metrics{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		// A label's value may have spaces.
		space := strings.LastIndexByte(line, ' ')
		n, err := strconv.ParseFloat(line[space+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("read metric %s: %w", line, err)
		}
		m[line[:max(space, 0)]] = n
	}
	return m, nil
}

// Sum adds up what has a name and all of the labels, given as name="value".
func (m Metrics) Sum(name string, labels ...string) (n float64) {
	for key, value := range m {
		if Has(key, name, labels...) {
			n += value
		}
	}
	return n
}

// Has reports whether a key of Metrics has a name and all of the labels.
func Has(key, name string, labels ...string) bool {
	metric, has, _ := strings.Cut(key, "{")
	if metric != name {
		return false
	}
	for _, l := range labels {
		// Another label's name may end like this one's.
		if !strings.Contains(","+has, ","+l) {
			return false
		}
	}
	return true
}

// Label is the value of one of the labels in a key of Metrics.
func Label(key, name string) string {
	_, labels, _ := strings.Cut(key, "{")
	_, rest, _ := strings.Cut(","+labels, ","+name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}
