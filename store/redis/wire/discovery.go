package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// findPeriod is the time between regular searches for the servers of a shard;
	// findPause, the least time before a search that a nudge asks for.
	findPeriod = time.Second
	findPause  = 100 * time.Millisecond
	// findTimeout bounds a search.
	findTimeout = 500 * time.Millisecond
)

// finder finds the servers of a shard that are not given by their addresses.
type finder interface {
	Find(ctx context.Context) ([]Roles, error)
	Close()
}

func (s *Shard) discover() {
	tick := time.NewTicker(findPeriod)
	defer tick.Stop()
	var failing bool
	for {
		ctx, cancel := context.WithTimeout(s.life, findTimeout)
		found, err := s.finder.Find(ctx)
		cancel()
		switch {
		case s.life.Err() != nil:
			return
		case err == nil:
			s.adopt(found)
		case !failing:
			s.Emit(Event{Kind: DiscoveryFailed, Err: err})
		}
		if failing && err == nil {
			s.Emit(Event{Kind: Discovered})
		}
		failing = err != nil
		if !Pause(s.life, findPause) {
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

func (s *Shard) nudge() {
	select {
	case s.nudged <- struct{}{}:
	default:
	}
}

// SentinelOptions locate a primary and its replicas through Redis Sentinel.
type SentinelOptions struct {
	// Master is the name under which the sentinels watch the primary.
	Master string
	// Addrs are the sentinels' addresses.
	Addrs []string
	// Credentials, if set, log in to the sentinels, at each connection.
	Credentials Credentials
}

// Sentinel asks all sentinels and follows the one that knows of the latest
// failover, and that it is over: one that was cut off may name a previous primary.
type Sentinel struct {
	master  string
	clients []*goredis.SentinelClient
}

// NewSentinel returns a finder that asks the sentinels of the options. It connects at its
// first use.
func NewSentinel(opts *Options) *Sentinel {
	s := &Sentinel{master: opts.Sentinel.Master}
	for _, addr := range opts.Sentinel.Addrs {
		o := clientOptions(addr, opts)
		o.DB, o.PoolSize, o.MaxActiveConns = 0, 1, 1
		o.CredentialsProviderContext = opts.Sentinel.Credentials
		s.clients = append(s.clients, goredis.NewSentinelClient(o))
	}
	return s
}

// SentinelReply is what a sentinel says.
type SentinelReply struct {
	Roles
	epoch int64
	// failsOver is set while the sentinel fails the primary over.
	failsOver bool
	Err       error
}

// isLater reports whether an answer knows more of failovers than another one.
func (a *SentinelReply) isLater(than *SentinelReply) bool {
	switch {
	case than.Primary == "" || a.epoch != than.epoch:
		return than.Primary == "" || a.epoch > than.epoch
	default:
		return than.failsOver && !a.failsOver
	}
}

// Find returns the servers after the latest failover.
func (s *Sentinel) Find(ctx context.Context) ([]Roles, error) {
	found, err := s.Latest(s.AskAll(ctx))
	if err != nil {
		return nil, err
	}
	return []Roles{found}, nil
}

// AskAll asks the sentinels at the same time; the answers are in their order.
func (s *Sentinel) AskAll(ctx context.Context) []SentinelReply {
	answers := make([]SentinelReply, len(s.clients))
	var all sync.WaitGroup
	for i, client := range s.clients {
		all.Go(func() { answers[i] = s.ask(ctx, client) })
	}
	all.Wait()
	return answers
}

// Latest returns the roles after the latest failover that an answer knows of.
func (s *Sentinel) Latest(answers []SentinelReply) (Roles, error) {
	var latest SentinelReply
	var failures []error
	for _, a := range answers {
		switch {
		case a.Err != nil:
			failures = append(failures, a.Err)
		case a.isLater(&latest):
			latest = a
		}
	}
	if latest.Primary == "" {
		return Roles{}, fmt.Errorf("ask the sentinels for %s: %w", s.master, errors.Join(failures...))
	}
	return latest.Roles, nil
}

func (s *Sentinel) ask(ctx context.Context, client *goredis.SentinelClient) (a SentinelReply) {
	master, err := client.Master(ctx, s.master).Result()
	if err != nil {
		return SentinelReply{Err: err}
	}
	if a.epoch, err = strconv.ParseInt(master["config-epoch"], 10, 64); err != nil {
		return SentinelReply{Err: fmt.Errorf("config-epoch: %w", err)}
	}
	a.failsOver = hasFlag(master["flags"], "failover_in_progress")
	// Until a failover has ended, MASTER has the new epoch, and the old address.
	addr, err := client.GetMasterAddrByName(ctx, s.master).Result()
	if err != nil {
		return SentinelReply{Err: err}
	}
	if len(addr) != 2 || addr[0] == "" || addr[1] == "" {
		return SentinelReply{Err: fmt.Errorf("no address of %s in its answer", s.master)}
	}
	a.Primary = net.JoinHostPort(addr[0], addr[1])
	replicas, err := client.Replicas(ctx, s.master).Result()
	if err != nil {
		return SentinelReply{Err: err}
	}
	for _, replica := range replicas {
		switch addr := addrIn(replica); {
		case addr == "" || addr == a.Primary:
		case isDownBySentinel(replica["flags"]):
			a.Down = append(a.Down, addr)
		default:
			a.Replicas = append(a.Replicas, addr)
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

// isDownBySentinel reports whether flags describe a server that cannot answer.
func isDownBySentinel(flags string) bool {
	return hasFlag(flags, "s_down") || hasFlag(flags, "o_down") || hasFlag(flags, "disconnected")
}

func hasFlag(flags, flag string) bool { return slices.Contains(strings.Split(flags, ","), flag) }

// Close closes the connections.
func (s *Sentinel) Close() {
	for _, client := range s.clients {
		_ = client.Close()
	}
}
