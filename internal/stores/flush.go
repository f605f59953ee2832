package stores

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// Pool keeps what outlives configs, and counts references: LoadOrNew and
// LoadOrStore add one, Delete takes one away, and the Delete of the last one
// removes the value and calls its Destruct, if it has one. Each kind of value has a
// type of keys of its own.
var Pool = caddy.NewUsagePool()

// inPool returns the values of one type in the pool.
func inPool[T any]() (values []T) {
	Pool.Range(func(_, pooled any) bool {
		if value, ok := pooled.(T); ok {
			values = append(values, value)
		}
		return true
	})
	return values
}

const (
	// exitTimeout bounds the delivery of charges at the end of the process.
	exitTimeout = 5 * time.Second
	// flushTimeout bounds it, in the background, for what no config uses any more.
	flushTimeout = time.Minute
)

// closer has charges to deliver when it is closed.
type closer interface {
	// Close delivers what waits, until ctx ends.
	Close(ctx context.Context)
}

// failedAtExit counts the charges that failed while the process ended, and uncertainAtExit those of them that
// the store may have counted.
var failedAtExit, uncertainAtExit atomic.Int64

// NoteLost notes that charges or refunds to a shard of a store have failed with err, for [Opened.Lost], and
// counts them for the log of a process that ends.
func NoteLost(store, shard string, charges int64, err error) {
	outcome := telemetry.OutcomeLabel(err)
	if outcome == telemetry.OutcomeLost {
		failureOf{store, shard, true}.note(time.Now(), err)
	}
	if caddy.Exiting() {
		failedAtExit.Add(charges)
		if outcome == telemetry.OutcomeUncertain {
			uncertainAtExit.Add(charges)
		}
	}
}

// flushes are the deliveries and closings that run.
var flushes struct {
	// ledgers counts the deliveries of ledgers, shards the closings of shards. A
	// ledger delivers through shards, so End waits for ledgers first.
	ledgers, shards sync.WaitGroup

	mu sync.Mutex
	// ending is set at the end of the process, and ended once the last flushes
	// have begun.
	ending, ended bool
}

// flushLife ends when the process no longer waits for flushes.
var flushLife, endFlushLife = context.WithCancel(context.Background())

// Flush delivers, in the background, what waits for c, and closes it.
func Flush(c closer) {
	flushes.mu.Lock()
	defer flushes.mu.Unlock()
	if !flushes.ended {
		flushes.shards.Go(bounded(c.Close))
	}
}

// deliver runs a ledger's delivery, before shards are flushed: in the background
// unless the process ends.
func deliver(run func(ctx context.Context)) {
	flushes.mu.Lock()
	ending := flushes.ending
	if !ending {
		flushes.ledgers.Go(bounded(run))
	}
	flushes.mu.Unlock()
	if ending {
		bounded(run)()
	}
}

func bounded(run func(ctx context.Context)) func() {
	return func() {
		ctx, cancel := context.WithTimeout(flushLife, flushTimeout)
		defer cancel()
		run(ctx)
	}
}

// End delivers, at the end of the process, what waits in ledgers and flushes
// what is in the pool, even if it is in use. It waits for that and for earlier
// flushes, and logs how many charges were lost, and of how many the outcome is uncertain.
func End(logger *zap.Logger) {
	flushes.mu.Lock()
	flushes.ending = true
	flushes.mu.Unlock()
	time.AfterFunc(exitTimeout, endFlushLife)
	flushes.ledgers.Wait()
	// Requests of older configs still use these.
	for _, pooled := range inPool[pooledLedger]() {
		pooled.registry.End(flushLife)
	}
	flushes.mu.Lock()
	for _, c := range inPool[closer]() {
		flushes.shards.Go(bounded(c.Close))
	}
	flushes.ended = true
	flushes.mu.Unlock()

	done := make(chan struct{})
	go func() {
		flushes.shards.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(exitTimeout + time.Second):
	}
	if n := failedAtExit.Load(); n > 0 {
		logger.Error("charges were lost at exit", zap.Int64("charges", n), zap.Int64("uncertain", uncertainAtExit.Load()))
	}
}
