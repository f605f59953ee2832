//go:build check

package redistest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestCluster(t *testing.T) {
	t.Parallel()
	before := time.Now()
	cluster := redistest.StartCluster(t, 3, 1, redistest.Args("--maxmemory-policy", "allkeys-lfu"), redistest.NodeTimeout(waitLimit))
	t.Logf("launched within %v", time.Since(before))

	if addrs := cluster.Addrs(); len(addrs) != 6 || addrs[4] != cluster.Nodes[4].Addr() {
		t.Errorf("addresses %v of %d nodes", addrs, len(cluster.Nodes))
	}
	for i, node := range cluster.Nodes[:3] {
		replicas, err := cluster.ReplicasOf(t.Context(), node)
		must(t, err)
		if len(replicas) != 1 || replicas[0] != cluster.Nodes[3+i] {
			t.Errorf("master %d has replicas %v", i, replicas)
		}
		requireReplica(t, replicas[0])
		info, err := replicas[0].Info("memory")
		if err != nil || info["maxmemory_policy"] != "allkeys-lfu" {
			t.Errorf("maxmemory_policy %q, %v; want that of the arguments", info["maxmemory_policy"], err)
		}
	}

	for _, key := range []string{
		"", "a", "123456789", "{user}.a", "a{user}b", "{}a", "a{}b{c}", "a{b", "a}b{c}", "{{a}}", "{a}{b}", "kéy", "\x00\xff",
	} {
		want, err := cluster.Nodes[5].Client().ClusterKeySlot(t.Context(), key).Result()
		if got := redistest.Keyslot(key); int64(got) != want || err != nil {
			t.Errorf("slot %d for %q, want %d, %v", got, key, want, err)
		}
	}

	client := clusterClient(t, cluster, "")
	owned := make(map[*redistest.Server]int)
	for i := range 30 {
		key := fmt.Sprint("key", i)
		must(t, client.Set(t.Context(), key, key, 0).Err())
		owner := masterOf(t, cluster, key)
		requireValue(t, owner, key, key)
		owned[owner]++
	}
	if len(owned) != 3 {
		t.Errorf("only %d masters have keys", len(owned))
	}
}

func TestClusterFailsOver(t *testing.T) {
	for name, fault := range map[string]struct{ begin, end func(*redistest.Server) error }{
		"killed": {(*redistest.Server).Kill, (*redistest.Server).Restart},
		"paused": {(*redistest.Server).Pause, (*redistest.Server).Resume},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := redistest.StartCluster(t, 3, 1)
			client := clusterClient(t, cluster, "")
			must(t, client.Set(t.Context(), "key", "value", 0).Err())
			old := masterOf(t, cluster, "key")
			replica := replicaOf(t, cluster, old)
			must(t, replica.WaitInSyncWith(t.Context(), old))

			must(t, fault.begin(old))
			before := time.Now()
			if now := masterOf(t, cluster, "key"); now != replica {
				t.Errorf("the new master is %s, want the replica %s", now.Addr(), replica.Addr())
			}
			must(t, cluster.WaitUntilOK(t.Context()))
			t.Logf("failed over within %v", time.Since(before))
			requireValue(t, replica, "key", "value")

			must(t, fault.end(old))
			before = time.Now()
			must(t, cluster.WaitUntilOK(t.Context()))
			t.Logf("the old master was a replica within %v", time.Since(before))
			if got := replicaOf(t, cluster, replica); got != old {
				t.Errorf("the new master's replica is %s, want the old master %s", got.Addr(), old.Addr())
			}
			must(t, old.WaitInSyncWith(t.Context(), replica))
			if got, err := client.Get(t.Context(), "key").Result(); got != "value" || err != nil {
				t.Errorf("got %q, %v through the cluster", got, err)
			}
		})
	}
}

