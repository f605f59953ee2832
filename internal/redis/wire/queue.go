package wire

import (
	"fmt"
	"runtime"
	"sync"
	"time"
)

// queue holds calls until a worker takes them. It is bounded, and its memory
// grows only as far as it is used.
type queue struct {
	mu     sync.Mutex
	filled *sync.Cond
	// calls[head:] are waiting.
	calls  []*Call
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

// Post runs c, a detached call, without waiting.
func (l *Lane) Post(c *Call) {
	if err := l.queue.put(c); err != nil {
		c.fail(fmt.Errorf("redis %s: %w", l.Addr, err))
	}
}

func (q *queue) put(c *Call) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return ErrClosed
	}
	if len(q.calls)-q.head+q.away >= q.limit {
		return ErrOverload
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

func (l *Lane) work() {
	batch := make([]*Call, 0, l.batch)
	cmds := make([]*Command, 0, l.batch)
	for {
		var inFlight bool
		if batch, inFlight = l.gather(batch[:0]); len(batch) == 0 {
			return
		}
		if l.tokens != nil {
			l.awaiting.Add(1)
			l.tokens <- struct{}{}
			l.awaiting.Add(-1)
		}
		l.run(batch, cmds)
		if l.tokens != nil {
			<-l.tokens
		}
		if inFlight {
			<-l.flight
		}
		clear(batch)
	}
}

// gather returns the next calls to send, or none once the lane is closed, and
// whether the caller fills l.flight.
func (l *Lane) gather(batch []*Call) (_ []*Call, inFlight bool) {
	if l.batch == 1 {
		return l.queue.take(batch, 1), false
	}
	l.gathering.Lock()
	defer l.gathering.Unlock()
	waiting := l.queue.wait()
	switch {
	case waiting == 0:
		return batch, false
	case l.persistent:
		// A pause before a full pipeline gains nothing, and would bound how many charges leave
		// in a second.
		if l.watched.Load() == 0 && waiting < l.batch {
			l.linger()
		}
	case l.way.least() < nearby:
		inFlight = l.takeOff()
		// Requests that are ready to run add their calls first.
		runtime.Gosched()
	}
	return l.queue.take(batch, l.batch), inFlight
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

// linger waits for other charges to join the pipeline.
func (l *Lane) linger() {
	timer := time.NewTimer(linger)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.hurried:
	case <-l.life.Done():
	}
}

// Hurry makes the worker that lingers, or else the next one that would, send at once.
func (l *Lane) Hurry() {
	select {
	case l.hurried <- struct{}{}:
	default:
	}
}

// takeOff waits until no pipeline is in flight, but not for a slow one, and
// reports whether the caller fills l.flight.
func (l *Lane) takeOff() bool {
	select {
	case l.flight <- struct{}{}:
		return true
	default:
	}
	timer := timerPool.Get().(*time.Timer)
	defer timerPool.Put(timer)
	timer.Reset(flightWait)
	select {
	case l.flight <- struct{}{}:
		return true
	case <-timer.C:
		return false
	}
}

// take moves up to limit calls into batch, oldest first, and waits for the first
// one. It adds none once the queue is closed and empty.
func (q *queue) take(batch []*Call, limit int) []*Call {
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

// putBack adds a call that was taken, after a pause, even beyond the limit or close.
func (q *queue) putBack(c *Call, after time.Duration) {
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

// quickest is the least time of a pipeline in this period and in the one before: on a busy
// machine the others wait for processors, which says nothing about how far a server is.
type quickest struct {
	mu             sync.Mutex
	began          time.Time
	this, previous time.Duration
}

// quickestPeriod is the length of a period.
const quickestPeriod = time.Second

func (q *quickest) note(took time.Duration, at time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch age := at.Sub(q.began); {
	case age < quickestPeriod:
		q.this = min(q.this, took)
	case age < 2*quickestPeriod:
		q.this, q.previous, q.began = took, q.this, at
	default:
		q.this, q.previous, q.began = took, took, at
	}
}

// least is 0 at first.
func (q *quickest) least() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return min(q.this, q.previous)
}
