package redistest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// Server is a redis-server process. It persists nothing unless its arguments
// say so. Its methods are safe for concurrent use.
type Server struct {
	port    *port
	bus     *port // where the other nodes of a cluster reach it; nil otherwise
	argv    []string
	dir     string
	socket  string // the path of its Unix socket, or empty
	login   login
	client  *goredis.Client
	primary *Server // nil for a primary
	link    *Proxy  // a replica's only way to its primary

	// tune makes the settings that are no arguments, once the process answers. Nil
	// means none.
	tune func(context.Context, *goredis.Client) error

	// own are the addresses of its client's connections.
	own sync.Map

	// disturbed is set once the server was killed or cut off, or paused in a cluster.
	disturbed atomic.Bool

	mu      sync.Mutex
	process *watchdog // nil before the start and after Stop
	paused  bool
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
	if s.bus != nil {
		errs = append(errs, s.bus.release())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop redis-server on %s: %w", s.Addr(), err)
	}
	return nil
}

// Addr is the server's address, "127.0.0.1:port". It never changes.
func (s *Server) Addr() string {
	return s.port.addr()
}

// SocketPath is the absolute path of the Unix socket on which the server also
// listens, or empty if its arguments name none. "--unixsocket" may name a path
// in the server's directory, such as "redis.sock".
func (s *Server) SocketPath() string {
	return s.socket
}

// Client is a client of this server for preparations and assertions. All its
// timeouts are 10 seconds, it obeys deadlines of contexts and never repeats a
// command. It logs in as [Login] says, and trusts a server's certificate even
// if it is expired. It remains usable when the server restarts; Stop closes it.
func (s *Server) Client() *goredis.Client {
	return s.client
}

// Running reports whether the server can answer: it was not killed, paused or
// stopped and has not exited.
func (s *Server) Running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil || s.process.killed || s.paused {
		return false
	}
	select {
	case <-s.process.exited:
		return false
	default:
		return true
	}
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

// Pause stops the server's process with SIGSTOP. The system still accepts
// connections and bytes for it, but nothing answers.
func (s *Server) Pause() error {
	return s.signal("pause", process.Pause, true)
}

// Resume lets a paused server continue; it then handles what has arrived.
func (s *Server) Resume() error {
	return s.signal("resume", process.Resume, false)
}

func (s *Server) signal(verb string, send func(pid int) error, paused bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bus != nil {
		// Other nodes may hold it against the node later.
		s.disturbed.Store(true)
	}
	err := errStopped
	if s.process != nil {
		err = s.process.signal(send)
	}
	if err != nil {
		return fmt.Errorf("%s redis-server on %s: %w", verb, s.Addr(), err)
	}
	s.paused = paused
	return nil
}

// Kill kills the server, paused or not, with SIGKILL and returns when it is
// gone. Its port stays reserved and refuses connections. Killing a killed server
// does nothing.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disturbed.Store(true)
	err := errStopped
	if s.process != nil {
		err = s.process.kill()
	}
	if err != nil {
		return fmt.Errorf("kill redis-server on %s: %w", s.Addr(), err)
	}
	return nil
}

// Restart kills the server unless that has happened and starts it again with
// the same port, directory and arguments. It returns when the server answers,
// within a minute; a replica need not be in sync then, see [Server.WaitInSync].
// Data survives only if the arguments enable persistence; the role that Sentinel
// or a cluster has given the server does.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.restart(); err != nil {
		return fmt.Errorf("restart redis-server: %w", err)
	}
	return nil
}

func (s *Server) restart() error {
	s.disturbed.Store(true)
	if s.process == nil {
		return errStopped
	}
	if err := s.process.kill(); err != nil {
		return err
	}
	previous := s.process
	err := s.start()
	// The directory passes to the new watchdog, even if its server failed.
	if s.process != previous {
		err = errors.Join(err, previous.release())
	}
	return err
}

// Calls is how often the server has run each command since it was started, by
// the command's name in lower case. What scripts run counts as well.
func (s *Server) Calls() (map[string]int64, error) {
	stats, err := s.Info("commandstats")
	if err != nil {
		return nil, err
	}
	return parseCalls(stats)
}

// readers are the commands by which fixed windows and leases are read, by scripts
// as well: each reads its bucket once. HGET, which looks for blocks and grants once a
// second, asks about no bucket.
var readers = []string{"hmget", "zcard"}

// Asked is how often the server was asked about a bucket, or to change it, since
// it was started. Scripts that are run for several buckets at once count as often.
func (s *Server) Asked() (sum int64, err error) {
	calls, err := s.Calls()
	for _, name := range readers {
		sum += calls[name]
	}
	return sum, err
}

func parseCalls(stats map[string]string) (map[string]int64, error) {
	calls := make(map[string]int64, len(stats))
	for field, text := range stats {
		name, ok := strings.CutPrefix(field, "cmdstat_")
		if !ok {
			continue
		}
		first, _, _ := strings.Cut(text, ",")
		n, err := strconv.ParseInt(strings.TrimPrefix(first, "calls="), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read the calls of %s from %q: %w", name, text, err)
		}
		calls[name] = n
	}
	return calls, nil
}

// errNoneRunning is the error of questions to a group of servers none of which
// runs.
var errNoneRunning = errors.New("none of the servers is running")

// running returns those servers that can answer.
func running(all []*Server) (some []*Server) {
	for _, s := range all {
		if s.Running() {
			some = append(some, s)
		}
	}
	return some
}

func addrs(all []*Server) []string {
	list := make([]string, len(all))
	for i, s := range all {
		list[i] = s.Addr()
	}
	return list
}

func stopAll(all []*Server) error {
	var errs []error
	for _, s := range all {
		errs = append(errs, s.Stop())
	}
	return errors.Join(errs...)
}