func TestClusterWithoutFullCoverage(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3, 0, redistest.Args("--cluster-require-full-coverage", "no"))
	lost, left := cluster.Nodes[0], cluster.Nodes[1]
	must(t, lost.Kill())
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
		if owner, err := cluster.MasterOf(deadline(t, 300*time.Millisecond), key); err == nil {
			err := owner.Client().Set(t.Context(), key, "value", 0).Err()
			if owner == lost || owner == left && err != nil {
				t.Errorf("write to master %s got %v", owner.Addr(), err)
			}
		}
	}
	err := cluster.WaitUntilOK(deadline(t, 5*time.Second))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "slot 0 has") {
		t.Errorf("got error %v, want one of the context and about slot 0", err)
	}
	must(t, lost.Restart())
	must(t, cluster.WaitUntilOK(t.Context()))
}

func TestLaunchClusterFails(t *testing.T) {
	if _, err := redistest.LaunchCluster(0, 0); err == nil {
		t.Error("launching a cluster without masters worked")
	}
	if _, err := redistest.LaunchCluster(1, 0, redistest.Args("--no-such-directive", "1")); err == nil {
		t.Error("launching with a wrong argument worked")
	}
}

func TestStoppedCluster(t *testing.T) {
	t.Parallel()
	cluster, err := redistest.LaunchCluster(1, 0)
	must(t, err)
	for range 2 {
		if err := cluster.Stop(); err != nil {
			t.Error(err)
		}
	}
	if owner, err := cluster.Owner(deadline(t, 50*time.Millisecond), 0); err == nil {
		t.Errorf("stopped node %s owns a slot", owner.Addr())
	}
	if _, err := cluster.ReplicasOf(t.Context(), cluster.Nodes[0]); err == nil {
		t.Error("replicas of a stopped node were found")
	}
}

// clusterClient makes a client of the whole cluster.
func clusterClient(t *testing.T, cluster *redistest.Cluster, password string) *goredis.ClusterClient {
	t.Helper()
	client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: cluster.Addrs(), Password: password, MaxRedirects: 20})
	t.Cleanup(func() { client.Close() })
	return client
}

func masterOf(t *testing.T, cluster *redistest.Cluster, key string) *redistest.Server {
	t.Helper()
	master, err := cluster.MasterOf(t.Context(), key)
	must(t, err)
	return master
}

// otherMaster is one of the first two nodes.
func otherMaster(cluster *redistest.Cluster, master *redistest.Server) *redistest.Server {
	if cluster.Nodes[0] == master {
		return cluster.Nodes[1]
	}
	return cluster.Nodes[0]
}

// replicaOf is a master's only replica.
func replicaOf(t *testing.T, cluster *redistest.Cluster, master *redistest.Server) *redistest.Server {
	t.Helper()
	replicas, err := cluster.ReplicasOf(t.Context(), master)
	must(t, err)
	if len(replicas) != 1 {
		t.Fatalf("master %s has %d replicas, want 1", master.Addr(), len(replicas))
	}
	return replicas[0]
}

func TestMigrateSlot(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 1, redistest.Args("--requirepass", "secret"), redistest.NodeTimeout(waitLimit))
	slot := redistest.Keyslot("{tag}")
	from := masterOf(t, cluster, "{tag}")
	to := otherMaster(cluster, from)
	client := clusterClient(t, cluster, "secret")
	const keys = 250
	for i := range keys {
		must(t, client.Set(t.Context(), fmt.Sprint("{tag}", i), i, time.Hour).Err())
	}

	// A writer counts through all of it and loses nothing.
	stop, done := make(chan struct{}), make(chan error)
	counted := 0
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			counted++
			if err := client.Incr(t.Context(), "{tag}counter").Err(); err != nil {
				done <- err
				return
			}
		}
	}()
	for _, way := range [][2]*redistest.Server{{from, to}, {to, from}, {from, to}} {
		must(t, cluster.MigrateSlot(t.Context(), slot, way[0], way[1]))
		must(t, cluster.WaitUntilOK(t.Context()))
		if owner := masterOf(t, cluster, "{tag}"); owner != way[1] {
			t.Errorf("slot %d belongs to %s, want %s", slot, owner.Addr(), way[1].Addr())
		}
	}
	close(stop)
	must(t, <-done)

	if got, err := client.Get(t.Context(), "{tag}counter").Int(); got != counted || err != nil {
		t.Errorf("counted to %d, %v; want %d", got, err, counted)
	}
	for _, node := range []*redistest.Server{from, to} {
		want := keys + 1
		if node == from {
			want = 0
		}
		got, err := node.Client().ClusterCountKeysInSlot(t.Context(), slot).Result()
		if got != int64(want) || err != nil {
			t.Errorf("%s has %d keys of the slot, %v; want %d", node.Addr(), got, err, want)
		}
	}
	if left, err := client.TTL(t.Context(), "{tag}0").Result(); left < 50*time.Minute || err != nil {
		t.Errorf("a key expires in %v, %v; want an hour", left, err)
	}
}

