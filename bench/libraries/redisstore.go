package libraries

import (
	"context"
	"fmt"
	"time"

	"github.com/gomodule/redigo/redis"
	golimiter "github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-redisstore"
)

// openRedisstore brings a pool that keeps its connections and lets goroutines
// wait for one. The pool that go-redisstore makes itself closes a connection
// after each use, and fails where more than a hundred are in use.
func openRedisstore(addr string, size int) (*limiter, error) {
	pool := &redis.Pool{
		MaxIdle:   size,
		MaxActive: size,
		Wait:      true,
		Dial:      func() (redis.Conn, error) { return redis.Dial("tcp", addr) },
	}
	return &limiter{
		limit: func(events int) (decide, error) {
			store, err := redisstore.NewWithPool(&redisstore.Config{Tokens: uint64(events), Interval: time.Hour}, pool)
			if err != nil {
				return nil, fmt.Errorf("open the store of go-redisstore: %w", err)
			}
			return decideGoLimiter(store), nil
		},
		close: func() { _ = pool.Close() },
	}, nil
}

func decideGoLimiter(store golimiter.Store) decide {
	return func(ctx context.Context, key string) (bool, error) {
		_, _, _, ok, err := store.Take(ctx, key)
		return ok, err
	}
}
