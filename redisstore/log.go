package redisstore

import (
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// shardLog logs the events of one store's shards. While all is well it logs nothing.
type shardLog struct {
	logger *zap.Logger
	events telemetry.Events
	name   string
	store  *redis.Store
	stops  []func()
	// queue has the events that wait to be emitted, in their order.
	queue chan func()
	done  chan struct{}

	mu sync.Mutex
	// twins are the pairs of servers that were logged. certificates are the faults of
	// client certificates, by file.
	twins        map[store.Twin]bool
	certificates map[string]error
}

// eventQueue is the capacity of the queue. Events beyond it are dropped.
const eventQueue = 64

// startShardLog starts a log, which ends when stop is called.
func startShardLog(logger *zap.Logger, events telemetry.Events, name string, remote *redis.Store) *shardLog {
	l := &shardLog{
		logger: logger.With(zap.String("store", name)), events: events, name: name, store: remote,
		twins: map[store.Twin]bool{}, certificates: map[string]error{},
		queue: make(chan func(), eventQueue), done: make(chan struct{}),
	}
	go l.emitQueued()
	// Pooled shards that were in use before have met their servers already.
	l.lookForTwins()
	return l
}

// add logs the events of a shard from now on.
func (l *shardLog) add(name string, shard pooledShard) {
	logger := l.logger.With(zap.String("shard", name))
	l.stops = append(l.stops, shard.Listen(func(e wire.Event) {
		l.log(logger, e)
		l.emit(name, e)
	}))
	if shard.certificate != nil {
		l.stops = append(l.stops, shard.certificate.listen(func(fault error) { l.logCertificate(shard.certificate, fault) }))
	}
}

func (l *shardLog) stop() {
	for _, stop := range l.stops {
		stop()
	}
	close(l.done)
}

func (l *shardLog) log(logger *zap.Logger, e wire.Event) {
	if e.Addr != "" {
		logger = logger.With(zap.String("address", e.Addr))
	}
	if e.Purpose != "" {
		logger = logger.With(zap.String("purpose", string(e.Purpose)))
	}
	if e.Err != nil {
		logger = logger.With(zap.Error(e.Err))
	}
	switch e.Kind {
	case wire.ServerDown:
		logger.Warn("server is left out")
	case wire.ServerUp:
		logger.Info("server is back")
	case wire.ReplicaLags:
		logger.Warn("replica lags and is left out")
	case wire.ReplicaCaughtUp:
		logger.Info("replica has caught up")
	case wire.PrimaryChanged:
		logger.Info("shard has another primary")
	case wire.Replaced:
		logger.Warn("server was replaced by another one")
	case wire.DiscoveryFailed:
		logger.Warn("servers cannot be found")
	case wire.Discovered:
		logger.Info("servers are found again")
	case wire.Misconfigured:
		logger.Warn("server is misconfigured")
	case wire.Mended:
		logger.Info("server is no longer misconfigured")
	case wire.ClockJumped:
		logger.Warn("server's clock has jumped")
	case wire.WrittenBack:
		logger.Warn("overrides were written back")
	case wire.Panicked:
		logger.Error("a panic was contained: report it, with this line")
	case wire.Met:
		l.lookForTwins()
	}
}

func (l *shardLog) emitQueued() {
	for {
		select {
		case emit := <-l.queue:
			emit()
		case <-l.done:
			return
		}
	}
}

// emit emits an event for a server that is left out or back. It does not wait for
// the handlers of the event.
func (l *shardLog) emit(shard string, e wire.Event) {
	kind := telemetry.EventShardDown
	if e.Kind == wire.ServerUp {
		kind = telemetry.EventShardUp
	}
	if e.Kind != wire.ServerUp && e.Kind != wire.ServerDown || !l.events.Wants(kind) {
		return
	}
	select {
	case l.queue <- func() {
		l.events.Emit(kind, map[string]any{
			"store": l.name, "shard": shard, "address": e.Addr, "purpose": string(e.Purpose),
		})
	}:
	default:
		l.logger.Warn("events are dropped, because their handlers are slow", zap.String("event", kind))
	}
}

// lookForTwins logs, once, that two shards are the same server.
func (l *shardLog) lookForTwins() {
	for _, pair := range store.Twins(l.store.Shards()) {
		l.mu.Lock()
		isLogged := l.twins[pair]
		l.twins[pair] = true
		l.mu.Unlock()
		if !isLogged {
			l.logger.Error("two shards are the same server: give each its own, or remove one of the shards",
				zap.String("address", pair.OtherAddress), zap.String("other_address", pair.Address))
		}
	}
}

// logCertificate logs that the files of a certificate are unusable, or usable again,
// once for all shards with that certificate.
func (l *shardLog) logCertificate(c *clientCertificate, fault error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	file := c.files[0]
	switch logged := l.certificates[file]; {
	case fault == nil && logged != nil:
		l.logger.Info("client certificate can be read again", zap.String("cert", file))
	case fault != nil && fmt.Sprint(logged) != fault.Error():
		l.logger.Warn("client certificate cannot be read, the one before stays in use: correct the files", zap.Error(fault))
	}
	l.certificates[file] = fault
}
