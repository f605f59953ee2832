package redis

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// send tries every command once and sets the outcomes. A server that lacks a
// script gets it and is asked again, and one that refuses plain charges is sent scripts.
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
	instead := replacePlain(cmds)
	if len(instead) > 0 {
		fault = l.pipeline(ctx, instead)
	}
	if crossing := withOutcome(cmds, splitting); len(crossing) > 0 {
		l.splits.Store(true)
		fault = l.pipeline(ctx, crossing)
	}
	if unknown := withOutcome(cmds, scriptless); len(unknown) > 0 {
		if fault = l.load(ctx, unknown); fault == nil {
			fault = l.pipeline(ctx, unknown)
		}
	}
	l.askTime(ctx, cmds)
	if slices.ContainsFunc(instead, func(c *command) bool { return c.outcome == nil }) {
		l.scripted.Store(true)
	}
	l.fault.note(fault)
	reported(fault)
}

func withOutcome(cmds []*command, h hint) (some []*command) {
	for _, cmd := range cmds {
		if cmd.outcome != nil && says(cmd.outcome, h) {
			some = append(some, cmd)
		}
	}
	return some
}

// askTime asks the server for the time if a reply has one that is not believed. If it is
// true after all, the server's clock was set, and the reply holds.
func (l *lane) askTime(ctx context.Context, cmds []*command) {
	var asked time.Time
	for _, cmd := range cmds {
		if !errors.Is(cmd.outcome, errTime) {
			continue
		}
		if asked.IsZero() {
			asked = time.Now()
			now, err := l.client.Load().Time(ctx).Result()
			if err != nil {
				return
			}
			cmd.clock.observe(now.UnixMicro(), asked, time.Now())
		}
		if cmd.clock.agrees(cmd.integers()[placeOfNow], asked) {
			cmd.outcome = nil
		}
	}
}

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
	var now int64
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
	}
	sent := time.Now()
	err := l.exec(ctx, cmds)
	at := time.Now()
	var reconnect bool
	for _, cmd := range cmds {
		if cmd.settleOutcome(err); cmd.outcome == nil {
			continue
		}
		cmd.outcome = fmt.Errorf("redis %s: %w", l.addr, cmd.outcome)
		if isServerFault(cmd.outcome) {
			fault = cmd.outcome
		}
		if l.shard.finder != nil && pointsElsewhere(cmd.outcome) {
			l.shard.nudge()
		}
		reconnect = reconnect || says(cmd.outcome, demoted)
	}
	if reconnect {
		l.shard.reconnect(l.addr)
	}
	observe(cmds, sent, at)
	return fault
}

// errTime is the outcome of a command whose reply has a time that is not believed.
var errTime = errors.New("the reply has a false time, or the server's clock was set")

// observe passes the times in the replies to the clock that decides.
func observe(cmds []*command, sent, at time.Time) {
	var last int64
	believed := false
	for _, cmd := range cmds {
		if !cmd.asksClock() || cmd.outcome != nil {
			continue
		}
		reply := cmd.integers()
		if len(reply) == 0 || reply[placeOfNow] == 0 {
			continue
		}
		// Buckets of a bundle share a reading.
		if now := reply[placeOfNow]; now != last {
			last, believed = now, cmd.clock.observe(now, sent, at)
		}
		switch {
		case believed:
		case cmd.reads:
			cmd.outcome = notExecuted(errTime)
		default:
			cmd.outcome = fmt.Errorf("%w: %w", store.ErrUncertain, errTime)
		}
	}
}

// guess lets scripts do without reading the clock. The first one of a pipeline reads it,
// and so do bundles, once each.
func guess(cmds []*command, isRead bool) {
	var passed int64
	for _, cmd := range cmds {
		if !cmd.asksClock() {
			continue
		}
		if isRead && passed == 0 {
			passed = cmd.clock.passed(time.Now())
		}
		cmd.stamp(passed)
		isRead = true
	}
}

// primaryNow is the time of the clock that decides, or that of this machine until a
// reply has told it.
func (c *command) primaryNow() int64 {
	at := time.Now()
	if c.clock != nil {
		if now, _, ok := c.clock.estimate(at); ok {
			return now
		}
	}
	return at.UnixMicro()
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
	var bundles []*bundle
	if l.canBundle() && len(cmds) > 1 {
		bundles, cmds = newBundles(cmds)
	}
	guess(cmds, slices.ContainsFunc(bundles, func(b *bundle) bool { return b.members[0].asksClock() }))
	for _, cmd := range cmds {
		cmd.single()
	}
	if len(bundles) == 0 && len(cmds) == 1 && !cmds[0].asking && cmds[0].charge == nil {
		return l.client.Load().Process(ctx, cmds[0])
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

func (b *bundle) goesWith(c *command) bool {
	m := b.members[0]
	return c.script == m.script && c.clock == m.clock && c.args[placeOfOperation] == m.args[placeOfOperation] && len(b.members) < maxBundle
}

// newBundles bundles commands. Those that stay alone are among the others.
func newBundles(cmds []*command) (bundles []*bundle, others []*command) {
	others = make([]*command, 0, len(cmds))
	for _, c := range cmds {
		if c.script == nil || c.script.bundle == nil || c.args[placeOfWord] != wordEvalSHA {
			others = append(others, c)
			continue
		}
		// Into the last one that it fits into, or a new one.
		i := len(bundles) - 1
		for i >= 0 && !bundles[i].goesWith(c) {
			i--
		}
		if i < 0 {
			i, bundles = len(bundles), append(bundles, new(bundle))
		}
		bundles[i].members = append(bundles[i].members, c)
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

func (b *bundle) write() {
	first := b.members[0]
	args := make([]any, 0, len(b.members)+len(first.args))
	args = append(args, wordEvalSHA, first.script.bundle.sha, len(b.members))
	same := true
	for _, m := range b.members {
		args = append(args, &m.key)
		same = same && bytes.Equal(m.packed, first.packed)
	}
	args = append(args, first.args[placeOfOperation])
	if same {
		args = append(args, &first.packed)
	} else {
		numbers := make([]byte, 0, len(b.members)*len(first.packed))
		for _, m := range b.members {
			numbers = append(numbers, m.packed...)
		}
		args = append(args, numbers, wordEach)
	}
	b.Cmd = goredis.NewCmd(context.Background(), args...)
}

// share gives each member its part of the reply, or the error.
func (b *bundle) share() {
	reply, err := b.Result()
	texts, _ := reply.(string)
	list, _ := reply.([]any)
	size := len(texts) / len(b.members)
	for i, m := range b.members {
		switch {
		case err != nil:
			m.failure = err
		case len(list) == len(b.members):
			m.reply, _ = list[i].(string)
			m.failure, _ = list[i].(error)
		default:
			m.reply = texts[i*size : (i+1)*size]
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
