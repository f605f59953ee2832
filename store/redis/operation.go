package redis

import (
	"context"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// operation is what is asked about every bucket of a group.
type operation struct {
	script *script
	// now is the instant that decides. If there is a clock it is the server's
	// that decides, and now is at most an estimate.
	now int64
	// clock is told that server's clock by the reply.
	clock *primaryClock
}

func (s *Store) opening(shard int) operation  { return s.writing(scriptOpen, shard) }
func (s *Store) charging(shard int) operation { return s.writing(scriptCharge, shard) }

func (s *Store) writing(script *script, shard int) operation {
	if s.opts.LocalClock {
		return operation{script: script, now: s.opts.Now().UnixMicro()}
	}
	op := operation{script: script, clock: s.shards[shard].clock}
	if now, age, ok := op.clock.estimate(time.Now()); ok && age <= clockTrust {
		op.now = now
	}
	return op
}

func (op operation) command(keys bucketKeys, r *store.Request) *command {
	key := keys.key(r.Limit, r.ClientKey)
	switch op.script {
	case scriptCheck:
		return newCommand(op.script, nil, key)
	case scriptOpen:
		now := op.now
		if op.clock != nil {
			now = 0
		}
		return newCommand(op.script, op.clock, key, r.Limit.Window.Microseconds(), now)
	default:
		now := op.now
		if op.clock != nil {
			// The estimate is never ahead: it has passed.
			now = -now
		}
		return newCommand(op.script, op.clock, key, r.Limit.Window.Microseconds(), now, r.Cost)
	}
}

// state is what the outcome of cmd means to r.
func (op operation) state(cmd *command, r *store.Request) store.State {
	if cmd.outcome != nil {
		return store.State{Err: cmd.outcome}
	}
	var bucket algorithm.FixedWindow
	var err error
	now := op.now
	if op.script == scriptCheck {
		bucket, err = decodeCheck(cmd.Val(), now)
	} else {
		bucket, now, err = decodeWrite(cmd.Val(), now)
	}
	switch {
	case err != nil:
		return store.State{Err: err}
	case op.script == scriptCharge:
		return bucket.Charged(now, r.Events)
	default:
		return bucket.Check(now, r.Events, r.Cost)
	}
}

func (s *Store) call(g group, deadline time.Time, op operation) *call {
	c := newCall(deadline)
	for _, i := range g.members {
		c.cmds = append(c.cmds, op.command(s.keys, &g.reqs[i]))
	}
	return c
}

// ask runs op on every bucket of g in one round trip and sets their states.
func (s *Store) ask(ctx context.Context, l *lane, g group, deadline time.Time, op operation) {
	c := s.call(g, deadline, op)
	sent, err := l.do(ctx, c)
	if err != nil {
		if sent && op.script == scriptCharge {
			err = fmt.Errorf("%w: %w", store.ErrUncertain, err)
		} else {
			err = notExecuted(err)
		}
		for _, i := range g.members {
			g.states[i] = store.State{Err: err}
		}
		return
	}
	for n, i := range g.members {
		g.states[i] = op.state(c.cmds[n], &g.reqs[i])
	}
	c.release()
}
