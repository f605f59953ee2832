package wire

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
)

// Cluster finds the nodes of a Redis Cluster.
type Cluster struct {
	opts    *Options
	history history
	hope    hope
	belief  belief
	// isVague is set if nothing identifies the cluster followed: IDs are missing, or differ between two answers of a node.
	isVague atomic.Bool
	// census is when all given nodes were last asked, and sources are the given nodes as they last answered.
	census  time.Time
	sources []Source
	// patient is when a search last waited longer for silent nodes.
	patient time.Time
	// nodes are those found last, which are asked before the given addresses; the
	// first one answered last.
	nodes []string
	kinds kinds
	// clients are by address.
	clients map[string]*goredis.Client
}

// NewCluster returns a finder that asks the nodes of the options, and those that they name. It connects
// at its first use.
func NewCluster(opts *Options) *Cluster {
	return &Cluster{opts: opts, clients: map[string]*goredis.Client{}}
}

// Find returns the nodes that a node of the cluster names.
func (c *Cluster) Find(ctx context.Context) (Found, error) {
	return c.FindAll(ctx, c.hope.within(findTimeout, c.opts.NodeTimeout()))
}

const (
	// together is how many nodes are asked at the same time.
	together = 16
	// censusPeriod is the time between two searches that ask all given nodes.
	censusPeriod = 5 * time.Second
)

var errElsewhere = fmt.Errorf("all that answer lead to other servers than those that are known, which stay in use; they are followed once most of the given sources name them for %v", FollowAfter)

// FindAll waits for each node for the timeout. Mostly it asks only the node that answered last, because a silent node
// takes the whole timeout. Regularly it asks all given nodes, and then the others until one covers all slots.
func (c *Cluster) FindAll(ctx context.Context, timeout time.Duration) (found Found, err error) {
	now := time.Now()
	var views, failed []clusterView
	addrs := appendNew(slices.Clone(c.nodes), c.opts.Cluster...)
	rest := appendNew(slices.Clone(c.opts.Cluster), c.nodes...)
	var d decision
	var best clusterView
	judged := c.belief
	fellSilent := slices.ContainsFunc(c.sources, func(s Source) bool { return s.Err != nil && !s.IsSilent })
	n, isDue := len(c.opts.Cluster), fellSilent || now.Sub(c.census) >= censusPeriod
	if len(c.nodes) > 0 && !isDue {
		v := &c.askAll(ctx, c.nodes[:1], timeout, timeout)[0]
		switch {
		case v.err != nil:
			failed, n = append(failed, *v), max(n, together)
			rest = slices.DeleteFunc(rest, func(addr string) bool { return addr == v.from })
		case c.isFollowed(v) && v.isCurrent(c.history.epoch):
			c.hope = c.hope.after(timeout, v.took, true)
			return c.accept(v, &decision{}, now)
		}
	}
	ask := func(addrs []string, timeout, connect time.Duration) {
		for _, v := range c.askAll(ctx, addrs, timeout, connect) {
			if v.err != nil {
				failed = append(failed, v)
			} else {
				views = append(views, v)
			}
		}
		// Only the decision about all views counts.
		judged = c.belief
		best, d = c.believe(&judged, views, now)
	}
	isPatient := timeout >= c.opts.NodeTimeout()
	isWaiting := isDue && timeout < c.opts.NodeTimeout() || !c.belief.isSet
	for ; len(rest) > 0 && ctx.Err() == nil; n = together {
		n = min(n, len(rest))
		ask(rest[:n], timeout, timeout)
		rest = rest[n:]
		lacksVotes := 2*votesOf(views, d.group) <= len(c.opts.Cluster)
		if isWaiting && (lacksVotes || owesTime(c.sources, c.patient, now)) {
			isPatient, c.patient = true, now
			patience := mostPatience
			if lacksVotes && (!c.isFollowed(&best) || !best.isCurrent(c.history.epoch)) {
				patience = math.MaxInt64
			}
			ask(c.silent(&failed), min(c.opts.NodeTimeout(), patience), min(c.connectTimeout(), patience))
		}
		if isWaiting = false; best.isCurrent(c.history.epoch) {
			break
		}
	}
	if isDue {
		c.census = time.Now()
	}
	c.hope = c.hope.after(timeout, best.took, best.isCurrent(c.history.epoch))
	var failures []error
	var silent []string
	for _, v := range failed {
		failures = append(failures, fmt.Errorf("%s: %w", v.from, v.err))
		silent = append(silent, v.from)
	}
	c.nodes = appendNew(slices.DeleteFunc(addrs, func(addr string) bool { return slices.Contains(silent, addr) }), silent...)
	c.belief = judged
	c.sources = c.sourcesAfter(views, failed, d.foreign, now, isPatient)
	if best.covers > 0 {
		return c.accept(&best, &d, now)
	}
	if len(d.foreign) > 0 {
		failures = append(failures, errElsewhere)
	}
	// ctx may have ended before a node was asked.
	return Found{Sources: c.sources}, fmt.Errorf("ask the cluster for its slots: %w", errors.Join(append(failures, ctx.Err())...))
}

