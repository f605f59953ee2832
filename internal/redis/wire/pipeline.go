package wire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// run tries every call of the batch once and concludes it. cmds is scratch space.
func (l *Lane) run(batch []*Call, cmds []*Command) {
	now := time.Now()
	var last time.Time
	var fair time.Duration
	live := batch[:0]
	for _, c := range batch {
		switch {
		case !c.claim():
		case l.life.Err() != nil:
			c.fail(fmt.Errorf("redis %s: %w", l.Addr, ErrClosed))
		case !c.deadline.After(now) && !l.persistent:
			c.fail(fmt.Errorf("redis %s: %w", l.Addr, ErrTimeout))
		case !c.deadline.After(now) && c.tries > 0:
			c.finish()
		default:
			live = append(live, c)
			for _, cmd := range c.Cmds {
				if cmd.isOpen() {
					cmds = append(cmds, cmd)
				}
			}
			fair = max(fair, c.fair)
			if c.deadline.After(last) {
				last = c.deadline
			}
		}
	}
	if len(live) == 0 {
		return
	}
	// The latest deadline bounds the batch: callers with an earlier one stop waiting
	// by themselves. The time that callers had lost before does not count against
	// the server.
	end := last
	if fairEnd := now.Add(fair); fairEnd.After(last) {
		end = fairEnd
	}
	if l.persistent {
		// A charge gets at least one try, however long it waited for the processor.
		if last.Before(now) {
			last = now
		}
		end = last.Add(ReplyTimeout)
	}
	ctx, cancel := context.WithDeadline(l.life, end)
	defer cancel()
	l.send(ctx, cmds, false)
	took := time.Since(now)
	l.pace.Add((int64(took) - l.pace.Load()) / 8)
	if slices.ContainsFunc(cmds, (*Command).answered) {
		// What was not sent says nothing about how far the server is.
		l.way.note(took, now)
	}
	for _, c := range live {
		_ = l.Shard.Contain(l.Addr, func() error {
			l.conclude(c)
			return nil
		})
	}
	// The space outlives the requests, whose limits lead to a whole config.
	clear(cmds)
}

// claim makes c the worker's, and reports whether it is still wanted.
func (c *Call) claim() bool {
	// Commands of a call that was sent before may have run: it has to be finished.
	return c.state.CompareAndSwap(callQueued, callSent) || c.state.Load() == callSent
}

// isOpen reports whether c has to be sent, for the first time or again.
func (c *Command) isOpen() bool {
	if c.Outcome == nil {
		return !c.answered()
	}
	return errors.Is(c.Outcome, store.ErrNotExecuted) && !errors.Is(c.Outcome, store.ErrFinal)
}

func (c *Command) answered() bool {
	switch cmd := c.Cmder.(type) {
	case nil, *goredis.StringCmd:
		text, _ := c.Result()
		return text != ""
	case *goredis.StringSliceCmd:
		return cmd.Val() != nil
	case *goredis.IntCmd:
		// A write without a script adds to a number.
		return cmd.Val() != 0
	case *goredis.Cmd:
		return cmd.Val() != nil
	}
	return false
}

// send tries every command once and sets the outcomes. A server that lacks a
// script gets it and is asked again, and one that refuses plain writes is sent scripts. Of what is sent
// apart, a reply beyond the bounds, or too long for the time, does not speak against the server.
func (l *Lane) send(ctx context.Context, cmds []*Command, apart bool) {
	var reported func(error)
	err := ErrShardDown
	if l.IsUp() {
		reported, err = l.breaker.Allow()
	}
	if err != nil {
		err = store.NotExecuted(l.Down())
		for _, cmd := range cmds {
			cmd.Outcome = err
		}
		return
	}
	fault := l.contain(func(*goredis.Client) error { return l.try(ctx, cmds) })
	if errors.Is(fault, contain.ErrPanic) {
		giveUp(cmds, fault)
	}
	if _, isPart := errors.AsType[partError](fault); apart && (isPart || errors.Is(fault, ErrFraming)) {
		fault = nil
	}
	l.fault.note(fault)
	reported(fault)
}

