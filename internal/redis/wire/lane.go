package wire

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
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
	// ReplyTimeout bounds the wait for the reply to a charge beyond its deadline.
	// No request waits for it, and without it the outcome is unknown.
	ReplyTimeout = 2 * time.Second
	// retryPause is the pause before the first retry of a refused call. It doubles
	// with each refusal, maxDoublings times.
	retryPause   = 10 * time.Millisecond
	maxDoublings = 4
	// retirePause is how long retired connections stay open for calls that have
	// already chosen them.
	retirePause = time.Second
	// reconnectPause is the least time between replacements of connections. It doubles with each
	// that was in vain, up to mostReconnectPause.
	reconnectPause     = 100 * time.Millisecond
	mostReconnectPause = 2 * time.Second
	// relapsePause is how long no ping closes a breaker that opens again within relapseTime: the server answers pings,
	// and not the calls.
	relapsePause = time.Second
	relapseTime  = 10 * time.Second
	// mostMute is how many INFOs have to fail in a row until a server of which nobody asks anything is pinged, and then
	// how many pings until it is left out.
	mostMute = 2
	// poolTimeout is never reached: there are as many connections as workers, one for
	// health, and one for operators.
	poolTimeout = 5 * time.Second
)

// Lane leads to one server for one purpose: a client, a queue, and the workers
// that turn queued calls into pipelines.
type Lane struct {
	Shard *Shard
	// Addr is the server's address.
	Addr string
	// client holds the connections. It is replaced when they lead to a server that
	// is no longer the primary.
	client      atomic.Pointer[goredis.Client]
	replacement replacement
	// unfit is why no calls are made of a server that answers, or nil.
	unfit   atomic.Pointer[error]
	breaker *gobreaker.TwoStepCircuitBreaker[any]
	// rests is until when the server is not pinged after the breaker has opened, or nil.
	rests atomic.Pointer[time.Time]
	queue *queue
	batch int
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
	// splits is set once the server has refused several keys in one call, or looks like a proxy.
	splits atomic.Bool
	// unloaded is set while the last attempt to load scripts has lost its connection.
	unloaded atomic.Bool
	// Scripted is set once the server has refused a plain command and has run the script
	// in its place, as a proxy may that does not know the command.
	Scripted atomic.Bool
	// expires is set once the server is known to bound the life of a key by a plain command, and
	// unopening once it has refused to open a window without a script.
	expires, unopening atomic.Bool
	sample             atomic.Pointer[string]
	// lacks is set while a script has failed because the server lacks a command.
	lacks atomic.Bool
	// fault is the last error that spoke against the server.
	fault lastFault
	// Lag is the least age of a replica's data, in nanoseconds.
	Lag atomic.Int64
	// pace is the recent average time of a pipeline, and way that of the quickest.
	pace atomic.Int64
	way  quickest
	// operators is full while a call runs apart.
	operators chan struct{}
	// pinged is locked while a ping runs.
	pinged sync.Mutex
	// mute is how many INFOs in a row had no reply, and deaf is how many pings.
	mute, deaf atomic.Int32
	// life ends when nothing more may be sent.
	life context.Context
	end  context.CancelFunc
}

func newLane(s *Shard, addr string, persistent bool) *Lane {
	opts := &s.Options
	l := &Lane{
		Shard:      s,
		Addr:       addr,
		queue:      newQueue(queueLimit),
		flight:     make(chan struct{}, 1),
		hurried:    make(chan struct{}, 1),
		operators:  make(chan struct{}, 1),
		batch:      1,
		persistent: persistent,
	}
	l.client.Store(l.newClient())
	// It opens when one pipeline more fails in a row than there are connections, because these can all be cut
	// at once while the server is well. Pings close it.
	l.breaker = gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Timeout: probePeriod / 2,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return int(c.ConsecutiveFailures) > opts.connections() || l.deaf.Load() >= mostMute
		},
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
	l.Lag.Store(int64(UnknownLag))
	l.life, l.end = context.WithCancel(context.Background())
	for range opts.PoolSize {
		l.workers.Go(l.work)
	}
	return l
}

// isUsable reports whether a replica can answer checks.
func (l *Lane) isUsable() bool {
	return l.IsUp() && time.Duration(l.Lag.Load()) <= l.Shard.Options.MaxReplicaLag
}

