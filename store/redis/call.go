package redis

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// The life of a call: it waits, then it is either sent or abandoned.
const (
	callQueued int32 = iota
	callSent
	callAbandoned
)

// call is a group of commands that one caller wants run by one server in one
// round trip.
type call struct {
	cmds []*command
	// began is when it was made.
	began, deadline time.Time
	state           atomic.Int32
	// done has room for one value, so that finishing never blocks.
	done chan struct{}
	// detached, if set, is run in place of signalling done.
	detached func(*call)
	// redirects is how many nodes have redirected it.
	redirects int
	// room is that of the first command, if it is a script's.
	room scriptCommand
}

var callPool = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

func newCall(deadline time.Time) *call {
	c := callPool.Get().(*call)
	c.began, c.deadline = time.Now(), deadline
	return c
}

// release gives back a call that is finished. A call that was abandoned must
// not be released: a worker may still hold it.
func (c *call) release() {
	clear(c.cmds)
	c.cmds = c.cmds[:0]
	c.detached = nil
	c.redirects = 0
	c.room = scriptCommand{}
	c.state.Store(callQueued)
	callPool.Put(c)
}

// fail finishes c without having run it.
func (c *call) fail(err error) {
	err = notExecuted(err)
	for _, cmd := range c.cmds {
		cmd.outcome = err
	}
	c.finish()
}

func (c *call) finish() {
	if c.detached != nil {
		c.detached(c)
		return
	}
	c.done <- struct{}{}
}

var timerPool = sync.Pool{New: func() any { return time.NewTimer(time.Hour) }}

// wait returns nil once c is finished. If ctx or the deadline ends first, c
// belongs to the worker and its commands must not be looked at; the error then
// says so, and sent tells whether they may have run.
func (c *call) wait(ctx context.Context) (sent bool, err error) {
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
