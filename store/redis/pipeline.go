package redis

import (
	"context"
	"fmt"
	"time"
)

// send gives every command its outcome of one try. A server that does not know
// a script is given it, and asked again.
func (l *lane) send(ctx context.Context, cmds []*command) {
	var reported func(error)
	err := ErrShardDown
	if l.isUp() {
		reported, err = l.breaker.Allow()
	}
	if err != nil {
		err = notExecuted(l.down())
		for _, cmd := range cmds {
			cmd.outcome = err
		}
		return
	}
	fault := l.pipeline(ctx, cmds)
	if crossing := withOutcome(cmds, splitting); len(crossing) > 0 {
		l.splits.Store(true)
		fault = l.pipeline(ctx, crossing)
	}
	if unknown := withOutcome(cmds, scriptless); len(unknown) > 0 {
		if fault = l.load(ctx, unknown); fault == nil {
			fault = l.pipeline(ctx, unknown)
		}
	}
	l.fault.note(fault)
	reported(fault)
}

// pipeline sends cmds in one round trip and returns an error that speaks
// against the server, if there is one.
func (l *lane) pipeline(ctx context.Context, cmds []*command) (fault error) {
	var teller *command
	var passed int64
	for _, cmd := range cmds {
		if cmd.sent || cmd.outcome != nil {
			cmd.renew()
		}
		if cmd.clock != nil {
			if cmd.stamp(passed); teller == nil {
				// The first one reads the clock; the others may save it.
				teller, passed = cmd, cmd.clock.passed(time.Now())
			}
		}
	}
	err := l.exec(ctx, cmds)
	at := time.Now()
	var reconnect bool
	for _, cmd := range cmds {
		if l.settle(cmd, err); isServerFault(cmd.outcome) {
			fault = cmd.outcome
		}
		reconnect = reconnect || says(cmd.outcome, demoted)
	}
	if reconnect {
		l.shard.reconnect(l.addr)
	}
	if teller != nil && teller.outcome == nil {
		if reply := teller.integers(); len(reply) > 0 && reply[placeOfNow] != 0 {
			teller.clock.observe(reply[placeOfNow], at)
		}
	}
	return fault
}

// exec sends cmds in one go. A single one needs no pipeline.
func (l *lane) exec(ctx context.Context, cmds []*command) error {
	if len(cmds) == 1 && !cmds[0].asking {
		return l.client.Load().Process(ctx, cmds[0])
	}
	var bundles []*bundle
	if l.canBundle() {
		bundles, cmds = newBundles(cmds)
	}
	pipe := l.client.Load().Pipeline()
	for _, b := range bundles {
		_ = pipe.Process(ctx, b)
	}
	for _, cmd := range cmds {
		if cmd.asking {
			pipe.Do(ctx, wordAsking)
		}
		_ = pipe.Process(ctx, cmd)
	}
	_, err := pipe.Exec(ctx)
	for _, b := range bundles {
		b.share()
	}
	return err
}

// settle sets what became of cmd in a pipeline that returned execErr.
func (l *lane) settle(cmd *command, execErr error) {
	if cmd.settleOutcome(execErr); cmd.outcome == nil {
		return
	}
	if l.shard.finder != nil && pointsElsewhere(cmd.outcome) {
		l.shard.nudge()
	}
	cmd.outcome = fmt.Errorf("redis %s: %w", l.addr, cmd.outcome)
}

// withOutcome returns those that were answered with a reply that has the hint.
func withOutcome(cmds []*command, h hint) (some []*command) {
	for _, cmd := range cmds {
		if cmd.outcome != nil && says(cmd.outcome, h) {
			some = append(some, cmd)
		}
	}
	return some
}
