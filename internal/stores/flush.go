package stores

import (
	"context"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
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

// NoteLost notes that an operation for some requests under a limit, at a shard of a store, has failed with err, for
// [Opened.Lost] and for the log of a process that ends.
func NoteLost(name, shard string, limit *store.Limit, op algorithm.Operation, requests int64, err error) {
	outcome := telemetry.OutcomeLabel(err)
	if outcome == telemetry.OutcomeLost {
		failureOf{name, shard, true}.note(time.Now(), err)
	}
	if caddy.Exiting() {
		atExit.note(loss{name, limit.Zone, lossOf(limit, op, err)}, requests, outcome == telemetry.OutcomeUncertain)
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

// Ending begins the end of the process, and returns what bounds it. Refunds that shards do not execute are repeated
// until then.
func Ending() context.Context {
	flushes.mu.Lock()
	defer flushes.mu.Unlock()
	if !flushes.ending {
		flushes.ending = true
		time.AfterFunc(exitTimeout, endFlushLife)
		for _, pooled := range inPool[pooledLedger]() {
			pooled.registry.RepeatRefunds(flushLife)
		}
	}
	return flushLife
}

// End delivers the charges and refunds waiting in ledgers at the end of the process, flushes the
// pool, and closes the stores of modules, even if they are in use. It waits for that and for
// earlier flushes, and logs the losses.
func End(logger *zap.Logger) {
	Ending()
	flushes.ledgers.Wait()
	inUse.Range(func(open, _ any) bool {
		flushes.ledgers.Go(func() { open.(*Opened).presence.withdraw(flushLife) })
		return true
	})
	// Requests of older configs still use these.
	for _, pooled := range inPool[pooledLedger]() {
		flushes.ledgers.Go(func() { pooled.registry.End(flushLife) })
	}
	flushes.ledgers.Wait()
	flushes.mu.Lock()
	for _, c := range inPool[closer]() {
		flushes.shards.Go(bounded(c.Close))
	}
	flushes.ended = true
	flushes.mu.Unlock()
	inUse.Range(func(open, _ any) bool {
		flushes.shards.Go(open.(*Opened).closeModule)
		return true
	})

	done := make(chan struct{})
	go func() {
		flushes.shards.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(exitTimeout + time.Second):
	}
	atExit.log(logger)
}
