package redistest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Cluster is a Redis Cluster. Its nodes find one down that does not answer for
// a second, and promote a replica of it a second or two later. Its methods are
// safe for concurrent use.
type Cluster struct {
	// Nodes are the servers, each of which can be killed, paused and restarted
	// on its own. Those that are masters at first come first. A restarted one
	// still knows the cluster.
	Nodes []*Server
}

// nodeTimeout is how long a node does not answer until another one finds it
// down. Arguments can change it.
const nodeTimeout = time.Second

// LaunchCluster starts masters that share all slots evenly, and as many replicas
// of each, all with the same options. It returns when all nodes agree as with
// [Cluster.WaitUntilOK] and replicas are in sync, which takes at least two seconds
// because Redis waits for as long. It fails like [Launch], without a master, or if
// the nodes do not agree within a minute, and then stops what it has started.
func LaunchCluster(masters, replicasPerMaster int, opts ...Option) (*Cluster, error) {
	c := &Cluster{}
	if err := c.launch(masters, replicasPerMaster, collect(opts)); err != nil {
		return nil, errors.Join(fmt.Errorf("launch cluster: %w", err), c.Stop())
	}
	return c, nil
}

// StartCluster launches like [LaunchCluster] for a test, which fails if the
// launch does. When the test ends, the cluster passes to another test or is stopped, see
// [Start].
func StartCluster(tb testing.TB, masters, replicasPerMaster int, opts ...Option) *Cluster {
	tb.Helper()
	return borrow(tb, fmt.Sprint("cluster ", masters, replicasPerMaster), collect(opts), func() (*Cluster, []*Server, error) {
		c, err := LaunchCluster(masters, replicasPerMaster, opts...)
		if err != nil {
			return nil, nil, err
		}
		return c, slices.Clone(c.Nodes), nil
	})
}

func (c *Cluster) launch(masters, replicasPerMaster int, opts options) error {
	if masters < 1 {
		return errors.New("it needs a master")
	}
	opts.primary, opts.cluster = nil, true
	for range masters * (1 + replicasPerMaster) {
		node, err := launch(opts, reservePort)
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, node)
	}
	ctx, cancel := context.WithTimeout(context.Background(), groupTimeout)
	defer cancel()
	if err := c.share(ctx, masters); err != nil {
		return err
	}
	if err := c.meet(ctx); err != nil {
		return err
	}
	for i, replica := range c.Nodes[masters:] {
		if err := replicate(ctx, replica, c.Nodes[i%masters]); err != nil {
			return err
		}
	}
	if err := c.WaitUntilOK(ctx); err != nil {
		return err
	}
	for i, replica := range c.Nodes[masters:] {
		if err := replica.WaitInSyncWith(ctx, c.Nodes[i%masters]); err != nil {
			return err
		}
	}
	return nil
}

// share gives the first nodes, the masters, their slots.
func (c *Cluster) share(ctx context.Context, masters int) error {
	for i, node := range c.Nodes {
		// Nodes with the same epoch would settle which is the newer one later.
		if err := node.client.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err(); err != nil {
			return fmt.Errorf("give %s an epoch: %w", node.Addr(), err)
		}
	}
	for i, node := range c.Nodes[:masters] {
		first, next := i*Slots/masters, (i+1)*Slots/masters
		if err := node.client.Do(ctx, "CLUSTER", "ADDSLOTSRANGE", first, next-1).Err(); err != nil {
			return fmt.Errorf("give %s its slots: %w", node.Addr(), err)
		}
	}
	return nil
}

