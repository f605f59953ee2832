package redis

import (
	"context"
	"errors"
	"time"
)

const (
	// findPeriod is how often it is asked who the servers of a shard are, and
	// findPause how soon that is done again if something points to a change.
	findPeriod = time.Second
	findPause  = 100 * time.Millisecond
	// findTimeout bounds one such question.
	findTimeout = 500 * time.Millisecond
)

// errNoServers is the error of calls while it is not known whom to ask.
var errNoServers = errors.New("no primary is known")

// finder finds the servers of a shard that are not given by their addresses.
type finder interface {
	// find asks who they are.
	find(ctx context.Context) ([]roles, error)
	close()
}

// discover keeps finding the servers, until the shard is closed.
func (s *Shard) discover() {
	tick := time.NewTicker(findPeriod)
	defer tick.Stop()
	var failing bool
	for {
		ctx, cancel := context.WithTimeout(s.life, findTimeout)
		found, err := s.finder.find(ctx)
		cancel()
		switch {
		case s.life.Err() != nil:
			return
		case err == nil:
			s.adopt(found)
		case !failing:
			s.tell(Event{Kind: DiscoveryFailed, Err: err})
		}
		if failing && err == nil {
			s.tell(Event{Kind: Discovered})
		}
		failing = err != nil
		if !pause(s.life, findPause) {
			return
		}
		select {
		case <-tick.C:
		case <-s.nudged:
		case <-s.life.Done():
			return
		}
	}
}

// nudge makes it be asked soon who the servers are.
func (s *Shard) nudge() {
	select {
	case s.nudged <- struct{}{}:
	default:
	}
}
