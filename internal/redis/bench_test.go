package redis

import (
	"context"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func benchRequests(keys int) [][]store.Request {
	reqs := make([][]store.Request, keys)
	for i := range reqs {
		reqs[i] = []store.Request{{Limit: hourly, ClientKey: "client-" + strconv.Itoa(i), Events: 1 << 40, Cost: 1}}
	}
	return reqs
}

// BenchmarkStore measures the decisions of many callers; server-µs/op is the CPU
// time of the primary and the replica.
func BenchmarkStore(b *testing.B) {
	sh := redistest.StartShard(b, 1)
	s := newStore(b, shardOf(b, sh), nil)
	plain := newStore(b, newShard(b, ShardOptions{
		Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}, NoPipelining: true,
	}), nil)
	reqs := benchRequests(500)
	for _, r := range reqs {
		if st := store.Answers(b.Context(), s.Charge, r)[0]; st.Err != nil {
			b.Fatal(st.Err)
		}
	}
	for _, c := range []struct {
		name string
		do   func(r []store.Request) []store.State
	}{
		{"Check", func(r []store.Request) []store.State { return store.Answers(context.Background(), s.Check, r) }},
		{"CheckPlain", func(r []store.Request) []store.State { return store.Answers(context.Background(), plain.Check, r) }},
		{"Take", func(r []store.Request) []store.State { return store.Answers(context.Background(), s.Take, r) }},
		{"Charge", func(r []store.Request) []store.State { return store.Answers(context.Background(), s.Charge, r) }},
		{"CheckAndChargeDetached", func(r []store.Request) []store.State {
			states := store.Answers(context.Background(), s.Check, r)
			s.ChargeReported(storetest.Posts(r), nil)
			return states
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(32)
			before := serverCPU(b, sh)
			var n atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if st := c.do(reqs[n.Add(1)%int64(len(reqs))])[0]; st.Err != nil {
						b.Error(st.Err)
						return
					}
				}
			})
			b.StopTimer()
			b.ReportMetric(float64((serverCPU(b, sh)-before).Nanoseconds())/1e3/float64(b.N), "server-µs/op")
		})
	}
}

func serverCPU(b *testing.B, sh *redistest.Shard) (sum time.Duration) {
	b.Helper()
	for _, server := range append(sh.Replicas, sh.Primary) {
		d, err := server.CPU()
		must(b, err)
		sum += d
	}
	return sum
}

func BenchmarkBucketKey(b *testing.B) {
	b.ReportAllocs()
	keys := ask.Keys{Prefix: "rl"}
	for b.Loop() {
		keys.Key(hourly, "x7Q:client-0001")
	}
}

func BenchmarkOwner(b *testing.B) {
	r := newRendezvous(membersOf(names(8)))
	for b.Loop() {
		r.owner("x7Q:client-0001")
	}
}

// BenchmarkMoment measures how long other callers can see a take that is refunded at
// once because another zone refuses the request. It measures from before the take
// until after the refund's arrival, which is an upper bound.
func BenchmarkMoment(b *testing.B) {
	server := redistest.Start(b)
	s := newStore(b, newShard(b, ShardOptions{Primary: server.Addr()}), nil)
	s.Warm(b.Context())
	r := oneOf("shared")
	key := s.asker.Keys.Key(hourly, "shared")
	var moments []time.Duration
	for b.Loop() {
		begin := time.Now()
		st := store.Answers(b.Context(), s.Take, r)[0]
		if st.Err != nil || st.Used != 1 {
			b.Fatalf("take: %+v", st)
		}
		refunded := slices.Clone(r)
		refunded[0].Receipt = st.Receipt
		s.RefundReported(storetest.Posts(refunded), nil)
		for {
			n, err := server.Client().HGet(b.Context(), key, "c").Int64()
			must(b, err)
			if n == 0 {
				break
			}
		}
		moments = append(moments, time.Since(begin))
	}
	slices.Sort(moments)
	b.ReportMetric(float64(moments[len(moments)/2].Microseconds()), "µs/median")
	b.ReportMetric(float64(moments[len(moments)*99/100].Microseconds()), "µs/p99")
}
