package redis

import "sync"

// queue holds calls until a worker takes them. It is bounded, and its memory
// grows only as far as it is used.
type queue struct {
	mu     sync.Mutex
	filled *sync.Cond
	calls  []*call
	limit  int
	closed bool
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
	if len(q.calls) >= q.limit {
		return errOverload
	}
	q.calls = append(q.calls, c)
	// Who takes from a longer queue wakes the next worker.
	if len(q.calls) == 1 {
		q.filled.Signal()
	}
	return nil
}

// wait waits for a call, and returns false once the queue is closed and empty.
func (q *queue) wait() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.await()
}

func (q *queue) await() bool {
	for len(q.calls) == 0 {
		if q.closed {
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
	n := min(limit, len(q.calls))
	batch = append(batch, q.calls[:n]...)
	rest := copy(q.calls, q.calls[n:])
	clear(q.calls[rest:])
	q.calls = q.calls[:rest]
	if rest > 0 {
		q.filled.Signal()
	}
	return batch
}

// close lets the workers end once they have taken what is there.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Broadcast()
}
