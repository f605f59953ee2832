package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// findPeriod is how often it is asked who the servers of a shard are, and
	// findPause how soon that is done again if something points to a change.
	findPeriod = time.Second
	findPause  = 100 * time.Millisecond
	// findTimeout bounds one such question.
	findTimeout = 500 * time.Millisecond
)

// errNoServers is the error of calls while it is not known whom to ask.
var errNoServers = errors.New("no primary is known")

// finder finds the servers of a shard that are not given by their addresses.
type finder interface {
	// find asks who they are.
	find(ctx context.Context) ([]roles, error)
	close()
}

// discover keeps finding the servers, until the shard is closed.
func (s *Shard) discover() {
	tick := time.NewTicker(findPeriod)
	defer tick.Stop()
	var failing bool
	for {
		ctx, cancel := context.WithTimeout(s.life, findTimeout)
		found, err := s.finder.find(ctx)
		cancel()
		switch {
		case s.life.Err() != nil:
			return
		case err == nil:
			s.adopt(found)
		case !failing:
			s.tell(Event{Kind: DiscoveryFailed, Err: err})
		}
		if failing && err == nil {
			s.tell(Event{Kind: Discovered})
		}
		failing = err != nil
		if !pause(s.life, findPause) {
			return
		}
		select {
		case <-tick.C:
		case <-s.nudged:
		case <-s.life.Done():
			return
		}
	}
}

// nudge makes it be asked soon who the servers are.
func (s *Shard) nudge() {
	select {
	case s.nudged <- struct{}{}:
	default:
	}
}

// SentinelOptions are how a primary and its replicas are found through Redis
// Sentinel.
type SentinelOptions struct {
	// Master is the name under which the sentinels watch the primary.
	Master string
	// Addrs are the sentinels' addresses.
	Addrs []string
	// Credentials, if set, are those for the sentinels, asked for at each
	// connection.
	Credentials Credentials
}

// sentinel asks all sentinels and follows the one that knows of the latest
// failover: one that was cut off may name a primary of the past.
type sentinel struct {
	master  string
	clients []*goredis.SentinelClient
}

func newSentinel(opts *ShardOptions) *sentinel {
	s := &sentinel{master: opts.Sentinel.Master}
	for _, addr := range opts.Sentinel.Addrs {
		o := clientOptions(addr, opts)
		o.DB, o.PoolSize, o.MaxActiveConns = 0, 1, 1
		o.CredentialsProviderContext = opts.Sentinel.Credentials
		s.clients = append(s.clients, goredis.NewSentinelClient(o))
	}
	return s
}

// answer is what one sentinel says.
type answer struct {
	roles
	epoch int64
	err   error
}

func (s *sentinel) find(ctx context.Context) ([]roles, error) {
	answers := make(chan answer, len(s.clients))
	for _, client := range s.clients {
		go func() { answers <- s.ask(ctx, client) }()
	}
	var latest answer
	var failures []error
	for range s.clients {
		switch a := <-answers; {
		case a.err != nil:
			failures = append(failures, a.err)
		case latest.primary == "" || a.epoch > latest.epoch:
			latest = a
		}
	}
	if latest.primary == "" {
		return nil, fmt.Errorf("ask the sentinels for %s: %w", s.master, errors.Join(failures...))
	}
	return []roles{latest.roles}, nil
}

func (s *sentinel) ask(ctx context.Context, client *goredis.SentinelClient) (a answer) {
	master, err := client.Master(ctx, s.master).Result()
	if err != nil {
		return answer{err: err}
	}
	if a.epoch, err = strconv.ParseInt(master["config-epoch"], 10, 64); err != nil {
		return answer{err: fmt.Errorf("config-epoch: %w", err)}
	}
	if a.primary = addrIn(master); a.primary == "" {
		return answer{err: fmt.Errorf("no address of %s in its answer", s.master)}
	}
	replicas, err := client.Replicas(ctx, s.master).Result()
	if err != nil {
		return answer{err: err}
	}
	for _, replica := range replicas {
		if addr := addrIn(replica); addr != "" && addr != a.primary && !isDownBySentinel(replica["flags"]) {
			a.replicas = append(a.replicas, addr)
		}
	}
	return a
}

func addrIn(server map[string]string) string {
	if server["ip"] == "" || server["port"] == "" {
		return ""
	}
	return net.JoinHostPort(server["ip"], server["port"])
}

// isDownBySentinel tells whether the flags of a server are those of one that
// cannot be asked.
func isDownBySentinel(flags string) bool {
	for _, flag := range strings.Split(flags, ",") {
		if flag == "s_down" || flag == "o_down" || flag == "disconnected" {
			return true
		}
	}
	return false
}

func (s *sentinel) close() {
	for _, client := range s.clients {
		_ = client.Close()
	}
}

var _ finder = (*sentinel)(nil)
