package redis

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The states of a call. A queued one becomes sent or abandoned; a sent one of
// which nothing ran may be queued again.
const (
	callQueued int32 = iota
	callSent
	callAbandoned
)

// call is the commands of one caller for one server, which run in one round trip.
type call struct {
	cmds            []*command
	began, deadline time.Time
	// fair is the least time that the server has before a timeout counts against
	// it, even beyond the deadline.
	fair  time.Duration
	state atomic.Int32
	// done has room for one value, so that finishing never blocks.
	done chan struct{}
	// detached, if set, runs instead of signalling done: once with all commands, or
	// several times with some of them.
	detached func(*call)
	// tries counts the times that it was sent and refused.
	tries int
	// redirects counts the nodes that redirected it.
	redirects int
	// room is for the first command, if it calls a script.
	room scriptCommand
}

var callPool = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

func newCall(deadline time.Time) *call {
	c := callPool.Get().(*call)
	c.began, c.deadline, c.fair = time.Now(), deadline, 0
	return c
}

// release gives back a finished call. An abandoned call must not be released: a
// worker may still hold it.
func (c *call) release() {
	clear(c.cmds)
	c.cmds = c.cmds[:0]
	c.detached, c.tries, c.redirects = nil, 0, 0
	c.room = scriptCommand{}
	c.state.Store(callQueued)
	callPool.Put(c)
}

// claim makes c the worker's, and reports whether it is still wanted.
func (c *call) claim() bool {
	// Commands of a call that was sent before may have run: it has to be finished.
	return c.state.CompareAndSwap(callQueued, callSent) || c.state.Load() == callSent
}

func (c *call) isOpen() bool { return slices.ContainsFunc(c.cmds, (*command).isOpen) }

// reopen prepares c for another try. If nothing of it ran, its caller may abandon it.
func (c *call) reopen() {
	c.tries++
	if !slices.ContainsFunc(c.cmds, func(cmd *command) bool { return !cmd.isOpen() }) {
		c.state.Store(callQueued)
	}
}

// finishSettled reports the outcomes of those commands of a detached call that are
// not open. The others stay in c.
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

// fail finishes c without running its open commands.
func (c *call) fail(err error) {
	err = notExecuted(err)
	for _, cmd := range c.cmds {
		if cmd.isOpen() {
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

// wait returns nil once c is finished. After an error, sent reports whether commands may
// have run; c then belongs to the worker and its commands must not be read.
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

// queue holds calls until a worker takes them. It is bounded, and its memory
// grows only as far as it is used.
type queue struct {
	mu     sync.Mutex
	filled *sync.Cond
	// calls[head:] are waiting.
	calls  []*call
	head   int
	limit  int
	closed bool
	// away counts the calls that pause before they are queued again.
	away int
}

func newQueue(limit int) *queue {
	q := &queue{limit: limit}
	q.filled = sync.NewCond(&q.mu)
	return q
}

func (q *queue) put(c *call) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return errClosed
	}
	if len(q.calls)-q.head+q.away >= q.limit {
		return errOverload
	}
	if q.head > 0 && len(q.calls) == cap(q.calls) {
		q.calls = q.calls[:copy(q.calls, q.calls[q.head:])]
		clear(q.calls[len(q.calls):cap(q.calls)])
		q.head = 0
	}
	q.calls = append(q.calls, c)
	// A worker that leaves calls behind wakes the next worker.
	if len(q.calls)-q.head == 1 {
		q.filled.Signal()
	}
	return nil
}

// putBack adds a call that was taken, after a pause, even beyond the limit or close.
func (q *queue) putBack(c *call, after time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.away++
	time.AfterFunc(after, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.away--
		q.calls = append(q.calls, c)
		q.filled.Signal()
		if q.closed && q.away == 0 {
			q.filled.Broadcast()
		}
	})
}

// wait waits for a call, and returns the number of calls: 0 once the queue is closed and empty.
func (q *queue) wait() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waitLocked()
	return len(q.calls) - q.head
}

func (q *queue) waitLocked() bool {
	for len(q.calls) == q.head {
		if q.closed && q.away == 0 {
			return false
		}
		q.filled.Wait()
	}
	return true
}

// take moves up to limit calls into batch, oldest first, and waits for the first
// one. It adds none once the queue is closed and empty.
func (q *queue) take(batch []*call, limit int) []*call {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.waitLocked() {
		return batch
	}
	taken := q.calls[q.head:min(q.head+limit, len(q.calls))]
	batch = append(batch, taken...)
	clear(taken)
	if q.head += len(taken); q.head == len(q.calls) {
		q.calls, q.head = q.calls[:0], 0
	} else {
		q.filled.Signal()
	}
	return batch
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.calls) - q.head + q.away
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Broadcast()
}

// abandonedTakes are takes that were sent and that their callers stopped waiting
// for. A refund of the same ID waits for the take: on another connection it could
// overtake the take, find nothing to give back, and leave the events spent.
type abandonedTakes struct {
	mu sync.Mutex
	// ends, by ID, are closed when the take has ended.
	ends map[string]chan struct{}
	// refunds counts the refunds that wait; idle, if not nil, is closed when there
	// are none.
	refunds int
	idle    chan struct{}
}

// add keeps the takes of c, which a worker holds, until c is finished.
func (a *abandonedTakes) add(c *call, g group) {
	var ids []string
	for _, i := range g.members {
		if id := g.reqs[i].ID; id != "" {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return
	}
	end := make(chan struct{})
	a.mu.Lock()
	if a.ends == nil {
		a.ends = map[string]chan struct{}{}
	}
	for _, id := range ids {
		a.ends[id] = end
	}
	a.mu.Unlock()
	go func() {
		<-c.done
		a.mu.Lock()
		for _, id := range ids {
			if a.ends[id] == end {
				delete(a.ends, id)
			}
		}
		a.mu.Unlock()
		close(end)
	}()
}

func (a *abandonedTakes) refundedBy(op algorithm.Operation, g group) (ends []chan struct{}) {
	if op != algorithm.Refund {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.ends) == 0 {
		return nil
	}
	for _, i := range g.members {
		if end := a.ends[g.reqs[i].ID]; end != nil {
			ends = append(ends, end)
		}
	}
	return ends
}

func (a *abandonedTakes) await(ctx context.Context, op algorithm.Operation, g group) {
	for _, end := range a.refundedBy(op, g) {
		select {
		case <-end:
		case <-ctx.Done():
			return
		}
	}
}

// after runs refund once the takes have ended.
func (a *abandonedTakes) after(ends []chan struct{}, refund func()) {
	a.mu.Lock()
	a.refunds++
	a.mu.Unlock()
	go func() {
		for _, end := range ends {
			<-end
		}
		refund()
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.refunds--; a.refunds == 0 && a.idle != nil {
			close(a.idle)
			a.idle = nil
		}
	}()
}

// settle waits until no refund waits, or ctx ends.
func (a *abandonedTakes) settle(ctx context.Context) {
	a.mu.Lock()
	if a.refunds == 0 {
		a.mu.Unlock()
		return
	}
	if a.idle == nil {
		a.idle = make(chan struct{})
	}
	idle := a.idle
	a.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
