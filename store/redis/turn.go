package redis

import (
	"context"
	"fmt"
	"time"
)

// doAlone is do where each call has a connection for itself: its caller makes it,
// which saves waking a worker and being woken. From then on it ends by its deadline
// or by that of ctx, but not when ctx is cancelled.
func (l *lane) doAlone(ctx context.Context, c *call) (sent bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("redis %s: %w", l.addr, err)
	}
	if end, ok := ctx.Deadline(); ok && end.Before(c.deadline) {
		c.deadline = end
	}
	select {
	case l.turns <- struct{}{}:
	default:
		if err := l.awaitTurn(ctx, c.deadline); err != nil {
			return false, fmt.Errorf("redis %s: %w", l.addr, err)
		}
	}
	l.run([]*call{c}, nil)
	<-l.turns
	select {
	case <-c.done:
		return true, nil
	default:
	}
	// It was redirected, and is a call of another lane.
	if sent, err = c.wait(context.WithoutCancel(ctx)); err != nil {
		return sent, fmt.Errorf("redis %s: %w", l.addr, err)
	}
	return sent, nil
}

// awaitTurn waits for a connection.
func (l *lane) awaitTurn(ctx context.Context, deadline time.Time) error {
	l.awaiting.Add(1)
	defer l.awaiting.Add(-1)
	timer := timerPool.Get().(*time.Timer)
	defer timerPool.Put(timer)
	timer.Reset(time.Until(deadline))
	select {
	case l.turns <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return ErrTimeout
	case <-l.life.Done():
		return errClosed
	}
}
