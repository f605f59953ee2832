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

const (
	// maxBatch bounds the calls in one pipeline, so that the next one does not
	// wait for long.
	maxBatch = 300
	// queueLimit bounds the calls that wait for one server. They are about a
	// second's worth; waiting longer does not help.
	queueLimit = 1 << 17
	// linger is how long a charge waits for others to join its pipeline, unless that is
	// full: no response waits for it, and a pipeline costs as much as several charges.
	linger = 2 * time.Millisecond
	// nearby is the round trip below which it pays to have one pipeline in flight
	// at a time and let it carry more, and flightWait how long the next one waits for it.
	nearby     = 300 * time.Microsecond
	flightWait = time.Millisecond
	// replyTimeout bounds the wait for the reply to a charge beyond its deadline.
	// No request waits for it, and without it the outcome is unknown.
	replyTimeout = 2 * time.Second
	// retryPause is the pause before the first retry of a refused call. It doubles
	// with each refusal, maxDoublings times.
	retryPause   = 10 * time.Millisecond
	maxDoublings = 4
	// retirePause is how long retired connections stay open for calls that have
	// already chosen them.
	retirePause = time.Second
	// reconnectPause is the least time between replacements of connections.
	reconnectPause = 100 * time.Millisecond
	// breakerPause is how long a server is left out whose pipelines fail in a row:
	// one more than there are connections, because these can all be cut at once
	// while the server is well.
	breakerPause = time.Second
	// poolTimeout is never reached: there are as many connections as workers, and
	// one for health.
	poolTimeout = 5 * time.Second
)

// lane leads to one server for one purpose: a client, a queue, and the workers
// that turn queued calls into pipelines.
type lane struct {
	shard *Shard
	addr  string
	// client holds the connections. It is replaced when they lead to a server that
	// is no longer the primary; reconnected is when, in nanoseconds since 1970.
	client      atomic.Pointer[goredis.Client]
	reconnected atomic.Int64
	breaker     *gobreaker.TwoStepCircuitBreaker[any]
	queue       *queue
	batch       int
	// persistent makes workers retry commands that did not run, until the deadline:
	// the lane is for charges.
	persistent bool
	workers    sync.WaitGroup
	// gathering is held by the worker that waits for the next batch.
	gathering sync.Mutex
	// flight is full while a pipeline to a nearby server is in flight.
	flight chan struct{}
	// tokens, without pipelining, is full while all connections are in use; nil if
	// callers leave their calls to workers.
	tokens chan struct{}
	// awaiting counts the calls that workers have taken and that wait for a token.
	awaiting atomic.Int64
	// watched counts the callers that wait.
	watched atomic.Int32
	// hurried is full if somebody waits for what is queued, or sent by now.
	hurried chan struct{}
	// splits is set once the server has refused several keys in one call.
	splits atomic.Bool
	// scripted is set once the server has refused a plain command and has run the script
	// in its place, as a proxy may that does not know the command.
	scripted atomic.Bool
	// fault is the last error that spoke against the server.
	fault lastFault
	// lag is the least age of a replica's data, in nanoseconds.
	lag atomic.Int64
	// pace is the recent average time of a pipeline, and way that of the quickest.
	pace atomic.Int64
	way  quickest
	// life ends when nothing more may be sent.
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
		hurried:    make(chan struct{}, 1),
		batch:      1,
		persistent: persistent,
	}
	l.client.Store(newClient(addr, opts, persistent))
	l.breaker = gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Timeout:       breakerPause,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return int(c.ConsecutiveFailures) > opts.connections() },
		IsSuccessful:  func(err error) bool { return !isServerFault(err) },
		OnStateChange: l.emitState,
	})
	switch {
	case !opts.NoPipelining:
		l.batch = maxBatch
	case !persistent:
		// Callers stop waiting at the deadline, so they cannot make persistent calls
		// themselves: these are retried and their replies awaited beyond it.
		l.tokens = make(chan struct{}, opts.PoolSize)
	}
	l.lag.Store(int64(unknownLag))
	l.life, l.end = context.WithCancel(context.Background())
	for range opts.PoolSize {
		l.workers.Go(l.work)
	}
	return l
}

// isUp reports whether calls are made. Pings find out when a server is back.
func (l *lane) isUp() bool { return l.breaker.State() == gobreaker.StateClosed }

// isUsable reports whether a replica can answer checks.
func (l *lane) isUsable() bool { return l.isUp() && !l.shard.lags(time.Duration(l.lag.Load())) }

