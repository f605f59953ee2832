package redis

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestShardsAreDescribed with roles, states, lags and connections.
func TestShardsAreDescribed(t *testing.T) { bothWays(t, requireDescribedShards) }

func requireDescribedShards(t *testing.T, plain bool) {
	sh := redistest.StartShard(t, 2)
	shard := newShard(t, ShardOptions{
		Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr(), sh.Replicas[1].Addr()},
		PoolSize: 1, NoPipelining: plain,
	})
	s := newStore(t, shard, nil)
	if got := s.Shards(); len(got) != 1 || got[0].Name != "a" || got[0].Kind != "static" || !got[0].Found || got[0].Servers[0].State != store.ServerUnmet {
		t.Errorf("before the first call: %+v", got)
	}
	s.Warm(t.Context())
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	eventually(t, "all servers are up", func() error {
		for _, server := range s.Shards()[0].Servers {
			if server.State != store.ServerUp || server.Role == store.RoleReplica && !server.LagKnown {
				return fmt.Errorf("%+v", server)
			}
		}
		return nil
	})
	servers := s.Shards()[0].Servers
	if len(servers) != 3 || servers[0].Role != store.RolePrimary || servers[1].Role != store.RoleReplica || servers[0].Address != sh.Primary.Addr() {
		t.Fatalf("%+v", servers)
	}
	if lanes := servers[0].Lanes; len(lanes) != 2 || lanes[0].Purpose != "checks" || lanes[1].Purpose != "charges" ||
		lanes[1].Breaker != "closed" || lanes[1].Latency <= 0 || lanes[1].Pool.Connections < 1 || lanes[1].Pool.Hits+lanes[1].Pool.Misses < 1 {
		t.Errorf("lanes of the primary: %+v", lanes)
	}
	must(t, sh.Replicas[1].Kill())
	eventually(t, "the replica is left out", func() error {
		store.Answers(t.Context(), s.Check, oneOf("k"))
		if got := s.Shards()[0].Servers[2]; got.State != store.ServerLeftOut || got.Lanes[0].Breaker == "closed" {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	if got := s.Shards()[0].Servers[1]; got.State != store.ServerUp {
		t.Errorf("the other replica: %+v", got)
	}
}

// TestPreviousShardIsRetired if it is no longer a member.
func TestPreviousShardIsRetired(t *testing.T) {
	r := newResharding(t)
	shards := r.store(r.members[:2], r.members).Shards()
	for i, want := range []string{"a false", "b false", "c true"} {
		if got := fmt.Sprint(shards[i].Name, " ", shards[i].Retired); got != want {
			t.Errorf("shard %d is %s, want %s", i, got, want)
		}
	}
}

// TestObserverReceivesEveryCommand with the role of its server.
func TestObserverReceivesEveryCommand(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	shard := shardOf(t, sh)
	var mu sync.Mutex
	observed := map[string]int{}
	observe := func(role store.Role, op algorithm.Operation, took time.Duration, err error) {
		mu.Lock()
		defer mu.Unlock()
		if took <= 0 || took > waitTimeout || err != nil {
			t.Errorf("%s %s took %s, error %v", role, op, took, err)
		}
		observed[fmt.Sprint(role, " ", op)]++
	}
	s := newStore(t, shard, func(o *Options) { o.Members[0].Observe = observe })
	other := newStore(t, shard, nil)
	ctx := t.Context()
	must(t, store.Answers(ctx, other.Take, oneOf("k"))[0].Err)
	must(t, store.Answers(ctx, s.Take, oneOf("k"))[0].Err)
	must(t, store.Answers(ctx, s.Charge, append(oneOf("k"), oneOf("l")...))[0].Err)
	must(t, sh.WaitReplicated(ctx))
	must(t, store.Answers(ctx, s.Check, oneOf("k"))[0].Err)
	must(t, store.Answers(ctx, s.Peek, oneOf("k"))[0].Err)
	must(t, store.Answers(ctx, s.Refund, oneOf("k"))[0].Err)
	answered := make(chan store.State)
	s.ChargeReported(storetest.Posts(oneOf("k")), func(_ int, st store.State) { answered <- st })
	must(t, (<-answered).Err)
	s.RefundReported(storetest.Posts(oneOf("k")), nil)
	eventually(t, "every command is observed", func() error {
		mu.Lock()
		defer mu.Unlock()
		want := map[string]int{"primary take": 1, "primary charge": 3, "replica check": 1, "replica peek": 1, "primary refund": 2}
		if fmt.Sprint(observed) != fmt.Sprint(want) {
			return fmt.Errorf("observed %v, want %v", observed, want)
		}
		return nil
	})
	// A call that is not made is not observed.
	must(t, sh.Primary.Kill())
	_ = store.Answers(ctx, s.Charge, nil)
}

// inspected returns an inspection that no server was late for, while none is down.
func inspected(t *testing.T, s *Store, r store.Request) (found store.Inspection) {
	t.Helper()
	eventually(t, "all servers answer an inspection in time", func() error {
		found = s.Inspect(t.Context(), r)
		copies := found.Copies
		for _, before := range found.Previous {
			copies = slices.Concat(copies, before.Copies)
		}
		for _, c := range copies {
			if kind := store.KindOf(c.State.Err); kind == store.KindTimeout || kind == store.KindBreaker {
				return c.State.Err
			}
		}
		return nil
	})
	return found
}

// resets resets a bucket, again while a server is late for it.
func resets(t *testing.T, s *Store, r store.Request) {
	t.Helper()
	eventually(t, "the bucket is reset in time", func() error { return s.Reset(t.Context(), r) })
}

// TestInspectionHasEveryServersCopy: a lagging replica has a different one.
func TestInspectionHasEveryServersCopy(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	must(t, sh.Replicas[0].PauseReplication())
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	r := oneOf("k")[0]
	r.Cost = 0
	found := inspected(t, s, r)
	if found.Shard != "a" || found.Previous != nil || len(found.Copies) != 2 {
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
		t.Errorf("the copy of a killed server: %+v", got)
	}
}

// TestResetReachesEveryCopy: at the owner and its replica, at the previous owner, and
// under the algorithms of other configurations.
func TestResetReachesEveryCopy(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	client := moving(before, after, 1)[0]
	request := func(limit store.Limit) []store.Request {
		limit.Zone, limit.Window = "reset", endless
		return []store.Request{{Limit: &limit, ClientKey: client, Events: 10, Cost: 1, ID: fmt.Sprint("id", time.Now().UnixNano())}}
	}
	buckets := func() (n int) {
		for _, server := range r.servers {
			found, err := server.Client().Keys(t.Context(), before.asker.Keys.Prefix+":"+ask.LayoutVersion+":*").Result()
			must(t, err)
			n += len(found)
		}
		return n
	}
	for _, limit := range storetest.Limits {
		must(t, store.Answers(t.Context(), before.Charge, request(limit))[0].Err)
		must(t, store.Answers(t.Context(), after.Charge, request(limit))[0].Err)
	}
	if n := buckets(); n != 2*len(storetest.Limits) {
		t.Fatalf("%d buckets", n)
	}
	// The other limits are those of the same zone in other configurations.
	reset := request(storetest.Limits[0])[0]
	found := inspected(t, after, reset)
	if len(found.Previous) != 1 || found.Previous[0].Shard == found.Shard || !found.Previous[0].Copies[0].Exists || !found.Copies[0].Exists {
		t.Errorf("found %+v", found)
	}
	resets(t, after, reset)
	if n := buckets(); n != 0 {
		t.Errorf("%d buckets are left", n)
	}
}

// TestResetOfAShardThatIsAway is an error.
func TestResetOfAShardThatIsAway(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), DialTimeout: 100 * time.Millisecond}), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, server.Kill())
	for range 2 {
		if err := s.Reset(t.Context(), oneOf("k")[0]); err == nil || errors.Is(err, store.ErrUncertain) {
			t.Errorf("the reset of a dead server's bucket got %v, want an error that is certain", err)
		}
	}
}

// TestResetInACluster reaches the bucket on any node.
func TestResetInACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 1, redistest.NodeTimeout(waitTimeout))
	s := newStore(t, newShard(t, ShardOptions{Cluster: cluster.Addrs()}), nil)
	for i := range 8 {
		client := fmt.Sprint("client-", i)
		must(t, store.Answers(t.Context(), s.Charge, oneOf(client))[0].Err)
		r := oneOf(client)[0]
		r.Cost = 0
		if found := inspected(t, s, r); len(found.Copies) != 2 || !found.Copies[0].Exists {
			t.Errorf("%s: %+v", client, found)
		}
		resets(t, s, r)
		if found := inspected(t, s, r); found.Copies[0].Exists || found.Copies[0].State.Err != nil {
			t.Errorf("%s after its reset: %+v", client, found)
		}
	}
}
