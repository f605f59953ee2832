package stores

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// Pool keeps across configs what outlives them. Each kind of value has a type of
// keys of its own.
var Pool = caddy.NewUsagePool()

// exitPatience is how long the process waits at its end for charges to be
// delivered; flushPatience is how long connections that no config uses any
// more do, in the background.
const (
	exitTimeout  = 5 * time.Second
	flushTimeout = time.Minute
)

// closer has charges to deliver when it is closed.
type closer interface {
	// Close delivers what waits, until ctx ends.
	Close(ctx context.Context)
}

// lostAtExit counts charges that failed while the process ended.
var lostAtExit atomic.Int64

// NoteLost notes that charges failed, for the log of a process that ends.
func NoteLost(charges int64) {
	if caddy.Exiting() {
		lostAtExit.Add(charges)
	}
}

// Flush delivers, in the background, what waits for c, and closes it.
func Flush(c closer) { flushes.begin(c) }

// End flushes what is in the pool, when the process ends.
func End(logger *zap.Logger) { flushes.end(logger) }

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

// begin delivers, in the background, what is waiting for c, and closes it.
func (f *flushSet) begin(c closer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		f.run(c)
	}
}

func (f *flushSet) run(c closer) {
	f.running.Go(func() {
		ctx, cancel := context.WithTimeout(f.life, flushTimeout)
		defer cancel()
		c.Close(ctx)
	})
}

// settle runs deliver in the background, before the shards are flushed.
func (f *flushSet) settle(deliver func(ctx context.Context)) {
	run := func() {
		ctx, cancel := context.WithTimeout(f.life, flushTimeout)
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

// end flushes all that is in the pool, whoever still uses them, waits for that and for what
// was begun before, and logs how many charges could not be delivered.
func (f *flushSet) end(logger *zap.Logger) {
	f.mu.Lock()
	f.ending = true
	f.mu.Unlock()
	time.AfterFunc(exitTimeout, f.stop)
	f.ledgers.Wait()
	endLedgers(f.life)
	f.mu.Lock()
	Pool.Range(func(_, pooled any) bool {
		if c, ok := pooled.(closer); ok {
			f.run(c)
		}
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
	case <-time.After(exitTimeout + time.Second):
	}
	if n := lostAtExit.Load(); n > 0 {
		logger.Error("charges were lost at exit", zap.Int64("charges", n))
	}
}