// close lets the workers finish the queued calls, until ctx ends.
func (l *Lane) close(ctx context.Context) {
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

// UnknownLag is the lag of a replica that was not inspected yet.
const UnknownLag = time.Duration(-1)

const (
	// probePeriod is the time between pings of servers that are left out.
	probePeriod = 250 * time.Millisecond
	// probeTimeout is the least time for a ping, apart from connecting.
	probeTimeout = 500 * time.Millisecond
)

// probe pings the servers that are left out, until the shard is closed, so that no
// request waits to find out whether a server is back, and those that may be down.
func (s *Shard) probe() {
	var pings sync.WaitGroup
	defer pings.Wait()
	for Pause(s.life, probePeriod) {
		s.mu.Lock()
		// Also those of redirections only.
		lanes := slices.Collect(maps.Values(s.lanes))
		s.mu.Unlock()
		for _, l := range lanes {
			if (!l.IsUp() || l.mute.Load() >= mostMute) && l.pinged.TryLock() {
				pings.Go(func() {
					defer l.pinged.Unlock()
					l.ping(s.life)
				})
			}
		}
	}
}

// ping lets the breaker close if it allows a try and the server answers, or open if that fails repeatedly.
func (l *Lane) ping(ctx context.Context) {
	if until := l.rests.Load(); until != nil && time.Until(*until) > 0 {
		return
	}
	reported, err := l.breaker.Allow()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.Shard.Options.ReplyWithin(probeTimeout))
	defer cancel()
	err = l.contain(func(client *goredis.Client) error { return classified(client.Ping(ctx).Err()) })
	l.fault.note(err)
	l.Shard.Options.noteLogin(err)
	if isServerFault(err) {
		l.deaf.Add(1)
	} else {
		l.deaf.Store(0)
	}
	reported(err)
}

// Restarted forgets which commands the server has run and refused: another start of it may be another
// version, and have other rights. That it spreads keys stays, because no reply would show it.
func (l *Lane) Restarted() {
	l.Scripted.Store(false)
	l.expires.Store(false)
	l.unopening.Store(false)
}

// Opens reports whether windows are opened without scripts.
func (l *Lane) Opens() bool { return l.expires.Load() && !l.unopening.Load() }

// Sample has LearnExpiry and Redirects find that out with a key like those of windows, at which nothing
// is, or what expires.
func (l *Lane) Sample(key func() string) {
	if l.sample.Load() == nil {
		l.sample.Store(new(key()))
	}
}

// LearnExpiry finds out whether the server bounds the life of a key by a plain command, and undoes it, on a
// connection of its own: some proxies close it on a word that they do not know.
func (l *Lane) LearnExpiry(ctx context.Context) {
	key := l.sample.Load()
	if key == nil || l.expires.Load() || l.unopening.Load() {
		return
	}
	// The others undo what an opening does to what is not ours.
	for _, words := range [][]any{{wordPExpire, *key, 1, "nx"}, {wordHLen, *key}, {wordHDel, *key, "r"}, {wordPersist, *key}} {
		err := l.contain(func(client *goredis.Client) error { return client.Do(ctx, words...).Err() })
		// Rights to the command are judged before those to the key, and before the key's slot.
		if m, isReply := MeaningOf(err); err != nil && (!isReply || (m.Kind != store.KindAuth || m.Hint != 0) && !strings.HasPrefix(err.Error(), "MOVED ")) {
			return
		}
	}
	l.expires.Store(true)
}

// Redirects reports whether the server redirects what is at keys like the sample, as [Redirects] says.
func (l *Lane) Redirects(ctx context.Context, sample *Lane) bool {
	key := sample.sample.Load()
	return key != nil && Redirects(ctx, l.client.Load(), *key)
}

// LackOfTime is [LackOfTime], asked once a script has failed for want of a command.
func (l *Lane) LackOfTime(ctx context.Context, sample *Lane) error {
	if !l.lacks.Load() {
		return nil
	}
	var keys []string
	if key := sample.sample.Load(); key != nil && !l.Shard.InCluster {
		keys = []string{*key}
	}
	err := LackOfTime(ctx, l.client.Load(), keys...)
	l.lacks.Store(err != nil)
	return err
}

// longInfo is for which one of the INFOs to a server that had no reply to the last one there is the full time.
const longInfo = 8