// meet makes the nodes know each other. A node forgets whom it was to meet if that one
// does not answer within the node timeout, as on a busy machine, so it is told again.
func (c *Cluster) meet(ctx context.Context) error {
	return pollEvery(ctx, groupPollInterval, func() error {
		var missing error
		// They would hear of each other through the first one, but later.
		for i, node := range c.Nodes {
			for _, other := range slices.Concat(c.Nodes[:i], c.Nodes[i+1:]) {
				known, err := node.knows(ctx, other)
				if err == nil && known == stranger {
					port, bus := strconv.Itoa(other.port.number), strconv.Itoa(other.bus.number)
					err = node.client.Do(ctx, "CLUSTER", "MEET", loopback, port, bus).Err()
				}
				if err == nil && known != acquaintance {
					err = errors.New("it does not know it yet")
				}
				if err != nil {
					missing = fmt.Errorf("make %s meet %s: %w", node.Addr(), other.Addr(), err)
				}
			}
		}
		return missing
	})
}

// What one node of a cluster is to another.
const (
	stranger = iota
	inHandshake
	acquaintance
)

// knows returns what another node of the cluster is to s.
func (s *Server) knows(ctx context.Context, other *Server) (int, error) {
	list, err := s.client.ClusterNodes(ctx).Result()
	if err != nil {
		return stranger, fmt.Errorf("ask node %s: %w", s.Addr(), err)
	}
	for line := range strings.Lines(list) {
		switch fields := strings.Fields(line); {
		case len(fields) < 3 || !strings.HasPrefix(fields[1], other.Addr()+"@"):
		case strings.Contains(fields[2], "handshake"):
			return inHandshake, nil
		default:
			return acquaintance, nil
		}
	}
	return stranger, nil
}

// replicate makes a node without slots the replica of another one, as soon as
// it knows that one.
func replicate(ctx context.Context, replica, master *Server) error {
	id, err := master.client.ClusterMyID(ctx).Result()
	if err == nil {
		err = pollEvery(ctx, groupPollInterval, func() error {
			return replica.client.ClusterReplicate(ctx, id).Err()
		})
	}
	if err != nil {
		return fmt.Errorf("make %s a replica of %s: %w", replica.Addr(), master.Addr(), err)
	}
	return nil
}

// Stop stops all nodes. Stopping them again does nothing.
func (c *Cluster) Stop() error {
	return stopAll(c.Nodes)
}

// Addrs are the addresses of all nodes, "127.0.0.1:port", in the order of
// Nodes. They never change.
func (c *Cluster) Addrs() []string {
	return addrs(c.Nodes)
}

// MasterOf returns the node that owns a key's slot, see [Cluster.Owner].
func (c *Cluster) MasterOf(ctx context.Context, key string) (*Server, error) {
	return c.Owner(ctx, Keyslot(key))
}

