package redis

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestContextBoundsCallsWithoutPipelining: of a server that does not answer.
func TestContextBoundsCallsWithoutPipelining(t *testing.T) {
	proxy := redistest.StartProxy(t, redistest.Start(t).Addr())
	s := newStore(t, newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: true, PoolSize: 1}), func(o *Options) { o.CheckTimeout = time.Hour })
	waitUntilUp(t, s)
	must(t, s.Check(t.Context(), ask("k"))[0].Err)
	must(t, proxy.SwallowReplies())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	soon(t, "a check whose context ends", func() {
		if err := s.Check(ctx, ask("k"))[0].Err; err == nil {
			t.Error("a check without a reply has no error")
		}
	})
	cancel()
	if err := s.Take(ctx, ask("k"))[0].Err; !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("a take of a context that has ended has error %v", err)
	}
	// The connection is occupied until check_timeout is over.
	must(t, proxy.Cut())
}

// TestChecksAtReplicasWakeNoWorker: without pipelining their callers make them too,
// although a replica has only half of the time.
func TestChecksAtReplicasWakeNoWorker(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	shard := newShard(t, ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}, NoPipelining: true})
	s := newStore(t, shard, nil)
	must(t, s.Charge(t.Context(), ask("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	// What would be left to a worker fails.
	shard.owner(0).replicas[0].queue.close()
	if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil || !st.Replica {
		t.Errorf("check: %+v, want the replica's answer", st)
	}
}
