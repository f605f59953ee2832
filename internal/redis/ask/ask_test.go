package ask

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestObserverAllocatesNothing(t *testing.T) {
	var total time.Duration
	o := Observer(func(_ store.Role, _ algorithm.Operation, took time.Duration, _ error) { total += took })
	c := wire.NewCall(time.Now(), 0)
	op := Op{Operation: algorithm.Check}
	r := store.Request{Limit: hourly, ClientKey: "k", Events: 10, Cost: 1}
	c.Cmds = append(c.Cmds, op.Command(Keys{}, &r, nil))
	if n := testing.AllocsPerRun(100, func() { o.observeAll(op, c) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
