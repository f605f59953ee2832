package ask

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// TestCommandsNeedNoLane: whoever has the words of a command run, and gives it the replies,
// has the state that the algorithm has.
func TestCommandsNeedNoLane(t *testing.T) {
	client := redistest.Start(t).Client()
	run := func(cmd *wire.Command) {
		t.Helper()
		var replies []any
		for _, words := range cmd.Words() {
			if cmd.IsScript() {
				words[0], words[1] = "eval", cmd.Source()
			}
			reply, err := client.Do(t.Context(), words...).Result()
			redistest.Must(t, err)
			replies = append(replies, reply)
		}
		cmd.Answer(replies...)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for n, limit := range storetest.Limits {
		limit.Zone = fmt.Sprint("offline", n)
		bucket := algorithm.New(&limit)
		now := time.Now().UnixMicro()
		until := int64(0)
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
			got, want := op.State(cmd, &r), what.Run(bucket, &r, now)
			if got != want {
				t.Fatalf("%v %v, step %d, %v: %+v, want %+v", limit.Algorithm, limit.Align, i, what, got, want)
			}
			// Checks do not store an aligned window.
			if until = 0; want.Used > 0 {
				until = want.Reset
			}
		}
	}
}
