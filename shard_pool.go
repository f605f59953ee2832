package shardlimit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// exitPatience is how long the process waits at its end for charges to be
// delivered; flushPatience is how long connections that no config uses any
// more do, in the background.
const (
	exitPatience  = 5 * time.Second
	flushPatience = time.Minute
)

var (
	// shardPool keeps connections across configs, by how they are made.
	shardPool = caddy.NewUsagePool()
	// flushes are the connections that are being closed.
	flushes sync.WaitGroup
	// lostAtExit counts charges that failed while the process ended.
	lostAtExit atomic.Int64
)

// pooledShard is a shard in shardPool.
type pooledShard struct{ *redis.Shard }

// Destruct implements [caddy.Destructor]: it delivers what is waiting, then
// closes the connections.
func (s pooledShard) Destruct() error {
	patience := flushPatience
	if caddy.Exiting() {
		patience = exitPatience
	}
	flushes.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		s.Close(ctx)
	})
	return nil
}

// acquireShard returns the shard that is reached by opts, and its key in the
// pool. The key holds no secret.
func acquireShard(opts redis.ShardOptions) (shard *redis.Shard, key string, err error) {
	text, err := json.Marshal(opts)
	if err != nil {
		return nil, "", fmt.Errorf("encode connection settings: %w", err)
	}
	sum := sha256.Sum256(text)
	key = hex.EncodeToString(sum[:])
	pooled, _, err := shardPool.LoadOrNew(key, func() (caddy.Destructor, error) {
		return pooledShard{redis.NewShard(opts)}, nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("connect: %w", err)
	}
	return pooled.(pooledShard).Shard, key, nil
}

func releaseShard(key string) {
	_, _ = shardPool.Delete(key) //nolint:errcheck // Destruct does not fail
}

// awaitFlushes waits, when the process ends, for all charges to be delivered
// and logs how many were not.
func awaitFlushes(logger *zap.Logger) {
	done := make(chan struct{})
	go func() {
		flushes.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(exitPatience + time.Second):
	}
	if n := lostAtExit.Load(); n > 0 {
		logger.Error("charges were lost at exit", zap.Int64("charges", n))
	}
}

var _ caddy.Destructor = pooledShard{}
