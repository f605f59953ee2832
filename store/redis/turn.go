package redis

import (
	"context"
	"time"
)

// takesTurn reports whether the caller makes c itself, which saves waking a worker
// and being woken: where each call has a connection to itself, one is free, and
// nothing makes the caller leave before the server has had its time. The caller
// then holds a turn.
func (l *lane) takesTurn(ctx context.Context, c *call) bool {
	if l.turns == nil || time.Until(c.deadline) < c.fair {
		return false
	}
	if end, ok := ctx.Deadline(); ok && end.Before(c.deadline) {
		return false
	}
	select {
	case l.turns <- struct{}{}:
		return true
	default:
		return false
	}
}

// doAlone makes c and gives the turn back. It ends by c's deadline, and not when
// a context is cancelled.
func (l *lane) doAlone(c *call) (sent bool, err error) {
	l.run([]*call{c}, nil)
	<-l.turns
	select {
	case <-c.done:
		return true, nil
	default:
	}
	// It was redirected, and is a call of another lane.
	return c.wait(context.Background())
}
