// Package redistest runs real redis-server processes, and network faults in
// front of them, for tests, benchmarks and demonstrations: single servers,
// primaries with replicas ([Shard]), [Sentinels] that watch these, and a
// [Cluster]. An [Authority] makes the certificates of servers that speak TLS.
//
// Every server listens on a loopback port of its own and keeps its files in a
// temporary directory of its own. Both the process and the directory vanish
// with [Server.Stop], and also when the program that launched the server ends
// in any other way: a panic, os.Exit, or a SIGKILL.
//
// Functions whose names begin with Launch or New return errors and suit any
// program. Each has a Start for tests and benchmarks, which fails the test and
// stops what it started when the test ends.
//
// The redis-server program, 7.0 or newer, must be on the PATH; REDISTEST_SERVER names another
// server of the family in its place, and [Family] several. The package is for Unix systems.
package redistest

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// Option is a property of the servers of a launch.
type Option func(*options)

type options struct {
	// program is the server's, by its path; empty for that of all tests.
	program string
	args    []string
	primary *Server
	login   login

	// cluster makes the server a node of a Redis Cluster.
	cluster bool

	// sentinel holds the lines with which a sentinel's configuration begins. Nil
	// makes a server that holds data.
	sentinel []string
}

// Args adds arguments for redis-server, such as "--appendonly", "yes". They
// override the package's own, except for the address.
func Args(args ...string) Option {
	return func(o *options) { o.args = append(o.args, args...) }
}

// NodeTimeout makes the nodes of a cluster take a silent one for failed after that time, in place
// of a second. Where it is long, a busy machine causes no failover.
func NodeTimeout(d time.Duration) Option {
	return Args("--cluster-node-timeout", strconv.FormatInt(d.Milliseconds(), 10))
}

// ReplicaOf makes a server a replica of primary, with the primary's certificate
// unless [TLS] names another. It has no meaning for shards and clusters.
func ReplicaOf(primary *Server) Option {
	return func(o *options) { o.primary = primary }
}

// Login is what the server's own client presents, and what the server presents
// to a primary if it is or becomes a replica. The arguments must make the server
// accept it, by "--requirepass" or "--aclfile". The default is the password of
// "--requirepass" and the user of Redis.
func Login(username, password string) Option {
	return func(o *options) { o.login.username, o.login.password = username, password }
}

// TLS makes the server speak TLS alone, as a replica also with its primary, and
// show this certificate. It accepts clients with a certificate of the same
// authority; with "--tls-auth-clients", "no" among the arguments it accepts all.
func TLS(certificate *Certificate) Option {
	return func(o *options) { o.login.certificate = certificate }
}

func collect(opts []Option) options {
	var o options
	for _, set := range opts {
		set(&o)
	}
	if o.login.password == "" {
		o.login.password = argument(o.args, "--requirepass")
	}
	if o.login.certificate == nil && o.primary != nil {
		o.login.certificate = o.primary.login.certificate
	}
	return o
}

// errPortTaken is the error of a server that cannot listen on its port.
var errPortTaken = errors.New("the port is taken")

// errStopped is the error of operations on a server after Stop.
var errStopped = errors.New("the server was stopped")

// configFile is the server's configuration file in its directory. The server
// itself writes its role there, for after a restart.
const configFile = "redis.conf"

// Launch starts a primary, or with [ReplicaOf] a replica, and returns when it
// answers; a replica is in sync with its primary then. It fails if redis-server
// is not on the PATH, if it exits, or if it is not ready within a minute; the
// error quotes its log.
func Launch(opts ...Option) (*Server, error) {
	return launch(collect(opts), reservePort)
}

// Start launches like [Launch] for a test, which fails if the launch does. When the test
// ends, the server passes to another test, emptied, if it is as it was after its launch;
// otherwise it is stopped.
func Start(tb testing.TB, opts ...Option) *Server {
	tb.Helper()
	if collect(opts).primary != nil {
		s, err := Launch(opts...)
		return stopAfter(tb, s, err, s.Stop)
	}
	return StartShard(tb, 0, opts...).Primary
}