// down is the error of calls that are not made. It quotes the last fault without
// wrapping it, because these calls did not fail that way.
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
		// Its workers may still wait for replies.
		return false, l.down()
	}
	switch err = ctx.Err(); {
	case err != nil:
	case l.takeToken(ctx, c):
		sent, err = l.doUnpipelined(c)
	default:
		l.watched.Add(1)
		defer l.watched.Add(-1)
		if err = l.queue.put(c); err == nil {
			sent, err = c.wait(ctx)
		}
	}
	if err != nil {
		return sent, fmt.Errorf("redis %s: %w", l.addr, err)
	}
	return true, nil
}

// takeToken reports whether the caller can make c itself, which saves waking a
// worker and being woken: without pipelining, if a connection is free and the
// caller stays at least until the server has had its fair time.
func (l *lane) takeToken(ctx context.Context, c *call) bool {
	if l.tokens == nil || time.Until(c.deadline) < c.fair {
		return false
	}
	if end, ok := ctx.Deadline(); ok && end.Before(c.deadline) {
		return false
	}
	select {
	case l.tokens <- struct{}{}:
		return true
	default:
		return false
	}
}

// doUnpipelined makes c and gives the token back. It ends by c's deadline, but not
// when a context is cancelled.
func (l *lane) doUnpipelined(c *call) (sent bool, err error) {
	l.run([]*call{c}, nil)
	<-l.tokens
	select {
	case <-c.done:
		return true, nil
	default:
	}
	// It was redirected and is now a call of another lane.
	return c.wait(context.Background())
}

// doPlain runs plain commands by the deadline of ctx and returns the first error. A
// missing key is none.
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

// post runs c, a detached call, without waiting.
func (l *lane) post(c *call) {
	if err := l.queue.put(c); err != nil {
		c.fail(fmt.Errorf("redis %s: %w", l.addr, err))
	}
}

// close lets the workers finish the queued calls, until ctx ends.
func (l *lane) close(ctx context.Context) {
	l.queue.close()
	// Closing the client ends all waiting for replies.
	end := sync.OnceFunc(func() {
		l.end()
		_ = l.client.Load().Close()
	})
	defer context.AfterFunc(ctx, end)()
	l.workers.Wait()
	for range cap(l.tokens) {
		select {
		case l.tokens <- struct{}{}:
		case <-l.life.Done():
		}
	}
	end()
}

func (l *lane) work() {
	batch := make([]*call, 0, l.batch)
	cmds := make([]*command, 0, l.batch)
	for {
		var inFlight bool
		if batch, inFlight = l.gather(batch[:0]); len(batch) == 0 {
			return
		}
		if l.tokens != nil {
			l.awaiting.Add(1)
			l.tokens <- struct{}{}
			l.awaiting.Add(-1)
		}
		l.run(batch, cmds)
		if l.tokens != nil {
			<-l.tokens
		}
		if inFlight {
			<-l.flight
		}
		clear(batch)
	}
}

// gather returns the next calls to send, or none once the lane is closed, and
// whether the caller fills l.flight.
func (l *lane) gather(batch []*call) (_ []*call, inFlight bool) {
	if l.batch == 1 {
		return l.queue.take(batch, 1), false
	}
	l.gathering.Lock()
	defer l.gathering.Unlock()
	waiting := l.queue.wait()
	switch {
	case waiting == 0:
		return batch, false
	case l.persistent:
		// A pause before a full pipeline gains nothing, and would bound how many charges leave
		// in a second.
		if l.watched.Load() == 0 && waiting < l.batch {
			l.linger()
		}
	case l.way.least() < nearby:
		inFlight = l.takeOff()
		// Requests that are ready to run add their calls first.
		runtime.Gosched()
	}
	return l.queue.take(batch, l.batch), inFlight
}

// linger waits for other charges to join the pipeline.
func (l *lane) linger() {
	timer := time.NewTimer(linger)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.hurried:
	case <-l.life.Done():
	}
}

// hurry makes the worker that lingers, or else the next one that would, send at once.
func (l *lane) hurry() {
	select {
	case l.hurried <- struct{}{}:
	default:
	}
}

// takeOff waits until no pipeline is in flight, but not for a slow one, and
// reports whether the caller fills l.flight.
func (l *lane) takeOff() bool {
	select {
	case l.flight <- struct{}{}:
		return true
	default:
	}
	timer := timerPool.Get().(*time.Timer)
	defer timerPool.Put(timer)
	timer.Reset(flightWait)
	select {
	case l.flight <- struct{}{}:
		return true
	case <-timer.C:
		return false
	}
}

