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

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
)

// Cluster finds the nodes of a Redis Cluster.
type Cluster struct {
	opts    *Options
	history history
	hope    hope
	// nodes are those found last, which are asked before the given addresses; the
	// first one answered last.
	nodes []string
	// clients are by address.
	clients map[string]*goredis.Client
}

// NewCluster returns a finder that asks the nodes of the options, and those that they name. It connects
// at its first use.
func NewCluster(opts *Options) *Cluster {
	return &Cluster{opts: opts, clients: map[string]*goredis.Client{}}
}

// Find returns the primaries that a node of the cluster names, with their replicas and slots.
func (c *Cluster) Find(ctx context.Context) ([]Roles, error) {
	found, err := c.FindAll(ctx, c.hope.within(findTimeout, c.opts.NodeTimeout()))
	return slices.DeleteFunc(found, func(r Roles) bool { return r.Primary == "" }), err
}

// together is how many nodes are asked at the same time.
const together = 16

// FindAll also returns the roles of nodes that have no primary. It asks the node that answered
// last, and then the others, because each that does not answer takes the timeout.
func (c *Cluster) FindAll(ctx context.Context, timeout time.Duration) ([]Roles, error) {
	addrs := appendNew(slices.Clone(c.nodes), c.opts.Cluster...)
	var best clusterView
	var failures []error
	var silent []string
	for first, n := 0, 1; first < len(addrs) && ctx.Err() == nil; first, n = first+n, together {
		asked := addrs[first:min(first+n, len(addrs))]
		for i, v := range c.askAll(ctx, asked, timeout) {
			switch {
			case v.err != nil:
				failures = append(failures, fmt.Errorf("%s: %w", asked[i], v.err))
				silent = append(silent, asked[i])
			case best.isBelow(&v, c.history.epoch):
				best = v
			}
		}
		if best.isCurrent(c.history.epoch) {
			break
		}
	}
	c.hope = c.hope.after(timeout, best.took, best.isCurrent(c.history.epoch))
	c.nodes = appendNew(slices.DeleteFunc(addrs, func(addr string) bool { return slices.Contains(silent, addr) }), silent...)
	var err error
	if best.covers == 0 {
		// ctx may have ended before a node was asked.
		err = errors.Join(append(failures, ctx.Err())...)
	} else {
		err = c.history.follow(best.epoch, best.isWhole, time.Now())
	}
	if err != nil {
		return nil, fmt.Errorf("ask the cluster for its slots: %w", err)
	}
	if best.isWhole {
		c.remember(best.roles, best.from)
	}
	return best.roles, nil
}

// clusterView is what one node, from, knows of the cluster, or the error of asking it.
type clusterView struct {
	from  string
	err   error
	roles []Roles
	// isWhole is set if the node is in touch with the others, and knows who has which slot: a
	// node that was cut off knows only the past.
	isWhole bool
	// covers is the number of slots that have an owner.
	covers int
	// epoch grows with each change of an owner.
	epoch int64
	took  time.Duration
}

// isCurrent reports whether the view is whole and of at least that epoch.
func (v *clusterView) isCurrent(epoch int64) bool { return v.isWhole && v.epoch >= epoch }

// isBelow reports whether another view is better: current, and then later; or else not older than
// that epoch, and then with more slots, or later.
func (v *clusterView) isBelow(other *clusterView, epoch int64) bool {
	mine, its := v.isCurrent(epoch), other.isCurrent(epoch)
	mayMine, mayIts := v.epoch >= epoch, other.epoch >= epoch
	switch {
	case mine != its:
		return its
	case its:
		return other.epoch > v.epoch
	case v.covers == 0 || mayMine != mayIts:
		return v.covers == 0 || mayIts
	case other.covers != v.covers:
		return other.covers > v.covers
	default:
		return other.epoch > v.epoch
	}
}

// askAll asks nodes at the same time; the views are in their order.
func (c *Cluster) askAll(ctx context.Context, addrs []string, timeout time.Duration) []clusterView {
	views := make([]clusterView, len(addrs))
	var all sync.WaitGroup
	began := time.Now()
	for i, addr := range addrs {
		client := c.client(addr)
		all.Go(func() {
			err := contain.Run(func() error {
				views[i] = c.ask(ctx, client, addr, timeout)
				views[i].took = time.Since(began)
				return nil
			})
			if err != nil {
				views[i] = clusterView{from: addr, err: err}
			}
		})
	}
	all.Wait()
	for i, addr := range addrs {
		if errors.Is(views[i].err, contain.ErrPanic) {
			// Its connection may be within a reply.
			c.disconnect(addr)
		}
	}
	return views
}

// ask asks one node, in one round trip.
func (c *Cluster) ask(ctx context.Context, client *goredis.Client, addr string, timeout time.Duration) clusterView {
	v := clusterView{from: addr}
	// Connecting may take longer than a search, and goes on when this ends.
	ctx, cancel := context.WithTimeout(ctx, 2*timeout)
	defer cancel()
	pipe := client.WithTimeout(timeout).Pipeline()
	info, listed, owned := pipe.ClusterInfo(ctx), pipe.ClusterShards(ctx), pipe.Do(ctx, "CLUSTER", "SLOTS")
	if _, v.err = pipe.Exec(ctx); v.err != nil {
		c.opts.noteLogin(v.err)
		v.err = otherKind(ctx, v.err, addr, c.opts, client.Process)
		return v
	}
	slots, err := owned.Slice()
	if err != nil {
		v.err = err
		return v
	}
	v.roles = rolesIn(slotsIn(slots, addr), c.shardsIn(listed.Val(), addr))
	if !slices.ContainsFunc(v.roles, func(r Roles) bool { return r.Primary != "" && len(r.Slots) > 0 }) {
		v.err = errors.New("it knows no slots")
		return v
	}
	v.covers = Covered(v.roles)
	v.epoch, _ = strconv.ParseInt(fieldOf(info.Val(), "cluster_current_epoch"), 10, 64)
	v.isWhole = fieldOf(info.Val(), "cluster_state") == "ok" && v.covers == SlotCount
	return v
}

