package redistest

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// MasterOf returns the node that owns a key's slot, see [Cluster.Owner].
func (c *Cluster) MasterOf(ctx context.Context, key string) (*Server, error) {
	return c.Owner(ctx, Keyslot(key))
}

// Owner returns the running node that regards itself as the master of a slot.
// While there is none, because the last one is gone, or more than one, because
// one has not heard of the other, it waits until ctx ends, at most 10 seconds.
func (c *Cluster) Owner(ctx context.Context, slot int) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
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

// WaitUntilOK returns when every slot has one running master, and all running
// nodes find the cluster's state ok and tell clients the same: these masters and
// all their running replicas. A node that was killed or paused must not be
// mentioned any more. It waits until ctx ends, at most a minute.
func (c *Cluster) WaitUntilOK(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, groupPatience)
	defer cancel()
	err := pollEvery(ctx, groupPollInterval, func() error { return c.ok(ctx) })
	if err != nil {
		return fmt.Errorf("wait until the cluster is ok: %w", err)
	}
	return nil
}

// ok tells what is missing until the cluster is ok.
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
			return fmt.Errorf("node %s tells clients %v, want %v", p.node.Addr(), got, want)
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
