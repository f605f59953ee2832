package ledger_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// TestChargesThatNoTryHelpsAreReported, once for each request, and not sent again:
// where some right is missing, and where the key holds something else.
func TestChargesThatNoTryHelpsAreReported(t *testing.T) {
	const key, requests = "rl:1:z:fw3600s:alice", 3
	r := store.Request{Limit: &store.Limit{Zone: "z", Algorithm: store.FixedWindow, Window: time.Hour}, ClientKey: "alice", Events: 10, Cost: 1}
	for name, c := range map[string]struct{ refuse, mend []any }{
		"pexpire":      {[]any{"ACL", "SETUSER", "limiter", "-pexpire"}, []any{"ACL", "SETUSER", "limiter", "+pexpire"}},
		"hset":         {[]any{"ACL", "SETUSER", "limiter", "-hset"}, []any{"ACL", "SETUSER", "limiter", "+hset"}},
		"evalsha":      {[]any{"ACL", "SETUSER", "limiter", "-evalsha"}, []any{"ACL", "SETUSER", "limiter", "+evalsha"}},
		"foreign data": {[]any{"SET", key, "foreign"}, []any{"DEL", key}},
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			do := func(args ...any) {
				t.Helper()
				if err := server.Client().Do(t.Context(), args...).Err(); err != nil {
					t.Fatal(err)
				}
			}
			do("ACL", "SETUSER", "limiter", "reset", "on", ">secret", "~*", "+@all")
			shard := redis.NewShard(redis.ShardOptions{
				Primary: server.Addr(), DialTimeout: time.Minute,
				Credentials: func(context.Context) (string, string, error) { return "limiter", "secret", nil },
			})
			defer shard.Close(context.Background())
			var lost atomic.Int64
			l := ledger.New(ledger.NewBooks(nil), redis.New(redis.Options{Members: []redis.Member{{Name: "a", Shard: shard}}}), ledger.Options{
				OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) {
					if !errors.Is(err, store.ErrFinal) {
						t.Errorf("%d were lost: %v, want an error that no try helps", n, err)
					}
					lost.Add(n)
				},
			})
			defer l.Leave()
			do(c.refuse...)
			for range requests {
				l.ChargeDetached([]store.Request{r})
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for l.Owes() && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			if l.Owes() || lost.Load() != requests {
				t.Errorf("%d of %d are reported; some wait still: %t", lost.Load(), requests, l.Owes())
			}
			do(c.mend...)
			l.ChargeDetached([]store.Request{r})
			for l.Owes() && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			if n, err := server.Client().HGet(t.Context(), key, "c").Int(); n != 1 || err != nil {
				t.Errorf("%d are counted, error %v, want the one after the mending", n, err)
			}
			if ttl := server.Client().PTTL(t.Context(), key).Val(); ttl <= 0 {
				t.Errorf("the bucket expires in %v", ttl)
			}
		})
	}
}
