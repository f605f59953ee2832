package redis

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// FuzzReply decodes any reply to an error or to a state that makes sense.
func FuzzReply(f *testing.F) {
	f.Add(replyBytes(100, 1, 3, 200, 0), int64(100), "3")
	f.Add(replyBytes(0, 0, -1, 200, 100), int64(100), "")
	f.Add(replyBytes(1, 100, 1000, 1, 2, 1000, 5, 0), int64(0), "x")
	f.Add(replyBytes(1<<60, 1, 1<<60, 7, 0, 0), int64(100), "\x00\x00\x00\x00\x00\x00\xf0\x3f")
	f.Add([]byte{}, int64(0), "9007199254740993")
	f.Fuzz(func(t *testing.T, data []byte, now int64, text string) {
		var reply []int64
		for ; len(data) >= 8; data = data[8:] {
			reply = append(reply, int64(binary.BigEndian.Uint64(data)))
		}
		for _, limit := range storetest.Limits {
			l := layoutOf(limit.Algorithm)
			r := &store.Request{Limit: &limit, Events: 10, Cost: 3, ID: "id"}
			for op := algorithm.Check; op <= algorithm.Penalize; op++ {
				makesSense(t, operation{Operation: op}.reply(l, r, reply, now))
			}
			if l.isSet {
				continue
			}
			for _, texts := range [][]string{{text}, {text, text, text}, {text[:len(text)/2], text[len(text)/2:], ""}} {
				if numbers, err := l.numbers(texts); err == nil {
					makesSense(t, l.state(r, now, false, numbers))
				}
			}
		}
	})
}

func makesSense(t *testing.T, st store.State) {
	t.Helper()
	if st.Err == nil && (st.Used < 0 || st.Remaining < 0 || st.Remaining > 10 || st.RetryAfter < 0 ||
		st.Reset < 0 || !st.Allowed && st.Penalty == 0 && st.Remaining > 3) {
		t.Fatalf("a reply is decoded as %+v", st)
	}
}

func replyBytes(values ...int64) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint64(b, uint64(v)) //nolint:gosec // the bits matter
	}
	return b
}

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
			key := bucketKeys{prefix: DefaultKeyPrefix}.key(&limit, name)
			must(t, put(t.Context(), client, key))
			before, err := client.Dump(t.Context(), key).Result()
			must(t, err)
			request := func() []store.Request {
				return []store.Request{
					{Limit: &limit, ClientKey: name, Events: 10, Cost: 1, ID: "id", Until: 1 << 50},
					{Limit: hourly, ClientKey: "other", Events: 1 << 40, Cost: 1, ID: "id", Until: 1 << 50},
				}
			}
			for op, ask := range map[string]func(context.Context, []store.Request, []store.State){
				"check": s.Check, "charge": s.Charge, "take": s.Take, "refund": s.Refund, "penalize": s.Penalize,
			} {
				what := fmt.Sprintf("%s of %s under %s %v", op, name, limit.Algorithm, limit.Align)
				states := store.Answers(t.Context(), ask, request())
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

// TestEveryAlgorithmHasALayout of its own, with which keys begin, and a script.
func TestEveryAlgorithmHasALayout(t *testing.T) {
	codes := map[string]store.Algorithm{}
	for a := range store.Algorithms {
		l := layoutOf(a)
		if l.code == "" || l.script == nil || l.arguments == nil || l.count == 0 {
			t.Errorf("%s has the layout %+v", a, l)
			continue
		}
		if other, is := codes[l.code]; is {
			t.Errorf("%s and %s have keys with %s", a, other, l.code)
		}
		codes[l.code] = a
	}
}
