package redis

import (
	"context"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

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