// run tries every call of the batch once and concludes it. cmds is scratch space.
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
			for _, cmd := range c.cmds {
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
		end = last.Add(replyTimeout)
	}
	ctx, cancel := context.WithDeadline(l.life, end)
	defer cancel()
	l.send(ctx, cmds)
	took := time.Since(now)
	l.pace.Add((int64(took) - l.pace.Load()) / 8)
	l.way.note(took, now)
	for _, c := range live {
		l.conclude(c)
	}
}

// conclude finishes a call, redirects it, or queues it for another try, without
// delaying the other calls of its pipeline.
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

// nextTry returns the pause before the next try and whether there is time for it.
// The last try leaves time to report the outcome.
func nextTry(tries int, deadline time.Time) (after time.Duration, hasTime bool) {
	left := time.Until(deadline)
	return min(retryPause<<min(tries, maxDoublings), left-retryPause), left >= 2*retryPause
}

// pause waits, and reports whether ctx is still alive.
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

// warm connects and loads the scripts ahead of the first call, which reports any
// failure.
func (l *lane) warm(ctx context.Context) {
	pipe := l.client.Load().Pipeline()
	for i := range layouts {
		layouts[i].script.load(ctx, pipe)
	}
	_, _ = pipe.Exec(ctx)
}

// reconnect makes calls use new connections, because a name or a virtual IP may
// lead to another server by now. Calls in flight end on the old ones.
func (l *lane) reconnect() {
	last, now := l.reconnected.Load(), time.Now().UnixNano()
	if now-last < int64(reconnectPause) || !l.reconnected.CompareAndSwap(last, now) {
		return
	}
	old := l.client.Swap(newClient(l.addr, &l.shard.opts, l.persistent))
	l.shard.retired.Go(func() {
		for pause(l.life, retirePause) {
			if used := old.PoolStats(); used.TotalConns == used.IdleConns {
				break
			}
		}
		_ = old.Close()
	})
}

// quickest is the least time of a pipeline in this period and in the one before: on a busy
// machine the others wait for processors, which says nothing about how far a server is.
type quickest struct {
	mu             sync.Mutex
	began          time.Time
	this, previous time.Duration
}

// quickestPeriod is the length of a period.
const quickestPeriod = time.Second

func (q *quickest) note(took time.Duration, at time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch age := at.Sub(q.began); {
	case age < quickestPeriod:
		q.this = min(q.this, took)
	case age < 2*quickestPeriod:
		q.this, q.previous, q.began = took, q.this, at
	default:
		q.this, q.previous, q.began = took, took, at
	}
}

// least is 0 at first.
func (q *quickest) least() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return min(q.this, q.previous)
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

func init() {
	// go-redis prints a line to stderr for each connection that fails: many a second
	// for a server that is down. The errors are returned as well.
	goredis.SetLogger(logging.NewBlacklistLogger([]string{"failed to dial"}))
}

// clientOptions returns the options of a client that connects at its first use,
// never repeats a command, and bounds every wait.
func clientOptions(addr string, opts *ShardOptions) *goredis.Options {
	o := &goredis.Options{
		Network: "tcp",
		Addr:    addr,
		// RESP2 avoids the push machinery of RESP3, which is not needed.
		Protocol:                   2,
		CredentialsProviderContext: opts.Credentials,
		TLSConfig:                  opts.TLS,
		Dialer:                     opts.connect,
		DB:                         opts.DB,
		MaxRetries:                 -1,
		// The dialler has a bound of its own, which changes.
		DialTimeout:   max(opts.DialTimeout, maxDialTimeout),
		DialerRetries: 1,
		// Every call has a deadline, which may be a long one.
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		ContextTimeoutEnabled: true,
		PoolTimeout:           poolTimeout,
		ConnMaxLifetime:       opts.ConnMaxLifetime,
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

func newClient(addr string, opts *ShardOptions, persistent bool) *goredis.Client {
	o := clientOptions(addr, opts)
	o.OnConnect = func(ctx context.Context, cn *goredis.Conn) error {
		// A server that requires a password closes a connection on which a bundle
		// arrives without it, and then the outcome is unknown. Other refusals of this
		// ping do not matter.
		if err := cn.Ping(ctx).Err(); err != nil && (!isReply(err) || says(err, shut)) {
			return fmt.Errorf("ping at connecting: %w", err)
		}
		if len(opts.Cluster) > 0 && !persistent {
			// A replica in a Redis Cluster answers only after READONLY.
			return cn.ReadOnly(ctx).Err()
		}
		return nil
	}
	return goredis.NewClient(o)
}
