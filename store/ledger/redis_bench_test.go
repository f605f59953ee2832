package ledger_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// BenchmarkRedis is a request that is checked and charged, by 64 callers on 500
// clients, with the ledger and without; cpu-µs/op is this process's time.
func BenchmarkRedis(b *testing.B) {
	sh := redistest.StartShard(b, 1)
	shard := redis.NewShard(redis.ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}})
	b.Cleanup(func() { shard.Close(context.Background()) })
	s := redis.New(redis.Options{Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: 5 * time.Second, ChargeTimeout: 5 * time.Second})
	l := ledger.New(ledger.NewBooks(nil), s, ledger.Options{})
	b.Cleanup(l.Leave)
	limit := store.Limit{Zone: "bench", Algorithm: store.FixedWindow, Window: time.Hour}
	reqs := make([][]store.Request, 500)
	for i := range reqs {
		reqs[i] = []store.Request{{Limit: &limit, ClientKey: "client-" + strconv.Itoa(i), Events: 1 << 40, Cost: 1}}
	}
	for _, c := range []struct {
		name string
		do   func(r []store.Request) store.State
	}{
		{"store alone", func(r []store.Request) store.State {
			st := s.Check(context.Background(), r)[0]
			s.ChargeDetached(r)
			return st
		}},
		{"ledger", func(r []store.Request) store.State {
			var states [1]store.State
			l.Admit(context.Background(), r, states[:])
			l.Settle(r, nil)
			return states[0]
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(32)
			before := cpu()
			var n atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if st := c.do(reqs[n.Add(1)%int64(len(reqs))]); st.Err != nil {
						b.Error(st.Err)
						return
					}
				}
			})
			b.ReportMetric(float64((cpu()-before).Nanoseconds())/1e3/float64(b.N), "cpu-µs/op")
		})
	}
}

// cpu is the processor time that this process has used.
func cpu() time.Duration {
	used, _ := process.CPUTime()
	return used
}