// Owner returns the running node that regards itself as the master of a slot.
// While there is none, because the last one is gone, or more than one, because
// one has not heard of the other, it waits until ctx ends, at most a minute.
func (c *Cluster) Owner(ctx context.Context, slot int) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	var owner *Server
	err := pollEvery(ctx, groupPollInterval, func() error {
		places, err := c.places(ctx)
		if err != nil {
			return err
		}
		owners := 0
		for _, p := range places {
			if p.owns(slot) {
				owner = p.node
				owners++
			}
		}
		if owners != 1 {
			return fmt.Errorf("%d nodes regard themselves as its master", owners)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find the master of slot %d: %w", slot, err)
	}
	return owner, nil
}

// ReplicasOf returns the running nodes that regard themselves as replicas of
// master, which need not run, in the order of Nodes. It fails if a node does not
// answer.
func (c *Cluster) ReplicasOf(ctx context.Context, master *Server) ([]*Server, error) {
	places, err := c.places(ctx)
	if err != nil {
		return nil, fmt.Errorf("find the replicas of %s: %w", master.Addr(), err)
	}
	var replicas []*Server
	for _, p := range places {
		if p.master == master.Addr() {
			replicas = append(replicas, p.node)
		}
	}
	return replicas, nil
}

// WaitUntilOK returns when every slot has one running master, and all running nodes
// find the cluster's state ok and name the same servers to clients: these masters and
// all their running replicas. A node that was killed or paused must not be mentioned
// any more. It waits until ctx ends, at most a minute.
func (c *Cluster) WaitUntilOK(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	err := pollEvery(ctx, groupPollInterval, func() error { return c.ok(ctx) })
	if err != nil {
		return fmt.Errorf("wait until the cluster is ok: %w", err)
	}
	return nil
}

// ok returns what is missing until the cluster is ok.
func (c *Cluster) ok(ctx context.Context) error {
	places, err := c.places(ctx)
	if err != nil {
		return err
	}
	want, err := servicesBy(places)
	if err != nil {
		return err
	}
	for _, p := range places {
		info, err := p.node.client.ClusterInfo(ctx).Result()
		if err != nil {
			return fmt.Errorf("ask node %s: %w", p.node.Addr(), err)
		}
		if !strings.Contains(info, "cluster_state:ok") {
			return fmt.Errorf("node %s does not find its state ok", p.node.Addr())
		}
		got, err := servicesFrom(ctx, p.node)
		if err != nil {
			return err
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("node %s names %v to clients, want %v", p.node.Addr(), got, want)
		}
	}
	return nil
}

// places asks the running nodes. It fails if none runs.
func (c *Cluster) places(ctx context.Context) ([]place, error) {
	var all []place
	for _, node := range running(c.Nodes) {
		p, err := placeOf(ctx, node)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	if len(all) == 0 {
		return nil, errNoneRunning
	}
	return all, nil
}

// place is what a node of a cluster says of itself.
type place struct {
	node   *Server
	master string // the address of a replica's master; empty for a master
	slots  []slotRange
}

// slotRange is a range of slots, both ends included.
type slotRange struct {
	first, last int
}

// placeOf asks a node for its place.
func placeOf(ctx context.Context, node *Server) (place, error) {
	table, err := node.client.ClusterNodes(ctx).Result()
	if err != nil {
		return place{}, fmt.Errorf("ask node %s: %w", node.Addr(), err)
	}
	p := place{node: node}
	if err := p.read(table); err != nil {
		return place{}, fmt.Errorf("read the table of node %s: %w", node.Addr(), err)
	}
	return p, nil
}

// read finds the place in the reply of CLUSTER NODES. A line of it is
//
//	id ip:port@bus flags master ping pong epoch link [slots ...]
//
// where the master is an id or "-".
func (p *place) read(table string) error {
	addrs := make(map[string]string)
	var self []string
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 8 {
			return fmt.Errorf("unknown line %q", line)
		}
		addrs[fields[0]], _, _ = strings.Cut(fields[1], "@")
		if slices.Contains(strings.Split(fields[2], ","), "myself") {
			self = fields
		}
	}
	if self == nil {
		return errors.New("no line is its own")
	}
	p.master = addrs[self[3]]
	for _, text := range self[8:] {
		// [slot->-id] and [slot-<-id] are slots on their way.
		if strings.HasPrefix(text, "[") {
			continue
		}
		r, err := parseSlots(text)
		if err != nil {
			return err
		}
		p.slots = append(p.slots, r)
	}
	return nil
}

// parseSlots reads "5" or "5-9".
func parseSlots(text string) (r slotRange, err error) {
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	if r.first, err = strconv.Atoi(first); err == nil {
		r.last, err = strconv.Atoi(last)
	}
	if err != nil {
		return r, fmt.Errorf("read slots %q: %w", text, err)
	}
	return r, nil
}

// owns reports whether the node regards itself as the master of a slot.
func (p place) owns(slot int) bool {
	return slices.ContainsFunc(p.slots, func(r slotRange) bool {
		return r.first <= slot && slot <= r.last
	})
}

// service is who serves a range of slots, as clients learn it.
type service struct {
	slots    slotRange
	master   string
	replicas string // their addresses, sorted, with commas
}

func newService(slots slotRange, master string, replicas []string) service {
	slices.Sort(replicas)
	return service{slots, master, strings.Join(replicas, ",")}
}

func sortServices(all []service) {
	slices.SortFunc(all, func(a, b service) int { return cmp.Compare(a.slots.first, b.slots.first) })
}

// servicesBy is what all clients should learn if what the nodes say of
// themselves is true. It fails unless every slot has one master, and every
// replica one of the masters.
func servicesBy(places []place) ([]service, error) {
	replicas := make(map[string][]string)
	for _, p := range places {
		if p.master != "" {
			replicas[p.master] = append(replicas[p.master], p.node.Addr())
		}
	}
	var all []service
	for _, p := range places {
		if p.master != "" {
			continue
		}
		for _, slots := range p.slots {
			all = append(all, newService(slots, p.node.Addr(), replicas[p.node.Addr()]))
		}
		delete(replicas, p.node.Addr())
	}
	for master, lost := range replicas {
		return nil, fmt.Errorf("%v replicate %s, which is no master", lost, master)
	}
	sortServices(all)
	next := 0
	for _, s := range all {
		if s.slots.first != next {
			return nil, fmt.Errorf("slot %d has not one master", min(next, s.slots.first))
		}
		next = s.slots.last + 1
	}
	if next != Slots {
		return nil, fmt.Errorf("slot %d has no master", next)
	}
	return all, nil
}

// servicesFrom is what clients learn from a node.
func servicesFrom(ctx context.Context, node *Server) ([]service, error) {
	reply, err := node.client.ClusterSlots(ctx).Result() //nolint:staticcheck // It is what clients ask.
	if err != nil {
		return nil, fmt.Errorf("ask node %s: %w", node.Addr(), err)
	}
	all := make([]service, 0, len(reply))
	for _, slots := range reply {
		var addrs []string
		for _, member := range slots.Nodes {
			addrs = append(addrs, member.Addr)
		}
		if len(addrs) == 0 {
			return nil, fmt.Errorf("node %s names no server for slot %d", node.Addr(), slots.Start)
		}
		all = append(all, newService(slotRange{slots.Start, slots.End}, addrs[0], addrs[1:]))
	}
	sortServices(all)
	return all, nil
}

// Slots is the number of hash slots of a Redis Cluster; they count from 0.
const Slots = 16384

// Keyslot is the hash slot of a key. Keys with the same tag, which is what
// stands between the first { and the next }, have the same slot.
func Keyslot(key string) int {
	if _, after, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(after, "}"); ok && tag != "" {
			key = tag
		}
	}
	// CRC-16/XMODEM.
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			carry := crc&0x8000 != 0
			crc <<= 1
			if carry {
				crc ^= 0x1021
			}
		}
	}
	return int(crc) % Slots
}