// try sends every command once and sets the outcomes. It returns an error that speaks against the server, if
// there is one.
func (l *Lane) try(ctx context.Context, cmds []*Command) (fault error) {
	fault = l.pipeline(ctx, cmds)
	l.undoForeign(cmds)
	instead := replacePlain(cmds)
	if len(instead) > 0 {
		fault = l.pipeline(ctx, instead)
	}
	if crossing := withOutcome(cmds, splitting); len(crossing) > 0 {
		l.splits.Store(true)
		fault = l.pipeline(ctx, crossing)
	}
	// NOSCRIPT for what calls none makes no sense, and stays an error.
	unknown := slices.DeleteFunc(withOutcome(cmds, scriptless), func(c *Command) bool { return c.script == nil })
	if len(unknown) > 0 {
		fault = l.callUnknown(ctx, unknown)
	}
	l.askTime(ctx, cmds)
	for _, c := range instead {
		switch {
		case c.Outcome != nil:
		case c.Reads:
			l.unopening.Store(true)
		default:
			l.Scripted.Store(true)
		}
	}
	return fault
}

// contain uses the client. A panic, such as of go-redis at a malformed reply, becomes an error, and replaces
// the connections, because replies that were not read would be taken for those to later commands.
func (l *Lane) contain(use func(client *goredis.Client) error) error {
	err := l.Shard.Contain(l.Addr, func() error { return use(l.client.Load()) })
	if errors.Is(err, contain.ErrPanic) {
		l.renew()
	}
	return err
}

// giveUp makes a panic the outcome of the commands that have none.
func giveUp(cmds []*Command, fault error) {
	for _, c := range cmds {
		switch {
		case c.Outcome != nil:
		case !c.sent, c.Reads:
			c.Outcome = store.NotExecuted(fault)
		case !c.answered():
			c.Outcome = fmt.Errorf("%w: %w", store.ErrUncertain, fault)
		}
	}
}

// IsUp reports whether calls are made. Pings find out when a server is back.
func (l *Lane) IsUp() bool {
	return l.breaker.State() == gobreaker.StateClosed && l.unfit.Load() == nil
}

// SetUnfit makes no calls be made, because of err, or calls be made again if err is nil: the
// server answers, and is of a kind that cannot keep buckets. Its name may lead to another one by now; where it leads to
// several in turn, it has to stay at one.
func (l *Lane) SetUnfit(err error) {
	if err == nil {
		l.unfit.Store(nil)
		return
	}
	if l.unfit.Store(&err); !errors.Is(err, ErrTurns) {
		l.reconnect()
	}
}

// Down is the error of calls that are not made. It quotes the last fault without
// wrapping it, because these calls did not fail that way.
func (l *Lane) Down() error {
	if unfit := l.unfit.Load(); unfit != nil {
		return fmt.Errorf("redis %s: %w: %w", l.Addr, ErrUnfit, *unfit)
	}
	if fault := l.fault.load(); fault != nil {
		return fmt.Errorf("redis %s: %w, the last of which was: %s", l.Addr, ErrShardDown, fault.Error())
	}
	return fmt.Errorf("redis %s: %w", l.Addr, ErrShardDown)
}

// lastFault is the last error that spoke against a server.
type lastFault struct{ err atomic.Pointer[error] }

func (f *lastFault) note(err error) {
	if err != nil {
		f.err.Store(&err)
	}
}

func (f *lastFault) load() error {
	if err := f.err.Load(); err != nil {
		return *err
	}
	return nil
}

// isServerFault reports whether err speaks against the server, and not only against
// one command.
func isServerFault(err error) bool {
	if err == nil {
		return false
	}
	m, isReply := MeaningOf(err)
	return !isReply || m.Hint&unfit != 0
}

// pipeline sends cmds in one round trip and returns an error that speaks against
// the server, if there is one.
func (l *Lane) pipeline(ctx context.Context, cmds []*Command) (fault error) {
	var now int64
	var nowBy *Clock
	for _, cmd := range cmds {
		if cmd.sent || cmd.Outcome != nil {
			cmd.Ready()
		}
		if cmd.write != nil {
			if now == 0 || nowBy != cmd.Clock {
				now, nowBy = cmd.Clock.Now(), cmd.Clock
			}
			cmd.CheckTime(now)
		}
	}
	sent := time.Now()
	for _, cmd := range cmds {
		cmd.countDown(sent)
	}
	err := l.exec(ctx, cmds)
	at := time.Now()
	var reconnect bool
	for _, cmd := range cmds {
		if cmd.SetOutcome(err); cmd.Outcome == nil {
			continue
		}
		cmd.Outcome = fmt.Errorf("redis %s: %w", l.Addr, cmd.Outcome)
		if isServerFault(cmd.Outcome) {
			fault = cmd.Outcome
		}
		if l.Shard.finder != nil && pointsElsewhere(cmd.Outcome) {
			l.Shard.nudge()
		}
		reconnect = reconnect || Says(cmd.Outcome, demoted)
		if Says(cmd.Outcome, LackingInside) {
			l.lacks.Store(true)
		}
		l.Shard.Options.noteLogin(cmd.Outcome)
	}
	if reconnect {
		l.Shard.reconnect(l.Addr)
	}
	observe(cmds, sent, at)
	return fault
}

