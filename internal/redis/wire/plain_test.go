package wire_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestChargesHearTheTime each second from a script: a plain one does not say that the server's clock was set, and its
// window is over.
func TestChargesHearTheTime(t *testing.T) {
	server := redistest.Start(t)
	shard := wire.NewShard(wire.Options{Primary: server.Addr(), DialTimeout: redistest.WaitTimeout}, nil)
	redistest.CloseAtEnd(t, shard)
	asker := &ask.Asker{Keys: ask.Keys{Prefix: "rl"}, CheckTimeout: redistest.WaitTimeout, ChargeTimeout: redistest.WaitTimeout}
	until := time.Now().Add(time.Hour).UnixMicro()
	r := store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Hour}, ClientKey: "k", Events: 10, Cost: 1, Until: until}
	redistest.Must(t, server.Client().HSet(t.Context(), asker.Keys.Key(r.Limit, "k"), "c", 0, "r", until).Err())
	scripts := func() int64 {
		calls, err := server.Calls()
		redistest.Must(t, err)
		return calls["evalsha"]
	}
	for n, age := range []time.Duration{wire.ClockPeriod + time.Millisecond, 0} {
		at, now := *shard.Owner(0), time.Now()
		at.Clock = wire.NewClock(now.Add(-time.Hour), time.Now)
		at.Clock.Observe(now.Add(-age), now.Add(-age))
		before, done := scripts(), make(chan store.State, 1)
		asker.Post(algorithm.Charge, &at, ask.Group{Reqs: []*store.Request{new(r)}}, func(_ int, st store.State) { done <- st })
		if st := <-done; st.Err != nil || st.Used != int64(n+1) {
			t.Errorf("a charge: %+v", st)
		}
		isLate := time.Since(now) >= wire.ClockPeriod
		if isPlain := scripts() == before; isPlain != (age == 0) && !isLate {
			t.Errorf("%v after a reply with the time, a charge is plain: %t", age, isPlain)
		}
	}
}
