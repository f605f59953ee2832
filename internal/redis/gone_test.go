package redis

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// awaitServers waits until a store has these servers besides those that are up, and a majority of sources or none.
func awaitServers(t *testing.T, what string, s *Store, hasQuorum bool, away ...string) {
	t.Helper()
	eventually(t, what, func() error {
		f := s.Shards()[0]
		var got []string
		for _, server := range slices.Concat(f.Servers, f.Sources) {
			if server.State != store.ServerUp {
				got = append(got, fmt.Sprint(server.Role, " ", server.Address, " ", server.State))
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(away) || (f.NoQuorum == nil) != hasQuorum || !f.Found {
			return fmt.Errorf("not up are %q, want %q; quorum: %w", got, away, errors.Join(f.NoQuorum, f.SearchFault))
		}
		return nil
	})
}

// TestReplicaThatNobodyAsksIsGone: a given replica that dies is left out without a call of it, until it is back, however
// many connections there may be.
func TestReplicaThatNobodyAsksIsGone(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	replica := sh.Replicas[0]
	s := newStore(t, newShard(t, ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{replica.Addr()}, PoolSize: 100}), nil)
	waitUntilUp(t, s)
	awaitServers(t, "all are up", s, true)
	must(t, replica.Kill())
	awaitServers(t, "the replica is gone", s, true, "replica "+replica.Addr()+" left_out")
	must(t, replica.Restart())
	awaitServers(t, "the replica is back", s, true)
}

// TestLostRedundancyWithSentinel: two of three sentinels and the only replica, until they are back.
func TestLostRedundancyWithSentinel(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	sentinels := redistest.StartSentinels(t, masterName, sh.Primary, 3, redistest.SentinelOptions{DownAfter: time.Second})
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	s := newStore(t, newShard(t, sentinelOptions(sentinels)), nil)
	waitUntilUp(t, s)
	awaitServers(t, "all are up", s, true)
	first, second, replica := sentinels.Nodes[1], sentinels.Nodes[2], sh.Replicas[0]
	must(t, second.Kill())
	awaitServers(t, "a sentinel is gone", s, true, "sentinel "+second.Addr()+" left_out")
	must(t, errors.Join(first.Kill(), replica.Kill()))
	awaitServers(t, "two sentinels and the replica are gone", s, false,
		"replica "+replica.Addr()+" left_out", "sentinel "+first.Addr()+" left_out", "sentinel "+second.Addr()+" left_out")
	if text := s.Shards()[0].NoQuorum.Error(); !strings.Contains(text, "only 1 of the 3 given sentinels") || !strings.Contains(text, first.Addr()) || !strings.Contains(text, "restart the silent ones, or correct the list and reload") {
		t.Errorf("the fault is %s", text)
	}
	corrected := newStore(t, newShard(t, ShardOptions{Sentinel: &SentinelOptions{Master: masterName, Addrs: sentinels.Addrs()[:1]}}), nil)
	waitUntilUp(t, corrected)
	awaitServers(t, "the list is corrected", corrected, true, "replica "+replica.Addr()+" left_out")
	must(t, errors.Join(first.Restart(), second.Restart(), replica.Restart()))
	awaitServers(t, "all are back", s, true)
}

// awaitReplaced waits until a store has a primary and that replica.
func awaitReplaced(t *testing.T, s *Store, fresh *redistest.Server) {
	t.Helper()
	eventually(t, "it is replaced", func() error {
		// Its successor may have joined, and be no replica yet.
		servers := s.Shards()[0].Servers
		if len(servers) != 2 || servers[1].Address != fresh.Addr() || servers[1].State != store.ServerUp {
			return fmt.Errorf("the servers are %+v", servers)
		}
		return nil
	})
}

// TestReplacedReplicaWithSentinel is missed until sentinels that are reset forget it.
func TestReplacedReplicaWithSentinel(t *testing.T) {
	t.Parallel()
	sh, fresh := redistest.StartShard(t, 1), redistest.Start(t)
	sentinels := redistest.StartSentinels(t, masterName, sh.Primary, 1, redistest.SentinelOptions{DownAfter: time.Second})
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	s := newStore(t, newShard(t, sentinelOptions(sentinels)), nil)
	waitUntilUp(t, s)
	awaitServers(t, "all are up", s, true)
	must(t, sh.Replicas[0].Kill())
	gone := "replica " + sh.Replicas[0].Addr() + " left_out"
	awaitServers(t, "the replica is gone", s, true, gone)
	host, port, err := net.SplitHostPort(sh.Primary.Addr())
	must(t, errors.Join(err, fresh.Client().ReplicaOf(t.Context(), host, port).Err(), fresh.WaitInSyncWith(t.Context(), sh.Primary)))
	must(t, sentinels.Nodes[0].Client().Do(t.Context(), "SENTINEL", "RESET", masterName).Err())
	awaitReplaced(t, s, fresh)
}

// TestLostReplicaOfACluster, and a given node that does not exist.
func TestLostReplicaOfACluster(t *testing.T) {
	t.Parallel()
	cluster, dead := redistest.StartCluster(t, 1, 1), redistest.Start(t)
	must(t, dead.Kill())
	s := newStore(t, newShard(t, ShardOptions{Cluster: []string{cluster.Addrs()[0], dead.Addr()}}), nil)
	waitUntilUp(t, s)
	awaitServers(t, "a node never was", s, false, "node "+dead.Addr()+" left_out")
	must(t, cluster.Nodes[1].Kill())
	awaitServers(t, "the replica is gone", s, false, "replica "+cluster.Addrs()[1]+" left_out", "node "+dead.Addr()+" left_out")
	must(t, cluster.Nodes[1].Restart())
	awaitServers(t, "the replica is back", s, false, "node "+dead.Addr()+" left_out")
}

// TestReplacedReplicaOfACluster is missed until the nodes forget it.
func TestReplacedReplicaOfACluster(t *testing.T) {
	t.Parallel()
	var nodes [3]*redistest.Server
	for i := range nodes {
		nodes[i] = redistest.Start(t, redistest.Args("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"))
	}
	primary, gone, fresh := nodes[0].Client(), nodes[1], nodes[2]
	must(t, primary.ClusterAddSlotsRange(t.Context(), 0, wire.SlotCount-1).Err())
	id, err := primary.ClusterMyID(t.Context()).Result()
	must(t, err)
	join := func(node *redistest.Server) {
		host, port, err := net.SplitHostPort(nodes[0].Addr())
		must(t, errors.Join(err, node.Client().ClusterMeet(t.Context(), host, port).Err()))
		eventually(t, "it is a replica", func() error { return node.Client().ClusterReplicate(t.Context(), id).Err() })
	}
	join(gone)
	s := newStore(t, newShard(t, ShardOptions{Cluster: []string{nodes[0].Addr()}}), nil)
	waitUntilUp(t, s)
	awaitServers(t, "both are up", s, true)
	eventually(t, "the replica is found", func() error {
		if n := len(s.Shards()[0].Servers); n != 2 {
			return fmt.Errorf("%d servers are found", n)
		}
		return nil
	})
	was, err := gone.Client().ClusterMyID(t.Context()).Result()
	must(t, errors.Join(err, gone.Kill()))
	awaitServers(t, "it is gone", s, true, "replica "+gone.Addr()+" left_out")
	join(fresh)
	must(t, primary.ClusterForget(t.Context(), was).Err())
	awaitReplaced(t, s, fresh)
}
