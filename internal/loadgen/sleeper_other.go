//go:build !linux

package loadgen

import "time"

// Sleeper sleeps as precisely as Go's timers do, which may be late by a
// millisecond. It is for one goroutine.
type Sleeper struct{}

// NewSleeper makes one, which is to be closed.
func NewSleeper() *Sleeper { return &Sleeper{} }

// Close does nothing.
func (*Sleeper) Close() {}

// Until sleeps until an instant.
func (*Sleeper) Until(t time.Time) { time.Sleep(time.Until(t)) }
