package redis

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestLogsOfAnyCost compares long logs of low and high costs, of which many expire at
// once, with the arithmetic in Go.
func TestLogsOfAnyCost(t *testing.T) {
	clock := storetest.NewClock(time.Now())
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), func(o *Options) { o.clock = clock.Now })
	limit := &store.Limit{Zone: "long", Algorithm: store.SlidingLog, Window: time.Minute}
	rng := rand.New(rand.NewPCG(1, 2))
	b := algorithm.New(limit)
	for i := range sweep.Size(750, 3_000) {
		op := []algorithm.Operation{algorithm.Charge, algorithm.Charge, algorithm.Take, algorithm.Check}[rng.IntN(4)]
		r := store.Request{Limit: limit, ClientKey: "k", ID: fmt.Sprint(i), Events: 1 + rng.Int64N(store.MaxMembers), Cost: rng.Int64N(20)}
		if rng.IntN(50) == 0 {
			r.Cost = rng.Int64N(store.MaxMembers)
		}
		run := map[algorithm.Operation]func() []store.State{
			algorithm.Charge: func() []store.State { return store.Answers(t.Context(), s.Charge, []store.Request{r}) },
			algorithm.Take:   func() []store.State { return store.Answers(t.Context(), s.Take, []store.Request{r}) },
			algorithm.Check:  func() []store.State { return store.Answers(t.Context(), s.Check, []store.Request{r}) },
		}[op]
		want, got := op.Run(b, &r, clock.Now().UnixMicro()), run()[0]
		if got != want {
			t.Fatalf("%s %d, %+v:\n got %+v\nwant %+v", op, i, r, got, want)
		}
		switch rng.IntN(250) {
		case 0:
			clock.Advance(59 * time.Second)
		default:
			clock.Advance(time.Duration(rng.IntN(6000)) * time.Microsecond)
		}
	}
}

// TestExpiredMembersGoInParts: a call removes a thousand members at most, and counts none
// of the others.
func TestExpiredMembersGoInParts(t *testing.T) {
	clock := storetest.NewClock(time.Now())
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.clock = clock.Now })
	for _, a := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		limit := &store.Limit{Zone: "expired", Algorithm: a, Window: time.Minute}
		request := func(id int) store.Request {
			return store.Request{Limit: limit, ClientKey: "k", ID: fmt.Sprint(id), Events: 10_000, Cost: 3}
		}
		for i := range 1500 {
			must(t, store.Answers(t.Context(), s.Charge, []store.Request{request(i)})[0].Err)
		}
		clock.Advance(2 * time.Minute)
		for i, left := range []int64{2002, 1004, 6, 8} {
			if st := store.Answers(t.Context(), s.Take, []store.Request{request(2000 + i)})[0]; st.Err != nil || !st.Allowed || st.Used != int64(3*(i+1)) {
				t.Errorf("%s: take %d: %+v", a, i, st)
			}
			n, err := server.Client().ZCard(t.Context(), s.asker.Keys.Key(limit, "k")).Result()
			must(t, err)
			if n != left {
				t.Errorf("%s: %d members after take %d, want %d", a, n, i, left)
			}
		}
	}
}

// TestMembersOfTheFutureGo with the next write, by a clock that was set back: later they would count.
func TestMembersOfTheFutureGo(t *testing.T) {
	clock := storetest.NewClock(time.Now())
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.clock = clock.Now })
	for _, a := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		limit := &store.Limit{Zone: "future", Algorithm: a, Window: time.Minute}
		for i, by := range []time.Duration{time.Hour, -time.Hour} {
			clock.Advance(by)
			r := store.Request{Limit: limit, ClientKey: "k", ID: fmt.Sprint(i), Events: 10, Cost: 1}
			must(t, store.Answers(t.Context(), s.Take, []store.Request{r})[0].Err)
		}
		if n := server.Client().ZCard(t.Context(), s.asker.Keys.Key(limit, "k")).Val(); n != 1 {
			t.Errorf("%s: there are %d members", a, n)
		}
	}
}

// TestRefundedLogExpires: a part of the only request is given back, which leaves the rest,
// and the bucket expires as it did before.
func TestRefundedLogExpires(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for _, a := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		limit := &store.Limit{Zone: "refunded", Algorithm: a, Window: time.Hour}
		for cost := int64(2); cost <= 10; cost++ {
			for back := int64(1); back <= cost; back++ {
				r := store.Request{Limit: limit, ClientKey: fmt.Sprint(cost, back), ID: "id", Events: 10, Cost: cost}
				must(t, store.Answers(t.Context(), s.Take, []store.Request{r})[0].Err)
				r.Cost = back
				used(t, fmt.Sprintf("%s: %d of %d refunded", a, back, cost), store.Answers(t.Context(), s.Refund, []store.Request{r})[0], cost-back)
				ttl, err := server.Client().PTTL(t.Context(), s.asker.Keys.Key(limit, r.ClientKey)).Result()
				must(t, err)
				// Nothing is left to expire if all is given back.
				if left := ttl > 0; left != (back < cost) || left && (ttl < limit.Window-waitTimeout || ttl > limit.Window+algorithm.Grace+2*time.Second) {
					t.Errorf("%s: %d of %d refunded, and the bucket expires in %v", a, back, cost, ttl)
				}
			}
		}
	}
}