// noteLogin reports that a server refuses the credentials, if err says so.
func (o *Options) noteLogin(err error) {
	if o.LoginRefused != nil && Says(err, login) {
		o.LoginRefused()
	}
}

// CheckTime makes a plain write a script call if it may run too late, by the time now: it
// may have waited for long. It is exported for internal/simstore only.
func (c *Command) CheckTime(now int64) {
	if c.ints[placeOfNow] = -now; c.write.Latest() <= now+ReplyTimeout.Microseconds() {
		c.becomeScript()
	}
}

// exec sends cmds at once. A single one needs no pipeline.
func (l *Lane) exec(ctx context.Context, cmds []*Command) error {
	var bundles []*bundle
	if l.canBundle() && len(cmds) > 1 {
		bundles, cmds = newBundles(cmds)
	}
	guess(cmds, slices.ContainsFunc(bundles, func(b *bundle) bool { return b.members[0].asksClock() }))
	if len(bundles) == 0 && len(cmds) == 1 && !cmds[0].asking && cmds[0].write == nil {
		cmds[0].single()
		return l.client.Load().Process(ctx, cmds[0])
	}
	pipe := l.client.Load().Pipeline()
	for _, b := range bundles {
		_ = pipe.Process(ctx, b)
	}
	for _, cmd := range cmds {
		cmd.AddTo(ctx, pipe)
	}
	_, err := pipe.Exec(ctx)
	for _, b := range bundles {
		b.share()
	}
	return err
}

// AddTo adds to a pipeline the commands of Redis that c consists of. It is exported for
// internal/simstore only.
func (c *Command) AddTo(ctx context.Context, pipe goredis.Pipeliner) {
	c.single()
	c.add(ctx, pipe, c)
	if c.write == nil {
		return
	}
	if c.expireArgs != nil {
		c.add(ctx, pipe, c.expire)
		c.add(ctx, pipe, c.size)
	}
	c.add(ctx, pipe, c.follow)
}

func (c *Command) add(ctx context.Context, pipe goredis.Pipeliner, cmd goredis.Cmder) {
	if c.asking {
		pipe.Do(ctx, wordAsking)
	}
	_ = pipe.Process(ctx, cmd)
}

// canBundle reports whether commands can be bundled. In a Redis Cluster, and behind
// some proxies, the keys of a call have to be in one slot.
func (l *Lane) canBundle() bool { return l.batch > 1 && !l.Shard.InCluster && !l.splits.Load() }

// guess lets scripts do without reading the clock. The first one of a pipeline reads it,
// and so do bundles, once each.
func guess(cmds []*Command, isRead bool) {
	var passed int64
	for _, cmd := range cmds {
		if !cmd.asksClock() {
			continue
		}
		if isRead && passed == 0 {
			passed = cmd.Clock.passed(time.Now())
		}
		cmd.stamp(passed)
		isRead = true
	}
}

// asksClock reports whether c calls a script that may read the clock that decides.
func (c *Command) asksClock() bool { return c.script != nil && c.Clock != nil }

// stamp gives a script an instant that the server's clock has passed, which may
// save it the reading; 0 makes it read the clock.
func (c *Command) stamp(now int64) {
	if c.MayGuess {
		c.ints[placeOfNow] = -now
		c.packed = AppendPacked(c.packed[:0], c.ints...)
	}
}

// single makes the command to send of a call of a script that is in no bundle.
func (c *Command) single() {
	if c.script != nil {
		c.Cmder = goredis.NewStringCmd(context.Background(), c.args...)
	}
}

// NoRetry keeps go-redis from repeating a command that may have spent something.
func (c *Command) NoRetry() bool { return c.script != nil || c.write != nil }

// Args is called by go-redis to write the command to a connection: until then it
// certainly did not run.
func (c *Command) Args() []any {
	c.sent = true
	return c.Cmder.Args()
}

