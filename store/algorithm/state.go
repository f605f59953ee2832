package algorithm

import (
	"math/bits"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// newState is the state of a bucket of which used counts at now, apart from
// what it depends on beyond that: resets and, if it is not allowed, how long
// to wait. spent tells whether the cost of r is part of used.
func newState(r *store.Request, now, used int64, spent bool) store.State {
	capacity := r.Capacity()
	needed := used
	if !spent {
		needed += r.Need()
	}
	return store.State{
		Allowed:   needed <= capacity,
		Limit:     max(capacity, 0),
		Used:      used,
		Remaining: max(capacity-used, 0),
		Now:       now,
	}
}

// wait sets how long a request that is not allowed has to wait, if that is
// until the instant at.
func wait(s *store.State, r *store.Request, at int64, spent bool) {
	switch {
	case s.Allowed:
	case !spent && r.Cost > r.Capacity():
		s.RetryAfter = store.Never
	default:
		s.RetryAfter = micros(max(at-s.Now, 0))
	}
}

// othersTurn is how long the whole windows are in which those ahead of r take
// everything, after the one in which used was spent and before it is the turn of
// r; no window lets more than the capacity through for long.
func othersTurn(r *store.Request, used int64, spent bool) int64 {
	capacity := r.Capacity()
	if spent || r.Ahead == 0 || capacity < 1 {
		return 0
	}
	window := r.Limit.Window.Microseconds()
	windows := max(r.Need()-max(capacity-used, 0)-1, 0) / capacity
	return min(windows, store.MaxInteger/window) * window
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// mulDiv returns a*b/c, rounded down, and what is left over, in units of 1/c.
// A quotient above [store.MaxInteger] becomes that, with nothing left over.
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
