package main

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// The delays, in microseconds like all instants here.
const (
	second = int64(time.Second / time.Microsecond)
	// travel is what a message needs between a Caddy and a server of Redis.
	travel = 500
	// linger is how long charges and refunds wait for others on their lane.
	linger = 2_000
	// serving is how long an admitted request runs.
	serving = 2_000
	// lag is how far replicas are behind.
	lag = 1_000
	// trust is the ledger's.
	trust = int64(ledger.DefaultTrust / time.Microsecond)
	// idleBatch is how long a batch may lie unused, reapPause how often such
	// ones are looked for; autoStart and shortPart are the parts of the limit and
	// of the window, inverted, that batches begin with and pause for.
	idleBatch = second
	reapPause = second / 4
	autoStart = 1000
	shortPart = 10
	// batchShare is how many percent of the limit batches hold at most.
	batchShare = 10
)

// route is which Caddy a request comes to.
type route uint8

const (
	// sticky: always the same for one client.
	sticky route = iota
	// anyCaddy: a random one.
	anyCaddy
	// inTurn: one after the other.
	inTurn
)

// setting is a zone with a fixed window, and the Caddys that it runs in.
type setting struct {
	name      string
	processes int
	route     route
	// before is set for charge before, and batch is what may be taken at once:
	// 0, a number, or [store.BatchAuto].
	before bool
	batch  int64
	limit  int64
	window int64
	align  bool
}

// open returns the window that begins at an instant.
func (s *setting) open(now int64) window {
	if s.align {
		return window{reset: now - now%s.window + s.window}
	}
	return window{reset: now + s.window}
}

// sharers is by how many processes batches divide the limit.
func (s *setting) sharers() int64 {
	if s.batch == store.BatchAuto {
		return int64(s.processes)
	}
	return 1
}

// ration is how large the next batch is, if the last one taught that.
func (s *setting) ration(size int64) int64 {
	if s.batch != store.BatchAuto {
		return min(s.batch, s.limit)
	}
	if size == 0 {
		size = s.limit / autoStart
	}
	return min(max(size, 1), max(s.limit*batchShare/100/s.sharers(), 1), s.limit)
}

// window is what a bucket of a fixed window holds.
type window struct{ used, reset int64 }

func (w window) isOpen(now int64) bool { return w.reset > now }

// spent is what counts at an instant.
func (w window) spent(now int64) int64 {
	if w.isOpen(now) {
		return w.used
	}
	return 0
}

// raise takes the later of two windows, and the higher count of one. It tells
// whether the other says less.
func (w *window) raise(o window) (less bool) {
	if o.reset > w.reset || o.reset == w.reset && o.used > w.used {
		*w = o
		return false
	}
	return o != *w
}
