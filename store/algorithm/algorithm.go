// Package algorithm has the arithmetic of the rate limiting algorithms: pure
// functions of a bucket's content and an instant, without I/O or a clock. The
// memory store runs it, and tests hold the Lua scripts to it.
//
// A [Bucket] is the content of one bucket, an [Operation] what a store does to
// it, and [Known] a copy of a remote bucket. [Traits] are what sets algorithms apart
// for all others.
package algorithm

import (
	"math/bits"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Bucket is the content of a bucket: what was spent, and when. The zero value of
// each implementation is an empty bucket.
//
// The instant now may go backwards by up to [Grace], and a bucket never gives more for it.
type Bucket interface {
	// Believe forgets what cannot be true at now: see [Believes]. [Operation.Run] begins
	// with it.
	Believe(r *store.Request, now int64)
	// Open opens a window, so that the state has a reset.
	Open(r *store.Request, now int64)
	// Charge spends the cost.
	Charge(r *store.Request, now int64)
	// Take spends the cost if it fits, and reports whether it did.
	Take(r *store.Request, now int64) bool
	// Refund gives the cost back.
	Refund(r *store.Request, now int64)
	// Penalize refuses requests until r.Until, unless the bucket is penalized.
	Penalize(r *store.Request, now int64)
	// View returns the state of r; spent reports whether its cost was spent
	// just now.
	View(r *store.Request, now int64, spent bool) store.State
	// Expiry is the instant from which the bucket may be forgotten.
	Expiry(limit *store.Limit) int64
	// Share is how much of a capacity is used at now: less is lost with a bucket of which
	// less is. It is at least 1 for a bucket that is full or penalized, or has leases.
	Share(limit *store.Limit, capacity, now int64) float64
}

// New returns an empty bucket of the limit.
func New(limit *store.Limit) Bucket { return Of(limit.Algorithm).empty() }

// add returns a + b for numbers that are not negative, or
// [store.MaxInteger] if that is less.
func add(a, b int64) int64 { return a + min(b, store.MaxInteger-a) }

func shareOf(used, capacity int64) float64 { return float64(used) / float64(max(capacity, 1)) }

// penalty is the part of a bucket that keeps it refused.
type penalty struct {
	// Penalty is the instant until which the bucket is refused, or 0.
	Penalty int64
}

func (p *penalty) isPenalized(now int64) bool { return p.Penalty > now }

// raise makes a share that of a full bucket under a penalty.
func (p *penalty) raise(share float64, now int64) float64 {
	if p.isPenalized(now) {
		return max(share, 1)
	}
	return share
}

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

// apply makes the state of a request that has spent nothing show the penalty.
func (p *penalty) apply(s *store.State) {
	if !p.isPenalized(s.Now) {
		return
	}
	s.Allowed, s.Remaining, s.Penalty = false, 0, p.Penalty
	s.Reset = max(s.Reset, p.Penalty)
	s.RetryAfter = max(s.RetryAfter, micros(p.Penalty-s.Now))
}

// noPenalty is the part of a bucket without penalties.
type noPenalty struct{}

// Penalize implements [Bucket].
func (noPenalty) Penalize(*store.Request, int64) {}

// noWindow is the part of a bucket without a window to open.
type noWindow struct{}

// Open implements [Bucket].
func (noWindow) Open(*store.Request, int64) {}

// Operation is what a store does to a bucket.
type Operation uint8

// The operations.
const (
	Check Operation = iota
	Charge
	Take
	Refund
	Penalize
	// Peek is Check without opening a window.
	Peek
)

// String returns the operation's name.
func (op Operation) String() string {
	return [...]string{"check", "charge", "take", "refund", "penalize", "peek"}[op]
}

// Run runs the operation on b, and returns the state of r.
func (op Operation) Run(b Bucket, r *store.Request, now int64) store.State {
	spent := false
	b.Believe(r, now)
	switch op {
	case Check:
		b.Open(r, now)
	case Charge:
		b.Charge(r, now)
		spent = true
	case Take:
		spent = b.Take(r, now)
	case Refund:
		b.Refund(r, now)
	case Penalize:
		b.Penalize(r, now)
	case Peek:
	}
	st := b.View(r, now, spent)
	if op != Take {
		// Nobody gives back what was charged.
		st.Receipt = store.Receipt{}
	}
	return st
}

// fitsIn reports whether a request fits in a bucket in which used counts. One that costs
// nothing does, however much that is.
func fitsIn(r *store.Request, used int64) bool {
	return r.Cost == 0 || used+r.Need() <= r.Capacity()
}

// newState is the state of a request to a bucket in which used counts at now,
// without resets and the time to wait. spent reports whether used includes the
// cost of r.
func newState(r *store.Request, now, used int64, spent bool) store.State {
	capacity := r.Capacity()
	needed := used
	if !spent {
		needed += r.Need()
	}
	return store.State{
		Allowed:   r.Cost == 0 || needed <= capacity,
		Limit:     max(capacity, 0),
		Used:      used,
		Remaining: max(capacity-used, 0),
		Now:       now,
	}
}

// wait sets the RetryAfter of a refused request that fits at the instant at.
func wait(s *store.State, r *store.Request, at int64, spent bool) {
	switch {
	case s.Allowed:
	case !spent && r.Cost > r.Capacity():
		s.RetryAfter = store.Never
	default:
		s.RetryAfter = micros(max(at-s.Now, 0))
	}
}

// othersTurn is the length of the whole windows that the requests ahead of r fill,
// after the window in which used was spent.
func othersTurn(r *store.Request, used int64, spent bool) int64 {
	capacity := r.Capacity()
	if spent || r.Ahead == 0 || capacity < 1 {
		return 0
	}
	window := r.Limit.Window.Microseconds()
	windows := max(r.Need()-max(capacity-used, 0)-1, 0) / capacity
	return min(windows, store.MaxInteger/window) * window
}

// endOf is when a charge stops counting that arrives at now, and would be over after span if it had
// just settled.
func endOf(r *store.Request, now, span int64) int64 {
	end := now + span
	switch {
	case r.Ends > 0:
		end = min(end, r.Ends)
	case r.Ends < 0:
		end = min(end, now-r.Ends)
	}
	return end
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// mulDiv returns a*b/c rounded down, and the rest in units of 1/c. It saturates at
// [store.MaxInteger] with no rest.
func mulDiv(a, b, c int64) (quotient, rest int64) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return store.MaxInteger, 0
	}
	q, r := bits.Div64(hi, lo, uint64(c))
	if q > store.MaxInteger {
		return store.MaxInteger, 0
	}
	return int64(q), int64(r)
}
