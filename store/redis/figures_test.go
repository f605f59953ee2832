package redis

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestShardsAreToldOf: roles, what is left out and what lags, and connections.
func TestShardsAreToldOf(t *testing.T) { bothWays(t, requireShardsToBeToldOf) }

func requireShardsToBeToldOf(t *testing.T, plain bool) {
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
	must(t, s.Charge(t.Context(), ask("k"))[0].Err)
	eventually(t, "all are up", func() error {
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
		s.Check(t.Context(), ask("k"))
		if got := s.Shards()[0].Servers[2]; got.State != store.ServerLeftOut || got.Lanes[0].Breaker == "closed" {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	if got := s.Shards()[0].Servers[1]; got.State != store.ServerUp {
		t.Errorf("the other one: %+v", got)
	}
}

// TestFormerShardIsRetired if it owns nothing any more.
func TestFormerShardIsRetired(t *testing.T) {
	r := newResharding(t)
	shards := r.store(r.members[:2], r.members).Shards()
	for i, want := range []string{"a false", "b false", "c true"} {
		if got := fmt.Sprint(shards[i].Name, " ", shards[i].Retired); got != want {
			t.Errorf("shard %d is %s, want %s", i, got, want)
		}
	}
}

// TestObserverIsToldOfEveryCommand, with who ran it.
func TestObserverIsToldOfEveryCommand(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	shard := shardOf(t, sh)
	var mu sync.Mutex
	told := map[string]int{}
	observe := func(role store.Role, op algorithm.Operation, took time.Duration, err error) {
		mu.Lock()
		defer mu.Unlock()
		if took <= 0 || took > patience || err != nil {
			t.Errorf("%s %s took %s, error %v", role, op, took, err)
		}
		told[fmt.Sprint(role, " ", op)]++
	}
	s := newStore(t, shard, func(o *Options) { o.Members[0].Observe = observe })
	other := newStore(t, shard, nil)
	ctx := t.Context()
	must(t, other.Take(ctx, ask("k"))[0].Err)
	must(t, s.Take(ctx, ask("k"))[0].Err)
	must(t, s.Charge(ctx, append(ask("k"), ask("l")...))[0].Err)
	must(t, sh.WaitReplicated(ctx))
	must(t, s.Check(ctx, ask("k"))[0].Err)
	must(t, s.Peek(ctx, ask("k"))[0].Err)
	must(t, s.Refund(ctx, ask("k"))[0].Err)
	answered := make(chan store.State)
	s.ChargeReported(ask("k"), func(_ int, st store.State) { answered <- st })
	must(t, (<-answered).Err)
	s.RefundDetached(ask("k"))
	eventually(t, "everything is told", func() error {
		mu.Lock()
		defer mu.Unlock()
		want := map[string]int{"primary take": 1, "primary charge": 3, "replica check": 1, "replica peek": 1, "primary refund": 2}
		if fmt.Sprint(told) != fmt.Sprint(want) {
			return fmt.Errorf("told %v, want %v", told, want)
		}
		return nil
	})
	// What is not made takes no time.
	must(t, sh.Primary.Kill())
	_ = s.Charge(ctx, nil)
}

// TestObserverAllocatesNothing.
func TestObserverAllocatesNothing(t *testing.T) {
	var total time.Duration
	o := Observer(func(_ store.Role, _ algorithm.Operation, took time.Duration, _ error) { total += took })
	c := newCall(time.Now())
	op := operation{Operation: algorithm.Check}
	c.cmds = append(c.cmds, op.command(bucketKeys{}, &ask("k")[0], new(scriptCommand)))
	if n := testing.AllocsPerRun(100, func() { o.tellAll(store.RolePrimary, algorithm.Check, c) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