// Migration is a slot on its way from one master of a cluster to another. Until
// [Migration.Finish] clients find keys that are still there at the source, and
// are sent to the destination for all others by an ASK.
type Migration struct {
	cluster  *Cluster
	slot     int
	from, to *Server
}

// migrationBatch is how many keys MigrateSlot moves with one command.
const migrationBatch = 100

// MigrateSlot moves a slot and its keys from one master to another while the
// cluster is in use. It returns when all running masters know; replicas hear of
// it in time, see [Cluster.WaitUntilOK]. When a master loses its last slot it
// becomes a replica of the slot's new one. It fails if a step does, and leaves
// the slot as it was then.
func (c *Cluster) MigrateSlot(ctx context.Context, slot int, from, to *Server) error {
	m, err := c.BeginMigration(ctx, slot, from, to)
	if err != nil {
		return err
	}
	for {
		moved, err := m.MoveKeys(ctx, migrationBatch)
		if err != nil {
			return err
		}
		if moved == 0 {
			return m.Finish(ctx)
		}
	}
}

// BeginMigration opens a slot at both masters and moves no keys. It fails if
// from is not the slot's master or to is not another one.
func (c *Cluster) BeginMigration(ctx context.Context, slot int, from, to *Server) (*Migration, error) {
	m := &Migration{cluster: c, slot: slot, from: from, to: to}
	source, err := from.client.ClusterMyID(ctx).Result()
	if err != nil {
		return nil, m.failed("begin migration", err)
	}
	destination, err := to.client.ClusterMyID(ctx).Result()
	if err != nil {
		return nil, m.failed("begin migration", err)
	}
	// The destination comes first: the source sends clients there.
	if err := m.set(ctx, to, "IMPORTING", source); err != nil {
		return nil, m.failed("begin migration", err)
	}
	if err := m.set(ctx, from, "MIGRATING", destination); err != nil {
		return nil, m.failed("begin migration", errors.Join(err, m.set(ctx, to, "STABLE")))
	}
	return m, nil
}