// stopAfter passes on what was launched and stops it when the test ends. The
// test fails if either does.
func stopAfter[S any](tb testing.TB, launched S, err error, stop func() error) S {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := stop(); err != nil {
			tb.Error(err)
		}
	})
	return launched
}

func launch(opts options, reserve func() (*port, error)) (*Server, error) {
	binary, err := opts.program, error(nil)
	if binary == "" {
		binary, err = serverProgram()
	}
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

// serverVariable names another server of the family than redis-server for all servers: a
// program on the PATH, or its path.
const serverVariable = "REDISTEST_SERVER"

func serverProgram() (string, error) {
	name := os.Getenv(serverVariable)
	if name == "" {
		return process.Find("redis-server")
	}
	binary, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s: %w; make servers brings some into bin/servers", serverVariable, err)
	}
	return filepath.Abs(binary)
}

func launchOn(binary string, opts options, reserve func() (*port, error)) (_ *Server, err error) {
	p, err := reserve()
	if err != nil {
		return nil, err
	}
	s := &Server{port: p, login: opts.login, primary: opts.primary}
	s.client = newClient(p.addr(), opts.login, &s.own)
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
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		if err := s.settle(ctx); err != nil {
			return nil, fmt.Errorf("%w; log: %s", err, serverLog(s.dir))
		}
	}
	return s, nil
}

