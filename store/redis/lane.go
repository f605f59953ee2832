package redis

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/sony/gobreaker/v2"
)

func init() {
	// go-redis prints a line to stderr for each connection that fails, which
	// for a server that is down is many times a second. The error is returned
	// as well, and reported by whoever uses the store.
	goredis.SetLogger(logging.NewBlacklistLogger([]string{"failed to dial"}))
}

// poolTimeout is not met: there are as many connections as workers, and few
// that ask for a server's health.
const poolTimeout = 5 * time.Second

// clientOptions are those of a client that connects when it is first used. It
// never repeats a command by itself, and every wait of it is bounded.
func clientOptions(addr string, opts *ShardOptions) *goredis.Options {
	o := &goredis.Options{
		Network: "tcp",
		Addr:    addr,
		// RESP2 saves the push machinery of RESP3, which nothing here uses.
		Protocol:                   2,
		CredentialsProviderContext: opts.Credentials,
		TLSConfig:                  opts.TLS,
		Dialer:                     opts.dial,
		DB:                         opts.DB,
		MaxRetries:                 -1,
		DialTimeout:                opts.dialTimeout(),
		DialerRetries:              1,
		// Every call brings its deadline, which may be a long one.
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		ContextTimeoutEnabled: true,
		PoolTimeout:           poolTimeout,
		PoolSize:              opts.connections(),
		MaxActiveConns:        opts.connections(),
		PipelinePoolSize:      -1,
		DisableIdentity:       true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	}
	if path, ok := strings.CutPrefix(addr, "unix/"); ok {
		o.Network, o.Addr = "unix", path
	}
	return o
}

// newClient returns a client for one server.
func newClient(addr string, opts *ShardOptions, persistent bool) *goredis.Client {
	o := clientOptions(addr, opts)
	o.OnConnect = func(ctx context.Context, cn *goredis.Conn) error {
		// A server that wants a password closes a connection that sends it a bundle
		// without one, and then nobody knows what ran. What else it may say to this
		// is not what was asked for.
		if err := cn.Ping(ctx).Err(); err != nil && (!isRefusal(err) || says(err, shut)) {
			return fmt.Errorf("ping at connecting: %w", err)
		}
		if len(opts.Cluster) > 0 && !persistent {
			// A replica in a Redis Cluster answers only who asks for that.
			return cn.ReadOnly(ctx).Err()
		}
		return nil
	}
	return goredis.NewClient(o)
}

// reconnect makes calls use new connections, for a name or a virtual IP may lead to
// another server by now. What is on its way ends on the old ones.
func (l *lane) reconnect() {
	last, now := l.reconnected.Load(), time.Now().UnixNano()
	if now-last < int64(reconnectPause) || !l.reconnected.CompareAndSwap(last, now) {
		return
	}
	old := l.client.Swap(newClient(l.addr, &l.shard.opts, l.persistent))
	l.shard.retired.Go(func() {
		// Whoever has chosen them already may use them still.
		for pause(l.life, retirePause) {
			if used := old.PoolStats(); used.TotalConns == used.IdleConns {
				break
			}
		}
		_ = old.Close()
	})
}

const (
	// maxBatch bounds the calls in one pipeline, so that one batch does not
	// keep the next waiting for long.
	maxBatch = 300
	// queueLimit bounds the calls that wait for one server: about a second's
	// worth, beyond which waiting longer does not help.
	queueLimit = 1 << 17
	// linger is how long a charge waits for others to be sent with it: no response
	// waits for it, and every pipeline costs as much as several charges.
	linger = 2 * time.Millisecond
	// nearby is how quickly a server answers for which it pays to have one
	// pipeline on its way at a time, and to let it carry more.
	nearby = 300 * time.Microsecond
	// replyPatience is how long, beyond its deadline, the reply to a charge is
	// waited for. Nobody else waits, and to give up is not to know.
	replyPatience = 2 * time.Second
	// retryPause is how long a call waits that a server refused, before it is sent
	// again. It doubles with each refusal, so often at most.
	retryPause    = 10 * time.Millisecond
	mostDoublings = 4
	// reconnectPause is how often at most connections are replaced.
	reconnectPause = 100 * time.Millisecond
	// breakerPause is how long a server is left out whose pipelines fail in a
	// row. It takes one more than there are connections, for these can all be
	// cut at once while the server is well.
	breakerPause = time.Second
)