func TestMigrationStepByStep(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitLimit))
	ctx := t.Context()
	from := masterOf(t, cluster, "{tag}")
	to := otherMaster(cluster, from)
	for _, key := range []string{"{tag}1", "{tag}2"} {
		set(t, from, key, "value")
	}
	slot := redistest.Keyslot("{tag}")
	if _, err := cluster.BeginMigration(ctx, slot, to, from); err == nil {
		t.Error("began a migration from a node that does not own the slot")
	}
	m, err := cluster.BeginMigration(ctx, slot, from, to)
	must(t, err)
	requireRedirect(t, from, "{tag}new", fmt.Sprint("ASK ", slot, " ", to.Addr()))
	requireRedirect(t, to, "{tag}new", fmt.Sprint("MOVED ", slot, " ", from.Addr()))
	requireValue(t, from, "{tag}1", "value")

	if moved, err := m.MoveKeys(ctx, 1); moved != 1 || err != nil {
		t.Fatalf("moved %d keys, %v; want 1", moved, err)
	}
	// One key is here and one is there.
	err = from.Client().MGet(ctx, "{tag}1", "{tag}2").Err()
	if err == nil || !strings.HasPrefix(err.Error(), "TRYAGAIN") {
		t.Errorf("got error %v for both keys, want TRYAGAIN", err)
	}
	if err := m.Finish(ctx); err == nil {
		t.Error("finished a migration with a key left")
	}
	requireOwner(t, cluster, slot, from)

	if moved, err := m.MoveKeys(ctx, 10); moved != 1 || err != nil {
		t.Fatalf("moved %d keys, %v; want 1", moved, err)
	}
	if moved, err := m.MoveKeys(ctx, 10); moved != 0 || err != nil {
		t.Fatalf("moved %d keys, %v; want none", moved, err)
	}
	must(t, m.Finish(ctx))
	requireOwner(t, cluster, slot, to)
	requireRedirect(t, from, "{tag}1", fmt.Sprint("MOVED ", slot, " ", to.Addr()))
	requireValue(t, to, "{tag}1", "value")
	requireValue(t, to, "{tag}2", "value")
}

func TestMigrateLastSlot(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitLimit))
	from, to := cluster.Nodes[0], cluster.Nodes[1]
	for _, order := range []struct {
		node    *redistest.Server
		command string
	}{{from, "DELSLOTSRANGE"}, {to, "DELSLOTSRANGE"}, {to, "ADDSLOTSRANGE"}} {
		err := order.node.Client().Do(t.Context(), "CLUSTER", order.command, 1, redistest.Slots/2-1).Err()
		must(t, err)
	}
	must(t, cluster.WaitUntilOK(t.Context()))
	must(t, cluster.MigrateSlot(t.Context(), 0, from, to))
	must(t, cluster.WaitUntilOK(t.Context()))
	if got := replicaOf(t, cluster, to); got != from {
		t.Errorf("the replica is %s, want the previous master %s", got.Addr(), from.Addr())
	}
}

func requireRedirect(t *testing.T, node *redistest.Server, key, want string) {
	t.Helper()
	_, err := node.Client().Get(t.Context(), key).Result()
	if errors.Is(err, goredis.Nil) || err == nil || err.Error() != want {
		t.Errorf("get %s from %s: got %v, want %s", key, node.Addr(), err, want)
	}
}

func requireOwner(t *testing.T, cluster *redistest.Cluster, slot int, want *redistest.Server) {
	t.Helper()
	owner, err := cluster.Owner(t.Context(), slot)
	if err != nil || owner != want {
		t.Fatalf("slot %d does not belong to %s, %v", slot, want.Addr(), err)
	}
}
