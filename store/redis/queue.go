package redis

import (
	"sync"
	"time"
)

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
