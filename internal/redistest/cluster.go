package redistest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
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

// LaunchCluster starts masters that share all slots evenly, and as many
// replicas of each as asked for, all with the same extra redis-server arguments.
// It returns when all nodes agree as with [Cluster.WaitUntilOK] and replicas are
// in sync, which takes at least two seconds because Redis waits for as long. It
// fails like [Launch], or if the nodes do not agree within a minute, and then
// stops what it has started.
func LaunchCluster(masters, replicasPerMaster int, args ...string) (*Cluster, error) {
	return LaunchClusterWith(masters, replicasPerMaster, Options{Args: args})
}

// LaunchClusterWith is [LaunchCluster] with the same options for all nodes,
// except that ReplicaOf has no meaning. All slots must have a master: with 0
// masters it fails.
func LaunchClusterWith(masters, replicasPerMaster int, opts Options) (*Cluster, error) {
	c := &Cluster{}
	if err := c.launch(masters, replicasPerMaster, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("launch cluster: %w", err), c.Stop())
	}
	return c, nil
}

// StartCluster launches a cluster like [LaunchCluster] and stops it when the
// test ends. The test fails if the cluster cannot be launched.
func StartCluster(tb testing.TB, masters, replicasPerMaster int, args ...string) *Cluster {
	tb.Helper()
	return StartClusterWith(tb, masters, replicasPerMaster, Options{Args: args})
}

// StartClusterWith launches a cluster like [LaunchClusterWith] and stops it
// when the test ends. The test fails if the cluster cannot be launched.
func StartClusterWith(tb testing.TB, masters, replicasPerMaster int, opts Options) *Cluster {
	tb.Helper()
	c, err := LaunchClusterWith(masters, replicasPerMaster, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Stop(); err != nil {
			tb.Error(err)
		}
	})
	return c
}

func (c *Cluster) launch(masters, replicasPerMaster int, opts Options) error {
	if masters < 1 {
		return errors.New("it needs a master")
	}
	opts.ReplicaOf, opts.cluster = nil, true
	for range masters * (1 + replicasPerMaster) {
		node, err := Launch(opts)
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, node)
	}
	ctx, cancel := context.WithTimeout(context.Background(), groupPatience)
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

// meet makes the nodes know each other.
func (c *Cluster) meet(ctx context.Context) error {
	// They would hear of each other through the first one, but in a while.
	for i, node := range c.Nodes {
		for _, other := range c.Nodes[:i] {
			port, bus := strconv.Itoa(other.port.number), strconv.Itoa(other.bus.number)
			if err := node.client.Do(ctx, "CLUSTER", "MEET", loopback, port, bus).Err(); err != nil {
				return fmt.Errorf("make %s meet %s: %w", node.Addr(), other.Addr(), err)
			}
		}
	}
	return nil
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
