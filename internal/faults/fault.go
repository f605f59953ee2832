package main

import (
	"context"
	"time"
)

// fault is what happens to a shard while requests come.
type fault struct {
	name string
	// launch starts the kind of shard that it can happen to.
	launch launcher
	// bring brings it on, waits while it shall last, and ends it. It returns when
	// the servers do again what they should.
	bring func(ctx context.Context, s *shard, lasting time.Duration) error
	// checks and primary are how much is left of what decides requests: of the
	// servers that check windows that are open, and of the primary, which takes
	// and opens windows.
	checks, primary reach
	// loses is what Redis itself forgets, persistence and replication being as
	// they are.
	loses loss
}

// reach is how much is left of what decides.
type reach int

const (
	// there: no request may notice.
	there reach = iota
	// partly: some requests are decided, and for the others on_error is.
	partly
	// away: requests notice, and on_error decides.
	away
)

// loss is what Redis forgets.
type loss int

const (
	// nothing that Redis has replied to.
	nothing loss = iota
	// tail: what a primary had not passed on to the replica that is promoted.
	tail
	// fork: what a primary takes after another one was promoted.
	fork
	// everything that was counted.
	everything
)

// isUnnoticed tells whether requests and counts have to be as without it.
func (f *fault) isUnnoticed() bool {
	return f.checks == there && f.primary == there && f.loses == nothing
}

// lasts returns a fault that is brought on by one step and ended by another.
func lasts(begin, end func(ctx context.Context, s *shard) error) func(context.Context, *shard, time.Duration) error {
	return func(ctx context.Context, s *shard, lasting time.Duration) error {
		if err := begin(ctx, s); err != nil {
			return err
		}
		if err := pause(ctx, lasting); err != nil {
			return err
		}
		return end(ctx, s)
	}
}

// repeats returns a fault that is one step again and again.
func repeats(every time.Duration, step func(ctx context.Context, s *shard) error) func(context.Context, *shard, time.Duration) error {
	return func(ctx context.Context, s *shard, lasting time.Duration) error {
		for end := time.Now().Add(lasting); time.Now().Before(end); {
			if err := step(ctx, s); err != nil {
				return err
			}
			if err := pause(ctx, every); err != nil {
				return err
			}
		}
		return nil
	}
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pollInterval is how often it is looked whether something has come about.
const pollInterval = 10 * time.Millisecond

// poll waits until done returns nil, for so long at most, and then returns what
// was missing.
func poll(ctx context.Context, patience time.Duration, done func() error) error {
	deadline := time.Now().Add(patience)
	for {
		missing := done()
		if missing == nil {
			return nil
		}
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return missing
		}
	}
}