// SetOutcome sets the outcome of c after a pipeline that returned execErr. It is exported
// for internal/simstore only.
func (c *Command) SetOutcome(execErr error) {
	_, err := c.Result()
	if err == nil {
		if c.answered() {
			c.Outcome = nil
			return
		}
		// go-redis sets no error on commands if the setup of the connection failed, for
		// example because of the password.
		if err = execErr; err == nil {
			err = errNoReply
		}
	}
	err = classified(err)
	m, isReply := MeaningOf(err)
	switch {
	case !c.sent, neverLeft(err):
		c.Outcome = store.NotExecuted(err)
	case c.Reads, isReply && m.Fate != Uncertain:
		c.Outcome = refused(err)
	default:
		c.Outcome = fmt.Errorf("%w: %w", store.ErrUncertain, err)
	}
}

// Result is the reply to a command that was sent, and its error.
func (c *Command) Result() (text string, err error) {
	if c.Cmder == nil {
		return c.reply, c.failure
	}
	switch cmd := c.Cmder.(type) {
	case *goredis.StringCmd:
		text = cmd.Val()
	case *goredis.Cmd:
		text, _ = cmd.Val().(string)
	}
	if err = c.Err(); err == nil && c.expireArgs != nil {
		err = cmp.Or(c.expire.Err(), c.size.Err())
	}
	return text, err
}

// errTime is the outcome of a command whose reply has a time that is not believed.
var errTime = errors.New("the reply has a false time, or the server's clock was set")

// observe passes the times in the replies to the clock that decides.
func observe(cmds []*Command, sent, at time.Time) {
	var last int64
	believed := false
	for _, cmd := range cmds {
		if !cmd.asksClock() || cmd.Outcome != nil {
			continue
		}
		reply := cmd.Numbers()
		if len(reply) == 0 || reply[placeOfNow] == 0 {
			continue
		}
		// Buckets of a bundle share a reading.
		if now := reply[placeOfNow]; now != last {
			last, believed = now, cmd.Clock.observe(now, sent, at)
		}
		switch {
		case believed:
		case cmd.Reads:
			cmd.Outcome = store.NotExecuted(errTime)
		default:
			cmd.Outcome = fmt.Errorf("%w: %w", store.ErrUncertain, errTime)
		}
	}
}

// Numbers is the reply of a script, or nil if it is malformed.
func (c *Command) Numbers() []int64 {
	text, _ := c.Result()
	numbers, err := Unpack(c.numbers[:0], text)
	if err != nil {
		return nil
	}
	return numbers
}

// undoForeign undoes what openings have done to what is not ours, also if their callers have left.
// Those show nothing then, as where there is no window, so that the script says what is wrong.
func (l *Lane) undoForeign(cmds []*Command) {
	var undone []*Command
	var undo [][]any
	for _, c := range cmds {
		if c.expireArgs == nil {
			continue
		}
		opened, bounded := c.Cmder.(*goredis.Cmd), c.expire.Val() == int64(1)
		made := opened.Val() == int64(1)
		if !IsReply(opened.Err()) {
			fields, _ := c.size.Val().(int64)
			texts, err := c.follow.Result()
			// Where the login of the connection failed, nothing was read, and no error says so.
			if err != nil || len(texts) == 0 || !c.write.(Opening).IsForeign(made, fields, texts) {
				continue
			}
			c.follow.SetVal(make([]string, len(texts)))
		}
		before := len(undo)
		if made {
			undo = append(undo, []any{wordHDel, c.key, c.args[2]})
		}
		// Something was there before, so it never expired.
		if bounded {
			undo = append(undo, []any{wordPersist, c.key})
		}
		if len(undo) > before {
			undone = append(undone, c)
		}
	}
	if len(undo) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(l.life, ReplyTimeout)
	defer cancel()
	pipe := l.client.Load().Pipeline()
	for _, words := range undo {
		pipe.Do(ctx, words...)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		for _, c := range undone {
			c.Outcome = store.NotExecuted(fmt.Errorf("redis %s: undo what an opening did to another program's data: %w", l.Addr, classified(err)))
		}
	}
}

// replacePlain makes the plain writes that the server has refused calls of the script,
// and returns them.
func replacePlain(cmds []*Command) (instead []*Command) {
	for _, c := range cmds {
		if c.write != nil && c.Outcome != nil && Says(c.Outcome, Lacking) {
			c.becomeScript()
			instead = append(instead, c)
		}
	}
	return instead
}

func withOutcome(cmds []*Command, h Hint) (some []*Command) {
	for _, cmd := range cmds {
		if cmd.Outcome != nil && Says(cmd.Outcome, h) {
			some = append(some, cmd)
		}
	}
	return some
}