// Covered returns the number of slots in the ranges of found, each counted once, because ranges may
// overlap.
func Covered(found []Roles) (n int) {
	t := topology{slots: new([SlotCount]uint16)}
	for _, r := range found {
		t.assign(r.Slots, 0)
	}
	for _, place := range t.slots {
		if place != 0 {
			n++
		}
	}
	return n
}

// fieldOf returns a field of the reply to CLUSTER INFO, or "".
func fieldOf(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
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
	// A node that refuses the database names the others all the same.
	o.DB, o.PoolSize, o.MaxActiveConns = 0, 1, 1
	client := goredis.NewClient(o)
	c.clients[addr] = client
	return client
}

// clusterNode is a node as its cluster knows it.
type clusterNode struct {
	id, addr          string
	isPrimary, isDown bool
}

// ownedSlots are slots, their primary and its replicas.
type ownedSlots struct {
	SlotRange
	nodes []clusterNode
}

// slotsIn reads the reply of from to CLUSTER SLOTS. What it cannot read has no owner.
func slotsIn(reply []any, from string) (all []ownedSlots) {
	for _, entry := range reply {
		words, _ := entry.([]any)
		if len(words) < 3 {
			continue
		}
		first, _ := words[0].(int64)
		last, _ := words[1].(int64)
		owned := ownedSlots{SlotRange: SlotRange{int(first), int(last)}}
		for _, word := range words[2:] {
			node, _ := word.([]any)
			if len(node) < 3 {
				break
			}
			host, _ := node[0].(string)
			port, _ := node[1].(int64)
			id, _ := node[2].(string)
			owned.nodes = append(owned.nodes, clusterNode{
				id: id, addr: nodeAddr(host, strconv.FormatInt(port, 10), from), isPrimary: len(owned.nodes) == 0,
			})
		}
		if len(owned.nodes) > 0 {
			all = append(all, owned)
		}
	}
	return all
}

// shardsIn reads the reply of from to CLUSTER SHARDS.
func (c *Cluster) shardsIn(reply []goredis.ClusterShard, from string) (shards [][]clusterNode) {
	for _, shard := range reply {
		var nodes []clusterNode
		for _, n := range shard.Nodes {
			port := n.Port
			if c.opts.TLS != nil && n.TLSPort != 0 {
				port = n.TLSPort
			}
			nodes = append(nodes, clusterNode{
				id: n.ID, addr: nodeAddr(n.Endpoint, strconv.FormatInt(port, 10), from), isPrimary: n.Role == "master", isDown: n.Health == "fail",
			})
		}
		shards = append(shards, nodes)
	}
	return shards
}

// rolesIn returns the primaries, with their replicas and slots; failed nodes are down, and may
// leave their slots without a primary. Only the slots say whose they are: a shard may list
// two primaries, and then no slots. The shards say which nodes are down, and which have no slots.
func rolesIn(slots []ownedSlots, shards [][]clusterNode) []Roles {
	known := map[string]clusterNode{}
	for _, n := range slices.Concat(shards...) {
		known[n.id] = n
	}
	var found []Roles
	place := map[string]int{} // in found, by the node's ID
	// put puts a node where it is, or else at a place, or else at a new one.
	put := func(n clusterNode, at int) int {
		if was, ok := place[n.id]; ok {
			return was
		}
		if at < 0 {
			found, at = append(found, Roles{}), len(found)
		}
		place[n.id] = at
		found[at].add(n)
		return at
	}
	for _, owned := range slots {
		at := -1
		for _, n := range owned.nodes {
			n.isDown = known[n.id].isDown
			if own := put(n, at); at < 0 {
				at = own
			}
		}
		found[at].Slots = append(found[at].Slots, owned.SlotRange)
	}
	for _, nodes := range shards {
		at := -1
		for _, n := range nodes {
			if !n.isPrimary || n.isDown {
				continue
			}
			if own := put(n, -1); at < 0 || len(found[own].Slots) > 0 {
				at = own
			}
		}
		for _, n := range nodes {
			if own := put(n, at); at < 0 {
				at = own
			}
		}
	}
	return found
}

func (r *Roles) add(n clusterNode) {
	switch {
	case n.isDown:
		r.Down = append(r.Down, n.addr)
	case n.isPrimary:
		r.Primary = n.addr
	default:
		r.Replicas = append(r.Replicas, n.addr)
	}
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
	for addr := range c.clients {
		if !slices.Contains(c.nodes, addr) && !slices.Contains(c.opts.Cluster, addr) {
			c.disconnect(addr)
		}
	}
}

func (c *Cluster) disconnect(addr string) {
	_ = c.clients[addr].Close()
	delete(c.clients, addr)
}

// Close closes the connections.
func (c *Cluster) Close() {
	for _, client := range c.clients {
		_ = client.Close()
	}
}
