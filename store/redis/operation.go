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
	// script is nil for one that reads.
	script *script
	// now is the instant that decides, if no clock does.
	now int64
	// clock is that of the server, if it decides.
	clock *primaryClock
}

func (s *Store) opening(shard int) operation  { return s.writing(scriptOpen, shard) }
func (s *Store) charging(shard int) operation { return s.writing(scriptCharge, shard) }

func (s *Store) writing(script *script, shard int) operation {
	if s.opts.LocalClock {
		return operation{script: script, now: s.opts.Now().UnixMicro()}
	}
	return operation{script: script, clock: s.shards[shard].clock}
}

func (op operation) command(keys bucketKeys, r *store.Request) *command {
	key := keys.key(r.Limit, r.ClientKey)
	switch op.script {
	case nil:
		return newRead(key)
	case scriptOpen:
		return newCommand(op.script, op.clock, key, r.Limit.Window.Microseconds(), op.now)
	default:
		return newCommand(op.script, op.clock, key, r.Limit.Window.Microseconds(), op.now, r.Cost)
	}
}

// state is what the outcome of cmd means to r.
func (op operation) state(cmd *command, r *store.Request) store.State {
	if cmd.outcome != nil {
		return store.State{Err: cmd.outcome}
	}
	reply, err := cmd.reply()
	if err != nil {
		return store.State{Err: err}
	}
	var bucket algorithm.FixedWindow
	now := op.now
	if op.script == nil {
		bucket, err = decodeCheck(reply, now)
	} else {
		bucket, now, err = decodeWrite(reply, -cmd.ints[argNow])
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
