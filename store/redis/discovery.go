package redis

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

// errNoServers is the error of calls while no primary is known.
var errNoServers = errors.New("no primary is known")

// finder finds the servers of a shard that are not given by their addresses.
type finder interface {
	find(ctx context.Context) ([]roles, error)
	close()
}

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
			s.emit(Event{Kind: DiscoveryFailed, Err: err})
		}
		if failing && err == nil {
			s.emit(Event{Kind: Discovered})
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

// sentinel asks all sentinels and follows the one that knows of the latest
// failover: one that was cut off may name a previous primary.
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

type answer struct {
	roles
	epoch int64
	err   error
}

func (s *sentinel) find(ctx context.Context) ([]roles, error) {
	found, err := s.latest(s.askAll(ctx))
	if err != nil {
		return nil, err
	}
	return []roles{found}, nil
}

// askAll asks the sentinels at the same time; the answers are in their order.
func (s *sentinel) askAll(ctx context.Context) []answer {
	answers := make([]answer, len(s.clients))
	var all sync.WaitGroup
	for i, client := range s.clients {
		all.Go(func() { answers[i] = s.ask(ctx, client) })
	}
	all.Wait()
	return answers
}

// latest returns the roles after the latest failover that an answer knows of.
func (s *sentinel) latest(answers []answer) (roles, error) {
	var latest answer
	var failures []error
	for _, a := range answers {
		switch {
		case a.err != nil:
			failures = append(failures, a.err)
		case latest.primary == "" || a.epoch > latest.epoch:
			latest = a
		}
	}
	if latest.primary == "" {
		return roles{}, fmt.Errorf("ask the sentinels for %s: %w", s.master, errors.Join(failures...))
	}
	return latest.roles, nil
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
		switch addr := addrIn(replica); {
		case addr == "" || addr == a.primary:
		case isDownBySentinel(replica["flags"]):
			a.down = append(a.down, addr)
		default:
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

// isDownBySentinel reports whether flags describe a server that cannot answer.
func isDownBySentinel(flags string) bool {
	return slices.ContainsFunc(strings.Split(flags, ","), func(flag string) bool {
		return flag == "s_down" || flag == "o_down" || flag == "disconnected"
	})
}

func (s *sentinel) close() {
	for _, client := range s.clients {
		_ = client.Close()
	}
}

// cluster finds the nodes of a Redis Cluster.
type cluster struct {
	opts *ShardOptions
	// timeout bounds the wait for a reply, so that one search can ask several nodes.
	timeout time.Duration
	// nodes are those found last, which are asked before the given addresses; the
	// first one answered last.
	nodes []string
	// clients are by address.
	clients map[string]*goredis.Client
}

func newCluster(opts *ShardOptions, timeout time.Duration) *cluster {
	return &cluster{opts: opts, timeout: timeout, clients: map[string]*goredis.Client{}}
}

func (c *cluster) find(ctx context.Context) ([]roles, error) {
	found, err := c.findAll(ctx)
	return slices.DeleteFunc(found, func(r roles) bool { return r.primary == "" }), err
}

// findAll also returns the roles of nodes that have no primary.
func (c *cluster) findAll(ctx context.Context) ([]roles, error) {
	var failures []error
	var doubtful []roles
	for _, addr := range appendNew(slices.Clone(c.nodes), c.opts.Cluster...) {
		found, isOK, err := c.ask(ctx, addr)
		switch {
		case err != nil:
			failures = append(failures, fmt.Errorf("%s: %w", addr, err))
		case isOK:
			c.remember(found, addr)
			return found, nil
		default:
			doubtful = found
		}
	}
	if doubtful != nil {
		return doubtful, nil
	}
	return nil, fmt.Errorf("ask the cluster for its slots: %w", errors.Join(failures...))
}

// ask asks one node. isOK is false for a node that was cut off from the others,
// which knows only the past.
func (c *cluster) ask(ctx context.Context, addr string) (found []roles, isOK bool, err error) {
	// Connecting may take longer than a search, and goes on when this ends.
	ctx, cancel := context.WithTimeout(ctx, 2*c.timeout)
	defer cancel()
	state, err := c.client(addr).ClusterInfo(ctx).Result()
	if err != nil {
		return nil, false, err
	}
	shards, err := c.client(addr).ClusterShards(ctx).Result()
	if err != nil {
		return nil, false, err
	}
	found = c.rolesIn(shards, addr)
	if !slices.ContainsFunc(found, func(r roles) bool { return r.primary != "" && len(r.slots) > 0 }) {
		return nil, false, errors.New("it knows no slots")
	}
	return found, parseInfo(state)["cluster_state"] == "ok", nil
}

func appendNew(list []string, addrs ...string) []string {
	for _, addr := range addrs {
		if !slices.Contains(list, addr) {
			list = append(list, addr)
		}
	}
	return list
}

func (c *cluster) client(addr string) *goredis.Client {
	if client, ok := c.clients[addr]; ok {
		return client
	}
	o := clientOptions(addr, c.opts)
	o.PoolSize, o.MaxActiveConns = 1, 1
	o.ReadTimeout, o.WriteTimeout = c.timeout, c.timeout
	client := goredis.NewClient(o)
	c.clients[addr] = client
	return client
}

// rolesIn returns the primaries, with their replicas and slots; failed nodes are down,
// and may leave their slots without a primary. from is the node that answered.
func (c *cluster) rolesIn(shards []goredis.ClusterShard, from string) (found []roles) {
	for _, shard := range shards {
		var r roles
		for _, node := range shard.Nodes {
			port := node.Port
			if c.opts.TLS != nil && node.TLSPort != 0 {
				port = node.TLSPort
			}
			addr := nodeAddr(node.Endpoint, strconv.FormatInt(port, 10), from)
			switch {
			case node.Health == "fail":
				r.down = append(r.down, addr)
			case node.Role != "master":
				r.replicas = append(r.replicas, addr)
			case r.primary == "":
				r.primary = addr
			}
		}
		for _, slots := range shard.Slots {
			r.slots = append(r.slots, slotRange{int(slots.Start), int(slots.End)})
		}
		found = append(found, r)
	}
	return found
}

// nodeAddr returns the address of a node that from has named. One without a host
// name is on the host of from.
func nodeAddr(host, port, from string) string {
	if host == "" || host == "?" {
		host, _, _ = net.SplitHostPort(from)
	}
	return net.JoinHostPort(host, port)
}

// remember sets the nodes to ask next time: the one that answered, then the others.
func (c *cluster) remember(found []roles, answered string) {
	c.nodes = []string{answered}
	for _, r := range found {
		if r.primary != "" {
			c.nodes = appendNew(appendNew(c.nodes, r.primary), r.replicas...)
		}
	}
	for addr, client := range c.clients {
		if !slices.Contains(c.nodes, addr) && !slices.Contains(c.opts.Cluster, addr) {
			_ = client.Close()
			delete(c.clients, addr)
		}
	}
}

func (c *cluster) close() {
	for _, client := range c.clients {
		_ = client.Close()
	}
}
