package shardlimit_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// directShard is a shard at addr, without Caddy.
func directShard(t *testing.T, addr string, plain bool) *redis.Shard {
	t.Helper()
	shard := redis.NewShard(redis.ShardOptions{Primary: addr, DialTimeout: caddytest.WaitLimit, NoPipelining: plain, PoolSize: 1})
	t.Cleanup(func() { shard.Close(t.Context()) })
	return shard
}

// directStore is a store of one shard that waits so long for a reply.
func directStore(shard *redis.Shard, timeout time.Duration, undelivered func(op algorithm.Operation, err error)) *redis.Store {
	return redis.New(redis.Options{
		Members:      []redis.Member{{Name: "a", Shard: shard}},
		CheckTimeout: timeout, ChargeTimeout: timeout,
		OnUndelivered: func(_ string, op algorithm.Operation, err error) {
			if undelivered != nil {
				undelivered(op, err)
			}
		},
	})
}

// TestLostRepliesOfTakesAndRefunds: neither is sent again when its reply does not
// arrive, and both are told to be uncertain.
func TestLostRepliesOfTakesAndRefunds(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprint("plain ", plain), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			proxy := redistest.StartProxy(t, server.Addr())
			told := make(chan error, len(counting))
			shard := directShard(t, proxy.Addr(), plain)
			patient := directStore(shard, caddytest.WaitLimit, nil)
			s := directStore(shard, 300*time.Millisecond, func(op algorithm.Operation, err error) {
				told <- errors.Join(want("operation", op, algorithm.Refund), uncertain(err))
			})
			// reachable waits until both ways to the server are open.
			reachable := func() {
				other := requests("other", 0)
				eventually(t, "the server is reached", func() error {
					return errors.Join(patient.Check(t.Context(), other)[0].Err, patient.Charge(t.Context(), other)[0].Err)
				})
			}
			direct := directStore(directShard(t, server.Addr(), plain), caddytest.WaitLimit, nil)
			used := func(what string, n int64) {
				t.Helper()
				for i, st := range direct.Check(t.Context(), requests("k", 0)) {
					must(t, what+", "+counting[i], errors.Join(st.Err, want("used", st.Used, n)))
				}
			}
			reachable()
			var taken []store.Request
			for id := range 3 {
				taken = requests("k", id)
				for i, st := range patient.Take(t.Context(), taken) {
					must(t, "take", st.Err)
					taken[i].Receipt = st.Receipt
				}
			}

			must(t, "swallow replies", proxy.SwallowReplies())
			for i, st := range s.Take(t.Context(), requests("k", 3)) {
				must(t, "take, "+counting[i], uncertain(st.Err))
			}
			must(t, "pass", proxy.Pass())
			reachable()
			used("after the take", 4)

			must(t, "swallow replies", proxy.SwallowReplies())
			s.RefundDetached(taken)
			for range counting {
				must(t, "refund", <-told)
			}
			must(t, "pass", proxy.Pass())
			reachable()
			used("after the refund", 3)
		})
	}
}

// requests are one for each algorithm that counts, under an ID.
func requests(clientKey string, id int) []store.Request {
	var reqs []store.Request
	for _, name := range counting {
		limit := &store.Limit{Zone: "lost", Algorithm: store.Algorithm(name), Window: 10000 * time.Hour}
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: clientKey, Events: 10, Cost: 1, ID: fmt.Sprintf("%011d", id)})
	}
	return reqs
}

func uncertain(err error) error {
	return want("outcome being unknown", errors.Is(err, store.ErrUncertain), true)
}