// sourcesAfter returns the given nodes after a search with these views, of which those at the places are foreign. A node
// that was not asked is as before.
func (c *Cluster) sourcesAfter(views, failed []clusterView, foreign []int, now time.Time, hadTime bool) (all []Source) {
	for _, addr := range c.opts.Cluster {
		source := sourceAt(c.sources, addr)
		isFrom := func(v clusterView) bool { return v.from == addr }
		if place := slices.IndexFunc(views, isFrom); place >= 0 {
			source = Source{Addr: addr, IsForeign: slices.Contains(foreign, place)}
			if source.IsForeign && len(views[place].marks) > 0 {
				source.Leads = FirstPrimary(views[place].roles)
			}
		} else if place := slices.IndexFunc(failed, isFrom); place >= 0 {
			source = source.miss(failed[place].err, now, hadTime)
		}
		all = append(all, source)
	}
	return all
}

// isFollowed reports whether a view is of the cluster that is followed, or none has an identity.
func (c *Cluster) isFollowed(v *clusterView) bool {
	return c.belief.relation(&v.answer) == sameServers || c.IsVague() && len(v.marks) == 0
}

// silent removes the given nodes from the failed ones, and returns them. Without a majority they are asked again, with more
// time, because a near foreign node must not decide alone.
func (c *Cluster) silent(failed *[]clusterView) (addrs []string) {
	*failed = slices.DeleteFunc(*failed, func(v clusterView) bool {
		if v.source >= 0 {
			addrs = append(addrs, v.from)
		}
		return v.source >= 0
	})
	return addrs
}

// connectTimeout is how long connecting may take in a search that waits for a majority: before the first one has found a
// cluster nothing is connected.
func (c *Cluster) connectTimeout() time.Duration {
	if c.belief.isSet {
		return c.opts.NodeTimeout()
	}
	return c.opts.ConnectTimeout()
}

// votesOf returns how many given nodes are among the views at these places.
func votesOf(views []clusterView, places []int) (n int) {
	for _, place := range places {
		if views[place].source >= 0 {
			n++
		}
	}
	return n
}

// believe returns the best view of the nodes that are believed. Those without an identity have no vote beside those with
// one, unless they are most before any was followed.
func (c *Cluster) believe(b *belief, views []clusterView, now time.Time) (best clusterView, d decision) {
	var vague []int
	answers := make([]answer, len(views))
	for i := range views {
		if answers[i] = views[i].answer; len(answers[i].marks) == 0 {
			vague = append(vague, i)
		}
	}
	if len(vague) < len(views) && (b.isSet || 2*votesOf(views, vague) <= len(c.opts.Cluster)) {
		for _, place := range vague {
			answers[place].source = -1
		}
	}
	d = b.judge(answers, len(c.opts.Cluster), now)
	epoch := c.history.epoch
	if d.replaces {
		epoch = 0
	}
	for _, place := range d.group {
		if v := &views[place]; best.isBelow(v, epoch) {
			best = *v
		}
	}
	return best, d
}

// accept returns what a view says, unless it is too old.
func (c *Cluster) accept(v *clusterView, d *decision, now time.Time) (Found, error) {
	if d.replaces {
		c.history = history{}
	}
	if err := c.history.follow(v.epoch, v.isWhole, now); err != nil {
		return Found{Sources: c.sources}, fmt.Errorf("ask the cluster for its slots: %w", err)
	}
	c.belief.follow(&v.answer, d)
	c.isVague.Store(!c.belief.isSet)
	if v.isWhole {
		c.remember(v.roles, v.from)
	}
	return Found{Roles: v.roles, Sources: c.sources, Replaced: d.replaces}, nil
}

// FirstPrimary returns a primary that is not taken for dead, or "".
func FirstPrimary(found []Roles) string {
	for _, r := range found {
		if r.Primary != "" {
			return r.Primary
		}
	}
	return ""
}

