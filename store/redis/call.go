package redis

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
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

// queue holds calls until a worker takes them. It is bounded, and its memory
// grows only as far as it is used.
type queue struct {
	mu     sync.Mutex
	filled *sync.Cond
	// calls[head:] are those that wait.
	calls  []*call
	head   int
	limit  int
	closed bool
	// away is how many were put back and are not here yet.
	away int
}

func newQueue(limit int) *queue {
	q := &queue{limit: limit}
	q.filled = sync.NewCond(&q.mu)
	return q
}

// put adds c, or returns an error if the queue is full or closed.
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
	// Who takes from a longer queue wakes the next worker.
	if len(q.calls)-q.head == 1 {
		q.filled.Signal()
	}
	return nil
}

// putBack adds a call that was taken, after a pause: however many wait, and even if
// the queue is closed meanwhile.
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

// wait waits for a call, and returns false once the queue is closed and empty.
func (q *queue) wait() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.await()
}

func (q *queue) await() bool {
	for len(q.calls) == q.head {
		if q.closed && q.away == 0 {
			return false
		}
		q.filled.Wait()
	}
	return true
}

// take moves up to limit calls into batch, oldest first, waiting for the first
// one. It returns nothing once the queue is closed and empty.
func (q *queue) take(batch []*call, limit int) []*call {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.await() {
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

// len is how many calls wait.
func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.calls) - q.head + q.away
}

// close lets the workers end once they have taken what is there.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Broadcast()
}

// strays are takes that nobody waits for any more and that are still on their way
// to a server. What gives back the events that they have under an ID waits for
// them: on another connection it could arrive before they do, find nothing, and
// leave what they take then.
type strays struct {
	mu   sync.Mutex
	ends map[string]chan struct{}
	// homing is how many wait for strays; idle, if somebody waits for that, is
	// closed when none does. Others may begin to meanwhile.
	homing int
	idle   chan struct{}
}

// add remembers the takes of c, which its worker holds, until it is finished.
func (s *strays) add(c *call, g group) {
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
	s.mu.Lock()
	if s.ends == nil {
		s.ends = map[string]chan struct{}{}
	}
	for _, id := range ids {
		s.ends[id] = end
	}
	s.mu.Unlock()
	go func() {
		<-c.done
		s.mu.Lock()
		for _, id := range ids {
			if s.ends[id] == end {
				delete(s.ends, id)
			}
		}
		s.mu.Unlock()
		close(end)
	}()
}

// of returns the ends of those whose events g gives back.
func (s *strays) of(what algorithm.Operation, g group) (ends []chan struct{}) {
	if what != algorithm.Refund {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ends) == 0 {
		return nil
	}
	for _, i := range g.members {
		if end := s.ends[g.reqs[i].ID]; end != nil {
			ends = append(ends, end)
		}
	}
	return ends
}

// await waits for those whose events g gives back, or until ctx ends.
func (s *strays) await(ctx context.Context, what algorithm.Operation, g group) {
	for _, end := range s.of(what, g) {
		select {
		case <-end:
		case <-ctx.Done():
			return
		}
	}
}

// after runs send once some have ended.
func (s *strays) after(ends []chan struct{}, send func()) {
	s.mu.Lock()
	s.homing++
	s.mu.Unlock()
	go func() {
		for _, end := range ends {
			<-end
		}
		send()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.homing--; s.homing == 0 && s.idle != nil {
			close(s.idle)
			s.idle = nil
		}
	}()
}

// settle waits until all were given back that are to be, or until ctx ends.
func (s *strays) settle(ctx context.Context) {
	s.mu.Lock()
	if s.homing == 0 {
		s.mu.Unlock()
		return
	}
	if s.idle == nil {
		s.idle = make(chan struct{})
	}
	idle := s.idle
	s.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