// lane is the way to one server for one purpose: a client, a queue, and the
// workers that turn what is queued into pipelines.
type lane struct {
	shard *Shard
	addr  string
	// client has the connections. It is replaced when these lead to a server that is
	// no primary any more; reconnected is when, in nanoseconds since 1970.
	client      atomic.Pointer[goredis.Client]
	reconnected atomic.Int64
	breaker     *gobreaker.TwoStepCircuitBreaker[any]
	queue       *queue
	batch       int
	// persistent makes what the server surely did not run be sent again, until its
	// deadline.
	persistent bool
	workers    sync.WaitGroup
	// gathering is held by the worker that waits for the next batch.
	gathering sync.Mutex
	// flight is full while a pipeline to a nearby server is on its way.
	flight chan struct{}
	// turns, without pipelining, is full while all connections are used; nil if
	// callers do not make their calls themselves.
	turns chan struct{}
	// awaiting is how many calls that workers have taken wait for a connection.
	awaiting atomic.Int64
	// watched is how many wait for calls of a persistent lane.
	watched atomic.Int32
	// splits is set once the server has refused several keys in one call.
	splits atomic.Bool
	// fault is the last that spoke against the server.
	fault fault
	// lags is set while a replica is too far behind to be asked; lag is how far,
	// in nanoseconds.
	lags atomic.Bool
	lag  atomic.Int64
	// lagTold is set while it was told that it is.
	lagTold atomic.Bool
	// pace is the recent average of how long a pipeline takes.
	pace atomic.Int64
	// life ends when nothing is to be sent any more.
	life context.Context
	end  context.CancelFunc
}

func newLane(s *Shard, addr string, persistent bool) *lane {
	opts := &s.opts
	l := &lane{
		shard:      s,
		addr:       addr,
		queue:      newQueue(queueLimit),
		flight:     make(chan struct{}, 1),
		batch:      1,
		persistent: persistent,
	}
	l.client.Store(newClient(addr, opts, persistent))
	l.breaker = gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Timeout:       breakerPause,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return int(c.ConsecutiveFailures) > opts.connections() },
		IsSuccessful:  func(err error) bool { return !isServerFault(err) },
		OnStateChange: l.tellState,
	})
	switch {
	case !opts.NoPipelining:
		l.batch = maxBatch
	case !persistent:
		// What is repeated until its deadline, and whose reply is waited for beyond
		// that, is not for a caller who stops waiting at the deadline.
		l.turns = make(chan struct{}, opts.poolSize())
	}
	l.lag.Store(int64(unknownLag))
	l.life, l.end = context.WithCancel(context.Background())
	for range opts.poolSize() {
		l.workers.Go(l.work)
	}
	return l
}

// isUp tells whether calls are made. Whether a server is back is seen by pings.
func (l *lane) isUp() bool { return l.breaker.State() == gobreaker.StateClosed }

// down is the error of calls that are not made. What spoke against the server
// last is told in words alone, for what that means to a call is another matter.
func (l *lane) down() error {
	if fault := l.fault.load(); fault != nil {
		return fmt.Errorf("redis %s: %w, the last of which was: %s", l.addr, ErrShardDown, fault.Error())
	}
	return fmt.Errorf("redis %s: %w", l.addr, ErrShardDown)
}

