package wire

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// The states of a call. A queued one becomes sent or abandoned; a sent one of
// which nothing ran may be queued again.
const (
	callQueued int32 = iota
	callSent
	callAbandoned
)

// Call is the commands of one caller for one server, which run in one round trip.
type Call struct {
	Cmds []*Command
	// Began is when the call was made.
	Began, deadline time.Time
	// fair is the least time that the server has before a timeout counts against
	// it, even beyond the deadline.
	fair  time.Duration
	state atomic.Int32
	// done has room for one value, so that finishing never blocks.
	done chan struct{}
	// Detached, if set, runs instead of signalling done: once with all commands, or
	// several times with some of them.
	Detached func(*Call)
	// tries counts the times that it was sent and refused.
	tries int
	// redirects counts the nodes that redirected it.
	redirects int
	// isApart is set if it runs outside the pipelines.
	isApart bool
	// Room is for the first command, if it calls a script.
	Room ScriptCall
}

var callPool = sync.Pool{New: func() any { return &Call{done: make(chan struct{}, 1)} }}

// NewCall returns a call that ends at the deadline, from which the caller takes the room
// for its first command. fair is the least time that the server has before a timeout counts
// against it, even beyond the deadline.
func NewCall(deadline time.Time, fair time.Duration) *Call {
	c := callPool.Get().(*Call)
	c.Began, c.deadline, c.fair = time.Now(), deadline, fair
	return c
}

// Release gives back a finished call. An abandoned call must not be released: a
// worker may still hold it.
func (c *Call) Release() {
	clear(c.Cmds)
	c.Cmds = c.Cmds[:0]
	c.Detached, c.tries, c.redirects, c.isApart = nil, 0, 0, false
	c.Room = ScriptCall{}
	c.state.Store(callQueued)
	callPool.Put(c)
}

// Do runs c and waits for it. If it returns nil every command has its outcome
// and the caller releases c; otherwise c must not be touched.
func (l *Lane) Do(ctx context.Context, c *Call) (sent bool, err error) {
	if !l.IsUp() {
		// Its workers may still wait for replies.
		return false, l.Down()
	}
	switch err = ctx.Err(); {
	case err != nil:
	case l.takeToken(ctx, c):
		sent, err = l.doUnpipelined(c)
	default:
		l.watched.Add(1)
		defer l.watched.Add(-1)
		if err = l.queue.put(c); err == nil {
			sent, err = c.wait(ctx)
		}
	}
	if err != nil {
		return sent, fmt.Errorf("redis %s: %w", l.Addr, err)
	}
	return true, nil
}

// takeToken reports whether the caller can make c itself, which saves waking a
// worker and being woken: without pipelining, if a connection is free and the
// caller stays at least until the server has had its fair time.
func (l *Lane) takeToken(ctx context.Context, c *Call) bool {
	if l.tokens == nil || time.Until(c.deadline) < c.fair {
		return false
	}
	if end, ok := ctx.Deadline(); ok && end.Before(c.deadline) {
		return false
	}
	select {
	case l.tokens <- struct{}{}:
		return true
	default:
		return false
	}
}

// doUnpipelined makes c and gives the token back. It ends by c's deadline, but not
// when a context is cancelled.
func (l *Lane) doUnpipelined(c *Call) (sent bool, err error) {
	l.run([]*Call{c}, nil)
	<-l.tokens
	select {
	case <-c.done:
		return true, nil
	default:
	}
	// It was redirected and is now a call of another lane.
	return c.wait(context.Background())
}

// wait returns nil once c is finished. After an error, sent reports whether commands may
// have run; c then belongs to the worker and its commands must not be read.
func (c *Call) wait(ctx context.Context) (sent bool, err error) {
	timer := timerPool.Get().(*time.Timer)
	timer.Reset(time.Until(c.deadline))
	defer timerPool.Put(timer)
	select {
	case <-c.done:
		return true, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		err = ErrTimeout
	}
	return !c.state.CompareAndSwap(callQueued, callAbandoned), err
}

var timerPool = sync.Pool{New: func() any { return time.NewTimer(time.Hour) }}

// DoAll runs commands by the deadline of ctx and returns the first error. A
// missing key is none.
func (l *Lane) DoAll(ctx context.Context, cmds ...*Command) error {
	return doAll(ctx, cmds, l.Do)
}

// DoApart is DoAll outside the pipelines, one call at a time: replies to operators may be larger than any that is
// believed, which breaks the connection, and says nothing of the server.
func (l *Lane) DoApart(ctx context.Context, cmds ...*Command) error {
	return doAll(ctx, cmds, func(ctx context.Context, c *Call) (sent bool, err error) {
		c.isApart = true
		go l.runApart(c)
		if sent, err = c.wait(ctx); err != nil {
			err = fmt.Errorf("redis %s: %w", l.Addr, err)
		}
		return sent, err
	})
}

// runApart makes a call once no other one runs apart.
func (l *Lane) runApart(c *Call) {
	ctx, cancel := context.WithDeadline(l.life, c.deadline)
	defer cancel()
	select {
	case l.operators <- struct{}{}:
		defer func() { <-l.operators }()
	case <-ctx.Done():
	}
	if !c.claim() {
		return
	}
	if err := ctx.Err(); err != nil {
		c.fail(fmt.Errorf("redis %s: %w", l.Addr, err))
		return
	}
	l.send(ctx, c.Cmds, true)
	_ = l.Shard.Contain(l.Addr, func() error {
		l.conclude(c)
		return nil
	})
}

func doAll(ctx context.Context, cmds []*Command, do func(context.Context, *Call) (sent bool, err error)) error {
	deadline, _ := ctx.Deadline()
	c := NewCall(deadline, 0)
	c.Cmds = append(c.Cmds, cmds...)
	if _, err := do(ctx, c); err != nil {
		return err
	}
	defer c.Release()
	for _, cmd := range cmds {
		if cmd.Outcome != nil && !errors.Is(cmd.Outcome, goredis.Nil) {
			return cmd.Outcome
		}
	}
	return nil
}