// prepare makes the files and ports that the process needs.
func (s *Server) prepare(binary string, opts options, reserve func() (*port, error)) (err error) {
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
	if s.socket = argument(opts.args, "--unixsocket"); s.socket != "" && !filepath.IsAbs(s.socket) {
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

	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	// The context also ends when the process does, so that no wait is in vain.
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

// ready returns what is missing until the process pid answers commands.
func (s *Server) ready(ctx context.Context, pid int) error {
	// What listens on the port may be another program, and never answer.
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
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

// config is what the server's configuration file says at first. It is for what
// the server itself changes there: Sentinel has it rewritten when it gives the
// server another role, which the server then has after a restart too.
func (s *Server) config(opts options) []string {
	switch {
	case opts.sentinel != nil:
		return opts.sentinel
	case s.link != nil:
		return []string{"replicaof " + loopback + " " + strconv.Itoa(s.link.port.number)}
	default:
		return nil
	}
}

// arguments are redis-server's arguments after the configuration file, which
// they override.
func (s *Server) arguments(opts options) []string {
	args := []string{
		"--save", "", "--appendonly", "no", "--dir", s.dir,
		"--daemonize", "no", "--protected-mode", "no", "--loglevel", "warning",
		// Without the delay a replica waits 5 seconds for companions.
		"--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0",
		// A synchronization that hangs begins anew while tests still wait for it.
		"--repl-timeout", "20",
		"--replica-announce-ip", loopback,
	}
	args = append(args, s.credentials()...)
	if s.bus != nil {
		args = append(args,
			"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
			"--cluster-announce-ip", loopback, "--cluster-port", strconv.Itoa(s.bus.number),
			"--cluster-node-timeout", strconv.FormatInt(nodeTimeout.Milliseconds(), 10),
			// A replica to which its master has not sent anything yet is not named to
			// clients. Without writes that would be the ping every 10 seconds.
			"--repl-ping-replica-period", "1")
	}
	args = append(args, s.login.certificate.arguments()...)
	args = append(args, "--bind", loopback)
	args = append(args, opts.args...)

	plain, encrypted := s.port.number, 0
	if s.login.certificate != nil {
		plain, encrypted = encrypted, plain
	}
	args = append(args, "--port", strconv.Itoa(plain))
	if encrypted != 0 {
		args = append(args, "--tls-port", strconv.Itoa(encrypted))
	}
	if opts.sentinel != nil {
		args = append(args, "--sentinel")
	}
	return args
}

// credentials are the arguments that let the server replicate. A server that
// is a primary at first may become a replica.
func (s *Server) credentials() []string {
	login := s.login
	if s.primary != nil {
		login = s.primary.login
	}
	var args []string
	if login.username != "" {
		args = append(args, "--masteruser", login.username)
	}
	if login.password != "" {
		args = append(args, "--masterauth", login.password)
	}
	return args
}

// argument is the value of the last argument of that name in args, or empty.
func argument(args []string, name string) string {
	for i := len(args) - 2; i >= 0; i-- {
		if args[i] == name {
			return args[i+1]
		}
	}
	return ""
}

// login is what a client needs to use a server.
type login struct {
	username, password string
	certificate        *Certificate // the server's; nil without TLS
}

// ownConn is a connection whose address is among own while it is open.
type ownConn struct {
	*net.TCPConn
	own *sync.Map
}

func (c ownConn) Close() error {
	c.own.Delete(c.LocalAddr().String())
	return c.TCPConn.Close()
}

// newClient returns a client whose addresses are added to own, except with TLS.
func newClient(addr string, l login, own *sync.Map) *goredis.Client {
	var config *tls.Config
	if l.certificate != nil {
		config = l.certificate.authority.insider()
	}
	options := &goredis.Options{
		Addr:                     addr,
		Username:                 l.username,
		Password:                 l.password,
		TLSConfig:                config,
		DialTimeout:              waitTimeout,
		ReadTimeout:              waitTimeout,
		WriteTimeout:             waitTimeout,
		ContextTimeoutEnabled:    true,
		DialerRetries:            1,
		MaxRetries:               -1,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if config == nil {
		options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			own.Store(conn.LocalAddr().String(), true)
			return ownConn{conn.(*net.TCPConn), own}, nil
		}
	}
	return goredis.NewClient(options)
}

const loopback = "127.0.0.1"

// port is a TCP port of the loopback address, reserved until it is released, see
// [process.ReservePort].
type port struct {
	number  int
	release func() error
}

func reservePort() (*port, error) {
	number, release, err := process.ReservePort()
	if err != nil {
		return nil, err
	}
	return &port{number, release}, nil
}

// addr is the port's address as host:port.
func (p *port) addr() string {
	return net.JoinHostPort(loopback, strconv.Itoa(p.number))
}

const (
	// waitTimeout bounds every wait that has no context of the caller's.
	waitTimeout = time.Minute

	// replicationTimeout bounds the waits for replication even if the
	// caller's context has no deadline.
	replicationTimeout = time.Minute

	// groupTimeout bounds the waits for a group of servers to agree even if
	// the caller's context has no deadline.
	groupTimeout = time.Minute

	// answerTimeout bounds one attempt at getting an answer from a server that
	// may not be there; others follow. A server that is there answers in that time
	// on a busy machine too.
	answerTimeout = 5 * time.Second

	pollInterval = 2 * time.Millisecond

	// groupPollInterval is for questions to all members of a group of servers,
	// which cost them time that they need to agree.
	groupPollInterval = 20 * time.Millisecond
)

// poll calls done until it returns nil. Once ctx has ended it returns the
// error of ctx together with what done last reported as missing.
func poll(ctx context.Context, done func() error) error {
	return pollEvery(ctx, pollInterval, done)
}

func pollEvery(ctx context.Context, interval time.Duration, done func() error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()

	var missing error
	for {
		err := done()
		if err == nil {
			return nil
		}
		// An error that the end of ctx caused says less than the one before. A
		// connection can notice the deadline before ctx does.
		end, bounded := ctx.Deadline()
		ended := ctx.Err() != nil || bounded && !time.Now().Before(end)
		if !ended || missing == nil {
			missing = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), missing)
		case <-ticker.C:
		}
	}
}

// Must ends a test unless err is nil.
func Must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// atOnce is how many parallel tests run at a time.
const atOnce = 12

// RunTests runs tests for a TestMain, and returns its exit code. Parallel tests
// with servers mostly wait, so that several run at a time on however few
// processors, unless -parallel is given.
func RunTests(m *testing.M) int {
	flag.Parse()
	isGiven := false
	flag.Visit(func(f *flag.Flag) { isGiven = isGiven || f.Name == "test.parallel" })
	if !isGiven {
		if err := flag.Set("test.parallel", fmt.Sprint(atOnce)); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if err := stopIdle(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	return code
}
