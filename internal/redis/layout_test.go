package redis

import (
	"context"
	"fmt"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// intruders put foreign data under a bucket's key.
var intruders = map[string]func(ctx context.Context, c *goredis.Client, key string) error{
	"text": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.Set(ctx, key, "hello", 0).Err()
	},
	"long text": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.Set(ctx, key, fmt.Sprintf("%0100d", 7), 0).Err()
	},
	"empty text": func(ctx context.Context, c *goredis.Client, key string) error { return c.Set(ctx, key, "", 0).Err() },
	"number":     func(ctx context.Context, c *goredis.Client, key string) error { return c.Set(ctx, key, 42, 0).Err() },
	"list": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.RPush(ctx, key, "a", "b").Err()
	},
	"set": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.SAdd(ctx, key, "a", "b").Err()
	},
	"hash": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.HSet(ctx, key, "name", "value").Err()
	},
	"our fields": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.HSet(ctx, key, "c", "many", "r", "soon").Err()
	},
	"stream": func(ctx context.Context, c *goredis.Client, key string) error {
		return c.XAdd(ctx, &goredis.XAddArgs{Stream: key, Values: []string{"a", "b"}}).Err()
	},
}

// TestForeignDataIsAnErrorAndStays under every operation, and fails no other bucket
// of the round trip.
func TestForeignDataIsAnErrorAndStays(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	client := server.Client()
	for name, put := range intruders {
		for n, limit := range storetest.Limits {
			limit.Zone = fmt.Sprint("foreign", n)
			key := ask.Keys{Prefix: DefaultKeyPrefix}.Key(&limit, name)
			must(t, put(t.Context(), client, key))
			before, err := client.Dump(t.Context(), key).Result()
			must(t, err)
			request := func() []store.Request {
				return []store.Request{
					{Limit: &limit, ClientKey: name, Events: 10, Cost: 1, ID: "id", Until: 1 << 50},
					{Limit: hourly, ClientKey: "other", Events: 1 << 40, Cost: 1, ID: "id", Until: 1 << 50},
				}
			}
			for op, run := range map[string]func(context.Context, []*store.Ask){
				"check": s.Check, "charge": s.Charge, "take": s.Take, "refund": s.Refund, "penalize": s.Penalize,
			} {
				what := fmt.Sprintf("%s of %s under %s %v", op, name, limit.Algorithm, limit.Align)
				states := store.Answers(t.Context(), run, request())
				// These do not read the bucket.
				idle := op == "refund" || op == "penalize" && (limit.Algorithm == store.Concurrency || limit.Algorithm == store.SlidingLog)
				if states[0].Err == nil && !idle {
					t.Errorf("%s has no error: %+v", what, states[0])
				}
				if states[1].Err != nil && op != "penalize" {
					t.Errorf("%s fails the other bucket: %v", what, states[1].Err)
				}
				if after, err := client.Dump(t.Context(), key).Result(); err != nil || after != before {
					t.Errorf("%s has changed the data, %v", what, err)
				}
				if ttl := client.PTTL(t.Context(), key).Val(); ttl >= 0 {
					t.Errorf("%s makes the data expire in %v", what, ttl)
				}
			}
			must(t, client.Del(t.Context(), key).Err())
		}
	}
}
