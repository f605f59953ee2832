package redis

import (
	"context"
	"fmt"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// send tries every command once and sets the outcomes. A server that lacks a
// script gets it and is asked again.
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

// withOutcome returns the commands whose error reply has the hint.
func withOutcome(cmds []*command, h hint) (some []*command) {
	for _, cmd := range cmds {
		if cmd.outcome != nil && says(cmd.outcome, h) {
			some = append(some, cmd)
		}
	}
	return some
}

// load loads the scripts of cmds.
func (l *lane) load(ctx context.Context, cmds []*command) error {
	pipe := l.client.Load().Pipeline()
	loaded := map[*script]bool{}
	for _, cmd := range cmds {
		if !loaded[cmd.script] {
			loaded[cmd.script] = true
			cmd.script.load(ctx, pipe)
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		err = fmt.Errorf("redis %s: load scripts: %w", l.addr, err)
		for _, cmd := range cmds {
			// The server refused them, so they count as not sent.
			cmd.sent, cmd.outcome = false, refused(err)
		}
		return err
	}
	return nil
}

// pipeline sends cmds in one round trip and returns an error that speaks against
// the server, if there is one.
func (l *lane) pipeline(ctx context.Context, cmds []*command) (fault error) {
	var first *command
	var passed, now int64
	var nowBy *primaryClock
	for _, cmd := range cmds {
		if cmd.sent || cmd.outcome != nil {
			cmd.renew()
		}
		if cmd.charge != nil {
			if now == 0 || nowBy != cmd.clock {
				now, nowBy = cmd.primaryNow(), cmd.clock
			}
			cmd.checkWindow(now)
		}
		if cmd.clock != nil && cmd.charge == nil {
			if cmd.stamp(passed); first == nil {
				// The first one reads the clock; the others may save the reading.
				first, passed = cmd, cmd.clock.passed(time.Now())
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
	if first != nil && first.outcome == nil {
		if reply := first.integers(); len(reply) > 0 && reply[placeOfNow] != 0 {
			first.clock.observe(reply[placeOfNow], at)
		}
	}
	return fault
}

// primaryNow is the time of the clock that decides.
func (c *command) primaryNow() int64 {
	if c.clock == nil {
		return time.Now().UnixMicro()
	}
	now, _, _ := c.clock.estimate(time.Now())
	return now
}

// checkWindow makes a plain charge a script call if its window may be over before it
// runs: the charge may have waited for long.
func (c *command) checkWindow(now int64) {
	if c.ints[placeOfNow] = -now; c.charge.Until <= now+replyTimeout.Microseconds() {
		c.becomeScript()
	}
}

// exec sends cmds at once. A single one needs no pipeline.
func (l *lane) exec(ctx context.Context, cmds []*command) error {
	if len(cmds) == 1 && !cmds[0].asking && cmds[0].charge == nil {
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
		if cmd.charge == nil {
			continue
		}
		if cmd.asking {
			pipe.Do(ctx, wordAsking)
		}
		_ = pipe.Process(ctx, cmd.window)
	}
	_, err := pipe.Exec(ctx)
	for _, b := range bundles {
		b.share()
	}
	return err
}

// settle sets the outcome of cmd in a pipeline that returned execErr.
func (l *lane) settle(cmd *command, execErr error) {
	if cmd.settleOutcome(execErr); cmd.outcome == nil {
		return
	}
	if l.shard.finder != nil && pointsElsewhere(cmd.outcome) {
		l.shard.nudge()
	}
	cmd.outcome = fmt.Errorf("redis %s: %w", l.addr, cmd.outcome)
}

// maxBundle bounds the buckets of one call of a script, which blocks its server
// for less than a millisecond.
const maxBundle = 100

// bundle is several commands of one script, sent as one call of it. That saves the
// server a third of its time, and go-redis most of its own.
type bundle struct {
	*goredis.Cmd
	members []*command
}

// canBundle reports whether commands can be bundled. In a Redis Cluster, and behind
// some proxies, the keys of a call have to be in one slot.
func (l *lane) canBundle() bool { return l.batch > 1 && !l.shard.isCluster() && !l.splits.Load() }

// isBundled reports whether c can be bundled with others.
func (c *command) isBundled() bool {
	return c.script != nil && c.script.bundle != nil && c.args[placeOfWord] == wordEvalSHA
}

// goesWith reports whether c fits into b.
func (b *bundle) goesWith(c *command) bool {
	m := b.members[0]
	return c.script == m.script && c.args[placeOfOperation] == m.args[placeOfOperation] && len(b.members) < maxBundle
}

// newBundles bundles commands. Those that stay alone are among the others.
func newBundles(cmds []*command) (bundles []*bundle, others []*command) {
	others = make([]*command, 0, len(cmds))
	for _, c := range cmds {
		if !c.isBundled() {
			others = append(others, c)
			continue
		}
		bundles = addToBundles(bundles, c)
	}
	several := bundles[:0]
	for _, b := range bundles {
		if len(b.members) == 1 {
			others = append(others, b.members[0])
			continue
		}
		b.write()
		several = append(several, b)
	}
	return several, others
}

// addToBundles adds c to the last bundle that it fits into, or to a new one.
func addToBundles(bundles []*bundle, c *command) []*bundle {
	for i := len(bundles) - 1; i >= 0; i-- {
		if b := bundles[i]; b.goesWith(c) {
			b.members = append(b.members, c)
			return bundles
		}
	}
	return append(bundles, &bundle{members: []*command{c}})
}

// write makes the command to send.
func (b *bundle) write() {
	first := b.members[0]
	args := make([]any, 0, len(b.members)+len(first.args)-1)
	args = append(args, wordEvalSHA, first.script.bundle.sha, len(b.members))
	numbers := make([]byte, 0, len(b.members)*len(first.packed))
	for _, m := range b.members {
		args = append(args, &m.key)
		numbers = append(numbers, m.packed...)
	}
	b.Cmd = goredis.NewCmd(context.Background(), append(args, first.args[placeOfOperation], numbers)...)
	b.SetFirstKeyPos(first.firstKey)
}

// share gives each member its part of the reply, or the error.
func (b *bundle) share() {
	reply, err := b.Result()
	texts, _ := reply.(string)
	list, _ := reply.([]any)
	size := len(texts) / len(b.members)
	for i, m := range b.members {
		cmd := m.Cmder.(*goredis.StringCmd)
		switch {
		case err != nil:
			cmd.SetErr(err)
		case len(list) == len(b.members):
			if failure, ok := list[i].(error); ok {
				cmd.SetErr(failure)
			} else if text, ok := list[i].(string); ok {
				cmd.SetVal(text)
			}
		default:
			cmd.SetVal(texts[i*size : (i+1)*size])
		}
	}
}

// NoRetry keeps go-redis from repeating a bundle that may have run.
func (b *bundle) NoRetry() bool { return true }

// Args is called by go-redis to write the bundle to a connection: from then on its
// members may have run.
func (b *bundle) Args() []any {
	for _, m := range b.members {
		m.sent = true
	}
	return b.Cmd.Args()
}

var _ goredis.Cmder = (*bundle)(nil)
