package redis

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestManyRefundsInOneBusyTime: the sums of a bucket that is never empty stay
// readable, whatever is refunded in it.
func TestManyRefundsInOneBusyTime(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	limit := &store.Limit{Zone: "busy", Algorithm: store.GCRA, Window: 720 * time.Hour}
	must(t, s.Charge(t.Context(), []store.Request{{Limit: limit, ClientKey: "k", Events: 100, Cost: 1}})[0].Err)
	reqs := []store.Request{{Limit: limit, ClientKey: "k", Events: 100, Burst: 100_000, Cost: 90_000}}
	for range 20 {
		st := s.Take(t.Context(), reqs)[0]
		must(t, st.Err)
		reqs[0].Receipt = st.Receipt
		must(t, s.Refund(t.Context(), reqs)[0].Err)
	}
	if st := s.Check(t.Context(), reqs)[0]; st.Err != nil || st.Used != 1 {
		t.Errorf("after all refunds: %+v", st)
	}
}
