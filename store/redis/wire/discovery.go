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
// failover: one that was cut off may name a previous primary.
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
	Err   error
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
		case latest.Primary == "" || a.epoch > latest.epoch:
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
	if a.Primary = addrIn(master); a.Primary == "" {
		return SentinelReply{Err: fmt.Errorf("no address of %s in its answer", s.master)}
	}
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
	return slices.ContainsFunc(strings.Split(flags, ","), func(flag string) bool {
		return flag == "s_down" || flag == "o_down" || flag == "disconnected"
	})
}

// Close closes the connections.
func (s *Sentinel) Close() {
	for _, client := range s.clients {
		_ = client.Close()
	}
}

// Cluster finds the nodes of a Redis Cluster.
type Cluster struct {
	opts *Options
	// timeout bounds the wait for a reply, so that one search can ask several nodes.
	timeout time.Duration
	// nodes are those found last, which are asked before the given addresses; the
	// first one answered last.
	nodes []string
	// clients are by address.
	clients map[string]*goredis.Client
}

// NewCluster returns a finder that asks the nodes of the options, and those that they name,
// and waits that long for a reply. It connects at its first use.
func NewCluster(opts *Options, timeout time.Duration) *Cluster {
	return &Cluster{opts: opts, timeout: timeout, clients: map[string]*goredis.Client{}}
}

// Find returns the primaries that a node of the cluster names, with their replicas and slots.
func (c *Cluster) Find(ctx context.Context) ([]Roles, error) {
	found, err := c.FindAll(ctx)
	return slices.DeleteFunc(found, func(r Roles) bool { return r.Primary == "" }), err
}

// FindAll also returns the roles of nodes that have no primary.
func (c *Cluster) FindAll(ctx context.Context) ([]Roles, error) {
	var failures []error
	var doubtful []Roles
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
func (c *Cluster) ask(ctx context.Context, addr string) (found []Roles, isOK bool, err error) {
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
	if !slices.ContainsFunc(found, func(r Roles) bool { return r.Primary != "" && len(r.Slots) > 0 }) {
		return nil, false, errors.New("it knows no slots")
	}
	return found, strings.Contains(state, "cluster_state:ok"), nil
}

func appendNew(list []string, addrs ...string) []string {
	for _, addr := range addrs {
		if !slices.Contains(list, addr) {
			list = append(list, addr)
		}
	}
	return list
}

func (c *Cluster) client(addr string) *goredis.Client {
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
func (c *Cluster) rolesIn(shards []goredis.ClusterShard, from string) (found []Roles) {
	for _, shard := range shards {
		var r Roles
		for _, node := range shard.Nodes {
			port := node.Port
			if c.opts.TLS != nil && node.TLSPort != 0 {
				port = node.TLSPort
			}
			addr := nodeAddr(node.Endpoint, strconv.FormatInt(port, 10), from)
			switch {
			case node.Health == "fail":
				r.Down = append(r.Down, addr)
			case node.Role != "master":
				r.Replicas = append(r.Replicas, addr)
			case r.Primary == "":
				r.Primary = addr
			}
		}
		for _, slots := range shard.Slots {
			r.Slots = append(r.Slots, SlotRange{int(slots.Start), int(slots.End)})
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
func (c *Cluster) remember(found []Roles, answered string) {
	c.nodes = []string{answered}
	for _, r := range found {
		if r.Primary != "" {
			c.nodes = appendNew(appendNew(c.nodes, r.Primary), r.Replicas...)
		}
	}
	for addr, client := range c.clients {
		if !slices.Contains(c.nodes, addr) && !slices.Contains(c.opts.Cluster, addr) {
			_ = client.Close()
			delete(c.clients, addr)
		}
	}
}

// Close closes the connections.
func (c *Cluster) Close() {
	for _, client := range c.clients {
		_ = client.Close()
	}
}