// clusterView is what one node, from, knows of the cluster, or the error of asking it.
type clusterView struct {
	answer
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

// askAll asks nodes at the same time, and waits as ask does; the views are in their order.
func (c *Cluster) askAll(ctx context.Context, addrs []string, timeout, connect time.Duration) []clusterView {
	views, moved := make([]clusterView, len(addrs)), make([]bool, len(addrs))
	var all sync.WaitGroup
	began := time.Now()
	for _, addr := range addrs {
		c.client(addr)
	}
	for i, addr := range addrs {
		all.Go(func() {
			err := contain.Run(func() error {
				views[i] = c.ask(ctx, c.clients[addr], addr, timeout, connect)
				views[i].took = time.Since(began)
				if views[i].err == nil && c.hasVagueIDs(ctx, &views[i], timeout) {
					views[i].marks = nil
				}
				return nil
			})
			if err != nil {
				views[i] = clusterView{from: addr, err: err}
			}
			moved[i] = c.opts.hasMoved(ctx, addr)
		})
	}
	all.Wait()
	for i, addr := range addrs {
		views[i].source = slices.Index(c.opts.Cluster, addr)
		if moved[i] || errors.Is(views[i].err, contain.ErrPanic) {
			// Its connection may be within a reply, or lead to a server that its name has left.
			c.disconnect(addr)
		}
	}
	return views
}

// IsVague reports whether nothing identifies the cluster followed.
func (c *Cluster) IsVague() bool { return c.isVague.Load() }

// hasVagueIDs asks a node again if its IDs have nothing in common with those of the nodes followed: some proxies make up
// IDs.
func (c *Cluster) hasVagueIDs(ctx context.Context, v *clusterView, timeout time.Duration) bool {
	if len(v.marks) == 0 || sourceAt(c.sources, v.from).Leads != "" || c.belief.relation(&v.answer) == sameServers {
		return false
	}
	again := c.ask(ctx, c.clients[v.from], v.from, timeout, timeout)
	return again.err == nil && !meet(v.marks, again.marks)
}

// ask asks one node, in one round trip, and waits that long for the reply, and to connect.
func (c *Cluster) ask(ctx context.Context, client *goredis.Client, addr string, timeout, connect time.Duration) clusterView {
	v := clusterView{from: addr}
	// Connecting may take longer than a search, and goes on when this ends.
	ctx, cancel := context.WithTimeout(ctx, timeout+connect)
	defer cancel()
	pipe := client.WithTimeout(timeout).Pipeline()
	info, listed, owned := pipe.ClusterInfo(ctx), pipe.ClusterShards(ctx), pipe.Do(ctx, "CLUSTER", "SLOTS")
	if _, v.err = pipe.Exec(ctx); v.err != nil {
		c.opts.noteLogin(v.err)
		v.err = c.kinds.faultOf(ctx, v.err, addr, c.opts, client.WithTimeout(timeout).Process)
		return v
	}
	slots, err := owned.Slice()
	if err != nil {
		v.err = err
		return v
	}
	inSlots, inShards := slotsIn(slots, addr), c.shardsIn(listed.Val(), addr)
	v.roles, v.marks = rolesIn(inSlots, inShards), idsIn(inSlots, inShards)
	if !slices.ContainsFunc(v.roles, func(r Roles) bool { return r.Primary != "" && len(r.Slots) > 0 }) {
		v.err = errors.New("it knows no slots")
		return v
	}
	if addr := sharedIn(inSlots); addr != "" {
		v.err = &Fault{
			Problem: "it names no host of some nodes, and several have the port of " + addr,
			Remedy:  "set cluster-preferred-endpoint-type on each node to ip, or to hostname with cluster-announce-hostname",
		}
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

// fieldsOf returns the fields of a reply to INFO, by name.
func fieldsOf(info string) func(name string) string {
	return func(name string) string { return fieldOf(info, name) }
}

// fieldOf returns a field of the reply to INFO or CLUSTER INFO, or "".
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
	// isNameless is set if its cluster names no host for it.
	isNameless bool
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
				id: id, addr: nodeAddr(host, strconv.FormatInt(port, 10), from), isPrimary: len(owned.nodes) == 0, isNameless: isNameless(host),
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

// idsIn returns the IDs of all nodes.
func idsIn(slots []ownedSlots, shards [][]clusterNode) (ids []string) {
	nodes := slices.Concat(shards...)
	for _, owned := range slots {
		nodes = append(nodes, owned.nodes...)
	}
	for _, n := range nodes {
		if n.id != "" {
			ids = append(ids, n.id)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
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

func isNameless(host string) bool { return host == "" || host == "?" }

// sharedIn returns an address at which two nodes seem to be because its cluster names no host for one of them, or "".
func sharedIn(slots []ownedSlots) string {
	at := map[string]clusterNode{}
	for _, owned := range slots {
		for _, n := range owned.nodes {
			other, isTaken := at[n.addr]
			if isTaken && other.id != n.id && (other.isNameless || n.isNameless) {
				return n.addr
			}
			at[n.addr] = n
		}
	}
	return ""
}

// nodeAddr returns the address of a node that from has named. One without a host
// name is on the host of from.
func nodeAddr(host, port, from string) string {
	if isNameless(host) {
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
