package redistest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestMigrateSlot(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 1, "--requirepass", "secret")
	slot := redistest.Keyslot("{tag}")
	from := masterOf(t, cluster, "{tag}")
	to := cluster.Nodes[0]
	if from == to {
		to = cluster.Nodes[1]
	}
	client := clusterClient(t, cluster, "secret")
	const keys = 250
	for i := range keys {
		if err := client.Set(t.Context(), fmt.Sprint("{tag}", i), i, time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
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
		if err := cluster.MigrateSlot(t.Context(), slot, way[0], way[1]); err != nil {
			t.Fatal(err)
		}
		waitUntilOK(t, cluster)
		if owner := masterOf(t, cluster, "{tag}"); owner != way[1] {
			t.Errorf("slot %d belongs to %s, want %s", slot, owner.Addr(), way[1].Addr())
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}

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
	cluster := redistest.StartCluster(t, 2, 0)
	ctx := t.Context()
	from := masterOf(t, cluster, "{tag}")
	to := cluster.Nodes[0]
	if from == to {
		to = cluster.Nodes[1]
	}
	for _, key := range []string{"{tag}1", "{tag}2"} {
		set(t, from, key, "value")
	}
	slot := redistest.Keyslot("{tag}")
	if _, err := cluster.BeginMigration(ctx, slot, to, from); err == nil {
		t.Error("began a migration from a node that does not own the slot")
	}
	m, err := cluster.BeginMigration(ctx, slot, from, to)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := m.Finish(ctx); err != nil {
		t.Fatal(err)
	}
	requireOwner(t, cluster, slot, to)
	requireRedirect(t, from, "{tag}1", fmt.Sprint("MOVED ", slot, " ", to.Addr()))
	requireValue(t, to, "{tag}1", "value")
	requireValue(t, to, "{tag}2", "value")
}

func TestMigrateLastSlot(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 0)
	from, to := cluster.Nodes[0], cluster.Nodes[1]
	for _, order := range []struct {
		node    *redistest.Server
		command string
	}{{from, "DELSLOTSRANGE"}, {to, "DELSLOTSRANGE"}, {to, "ADDSLOTSRANGE"}} {
		err := order.node.Client().Do(t.Context(), "CLUSTER", order.command, 1, redistest.Slots/2-1).Err()
		if err != nil {
			t.Fatal(err)
		}
	}
	waitUntilOK(t, cluster)
	if err := cluster.MigrateSlot(t.Context(), 0, from, to); err != nil {
		t.Fatal(err)
	}
	waitUntilOK(t, cluster)
	if got := replicaOf(t, cluster, to); got != from {
		t.Errorf("the replica is %s, want the former master %s", got.Addr(), from.Addr())
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
