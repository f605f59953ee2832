package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

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
