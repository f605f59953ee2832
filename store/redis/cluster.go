package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	goredis "github.com/redis/go-redis/v9"
)

// cluster finds the nodes of a Redis Cluster.
type cluster struct {
	opts *ShardOptions
	// nodes are those that were found last, asked before the addresses that were
	// given; the first one answered last.
	nodes []string
	// clients are for the questions, by address.
	clients map[string]*goredis.Client
}

func newCluster(opts *ShardOptions) *cluster {
	return &cluster{opts: opts, clients: map[string]*goredis.Client{}}
}

func (c *cluster) find(ctx context.Context) ([]roles, error) {
	var failures []error
	var doubtful []roles
	for _, addr := range c.candidates() {
		state, err := c.client(addr).ClusterInfo(ctx).Result()
		if err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", addr, err))
			continue
		}
		shards, err := c.client(addr).ClusterShards(ctx).Result()
		found := c.rolesIn(shards, addr)
		if err == nil && !slices.ContainsFunc(found, func(r roles) bool { return len(r.slots) > 0 }) {
			err = errors.New("it knows no slots")
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", addr, err))
			continue
		}
		// A node that was cut off from the others knows only what was.
		if parseInfo(state)["cluster_state"] != "ok" {
			doubtful = found
			continue
		}
		c.remember(found, addr)
		return found, nil
	}
	if doubtful != nil {
		return doubtful, nil
	}
	return nil, fmt.Errorf("ask the cluster for its slots: %w", errors.Join(failures...))
}

// candidates are the nodes to ask, in order.
func (c *cluster) candidates() []string {
	all := slices.Clone(c.nodes)
	for _, addr := range c.opts.Cluster {
		if !slices.Contains(all, addr) {
			all = append(all, addr)
		}
	}
	return all
}

// client returns one with a short timeout, so that several nodes can be asked
// while there is time.
func (c *cluster) client(addr string) *goredis.Client {
	if client, ok := c.clients[addr]; ok {
		return client
	}
	o := clientOptions(addr, c.opts)
	o.PoolSize, o.MaxActiveConns = 1, 1
	o.ContextTimeoutEnabled = false
	o.ReadTimeout, o.WriteTimeout = findTimeout/4, findTimeout/4
	client := goredis.NewClient(o)
	c.clients[addr] = client
	return client
}

// rolesIn are the primaries, with their replicas and slots, apart from nodes that
// have failed. from is the node that answered.
func (c *cluster) rolesIn(shards []goredis.ClusterShard, from string) (found []roles) {
	for _, shard := range shards {
		var r roles
		for _, node := range shard.Nodes {
			addr := c.addrOf(node, from)
			switch {
			case node.Health == "fail":
			case node.Role != "master":
				r.replicas = append(r.replicas, addr)
			case r.primary == "":
				r.primary = addr
			}
		}
		for _, slots := range shard.Slots {
			r.slots = append(r.slots, slotRange{int(slots.Start), int(slots.End)})
		}
		if r.primary != "" {
			found = append(found, r)
		}
	}
	return found
}

// addrOf is the address of a node. One that does not say its own is where the
// node is that told of it.
func (c *cluster) addrOf(node goredis.Node, from string) string {
	host, port := node.Endpoint, node.Port
	if host == "" || host == "?" {
		host, _, _ = net.SplitHostPort(from)
	}
	if c.opts.TLS != nil && node.TLSPort != 0 {
		port = node.TLSPort
	}
	return net.JoinHostPort(host, strconv.FormatInt(port, 10))
}

// remember notes whom to ask the next time: who just answered, then the others.
func (c *cluster) remember(found []roles, answered string) {
	c.nodes = []string{answered}
	for _, r := range found {
		for _, addr := range append([]string{r.primary}, r.replicas...) {
			if !slices.Contains(c.nodes, addr) {
				c.nodes = append(c.nodes, addr)
			}
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

var _ finder = (*cluster)(nil)

// maxRedirects is how often a command follows a MOVED or ASK.
const maxRedirects = 3

// node is another node of a Redis Cluster, to which a command was redirected.
type node struct {
	addr string
	// asking is set if that node runs the command only after ASKING.
	asking bool
}

// redirection returns the node to which err redirects a command. The node that
// replied err did not run the command.
func (l *lane) redirection(err error) (to node, ok bool) {
	if err == nil || l.shard.cluster == nil {
		return node{}, false
	}
	addr, ok := goredis.IsMovedError(err)
	if !ok {
		if addr, ok = goredis.IsAskError(err); !ok {
			return node{}, false
		}
		to.asking = true
	}
	colon := strings.LastIndexByte(addr, ':')
	if colon < 0 {
		return node{}, false
	}
	host := strings.Trim(addr[:colon], "[]")
	if host == "" || host == "?" {
		// A node without a name of its own is where the one is that replied.
		host, _, _ = net.SplitHostPort(l.addr)
	}
	to.addr = net.JoinHostPort(host, addr[colon+1:])
	return to, true
}

// laneAt returns the lane to a node, or nil once the shard is closed. A node that
// is in no topology yet keeps its lane until the next one is adopted. While the
// shard is being closed the lane is a new one, which is closed after the others.
func (s *Shard) laneAt(addr string, persistent bool) *lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes == nil {
		return nil
	}
	return s.laneTo(addr, persistent)
}

// redirect reports whether some of c's commands belong to other nodes, and lets
// these run them: as calls of their own in the nodes' lanes, so that nobody here
// waits for a node that is silent. What else of c is to be sent again is another
// such call. When all of them have ended, c is finished; if it is detached, those of
// its commands that are settled do not wait for that.
func (l *lane) redirect(c *call) bool {
	parts := l.redirected(c)
	if parts == nil {
		return false
	}
	l.shard.nudge()
	if c.detached != nil && len(c.cmds) > 1 {
		c.finishSettled()
	}
	open := new(atomic.Int64)
	for _, part := range parts {
		open.Add(int64(len(part.cmds)))
	}
	for addr, part := range parts {
		part.detached = func(part *call) {
			ended := int64(len(part.cmds))
			part.release()
			if open.Add(-ended) == 0 {
				c.finish()
			}
		}
		if to := l.shard.laneAt(addr, l.persistent); to != nil {
			to.post(part)
		} else {
			part.fail(fmt.Errorf("redis %s: %w", addr, errClosed))
		}
	}
	return true
}

// redirected returns calls of c's commands that are to be sent again, by the
// address of the node to send them to; nil unless one was redirected.
func (l *lane) redirected(c *call) (parts map[string]*call) {
	if l.shard.cluster == nil || c.redirects == maxRedirects ||
		!slices.ContainsFunc(c.cmds, func(cmd *command) bool { _, ok := l.redirection(cmd.outcome); return ok }) {
		return nil
	}
	parts = map[string]*call{}
	for _, cmd := range c.cmds {
		to, ok := l.redirection(cmd.outcome)
		switch {
		case ok:
			cmd.asking = to.asking
			cmd.forgetClock()
		case l.persistent && cmd.isOpen():
			to.addr = l.addr
		default:
			continue
		}
		part := parts[to.addr]
		if part == nil {
			part = newCall(c.deadline)
			part.fair, part.redirects = c.fair, c.redirects+1
			parts[to.addr] = part
		}
		part.cmds = append(part.cmds, cmd)
	}
	return parts
}
