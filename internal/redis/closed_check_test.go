//go:build check

package redis

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestClosedShardLeavesNothingBehind, for every kind, used or not, up or down.
func TestClosedShardLeavesNothingBehind(t *testing.T) {
	single := redistest.StartShard(t, 1)
	_, sentinels := sentinelShard(t, 1)
	nodes := redistest.StartCluster(t, 3, 0, redistest.NodeTimeout(waitTimeout))
	gone := redistest.Start(t)
	must(t, gone.Kill())
	silent := redistest.Start(t)
	must(t, silent.Pause())
	t.Cleanup(func() { must(t, silent.Resume()) })
	for name, opts := range map[string]ShardOptions{
		"static":       {Primary: single.Primary.Addr(), Replicas: []string{single.Replicas[0].Addr()}},
		"plain":        {Primary: single.Primary.Addr(), NoPipelining: true},
		"sentinel":     sentinelOptions(sentinels),
		"cluster":      {Cluster: nodes.Addrs()},
		"gone":         {Primary: gone.Addr()},
		"silent":       {Primary: silent.Addr(), Replicas: []string{gone.Addr()}},
		"no sentinel":  {Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{gone.Addr(), silent.Addr()}}},
		"lost cluster": {Cluster: []string{gone.Addr(), silent.Addr()}},
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			for _, used := range []bool{false, true} {
				shard := NewShard(opts)
				s := New(Options{Members: []Member{{Name: "a", Shard: shard}}, CheckTimeout: 300 * time.Millisecond, ChargeTimeout: 300 * time.Millisecond})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				if used {
					s.Warm(ctx)
					store.Answers(t.Context(), s.Check, oneOf("k"))
					s.ChargeReported(storetest.Posts(oneOf("k")), nil)
				}
				shard.Close(ctx)
				cancel()
			}
			// go-redis checks once a second whether it may still dial.
			eventually(t, "no goroutine is left", func() error { return goleak.Find(before) })
		})
	}
}