// callUnknown sends calls of scripts that the server lacks, once it has loaded them. Behind proxies
// that refuse to load scripts, or close the connection on it twice in a row, the calls bring the
// source. The server knows that script then, and not its bundle.
func (l *Lane) callUnknown(ctx context.Context, cmds []*Command) error {
	err := l.load(ctx, cmds)
	l.NoteHidden(err)
	cut := isCut(err)
	bySource := err != nil && ctx.Err() == nil && (Says(err, Lacking) || cut)
	neverLoads := Says(err, Lacking) || cut && l.unloaded.Load()
	l.unloaded.Store(cut)
	for _, cmd := range cmds {
		switch {
		case bySource:
			cmd.callBySource()
		case err != nil:
			// The server refused them, so they count as not sent.
			cmd.sent, cmd.Outcome = false, refused(err)
		}
	}
	if err != nil && !bySource {
		return err
	}
	fault := l.pipeline(ctx, cmds)
	if neverLoads && slices.ContainsFunc(cmds, func(c *Command) bool { return c.Outcome == nil }) {
		l.splits.Store(true)
	}
	return fault
}

// isCut reports whether a call was sent and had no reply.
func isCut(err error) bool { return err != nil && !IsReply(err) && !neverLeft(err) }

func (l *Lane) load(ctx context.Context, cmds []*Command) error {
	pipe := l.client.Load().Pipeline()
	loaded := map[*Script]bool{}
	for _, cmd := range cmds {
		if !loaded[cmd.script] {
			loaded[cmd.script] = true
			cmd.script.Load(ctx, pipe)
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("redis %s: load scripts: %w", l.Addr, classified(err))
	}
	return nil
}

// askTime asks the server for the time if a reply has one that is not believed. If it is
// true after all, the server's clock was set, and the reply holds.
func (l *Lane) askTime(ctx context.Context, cmds []*Command) {
	var asked time.Time
	for _, cmd := range cmds {
		if !errors.Is(cmd.Outcome, errTime) {
			continue
		}
		if asked.IsZero() {
			asked = time.Now()
			now, err := l.client.Load().Time(ctx).Result()
			if err != nil {
				return
			}
			cmd.Clock.observe(now.UnixMicro(), asked, time.Now())
		}
		if cmd.Clock.agrees(cmd.Numbers()[placeOfNow], asked) {
			cmd.Outcome = nil
		}
	}
}

// conclude finishes a call, redirects it, or queues it for another try, without
// delaying the other calls of its pipeline.
func (l *Lane) conclude(c *Call) {
	if l.Shard.InCluster && l.redirect(c) {
		return
	}
	if !l.persistent || !c.isOpen() {
		c.finish()
		return
	}
	after, hasTime := NextTry(c.tries, c.deadline)
	if !hasTime || l.life.Err() != nil {
		c.finish()
		return
	}
	if c.Detached != nil && len(c.Cmds) > 1 {
		c.finishDone()
	}
	c.reopen()
	l.queue.putBack(c, after)
}

func (c *Call) isOpen() bool { return slices.ContainsFunc(c.Cmds, (*Command).isOpen) }

// NextTry returns the pause before the next try and whether there is time for it.
// The last try leaves time to report the outcome.
func NextTry(tries int, deadline time.Time) (after time.Duration, hasTime bool) {
	left := time.Until(deadline)
	return min(retryPause<<min(tries, maxDoublings), left-retryPause), left >= 2*retryPause
}

// Pause waits, and reports whether ctx is still alive.
func Pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// finishDone reports the outcomes of those commands of a detached call that are
// not open. The others stay in c.
func (c *Call) finishDone() {
	done := NewCall(c.deadline, 0)
	done.Began, done.Detached = c.Began, c.Detached
	open := c.Cmds[:0]
	for _, cmd := range c.Cmds {
		if cmd.isOpen() {
			open = append(open, cmd)
		} else {
			done.Cmds = append(done.Cmds, cmd)
		}
	}
	clear(c.Cmds[len(open):])
	c.Cmds = open
	done.finish()
}

// reopen prepares c for another try. If nothing of it ran, its caller may abandon it.
func (c *Call) reopen() {
	c.tries++
	if !slices.ContainsFunc(c.Cmds, func(cmd *Command) bool { return !cmd.isOpen() }) {
		c.state.Store(callQueued)
	}
}

// fail finishes c without running its open commands.
func (c *Call) fail(err error) {
	err = store.NotExecuted(err)
	for _, cmd := range c.Cmds {
		if cmd.isOpen() {
			cmd.Outcome = err
		}
	}
	c.finish()
}

func (c *Call) finish() {
	if c.Detached != nil {
		c.Detached(c)
		return
	}
	c.done <- struct{}{}
}
