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
	s := newStore(t, newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: true, PoolSize: 1}), nil)
	waitUntilUp(t, s)
	must(t, s.Check(t.Context(), ask("k"))[0].Err)
	must(t, proxy.SwallowReplies())
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Check(ctx, ask("k"))[0].Err; err == nil {
		t.Error("a check without a reply has no error")
	}
	if took := time.Since(began); took > patience/2 {
		t.Errorf("it took %v, and check_timeout is %v", took, patience)
	}
	cancel()
	if err := s.Take(ctx, ask("k"))[0].Err; !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("a take of a context that has ended has error %v", err)
	}
	// The connection is occupied until check_timeout is over.
	must(t, proxy.Cut())
}
