// Package algorithm is the arithmetic of the rate limiting algorithms: pure
// functions of a bucket's content and an instant, without I/O or a clock. The
// memory store runs it, and the Lua scripts are held to it by tests.
package algorithm

import (
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Bucket is the content of a bucket: what was spent, and when. The zero value
// of each implementation is a bucket in which nothing ever was.
//
// The instant now never has to move forward: a bucket makes the best of one
// that is before what it has seen, and never gives more for it.
type Bucket interface {
	// Open makes sure that there is a reset to tell.
	Open(r *store.Request, now int64)
	// Charge spends the cost.
	Charge(r *store.Request, now int64)
	// Take spends the cost if it fits, and tells whether it did.
	Take(r *store.Request, now int64) bool
	// Refund gives the cost back.
	Refund(r *store.Request, now int64)
	// Penalize keeps the bucket refused until r.Until, unless it is already.
	Penalize(r *store.Request, now int64)
	// View is what the bucket looks like to r; spent tells whether the
	// cost of r was spent just now, or is yet to be.
	View(r *store.Request, now int64, spent bool) store.State
	// Expiry is the instant from which on a bucket of the limit says nothing
	// any more: it may be forgotten.
	Expiry(limit *store.Limit) int64
	// Weight is how many events the bucket holds, at most: the less it is, the
	// less is lost with the bucket.
	Weight(limit *store.Limit) int64
}

// New returns an empty bucket of the limit.
func New(limit *store.Limit) Bucket {
	switch limit.Algorithm {
	case store.SlidingWindow:
		return new(SlidingWindow)
	case store.SlidingLog:
		return new(SlidingLog)
	case store.GCRA:
		return new(GCRA)
	case store.Concurrency:
		return new(Concurrency)
	default:
		return new(FixedWindow)
	}
}

// add returns a + b for numbers that are not negative, or
// [store.MaxInteger] if that is less.
func add(a, b int64) int64 { return a + min(b, store.MaxInteger-a) }

// penalty is the part of a bucket that keeps it refused.
type penalty struct {
	// Penalty is the instant until which the bucket is refused, or 0.
	Penalty int64
}

func (p *penalty) isPenalized(now int64) bool { return p.Penalty > now }

// live is the penalty's end, or 0 if it is over.
func (p *penalty) live(now int64) int64 {
	if p.isPenalized(now) {
		return p.Penalty
	}
	return 0
}

// Penalize implements [Bucket].
func (p *penalty) Penalize(r *store.Request, now int64) {
	if !p.isPenalized(now) {
		p.Penalty = r.Until
	}
}

// apply makes a state that was not asked to spend show the penalty.
func (p *penalty) apply(s *store.State) {
	if !p.isPenalized(s.Now) {
		return
	}
	s.Allowed, s.Remaining, s.Penalty = false, 0, p.Penalty
	s.Reset = max(s.Reset, p.Penalty)
	s.RetryAfter = max(s.RetryAfter, micros(p.Penalty-s.Now))
}

// noPenalty is the part of a bucket that knows none.
type noPenalty struct{}

// Penalize implements [Bucket].
func (noPenalty) Penalize(*store.Request, int64) {}

// noWindow is the part of a bucket that has no window to open.
type noWindow struct{}

// Open implements [Bucket].
func (noWindow) Open(*store.Request, int64) {}