// do runs c and waits for it. If it returns nil every command has its outcome
// and the caller releases c; otherwise c must not be touched.
func (l *lane) do(ctx context.Context, c *call) (sent bool, err error) {
	if !l.isUp() {
		// Its workers may be waiting still for what it owes.
		return false, l.down()
	}
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("redis %s: %w", l.addr, err)
	}
	if l.takesTurn(ctx, c) {
		if sent, err = l.doAlone(c); err != nil {
			return sent, fmt.Errorf("redis %s: %w", l.addr, err)
		}
		return true, nil
	}
	l.watched.Add(1)
	defer l.watched.Add(-1)
	if err := l.queue.put(c); err != nil {
		return false, fmt.Errorf("redis %s: %w", l.addr, err)
	}
	if sent, err = c.wait(ctx); err != nil {
		return sent, fmt.Errorf("redis %s: %w", l.addr, err)
	}
	return sent, nil
}

// doPlain runs plain commands, for which the deadline of ctx holds, and returns the
// first error. That a key is not there is none.
func (l *lane) doPlain(ctx context.Context, cmds ...*command) error {
	deadline, _ := ctx.Deadline()
	c := newCall(deadline)
	c.cmds = append(c.cmds, cmds...)
	if _, err := l.do(ctx, c); err != nil {
		return err
	}
	defer c.release()
	for _, cmd := range cmds {
		if cmd.outcome != nil && !errors.Is(cmd.outcome, goredis.Nil) {
			return cmd.outcome
		}
	}
	return nil
}

// post runs c without waiting; c.detached is told.
func (l *lane) post(c *call) {
	if err := l.queue.put(c); err != nil {
		c.fail(fmt.Errorf("redis %s: %w", l.addr, err))
	}
}

// close lets the workers finish what is queued, or until ctx ends.
func (l *lane) close(ctx context.Context) {
	l.queue.close()
	// Closing the client ends what waits for a reply.
	end := sync.OnceFunc(func() {
		l.end()
		_ = l.client.Load().Close()
	})
	defer context.AfterFunc(ctx, end)()
	l.workers.Wait()
	for range cap(l.turns) {
		select {
		case l.turns <- struct{}{}:
		case <-l.life.Done():
		}
	}
	end()
}

func (l *lane) work() {
	batch := make([]*call, 0, l.batch)
	cmds := make([]*command, 0, l.batch)
	for {
		var alone bool
		if batch, alone = l.gather(batch[:0]); len(batch) == 0 {
			return
		}
		if l.turns != nil {
			l.awaiting.Add(1)
			l.turns <- struct{}{}
			l.awaiting.Add(-1)
		}
		l.run(batch, cmds)
		if l.turns != nil {
			<-l.turns
		}
		if alone {
			<-l.flight
		}
		clear(batch)
	}
}

// gather returns the next calls to be sent, or none once the lane is closed,
// and whether the caller fills l.flight.
func (l *lane) gather(batch []*call) (_ []*call, alone bool) {
	if l.batch == 1 {
		return l.queue.take(batch, 1), false
	}
	l.gathering.Lock()
	defer l.gathering.Unlock()
	if !l.queue.wait() {
		return batch, false
	}
	switch {
	case l.persistent:
		if l.watched.Load() == 0 {
			pause(l.life, linger)
		}
	case l.pace.Load() < int64(nearby):
		alone = l.takeOff()
		// Requests that are ready to run go first: what they ask goes along.
		runtime.Gosched()
	}
	return l.queue.take(batch, l.batch), alone
}

// takeOff waits until no pipeline is on its way, but not for one that takes
// longer than it should, and tells whether the caller fills l.flight.
func (l *lane) takeOff() bool {
	select {
	case l.flight <- struct{}{}:
		return true
	default:
	}
	timer := timerPool.Get().(*time.Timer)
	defer timerPool.Put(timer)
	timer.Reset(nearby)
	select {
	case l.flight <- struct{}{}:
		return true
	case <-timer.C:
		return false
	}
}

