package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// Options say how a server is launched. The zero value makes a primary that
// anybody may use.
type Options struct {
	// Args are arguments for redis-server, such as "--appendonly", "yes". They
	// come after the package's own and override them, except for the address.
	Args []string

	// ReplicaOf is the primary to replicate. Nil, the default, makes a primary.
	ReplicaOf *Server

	// Username and Password are what the server's own client presents, and what
	// the server presents to a primary if it is or becomes a replica. Args must
	// make the server accept them, by "--requirepass" or "--aclfile". The default
	// password is that of "--requirepass" in Args, the default user is Redis's.
	Username, Password string

	// TLS makes the server speak TLS alone, as a replica also with its primary,
	// and show this certificate. It accepts clients that show a certificate of
	// the same authority; with "--tls-auth-clients", "no" in Args all. Nil means
	// the primary's, and no TLS for a primary.
	TLS *Certificate

	// cluster makes the server a node of a Redis Cluster.
	cluster bool

	// sentinel makes the server a sentinel with a configuration of these lines
	// and its address. Nil makes a server that holds data.
	sentinel []string
}

// errPortTaken is the error of a server that cannot listen on its port.
var errPortTaken = errors.New("the port is taken")

// errStopped is the error of operations on a server after Stop.
var errStopped = errors.New("the server was stopped")

// configFile is the server's configuration file in its directory. The server
// itself writes there what it shall be after a restart.
const configFile = "redis.conf"

// Launch starts a server and returns when it answers; a replica also is in
// sync with its primary then. It fails if redis-server is not on the PATH, if it
// exits, or if it is not ready within 10 seconds; the error quotes its log.
func Launch(opts Options) (*Server, error) {
	return launch(opts, reservePort)
}

// StartWith launches a server like [Launch] and stops it when the test ends.
// The test fails if the server cannot be launched.
func StartWith(tb testing.TB, opts Options) *Server {
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

func launch(opts Options, reserve func() (*port, error)) (*Server, error) {
	binary, err := process.Find("redis-server")
	if err != nil {
		return nil, err
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
	login := opts.login()
	s := &Server{port: p, login: login, client: newClient(p.addr(), login), primary: opts.ReplicaOf}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Stop(), os.RemoveAll(s.dir))
		}
	}()
	if err := s.prepare(binary, opts, reserve); err != nil {
		return nil, err
	}
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

// prepare makes what the process needs before it starts.
func (s *Server) prepare(binary string, opts Options, reserve func() (*port, error)) (err error) {
	if s.dir, err = os.MkdirTemp("", "redistest-"); err != nil {
		return fmt.Errorf("make the server's directory: %w", err)
	}
	if s.primary != nil {
		if s.link, err = NewProxy(s.primary.Addr()); err != nil {
			return err
		}
	}
	if opts.cluster {
		if s.bus, err = reserve(); err != nil {
			return err
		}
	}
	if opts.sentinel != nil {
		s.tune = hurrySentinel
	}
	if s.socket = argument(opts.Args, "--unixsocket"); s.socket != "" && !filepath.IsAbs(s.socket) {
		s.socket = filepath.Join(s.dir, s.socket)
	}
	file, lines := filepath.Join(s.dir, configFile), strings.Join(s.config(opts), "\n")
	if err := os.WriteFile(file, []byte(lines+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the server's configuration: %w", err)
	}
	s.argv = append([]string{binary, file}, s.arguments(opts)...)
	return nil
}

// start runs the process and waits until it answers. If it does not, it is
// killed and its directory stays until Stop.
func (s *Server) start() error {
	process, err := watch(s.dir, s.argv)
	if err != nil {
		return err
	}
	s.process = process
	s.paused = false

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
	err = poll(ctx, func() error { return s.ready(ctx, process.pid) })
	if err == nil && s.tune != nil {
		err = s.tune(ctx, s.client)
	}
	if err == nil {
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
	// A sentinel has no data and does not mention it.
	if loading := info["loading"]; loading != "0" && loading != "" {
		return errors.New("it is loading its data")
	}
	return nil
}
