package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Options say how a server is launched. The zero value makes a primary.
type Options struct {
	// Args are arguments for redis-server, such as "--appendonly", "yes". They
	// come after the package's own and override them, except for the address.
	Args []string

	// ReplicaOf is the primary to replicate. Nil, the default, makes a primary.
	ReplicaOf *Server
}

// Server is a redis-server process. It persists nothing unless its arguments
// say so. Its methods are safe for concurrent use.
type Server struct {
	port    *port
	argv    []string
	dir     string
	client  *goredis.Client
	primary *Server // nil for a primary
	link    *Proxy  // a replica's only way to its primary

	mu      sync.Mutex
	process *watchdog // nil before the start and after Stop
}

// errPortTaken is the error of a server that cannot listen on its port.
var errPortTaken = errors.New("the port is taken")

// errStopped is the error of operations on a server after Stop.
var errStopped = errors.New("the server was stopped")

// Launch starts a server and returns when it answers; a replica also is in
// sync with its primary then. It fails if redis-server is not on the PATH, if it
// exits, or if it is not ready within 10 seconds; the error quotes its log.
func Launch(opts Options) (*Server, error) {
	return launch(opts, reservePort)
}

func launch(opts Options, reserve func() (*port, error)) (*Server, error) {
	binary, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("find redis-server (to install it: apt-get install redis-server): %w", err)
	}
	// A port that was free can be lost to a program that insists on its number.
	const attempts = 5
	for attempt := 1; ; attempt++ {
		s, err := launchOn(binary, opts, reserve)
		if err == nil {
			return s, nil
		}
		if attempt == attempts || !errors.Is(err, errPortTaken) {
			return nil, fmt.Errorf("launch redis-server: %w", err)
		}
	}
}

func launchOn(binary string, opts Options, reserve func() (*port, error)) (_ *Server, err error) {
	p, err := reserve()
	if err != nil {
		return nil, err
	}
	s := &Server{port: p, client: newClient(p.addr()), primary: opts.ReplicaOf}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Stop(), os.RemoveAll(s.dir))
		}
	}()
	if s.dir, err = os.MkdirTemp("", "redistest-"); err != nil {
		return nil, fmt.Errorf("make the server's directory: %w", err)
	}
	s.argv = []string{
		binary,
		"--save", "", "--appendonly", "no", "--dir", s.dir,
		"--daemonize", "no", "--protected-mode", "no", "--loglevel", "warning",
		// Without the delay a replica waits 5 seconds for companions.
		"--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0",
	}
	if s.primary != nil {
		if s.link, err = NewProxy(s.primary.Addr()); err != nil {
			return nil, err
		}
		s.argv = append(s.argv, "--replicaof", loopback, strconv.Itoa(s.link.port.number))
	}
	s.argv = append(s.argv, opts.Args...)
	s.argv = append(s.argv, "--bind", loopback, "--port", strconv.Itoa(p.number))

	if err := s.start(); err != nil {
		return nil, err
	}
	if s.primary != nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.settle(ctx); err != nil {
			return nil, fmt.Errorf("%w; log: %s", err, serverLog(s.dir))
		}
	}
	return s, nil
}

func newClient(addr string) *goredis.Client {
	return goredis.NewClient(&goredis.Options{
		Addr:                     addr,
		DialTimeout:              patience,
		ReadTimeout:              patience,
		WriteTimeout:             patience,
		ContextTimeoutEnabled:    true,
		DialerRetries:            1,
		MaxRetries:               -1,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// start runs the process and waits until it answers. If it does not, it is
// killed and its directory stays until Stop.
func (s *Server) start() error {
	process, err := watch(s.dir, s.argv)
	if err != nil {
		return err
	}
	s.process = process

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// The context also ends when the process does, so that nobody waits in vain.
	go func() {
		select {
		case <-process.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	if err = poll(ctx, func() error { return s.ready(ctx, process.pid) }); err == nil {
		return nil
	}
	log := serverLog(s.dir)
	select {
	case <-process.exited:
		err = errors.New("it exited")
		if strings.Contains(log, "Address already in use") {
			err = errPortTaken
		}
	default:
	}
	return errors.Join(fmt.Errorf("start on %s: %w; log: %s", s.Addr(), err, log), process.kill())
}

// ready tells what is missing until the process pid answers commands.
func (s *Server) ready(ctx context.Context, pid int) error {
	// What listens on the port may be another program, and never answer.
	ctx, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	// The client makes connections slowly once enough attempts have failed.
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", s.Addr())
	if err != nil {
		return err
	}
	conn.Close()
	info, err := s.info(ctx, "")
	if err != nil {
		return err
	}
	if info["process_id"] != strconv.Itoa(pid) {
		return fmt.Errorf("%w by process %s", errPortTaken, info["process_id"])
	}
	if info["loading"] != "0" {
		return errors.New("it is loading its data")
	}
	return nil
}

// Stop ends the server, removes its files and closes its client. Stopping a
// server again does nothing.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()

	var errs []error
	if s.process != nil {
		errs = append(errs, s.process.end())
		s.process = nil
	}
	if s.link != nil {
		errs = append(errs, s.link.Close())
	}
	if err := s.client.Close(); !errors.Is(err, goredis.ErrClosed) {
		errs = append(errs, err)
	}
	errs = append(errs, s.port.release())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop redis-server on %s: %w", s.Addr(), err)
	}
	return nil
}

// Addr is the server's address, "127.0.0.1:port". It never changes.
func (s *Server) Addr() string {
	return s.port.addr()
}

// Client is a client of this server for preparations and assertions. All its
// timeouts are 10 seconds, it obeys deadlines of contexts and never repeats a
// command. It remains usable when the server restarts; Stop closes it.
func (s *Server) Client() *goredis.Client {
	return s.client
}

// Info returns the fields of a section of the INFO command, such as
// "replication"; the empty section means all default ones.
func (s *Server) Info(section string) (map[string]string, error) {
	return s.info(context.Background(), section)
}

func (s *Server) info(ctx context.Context, section string) (map[string]string, error) {
	var sections []string
	if section != "" {
		sections = append(sections, section)
	}
	text, err := s.client.Info(ctx, sections...).Result()
	if err != nil {
		return nil, fmt.Errorf("get info of redis-server on %s: %w", s.Addr(), err)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields, nil
}

// CPU is the processor time, user and system, that the server has used since
// it was started or restarted, to the microsecond. Asking costs the server a
// command, which counts.
func (s *Server) CPU() (time.Duration, error) {
	info, err := s.Info("cpu")
	if err != nil {
		return 0, err
	}
	var total time.Duration
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		used, err := time.ParseDuration(info[name] + "s")
		if err != nil {
			return 0, fmt.Errorf("read %s of redis-server on %s: %w", name, s.Addr(), err)
		}
		total += used
	}
	return total, nil
}

// Start launches a primary with extra redis-server arguments and stops it when
// the test ends. The test fails if that is impossible, also where redis-server
// is not installed.
func Start(tb testing.TB, args ...string) *Server {
	tb.Helper()
	return start(tb, Options{Args: args})
}

// StartReplica launches a replica of s with extra redis-server arguments and
// stops it when the test ends. It is in sync with s when StartReplica returns.
func (s *Server) StartReplica(tb testing.TB, args ...string) *Server {
	tb.Helper()
	return start(tb, Options{Args: args, ReplicaOf: s})
}

func start(tb testing.TB, opts Options) *Server {
	tb.Helper()
	s, err := Launch(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Stop(); err != nil {
			tb.Error(err)
		}
	})
	return s
}