// run gives every call of the batch its outcome, or makes it wait for another try.
// cmds is scratch space.
func (l *lane) run(batch []*call, cmds []*command) {
	now := time.Now()
	var last time.Time
	var fair time.Duration
	live := batch[:0]
	for _, c := range batch {
		switch {
		case !c.claim():
		case l.life.Err() != nil:
			c.fail(fmt.Errorf("redis %s: %w", l.addr, errClosed))
		case !c.deadline.After(now) && !l.persistent:
			c.fail(fmt.Errorf("redis %s: %w", l.addr, ErrTimeout))
		case !c.deadline.After(now) && c.tries > 0:
			c.finish()
		default:
			live = append(live, c)
			cmds = c.appendOpen(cmds)
			fair = max(fair, c.fair)
			if c.deadline.After(last) {
				last = c.deadline
			}
		}
	}
	if len(live) == 0 {
		return
	}
	// The latest deadline holds for the batch: whoever waits for an earlier
	// one stops waiting by himself. A server that times out has had its fair time:
	// what callers had lost before does not speak against it.
	patient := last
	if end := now.Add(fair); end.After(last) {
		patient = end
	}
	if l.persistent {
		// A charge is tried at least once, however long it had to wait for the
		// processor.
		if last.Before(now) {
			last = now
		}
		patient = last.Add(replyPatience)
	}
	ctx, cancel := context.WithDeadline(l.life, patient)
	defer cancel()
	l.send(ctx, cmds)
	l.pace.Add((int64(time.Since(now)) - l.pace.Load()) / 8)
	for _, c := range live {
		l.conclude(c)
	}
}

// conclude finishes a call, makes it follow redirections, or makes it wait for
// another try: apart from the others of its pipeline and from the worker.
func (l *lane) conclude(c *call) {
	if l.redirect(c) {
		return
	}
	if !l.persistent || !c.isOpen() {
		c.finish()
		return
	}
	after, hasTime := nextTry(c.tries, c.deadline)
	if !hasTime || l.life.Err() != nil {
		c.finish()
		return
	}
	if c.detached != nil && len(c.cmds) > 1 {
		c.finishSettled()
	}
	c.reopen()
	l.queue.putBack(c, after)
}

// nextTry returns after which pause to try again what was refused, and whether there
// is time for that. The last try leaves time to tell whoever waits how it ended.
func nextTry(tries int, deadline time.Time) (after time.Duration, hasTime bool) {
	left := time.Until(deadline)
	return min(retryPause<<min(tries, mostDoublings), left-retryPause), left >= 2*retryPause
}

// pause waits, and tells whether ctx is still alive.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// warm connects and brings the scripts, so that the first call does not have
// to wait for that. What goes wrong will be said by the call that needs it.
func (l *lane) warm(ctx context.Context) {
	pipe := l.client.Load().Pipeline()
	for _, s := range allScripts {
		s.load(ctx, pipe)
	}
	_, _ = pipe.Exec(ctx)
}

// load gives the server the scripts of cmds.
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
			// They were refused, so they are as good as never sent.
			cmd.sent, cmd.outcome = false, refused(err)
		}
		return err
	}
	return nil
}

// takesTurn reports whether the caller makes c itself, which saves waking a worker
// and being woken: where each call has a connection to itself, one is free, and
// nothing makes the caller leave before the server has had its time. The caller
// then holds a turn.
func (l *lane) takesTurn(ctx context.Context, c *call) bool {
	if l.turns == nil || time.Until(c.deadline) < c.fair {
		return false
	}
	if end, ok := ctx.Deadline(); ok && end.Before(c.deadline) {
		return false
	}
	select {
	case l.turns <- struct{}{}:
		return true
	default:
		return false
	}
}

// doAlone makes c and gives the turn back. It ends by c's deadline, and not when
// a context is cancelled.
func (l *lane) doAlone(c *call) (sent bool, err error) {
	l.run([]*call{c}, nil)
	<-l.turns
	select {
	case <-c.done:
		return true, nil
	default:
	}
	// It was redirected, and is a call of another lane.
	return c.wait(context.Background())
}
