package stores

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// Pool keeps what outlives configs, and counts references: LoadOrNew and
// LoadOrStore add one, Delete takes one away, and the Delete of the last one
// removes the value and calls its Destruct. Each kind of value has a type of keys
// of its own.
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

// lostAtExit counts charges that failed while the process ended.
var lostAtExit atomic.Int64

// NoteLost counts charges that failed, for the log of a process that ends.
func NoteLost(charges int64) {
	if caddy.Exiting() {
		lostAtExit.Add(charges)
	}
}

// Flush delivers, in the background, what waits for c, and closes it.
func Flush(c closer) { flushes.begin(c) }

// End delivers, at the end of the process, what waits in ledgers and flushes
// what is in the pool, even if it is in use. It waits for that and for earlier
// flushes, and logs how many charges were lost.
func End(logger *zap.Logger) { flushes.end(logger) }

var flushes = newFlushSet()

// flushSet are the flushes that run.
type flushSet struct {
	// ledgers counts the deliveries of ledgers, shards the closings of shards. A
	// ledger delivers through shards, so end waits for ledgers first.
	ledgers, shards sync.WaitGroup
	// life ends when the process no longer waits for flushes.
	life context.Context
	stop context.CancelFunc

	mu sync.Mutex
	// ending is set at the end of the process, and ended once the last flushes
	// have begun.
	ending, ended bool
}

func newFlushSet() *flushSet {
	f := new(flushSet)
	f.life, f.stop = context.WithCancel(context.Background())
	return f
}

func (f *flushSet) begin(c closer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		f.shards.Go(f.bounded(c.Close))
	}
}

// deliver runs a ledger's delivery, before shards are flushed: in the background
// unless the process ends.
func (f *flushSet) deliver(run func(ctx context.Context)) {
	f.mu.Lock()
	ending := f.ending
	if !ending {
		f.ledgers.Go(f.bounded(run))
	}
	f.mu.Unlock()
	if ending {
		f.bounded(run)()
	}
}

func (f *flushSet) bounded(run func(ctx context.Context)) func() {
	return func() {
		ctx, cancel := context.WithTimeout(f.life, flushTimeout)
		defer cancel()
		run(ctx)
	}
}

func (f *flushSet) end(logger *zap.Logger) {
	f.mu.Lock()
	f.ending = true
	f.mu.Unlock()
	time.AfterFunc(exitTimeout, f.stop)
	f.ledgers.Wait()
	// Requests of older configs still use these.
	for _, pooled := range inPool[pooledLedger]() {
		pooled.books.End(f.life)
	}
	f.mu.Lock()
	for _, c := range inPool[closer]() {
		f.shards.Go(f.bounded(c.Close))
	}
	f.ended = true
	f.mu.Unlock()

	done := make(chan struct{})
	go func() {
		f.shards.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(exitTimeout + time.Second):
	}
	if n := lostAtExit.Load(); n > 0 {
		logger.Error("charges were lost at exit", zap.Int64("charges", n))
	}
}
