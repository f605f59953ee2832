package redis

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Peek implements [store.Peeker].
func (s *Store) Peek(ctx context.Context, reqs []store.Request) []store.State {
	if s.former != nil {
		return s.moved(ctx, algorithm.Check, reqs, s.opts.CheckTimeout, s.peekReady)
	}
	return s.peekReady(ctx, reqs)
}

func (s *Store) peekReady(ctx context.Context, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	s.awaitServers(ctx, reqs, s.opts.CheckTimeout)
	s.perOwner(reqs, states, func(at owner, g group) { s.peek(ctx, at.servers, g) })
	return states
}

// peek reads from a replica, or from the primary if there is none.
func (s *Store) peek(ctx context.Context, at *servers, g group) {
	if at == nil {
		g.fail(notExecuted(errNoServers))
		return
	}
	start := time.Now()
	half, deadline := start.Add(s.opts.CheckTimeout/2), start.Add(s.opts.CheckTimeout)
	now, _, replica := s.reader(at, start)
	if replica != nil {
		s.ask(ctx, replica, g, half, reading(algorithm.Peek, at, now))
		if g.members = g.failed(); len(g.members) == 0 || ctx.Err() != nil {
			return
		}
	}
	if now == 0 {
		now = s.peekTime(at, start)
	}
	s.ask(ctx, at.checks, g, deadline, peeking(at, now))
}

// peekTime is the instant that decides whether a window is over.
func (s *Store) peekTime(at *servers, start time.Time) int64 {
	if now, _, ok := at.clock.estimate(start); ok && !s.opts.LocalClock {
		return now
	}
	// Where the primary has not told its time yet, nobody can say better.
	return s.opts.Now().UnixMicro()
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
