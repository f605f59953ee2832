// Package algorithm is the arithmetic of the rate limiting algorithms: pure
// functions of a bucket's content and an instant, without I/O or a clock. The
// memory store runs it, and the Lua scripts are held to it by tests.
package algorithm

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// FixedWindow is the content of a fixed window bucket. The zero value is a
// bucket in which no window was ever opened.
type FixedWindow struct {
	// Used is what was spent in the window.
	Used int64
	// Reset is the instant at which the window ends. It is chosen once, when
	// the window opens.
	Reset int64
}

// IsOpen tells whether the window is open at now. The instant of its reset no
// longer belongs to it.
func (b FixedWindow) IsOpen(now int64) bool { return b.Reset > now }

// Open returns the window that is open at now: b itself, or a new one of the
// given length in microseconds.
func (b FixedWindow) Open(now, window int64) FixedWindow {
	if b.IsOpen(now) {
		return b
	}
	return FixedWindow{Reset: now + window}
}

// Charge spends cost in the window that is open at now. The count stops at
// [store.MaxInteger].
func (b FixedWindow) Charge(now, window, cost int64) FixedWindow {
	b = b.Open(now, window)
	b.Used += min(cost, store.MaxInteger-b.Used)
	return b
}

// Check is what the open window b looks like at now to a request that has yet
// to spend cost.
func (b FixedWindow) Check(now, events, cost int64) store.State {
	return b.state(now, events, b.Used <= events-cost)
}

// Charged is what the open window b looks like at now to a request whose cost
// is already part of it.
func (b FixedWindow) Charged(now, events int64) store.State {
	return b.state(now, events, b.Used <= events)
}

func (b FixedWindow) state(now, events int64, fits bool) store.State {
	s := store.State{
		Allowed:   fits,
		Limit:     events,
		Used:      b.Used,
		Remaining: max(events-b.Used, 0),
		Reset:     b.Reset,
		Now:       now,
	}
	if !fits {
		s.RetryAfter = time.Duration(b.Reset-now) * time.Microsecond
	}
	return s
}
