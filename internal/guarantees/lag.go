package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// lagKey holds the instant at which it was written last.
const lagKey = "guarantees:lag"

// lagWatch measures how far a replica is behind.
type lagWatch struct {
	most    atomic.Int64
	stop    context.CancelFunc
	running sync.WaitGroup
}

const (
	// writePace is how often something is written, readPace how often it is looked
	// for.
	writePace = 20 * time.Millisecond
	readPace  = 4 * time.Millisecond
)

// watchLag writes instants to the primary, and looks when each is first seen at
// the replica: that is the lag, and at most the pace of reading beyond it.
func watchLag(shard *redistest.Shard) *lagWatch {
	ctx, stop := context.WithCancel(context.Background())
	w := &lagWatch{stop: stop}
	began := time.Now().UnixMicro()
	w.running.Go(func() {
		for ctx.Err() == nil {
			shard.Primary.Client().Set(ctx, lagKey, time.Now().UnixMicro(), 0)
			time.Sleep(writePace)
		}
	})
	w.running.Go(func() {
		for last := began; ctx.Err() == nil; time.Sleep(readPace) {
			if n, err := shard.Replicas[0].Client().Get(ctx, lagKey).Int64(); err == nil && n > last {
				last = n
				w.most.Store(max(w.most.Load(), time.Now().UnixMicro()-n))
			}
		}
	})
	return w
}

// end returns the longest lag.
func (w *lagWatch) end() time.Duration {
	w.stop()
	w.running.Wait()
	return time.Duration(w.most.Load()) * time.Microsecond
}

// setLag delays a shard's replication, and waits until the replica lags by that
// and no longer by more.
func setLag(ctx context.Context, shard *redistest.Shard, lag time.Duration) error {
	if err := shard.Replicas[0].DelayReplication(lag); err != nil {
		return err
	}
	written := time.Now()
	if err := shard.Primary.Client().Set(ctx, lagKey, written.UnixMicro(), 0).Err(); err != nil {
		return fmt.Errorf("write to the primary: %w", err)
	}
	if err := shard.WaitReplicated(ctx); err != nil {
		return err
	}
	if took := time.Since(written); took < lag {
		return errors.Join(errLag, fmt.Errorf("a replica that should lag by %v lags by %v", lag, took))
	}
	// What is on its way with the old delay may come before that.
	time.Sleep(lag)
	return nil
}

var errLag = errors.New("the replication is not delayed")
