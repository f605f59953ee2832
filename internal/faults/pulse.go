package main

import (
	"context"
	"time"
)

// pulse watches whether the machine lets this process run when it should. One
// that stands still makes timeouts pass that are no fault of anybody.
type pulse struct {
	longest time.Duration
	ended   chan struct{}
}

const pulseInterval = 5 * time.Millisecond

// feel watches until ctx ends.
func feel(ctx context.Context) *pulse {
	p := &pulse{ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		for last := time.Now(); pause(ctx, pulseInterval) == nil; {
			now := time.Now()
			p.longest = max(p.longest, now.Sub(last)-pulseInterval)
			last = now
		}
	}()
	return p
}

// stood is how long the machine stood still at most, once the context has ended.
func (p *pulse) stood() time.Duration {
	<-p.ended
	return p.longest
}