// Info asks the server for INFO. It waits for a reply for that long at least, or as [Options.ReplyWithin] says, which is
// rare after an INFO without a reply, because a silent server would hold up the examination of others.
func (l *Lane) Info(ctx context.Context, least time.Duration) (text string, err error) {
	timeout := l.Shard.Options.ReplyWithin(least)
	if l.mute.Load()%longInfo != 0 {
		timeout = least
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = l.contain(func(client *goredis.Client) (err error) {
		text, err = client.Info(ctx).Result()
		return err
	})
	switch {
	case err == nil || IsReply(err):
		l.mute.Store(0)
		l.deaf.Store(0)
	case !isCut(err) || store.KindOf(err) == store.KindTimeout:
		// A proxy may close the connection on a word that it does not know, and on PING too.
		l.mute.Add(1)
	}
	return text, err
}

// ClusterSize returns how many primaries with slots the server knows in its Redis Cluster.
func (l *Lane) ClusterSize(ctx context.Context) (n int, err error) {
	err = l.contain(func(client *goredis.Client) error {
		text, err := client.ClusterInfo(ctx).Result()
		if err != nil {
			return err
		}
		n, err = strconv.Atoi(fieldOf(text, "cluster_size"))
		return err
	})
	return n, err
}

// Figures describes the lane for operators.
func (l *Lane) Figures() store.LaneFigures {
	pool, breaker := l.client.Load().PoolStats(), l.breaker.State().String()
	if l.unfit.Load() != nil {
		breaker = store.BreakerUnfit
	}
	return store.LaneFigures{
		Purpose: string(l.purpose()),
		Breaker: breaker,
		Fault:   l.fault.load(),
		Latency: time.Duration(l.pace.Load()),
		Queued:  l.queue.len() + int(l.awaiting.Load()),
		Pool: store.PoolFigures{
			Connections: int64(pool.TotalConns), Idle: int64(pool.IdleConns),
			Hits: int64(pool.Hits), Misses: int64(pool.Misses), Timeouts: int64(pool.Timeouts), Stale: int64(pool.StaleConns),
		},
	}
}

// warm connects and loads the scripts ahead of the first call, which reports any
// failure.
func (l *Lane) warm(ctx context.Context, scripts []*Script) {
	for range 2 {
		err := l.contain(func(client *goredis.Client) error {
			pipe := client.Pipeline()
			for _, s := range scripts {
				s.Load(ctx, pipe)
			}
			_, err := pipe.Exec(ctx)
			return err
		})
		// A proxy may close the connection on a word that it does not know. A late server is none.
		if l.NoteHidden(err); !isCut(err) || store.KindOf(err) == store.KindTimeout || ctx.Err() != nil {
			return
		}
	}
	l.splits.Store(true)
}

// NoteHidden notes the error of loading scripts, or of INFO: where these are unknown, a proxy may spread
// the keys of a call over servers, and send it to one of them.
func (l *Lane) NoteHidden(err error) {
	if m, _ := MeaningOf(err); m.Hint&Lacking != 0 && m.Kind != store.KindAuth {
		l.splits.Store(true)
	}
}

// reconnect makes calls use new connections, because a name or a virtual IP may
// lead to another server by now. Calls in flight end on the old ones.
func (l *Lane) reconnect() {
	if l.replacement.isDue(time.Now()) {
		l.Shard.Options.names.forget(l.Addr, "")
		l.renew()
	}
}

// renew makes calls use new connections.
func (l *Lane) renew() {
	old := l.client.Swap(l.newClient())
	l.Shard.retired.Go(func() {
		for Pause(l.life, retirePause) {
			if used := old.PoolStats(); used.TotalConns == used.IdleConns {
				break
			}
		}
		_ = old.Close()
	})
}

// replacement says when connections may be replaced.
type replacement struct {
	mu    sync.Mutex
	last  time.Time
	pause time.Duration
}

// isDue reports whether connections that lead to no primary are replaced at now. If the new ones
// lead to none either, the next ones have to wait longer.
func (r *replacement) isDue(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	since := now.Sub(r.last)
	switch {
	case since < r.pause:
		return false
	case since > 2*r.pause+reconnectPause:
		r.pause = reconnectPause
	default:
		r.pause = min(2*r.pause, mostReconnectPause)
	}
	r.last = now
	return true
}

func (l *Lane) purpose() Purpose {
	if l.persistent {
		return PurposeCharges
	}
	return PurposeChecks
}

func (l *Lane) emitState(_ string, from, to gobreaker.State) {
	switch {
	case from == gobreaker.StateClosed:
		until := time.Now()
		if last := l.rests.Load(); last != nil && until.Sub(*last) < relapseTime {
			until = until.Add(relapsePause)
		}
		l.rests.Store(&until)
		l.Shard.Emit(Event{Kind: ServerDown, Addr: l.Addr, Purpose: l.purpose(), Err: l.fault.load()})
	case to == gobreaker.StateClosed:
		l.Shard.Emit(Event{Kind: ServerUp, Addr: l.Addr, Purpose: l.purpose()})
	}
}
