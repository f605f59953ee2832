package wire

import (
	"context"
	"sync"
)

// Abandoned are takes, and renewals of leases, that were sent and that their callers stopped
// waiting for. A refund of the same ID waits for them: on another connection it could
// overtake them, find nothing to give back, and leave the events spent.
type Abandoned struct {
	mu sync.Mutex
	// ends, by ID, are closed when the take has ended.
	ends map[string]chan struct{}
	// refunds counts the refunds that wait; idle, if not nil, is closed when there
	// are none.
	refunds int
	idle    chan struct{}
}

// Add keeps the takes of c with these IDs, which a worker holds, until c is finished. Then it calls finished, which may
// read the outcomes.
func (a *Abandoned) Add(c *Call, ids []string, finished func()) {
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
		finished()
	}()
}

// Of returns what is closed when the take with this ID has ended; nil if it is not kept.
func (a *Abandoned) Of(id string) chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ends[id]
}

// After runs refund once the takes have ended.
func (a *Abandoned) After(ends []chan struct{}, refund func()) {
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

// await waits until no refund waits, or ctx ends.
func (a *Abandoned) await(ctx context.Context) {
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
