//go:build check

package redistest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// childEnv makes the test binary be a program that launches a server and then
// ends in the way that the variable names.
const childEnv = "REDISTEST_CHILD"

func TestMain(m *testing.M) {
	if ending := os.Getenv(childEnv); ending != "" {
		child(ending)
	}
	os.Exit(RunTests(m))
}

// child launches a server, prints its process id and directory, and waits for
// the end of its input before it ends without stopping the server.
func child(ending string) {
	s, err := Launch()
	if err != nil {
		panic(err)
	}
	switch ending {
	case "paused":
		err = s.Pause()
	case "killed":
		err = s.Kill()
	case "restarted":
		err = s.Restart()
	case "sentinel":
		var sentinels *Sentinels
		if sentinels, err = LaunchSentinels("primary", s, 1, SentinelOptions{}); err == nil {
			s = sentinels.Nodes[0]
		}
	}
	if err != nil {
		panic(err)
	}
	fmt.Println(s.process.pid, s.dir)
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		panic(err)
	}
	switch ending {
	case "exit":
		os.Exit(3)
	case "panic":
		panic("the child ends here")
	default:
		self, err := os.FindProcess(os.Getpid())
		panic(errors.Join(err, self.Kill()))
	}
}

func TestServerEndsWithProgram(t *testing.T) {
	// All but the first two end with a SIGKILL.
	for _, ending := range []string{"exit", "panic", "sigkill", "paused", "killed", "restarted", "sentinel"} {
		t.Run(ending, func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), childEnv+"="+ending)
			stdin, err := cmd.StdinPipe()
			Must(t, err)
			stdout, err := cmd.StdoutPipe()
			Must(t, err)
			Must(t, cmd.Start())
			line, err := bufio.NewReader(stdout).ReadString('\n')
			if err != nil {
				t.Fatalf("read what the child launched: %v", errors.Join(err, cmd.Wait()))
			}
			var pid int
			var dir string
			if _, err := fmt.Sscan(line, &pid, &dir); err != nil {
				t.Fatalf("parse %q: %v", line, err)
			}
			if alive := isAlive(pid); alive != (ending != "killed") {
				t.Errorf("server alive before the child ended: %v", alive)
			}
			if _, err := os.Stat(dir); err != nil {
				t.Errorf("directory before the child ended: %v", err)
			}

			stdin.Close()
			if err := cmd.Wait(); err == nil {
				t.Error("child succeeded, want a failure")
			}
			requireGone(t, pid, dir)
		})
	}
}

// isAlive reports whether there is a process of that ID.
func isAlive(pid int) bool {
	p, err := os.FindProcess(pid)
	return err == nil && p.Signal(syscall.Signal(0)) == nil
}

// requireGone waits until there is neither the process nor the directory.
func requireGone(t *testing.T, pid int, dir string) {
	t.Helper()
	Eventually(t, "the process and its directory are gone", func() error {
		_, err := os.Stat(dir)
		if isAlive(pid) || !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("process %d alive: %v, directory %s: %w", pid, isAlive(pid), dir, err)
		}
		return nil
	})
}

func TestStopLeavesNothing(t *testing.T) {
	for name, fault := range map[string]func(*Server) error{
		"running": func(*Server) error { return nil },
		"paused":  (*Server).Pause,
		"killed":  (*Server).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			s := Start(t)
			pid := s.process.pid
			Must(t, fault(s))
			Must(t, s.Stop())
			requireGone(t, pid, s.dir)
		})
	}
}

func TestFailedLaunchLeavesNothing(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	_, err := Launch(Args("--no-such-directive", "1"))
	if err == nil || !strings.Contains(err.Error(), "no-such-directive") {
		t.Errorf("got error %v, want one that quotes the log", err)
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) != 0 {
		t.Errorf("left %v, %v; want nothing", left, err)
	}
}

