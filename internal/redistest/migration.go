package redistest

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

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
	args := []any{"MIGRATE", loopback, m.to.port.number, "", 0, patience.Milliseconds()}
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
	// Keys that have expired in the meantime are not found, which is no error.
	if err := m.from.client.Do(ctx, args...).Err(); err != nil {
		return 0, m.failed("move keys", err)
	}
	return len(keys), nil
}

// Finish makes the destination the slot's master, and tells all running
// masters. It fails if the source still has keys of the slot.
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
	// The destination comes first. Were it the source, and then nothing, nobody
	// would own the slot.
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
