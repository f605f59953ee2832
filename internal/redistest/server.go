package redistest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
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

	// tune gives a process that has started the settings that are no arguments.
	// Nil means none.
	tune func(context.Context, *goredis.Client) error

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
// command. It logs in as [Options] say, and trusts a server's certificate even
// if it is expired. It remains usable when the server restarts; Stop closes it.
func (s *Server) Client() *goredis.Client {
	return s.client
}

// Running tells whether the server can answer: it was not killed, paused or
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

// Start launches a primary with extra redis-server arguments and stops it when
// the test ends. The test fails if that is impossible, also where redis-server
// is not installed.
func Start(tb testing.TB, args ...string) *Server {
	tb.Helper()
	return StartWith(tb, Options{Args: args})
}

// StartReplica launches a replica of s with extra redis-server arguments and
// stops it when the test ends. It is in sync with s when StartReplica returns.
func (s *Server) StartReplica(tb testing.TB, args ...string) *Server {
	tb.Helper()
	return StartWith(tb, Options{Args: args, ReplicaOf: s})
}
