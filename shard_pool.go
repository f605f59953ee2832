package shardlimit

import (
	"context"
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

// shardPool keeps connections across configs, by how they are made.
var shardPool = caddy.NewUsagePool()

// lostAtExit counts charges that failed while the process ended.
var lostAtExit atomic.Int64

// flushes are the connections that are being closed.
var flushes = newFlushSet()

type flushSet struct {
	running sync.WaitGroup
	// ledgers deliver through shards what waits in them.
	ledgers sync.WaitGroup
	// life ends when the process no longer waits for flushes.
	life context.Context
	stop context.CancelFunc

	mu sync.Mutex
	// ending is set at the end of the process, ended when the last have begun.
	ending, ended bool
}

func newFlushSet() *flushSet {
	f := new(flushSet)
	f.life, f.stop = context.WithCancel(context.Background())
	return f
}

// begin delivers, in the background, what is waiting for s, and closes it.
func (f *flushSet) begin(s pooledShard) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		f.run(s)
	}
}

func (f *flushSet) run(s pooledShard) {
	f.running.Go(func() {
		ctx, cancel := context.WithTimeout(f.life, flushPatience)
		defer cancel()
		s.Close(ctx)
	})
}

// settle runs deliver in the background, before the shards are flushed.
func (f *flushSet) settle(deliver func(ctx context.Context)) {
	run := func() {
		ctx, cancel := context.WithTimeout(f.life, flushPatience)
		defer cancel()
		deliver(ctx)
	}
	f.mu.Lock()
	if !f.ending {
		f.ledgers.Go(run)
		run = nil
	}
	f.mu.Unlock()
	if run != nil {
		run()
	}
}

// end flushes all shards, whoever still uses them, waits for that and for what
// was begun before, and logs how many charges could not be delivered.
func (f *flushSet) end(logger *zap.Logger) {
	f.mu.Lock()
	f.ending = true
	f.mu.Unlock()
	time.AfterFunc(exitPatience, f.stop)
	f.ledgers.Wait()
	endLedgers(f.life)
	f.mu.Lock()
	shardPool.Range(func(_, shard any) bool {
		f.run(shard.(pooledShard))
		return true
	})
	f.ended = true
	f.mu.Unlock()

	done := make(chan struct{})
	go func() {
		f.running.Wait()
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

// pooledShard is a shard in shardPool, and the certificate that its connections
// show, or nil.
type pooledShard struct {
	*redis.Shard
	certificate *clientCertificate
}

// Destruct implements [caddy.Destructor]: it delivers what is waiting, then
// closes the connections.
func (s pooledShard) Destruct() error {
	flushes.begin(s)
	return nil
}

// acquireShard returns the shard that is reached as said, and its key in the
// pool. Shards that are reached in the same way share their connections.
func acquireShard(r reach) (shard pooledShard, key string, err error) {
	if key, err = r.key(); err != nil {
		return pooledShard{}, "", err
	}
	pooled, _, err := shardPool.LoadOrNew(key, func() (caddy.Destructor, error) {
		return pooledShard{redis.NewShard(r.options()), r.certificate()}, nil
	})
	if err != nil {
		return pooledShard{}, "", fmt.Errorf("connect: %w", err)
	}
	return pooled.(pooledShard), key, nil
}

func releaseShards(keys []string) {
	for _, key := range keys {
		_, _ = shardPool.Delete(key)
	}
}

var _ caddy.Destructor = pooledShard{}
