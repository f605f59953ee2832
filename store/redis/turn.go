package redis

import (
	"context"
	"fmt"
	"time"
)

// doAlone is do where each call has a connection for itself: its caller makes it,
// which saves waking a worker and being woken. From then on the call ends by its
// deadline alone.
func (l *lane) doAlone(ctx context.Context, c *call) (sent bool, err error) {
	select {
	case l.turns <- struct{}{}:
	default:
		if err := l.awaitTurn(ctx, c.deadline); err != nil {
			return false, fmt.Errorf("redis %s: %w", l.addr, err)
		}
	}
	l.run([]*call{c}, nil)
	<-l.turns
	<-c.done
	return true, nil
}

// awaitTurn waits for a connection.
func (l *lane) awaitTurn(ctx context.Context, deadline time.Time) error {
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
