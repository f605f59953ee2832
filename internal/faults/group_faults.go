package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// groupFaults are those of servers that Sentinel watches, and of a Redis Cluster.
var groupFaults = []*fault{
	{
		name: "a sentinel killed", launch: watched,
		bring: lasts(
			func(_ context.Context, s *shard) error { return s.sentinels.Nodes[0].Kill() },
			func(_ context.Context, s *shard) error { return s.sentinels.Nodes[0].Restart() }),
	},
	{
		name: orderedFailover, launch: watched, primary: partly, loses: fork,
		bring: failOver((*redistest.Sentinels).Failover),
	},
	{
		name: killedFailover, launch: watched, primary: away, loses: tail,
		bring: killAndFailOver(),
	},
	{
		name: doubleFailover, launch: watched, primary: away, loses: tail,
		bring: killAndFailOver(func(s *shard) error { return s.sentinels.Nodes[0].Kill() }),
	},
	{
		name: "slots migrate in a Cluster", launch: clustered,
		bring: migrateSlots,
	},
	{
		name: "Cluster node killed, its replica promoted", launch: clustered, checks: partly, primary: partly, loses: tail,
		bring: killNode,
	},
}

// successions are the faults after which the primary has another history.
var successions = []string{restart, orderedFailover, killedFailover, doubleFailover}

const (
	restart         = "primary killed and restarted"
	orderedFailover = "failover ordered from Sentinel"
	killedFailover  = "primary killed, failover by Sentinel"
	doubleFailover  = "primary and a sentinel killed, failover"
)

// failOver is a fault that makes the sentinels promote a replica. The old primary
// goes on as a replica of that.
func failOver(order func(*redistest.Sentinels, context.Context) error) func(context.Context, *shard, time.Duration) error {
	return func(ctx context.Context, s *shard, _ time.Duration) error {
		old := s.primary()
		if err := order(s.sentinels, ctx); err != nil {
			return err
		}
		if _, err := s.sentinels.WaitForMaster(ctx, old.Addr()); err != nil {
			return err
		}
		return s.sentinels.WaitForReplicas(ctx, len(s.servers)-1)
	}
}

// killAndFailOver is a fault that kills the primary, and what else there is to
// kill, for good.
func killAndFailOver(others ...func(*shard) error) func(context.Context, *shard, time.Duration) error {
	return func(ctx context.Context, s *shard, _ time.Duration) error {
		errs := []error{s.primary().Kill()}
		for _, kill := range others {
			errs = append(errs, kill(s))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		_, err := s.sentinels.WaitForMaster(ctx, s.primary().Addr())
		return err
	}
}

// migrateSlots moves the slot of each bucket to another node, one after the
// other.
func migrateSlots(ctx context.Context, s *shard, lasting time.Duration) error {
	keys, err := s.keys(ctx)
	if err != nil {
		return err
	}
	masters := s.primaries()
	for _, key := range keys {
		if err := pause(ctx, lasting/time.Duration(len(keys))); err != nil {
			return err
		}
		slot := redistest.Keyslot(key)
		from, err := s.cluster.Owner(ctx, slot)
		if err != nil {
			return err
		}
		if err := s.cluster.MigrateSlot(ctx, slot, from, next(masters, from)); err != nil {
			return err
		}
	}
	return nil
}

// next is the server after another one.
func next(servers []*redistest.Server, after *redistest.Server) *redistest.Server {
	for i, s := range servers {
		if s == after {
			return servers[(i+1)%len(servers)]
		}
	}
	return servers[0]
}

// keys are those of the zone's buckets.
func (s *shard) keys(ctx context.Context) (all []string, err error) {
	for _, server := range s.primaries() {
		keys, err := server.Client().Keys(ctx, keysOf(zone)).Result()
		if err != nil {
			return nil, fmt.Errorf("list buckets: %w", err)
		}
		all = append(all, keys...)
	}
	if len(all) == 0 {
		return nil, errors.New("there are no buckets")
	}
	return all, nil
}

// killNode kills, for good, a node that has buckets.
func killNode(ctx context.Context, s *shard, _ time.Duration) error {
	keys, err := s.keys(ctx)
	if err != nil {
		return err
	}
	node, err := s.cluster.MasterOf(ctx, keys[0])
	if err != nil {
		return err
	}
	if err := node.Kill(); err != nil {
		return err
	}
	return s.cluster.WaitUntilOK(ctx)
}
