package redis

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// The life of a call: it waits, then it is either sent or abandoned. One of which
// nothing ran may wait again.
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
	// fair is how long its server is given to answer, at least, however little is
	// left until the deadline: by less it is not judged.
	fair  time.Duration
	state atomic.Int32
	// done has room for one value, so that finishing never blocks.
	done chan struct{}
	// detached, if set, is run in place of signalling done: once, or more often with
	// some of the commands each time.
	detached func(*call)
	// tries is how often it was sent and refused.
	tries int
	// redirects is how many nodes have redirected it.
	redirects int
	// room is that of the first command, if it is a script's.
	room scriptCommand
}

var callPool = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

func newCall(deadline time.Time) *call {
	c := callPool.Get().(*call)
	c.began, c.deadline, c.fair = time.Now(), deadline, 0
	return c
}

// release gives back a call that is finished. A call that was abandoned must
// not be released: a worker may still hold it.
func (c *call) release() {
	clear(c.cmds)
	c.cmds = c.cmds[:0]
	c.detached, c.tries, c.redirects = nil, 0, 0
	c.room = scriptCommand{}
	c.state.Store(callQueued)
	callPool.Put(c)
}

// claim makes c the worker's, and reports whether somebody wants it still.
func (c *call) claim() bool {
	// One that was sent before has commands that did not run, whoever waits.
	return c.state.CompareAndSwap(callQueued, callSent) || c.state.Load() == callSent
}

// isOpen reports whether some command has no outcome yet, or one that another try
// may change.
func (c *call) isOpen() bool { return slices.ContainsFunc(c.cmds, (*command).isOpen) }

// reopen makes c wait for another try. Where nothing of it ran, whoever waits for
// it may abandon it.
func (c *call) reopen() {
	c.tries++
	if !slices.ContainsFunc(c.cmds, func(cmd *command) bool { return !cmd.isOpen() }) {
		c.state.Store(callQueued)
	}
}

// appendOpen appends the commands of c that are to be sent.
func (c *call) appendOpen(cmds []*command) []*command {
	if c.tries == 0 {
		return append(cmds, c.cmds...)
	}
	for _, cmd := range c.cmds {
		if cmd.isOpen() {
			cmds = append(cmds, cmd)
		}
	}
	return cmds
}

// finishSettled tells the caller of a detached call what became of the commands
// that are not open. The others stay.
func (c *call) finishSettled() {
	settled := newCall(c.deadline)
	settled.began, settled.detached = c.began, c.detached
	open := c.cmds[:0]
	for _, cmd := range c.cmds {
		if cmd.isOpen() {
			open = append(open, cmd)
		} else {
			settled.cmds = append(settled.cmds, cmd)
		}
	}
	clear(c.cmds[len(open):])
	c.cmds = open
	settled.finish()
}

// fail finishes c without having run what is open.
func (c *call) fail(err error) {
	err = notExecuted(err)
	for _, cmd := range c.cmds {
		if c.tries == 0 || cmd.isOpen() {
			cmd.outcome = err
		}
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