// MoveKeys moves at most n of the slot's keys, with their expiry, in one
// command that blocks both masters, and returns how many it found: with 0 none
// is left. It fails if a key exists at the destination, too.
func (m *Migration) MoveKeys(ctx context.Context, n int) (int, error) {
	keys, err := m.from.client.ClusterGetKeysInSlot(ctx, m.slot, n).Result()
	if err != nil {
		return 0, m.failed("move keys", err)
	}
	if len(keys) == 0 {
		return 0, nil
	}
	args := []any{"MIGRATE", loopback, m.to.port.number, "", 0, waitTimeout.Milliseconds()}
	switch l := m.to.login; {
	case l.username != "":
		args = append(args, "AUTH2", l.username, l.password)
	case l.password != "":
		args = append(args, "AUTH", l.password)
	}
	args = append(args, "KEYS")
	for _, key := range keys {
		args = append(args, key)
	}
	// Keys that have expired since are not found, which is no error.
	if err := m.from.client.Do(ctx, args...).Err(); err != nil {
		return 0, m.failed("move keys", err)
	}
	return len(keys), nil
}

// Finish makes the destination the slot's master, and informs all running masters. It
// fails if the source still has keys of the slot.
func (m *Migration) Finish(ctx context.Context) error {
	destination, err := m.to.client.ClusterMyID(ctx).Result()
	if err != nil {
		return m.failed("finish migration", err)
	}
	// The destination would take the slot, and the source lose its keys.
	left, err := m.from.client.ClusterCountKeysInSlot(ctx, m.slot).Result()
	if err == nil && left != 0 {
		err = fmt.Errorf("the source still has %d keys", left)
	}
	if err != nil {
		return m.failed("finish migration", err)
	}
	places, err := m.cluster.places(ctx)
	if err != nil {
		return m.failed("finish migration", err)
	}
	// The destination comes first: were only the source changed, no node would own the
	// slot.
	order := []*Server{m.to, m.from}
	for _, p := range places {
		if p.master == "" && p.node != m.from && p.node != m.to {
			order = append(order, p.node)
		}
	}
	for _, node := range order {
		err := m.set(ctx, node, "NODE", destination)
		// A master that heard of it from another node, and had no other slot, is a
		// replica by now and takes no orders.
		if err != nil && (node == m.to || !strings.Contains(err.Error(), "only with masters")) {
			return m.failed("finish migration", err)
		}
	}
	return nil
}

// set gives a node an order about the slot.
func (m *Migration) set(ctx context.Context, node *Server, order ...any) error {
	args := append([]any{"CLUSTER", "SETSLOT", m.slot}, order...)
	if err := node.client.Do(ctx, args...).Err(); err != nil {
		return fmt.Errorf("set slot at %s: %w", node.Addr(), err)
	}
	return nil
}

func (m *Migration) failed(step string, err error) error {
	return fmt.Errorf("%s of slot %d from %s to %s: %w", step, m.slot, m.from.Addr(), m.to.Addr(), err)
}