func TestReservedPort(t *testing.T) {
	p, err := reservePort()
	Must(t, err)
	if conn, err := net.Dial("tcp", p.addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial got %v, %v; want connection refused", conn, err)
	}
	for range 2 {
		listener, err := net.Listen("tcp", p.addr())
		if err != nil {
			t.Fatalf("listen on a reserved port: %v", err)
		}
		listener.Close()
	}
	for range 2 {
		if err := p.release(); err != nil {
			t.Errorf("release: %v", err)
		}
	}
}

func TestLaunchTakesAnotherPortIfOneIsLost(t *testing.T) {
	lost, err := reservePort()
	Must(t, err)
	listener, err := net.Listen("tcp", lost.addr())
	Must(t, err)
	defer listener.Close()

	ports := 0
	s, err := launch(options{}, func() (*port, error) {
		if ports++; ports == 1 {
			return lost, nil
		}
		return reservePort()
	})
	Must(t, err)
	defer func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	}()
	if ports != 2 || s.Addr() == lost.addr() {
		t.Errorf("listening on %s after %d ports; want the second port, not %s", s.Addr(), ports, lost.addr())
	}

	ports = 0
	_, err = launch(options{}, func() (*port, error) {
		ports++
		return lost, nil
	})
	if !errors.Is(err, errPortTaken) {
		t.Errorf("got error %v after %d ports, want %v", err, ports, errPortTaken)
	}
}

func TestParseCalls(t *testing.T) {
	stats := map[string]string{
		"cmdstat_time": "calls=7,usec=9", "cmdstat_eval": "calls=5,usec=9", "cmdstat_config|get": "calls=12,usec=9", "redis_version": "7.0.15",
	}
	got, err := parseCalls(stats)
	if want := map[string]int64{"time": 7, "eval": 5, "config|get": 12}; err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, error %v, want %v", got, err, want)
	}
	stats["cmdstat_eval"] = "usec=9"
	if _, err := parseCalls(stats); err == nil {
		t.Error("statistics without calls were read")
	}
}

// TestDirectoryIsRemovedWhileAChildWrites checks that a server's directory is removed although a
// child of the server, such as one that saves, goes on writing to it for a while.
func TestDirectoryIsRemovedWhileAChildWrites(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "server")
	Must(t, os.Mkdir(dir, 0o700))
	const server = `cd "$0"
for i in 1 2 3 4 5 6 7 8; do
	(n=0; while [ $n -lt 2000 ]; do n=$((n + 1)); : >"$i.$n" || exit; done) 3>&- &
done
exec sleep 600`
	w, err := watch(dir, []string{"/bin/sh", "-c", server, dir})
	Must(t, err)
	for written := false; !written; {
		_, err := os.Stat(filepath.Join(dir, "1.100"))
		written = err == nil
	}
	Must(t, w.end())
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is there: %v", err)
	}
}

// TestNodesMeetAgain where one of them has not answered for so long that the other has forgotten it.
func TestNodesMeetAgain(t *testing.T) {
	t.Parallel() // it spends its time waiting
	c := new(Cluster)
	t.Cleanup(func() { _ = c.Stop() })
	for range 2 {
		node, err := launch(options{cluster: true}, reservePort)
		if err != nil {
			t.Fatal(err)
		}
		c.Nodes = append(c.Nodes, node)
	}
	awake, asleep := c.Nodes[0], c.Nodes[1]
	is := func(wanted int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := pollEvery(ctx, groupPollInterval, func() error {
			known, err := awake.knows(t.Context(), asleep)
			if err == nil && known != wanted {
				err = fmt.Errorf("it is %d, want %d", known, wanted)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := asleep.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := awake.client.Do(t.Context(), "CLUSTER", "MEET", loopback, asleep.port.number, asleep.bus.number).Err(); err != nil {
		t.Fatal(err)
	}
	is(stranger)
	if err := asleep.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := c.meet(t.Context()); err != nil {
		t.Fatal(err)
	}
	is(acquaintance)
}
