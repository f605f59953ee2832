package ask

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestCommandsNeedNoLane: whoever has a command run has the state that the algorithm has.
func TestCommandsNeedNoLane(t *testing.T) {
	server := redistest.Start(t)
	shard := wire.NewShard(wire.Options{Primary: server.Addr(), DialTimeout: redistest.WaitTimeout}, nil)
	redistest.CloseAtEnd(t, shard)
	shard.Warm(t.Context(), Scripts())
	run := func(cmd *wire.Command) {
		t.Helper()
		pipe := server.Client().Pipeline()
		cmd.AddTo(t.Context(), pipe)
		_, err := pipe.Exec(t.Context())
		redistest.Must(t, err)
		cmd.SetOutcome(nil)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for n, limit := range storetest.Limits {
		limit.Zone = fmt.Sprint("offline", n)
		bucket := algorithm.New(&limit)
		now := time.Now().UnixMicro()
		until, want := int64(0), store.State{}
		for i := range 200 {
			now += rng.Int64N(limit.Window.Microseconds() / 4)
			r := store.Request{Limit: &limit, ClientKey: "k", Events: 10, Cost: 1 + rng.Int64N(3), ID: fmt.Sprint(i), Until: until}
			what := []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take, algorithm.Peek}[rng.IntN(4)]
			op := Op{Operation: what, Role: store.RolePrimary, Now: now, ReadOnly: what == algorithm.Peek}
			if what == algorithm.Charge {
				op.Latest = now
			}
			cmd := op.Command(Keys{Prefix: "rl"}, &r, nil)
			run(cmd)
			got, _ := op.Outcome(cmd, &r)
			if want = what.Run(bucket, &r, now); got != want {
				t.Fatalf("%v %v, step %d, %v: %+v, want %+v", limit.Algorithm, limit.Align, i, what, got, want)
			}
			// Checks do not store an aligned window.
			if until = 0; want.Used > 0 {
				until = want.Reset
			}
		}
	}
}
