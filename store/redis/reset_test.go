package redis

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// TestInspectionTellsServersApart: a replica that lags has another copy.
func TestInspectionTellsServersApart(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, s.Charge(t.Context(), ask("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	must(t, sh.Replicas[0].PauseReplication())
	must(t, s.Charge(t.Context(), ask("k"))[0].Err)
	r := ask("k")[0]
	r.Cost = 0
	found := s.Inspect(t.Context(), r)
	if found.Shard != "a" || found.Former != nil || len(found.Copies) != 2 {
		t.Fatalf("%+v", found)
	}
	for i, want := range []store.Copy{
		{Address: sh.Primary.Addr(), Role: store.RolePrimary, State: store.State{Used: 2}},
		{Address: sh.Replicas[0].Addr(), Role: store.RoleReplica, State: store.State{Used: 1, Replica: true}},
	} {
		got := found.Copies[i]
		if got.Address != want.Address || got.Role != want.Role || !got.Exists || got.State.Err != nil || got.State.Used != want.State.Used || got.State.Replica != want.State.Replica {
			t.Errorf("copy %d is %+v, want %+v", i, got, want)
		}
	}
	must(t, sh.Replicas[0].Kill())
	if got := s.Inspect(t.Context(), r).Copies[1]; got.State.Err == nil || got.Exists {
		t.Errorf("a server that is away: %+v", got)
	}
}

// TestResetReachesEveryCopy: of the owner and its replica, of the owner before
// a resharding, and of configs that count in another way.
func TestResetReachesEveryCopy(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	client := moving(before, after, 1)[0]
	request := func(limit store.Limit) []store.Request {
		limit.Zone, limit.Window = "reset", time.Hour
		return []store.Request{{Limit: &limit, ClientKey: client, Events: 10, Cost: 1, ID: fmt.Sprint("id", time.Now().UnixNano())}}
	}
	buckets := func() (n int) {
		for _, server := range r.servers {
			found, err := server.Client().Keys(t.Context(), before.keys.prefix+":"+layoutVersion+":*").Result()
			must(t, err)
			n += len(found)
		}
		return n
	}
	for _, limit := range storetest.Limits {
		must(t, before.Charge(t.Context(), request(limit))[0].Err)
		must(t, after.Charge(t.Context(), request(limit))[0].Err)
	}
	if n := buckets(); n != 2*len(storetest.Limits) {
		t.Fatalf("%d buckets", n)
	}
	// The limits after the first are the same zone in other configs.
	reset := request(storetest.Limits[0])[0]
	found := after.Inspect(t.Context(), reset)
	if found.Former == nil || found.Former.Shard == found.Shard || !found.Former.Copies[0].Exists || !found.Copies[0].Exists {
		t.Errorf("found %+v", found)
	}
	must(t, after.Reset(t.Context(), reset))
	if n := buckets(); n != 0 {
		t.Errorf("%d buckets are left", n)
	}
}

// TestResetOfAShardThatIsAway says so.
func TestResetOfAShardThatIsAway(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), DialTimeout: 100 * time.Millisecond}), nil)
	must(t, s.Charge(t.Context(), ask("k"))[0].Err)
	must(t, server.Kill())
	if err := s.Reset(t.Context(), ask("k")[0]); err == nil {
		t.Error("no error")
	}
	if err := s.Reset(t.Context(), ask("k")[0]); errors.Is(err, store.ErrUncertain) {
		t.Errorf("a reset is repeated at no risk: %v", err)
	}
}

// TestResetInACluster, whatever node the bucket is on.
func TestResetInACluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 1)
	s := newStore(t, newShard(t, ShardOptions{Cluster: cluster.Addrs()}), nil)
	for i := range 8 {
		client := fmt.Sprint("client-", i)
		must(t, s.Charge(t.Context(), ask(client))[0].Err)
		r := ask(client)[0]
		r.Cost = 0
		if found := s.Inspect(t.Context(), r); len(found.Copies) != 2 || !found.Copies[0].Exists {
			t.Errorf("%s: %+v", client, found)
		}
		must(t, s.Reset(t.Context(), r))
		if found := s.Inspect(t.Context(), r); found.Copies[0].Exists || found.Copies[0].State.Err != nil {
			t.Errorf("%s after its reset: %+v", client, found)
		}
	}
}
