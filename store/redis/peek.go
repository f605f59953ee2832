package redis

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Peek implements [store.Peeker].
func (s *Store) Peek(ctx context.Context, reqs []store.Request) []store.State {
	deadline := time.Now().Add(s.opts.CheckTimeout)
	if s.former != nil {
		return s.moved(ctx, algorithm.Check, reqs, deadline, s.peekReady)
	}
	return s.peekReady(ctx, reqs, deadline)
}

func (s *Store) peekReady(ctx context.Context, reqs []store.Request, deadline time.Time) []store.State {
	states := make([]store.State, len(reqs))
	s.awaitServers(ctx, reqs, deadline)
	s.perOwner(reqs, states, func(at owner, g group) { s.peek(ctx, at.servers, g, deadline) })
	return states
}

// peek reads from a replica, or from the primary if there is none.
func (s *Store) peek(ctx context.Context, at *servers, g group, deadline time.Time) {
	if at == nil {
		g.fail(notExecuted(errNoServers))
		return
	}
	start := time.Now()
	now, _ := s.timeAt(at, start)
	if replica := s.replica(at); replica != nil {
		half := start.Add(deadline.Sub(start) / 2)
		s.ask(ctx, replica, g, half, reading(algorithm.Peek, at, now))
		if g.members = g.failed(); len(g.members) == 0 || ctx.Err() != nil {
			return
		}
	}
	s.ask(ctx, at.checks, g, deadline, peeking(at, now))
}

// failed returns the members that have an error.
func (g group) failed() (members []int) {
	for _, i := range g.members {
		if g.states[i].Err != nil {
			members = append(members, i)
		}
	}
	return members
}

var _ store.Peeker = (*Store)(nil)
