package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// awaitServers waits until a store has these servers besides those that are up, and a majority of sources or none.
func awaitServers(t *testing.T, what string, s *Store, hasQuorum bool, away ...string) {
	t.Helper()
	eventually(t, what, func() error {
		f := s.Shards()[0]
		var got []string
		for _, server := range f.Servers {
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
	if text := s.Shards()[0].NoQuorum.Error(); !strings.Contains(text, "only 1 of the 3 given sentinels") || !strings.Contains(text, first.Addr()) {
		t.Errorf("the fault is %s", text)
	}
	must(t, errors.Join(first.Restart(), second.Restart(), replica.Restart()))
	awaitServers(t, "all are back", s, true)
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
