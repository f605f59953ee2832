package redis

import (
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// BenchmarkMoment measures for how long a take that is refunded right away,
// because another zone refuses the request, can be seen by others: from before
// the take is sent until the refund is seen to have arrived, so at most.
func BenchmarkMoment(b *testing.B) {
	server := redistest.Start(b)
	s := newStore(b, newShard(b, ShardOptions{Primary: server.Addr()}), nil)
	s.Warm(b.Context())
	r := ask("shared")
	key := s.keys.key(hourly, "shared")
	var moments []time.Duration
	for b.Loop() {
		begin := time.Now()
		st := s.Take(b.Context(), r)[0]
		if st.Err != nil || st.Used != 1 {
			b.Fatalf("take: %+v", st)
		}
		refunded := slices.Clone(r)
		refunded[0].Receipt = st.Receipt
		s.RefundDetached(refunded)
		for {
			n, err := server.Client().HGet(b.Context(), key, "c").Int64()
			if err != nil {
				b.Fatal(err)
			}
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
