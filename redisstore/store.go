package redisstore

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// Store counts in Redis, 7.0 or later, where all Caddy instances that use
// the same shards share the counts. (Valkey, 7.2 or later, is meant to work and
// was not tested.) Each client's counts live on one shard. Checks are answered by
// its replicas; charges go to its primary, off the request's path.
type Store struct {
	// The shards: independent Redis servers, each with its replicas, or Redis
	// Clusters, over which the clients are spread. Adding one moves only the
	// clients it gets. Required.
	Shards []*Shard `json:"shards,omitempty"`

	// While shards are added, removed or weighted anew: the names of the shards
	// before that, each with `:` and its weight then if that has changed. Clients
	// who get another shard keep what they have spent there: it is brought along
	// when they first come. Give this to all Caddys one by one, and leave it out
	// again once the longest window is over; shards that are removed stay defined
	// until then, with `retired`. While some Caddys do not have it yet, a client
	// who moves can get up to twice its limit in a window.
	PreviousShards []string `json:"previous_shards,omitempty"`

	Connection

	// What the keys in Redis start with: letters, digits and the characters
	// `_ . : -`. Stores with different prefixes do not share counts.
	// Default: `rl`.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// If set, client keys are replaced by their HMAC-SHA-256 under this
	// secret, so that Redis never holds an IP address or a token. Placeholders
	// work. Changing it starts new counters.
	KeySecret string `json:"key_secret,omitempty"`

	// Which servers answer checks: `replicas`, the primary standing in for
	// them, or `primary`. Default: `replicas`.
	ReadFrom string `json:"read_from,omitempty"`

	// Whose clock tells whether a window is over: `redis`, that of the shard's
	// primary, or `local`, that of this machine, which then must agree with
	// those of the other Caddy instances. Default: `redis`.
	Clock string `json:"clock,omitempty"`

	// How long a request waits for a check at most; then `on_error` applies.
	// Default: 50ms.
	CheckTimeout caddy.Duration `json:"check_timeout,omitempty"`

	// How long a charge is tried again that could not be sent or was refused;
	// the reply is waited for two seconds longer. No request waits for either.
	// Default: 250ms.
	ChargeTimeout caddy.Duration `json:"charge_timeout,omitempty"`

	// `on`: what waits at the same time is sent together, scripts for several
	// keys as one. `off`: each call is sent by itself, which suits proxies that
	// spread keys over servers. Default: `on`.
	Pipelining string `json:"pipelining,omitempty"`

	// How long what the primary said about a bucket is relied upon. For that
	// time a replica that says less is overruled, a client that is over its
	// limit is refused without asking, and one whose requests all come to this
	// Caddy is admitted without asking while half of its limit is left.
	// Afterwards the primary is asked.
	// Default: 1s.
	LedgerTrust caddy.Duration `json:"ledger_trust,omitempty"`

	// For how many buckets (a zone's count for one client) this process
	// remembers what it knows, at less than 300 bytes each. When there are
	// more, those that are not in use are forgotten first; charges that wait
	// for a shard that is down and have to be dropped are logged and counted.
	// Default: 1000000.
	LedgerMaxBuckets int `json:"ledger_max_buckets,omitempty"`

	// How many buckets this Caddy opens a second, in each zone, for clients that
	// are new: those that have no bucket and have not come to it within the last
	// three windows, or within a minute if that is longer. New clients beyond that
	// share one bucket of their zone until there are fewer of them, so that made-up
	// client keys cannot fill Redis. A million clients of a store are remembered.
	// Choose it well above the number of new clients that a busy second brings,
	// after a restart of Redis too, and so that as many buckets as are opened in
	// a window fit into Redis, at about 180 bytes each. Default: 0, any number.
	MaxNewBuckets int `json:"max_new_buckets,omitempty"`

	// What zones do while a shard cannot answer, unless they say otherwise:
	// `allow`, `deny` (status 503) or `local` (this process counts alone).
	// Default: `allow`.
	OnError string `json:"on_error,omitempty"`

	logger      *zap.Logger
	events      telemetry.Events
	undelivered telemetry.LogThrottle

	mu sync.Mutex
	// open are the shards of each call of OpenStore.
	open []openShards
}

// openShards are the keys in the pool of a store's shards and, if there are
// previous ones, of what was brought to them; and what logs what happens to them.
type openShards struct {
	keys       []shardKey
	migrations migrationsKey
	log        *shardLog
}

// release ends the use of what is in pools.
func (o *openShards) release() {
	releaseShards(o.keys)
	if o.migrations != "" {
		_, _ = stores.Pool.Delete(o.migrations)
	}
}

// CaddyModule returns the Caddy module information.
func (*Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit.stores.redis",
		New: func() caddy.Module { return new(Store) },
	}
}

// Provision implements [caddy.Provisioner]. It resolves placeholders, reads
// files, and does not connect.
func (s *Store) Provision(ctx caddy.Context) error {
	s.logger = ctx.Logger()
	var err error
	if s.events, err = telemetry.NewEvents(ctx); err != nil {
		return err
	}
	if err := s.provision(caddy.NewReplacer()); err != nil {
		return fmt.Errorf("redis store: %w", err)
	}
	return nil
}

func (s *Store) provision(repl *caddy.Replacer) (err error) {
	if err := s.Connection.provision(repl); err != nil {
		return err
	}
	if s.KeySecret, err = reveal(repl, s.KeySecret); err != nil {
		return fmt.Errorf("key_secret: %w", err)
	}
	for _, shard := range s.Shards {
		if shard == nil {
			continue // for Validate to refuse
		}
		if err := shard.provision(repl); err != nil {
			return fmt.Errorf("shard %s: %w", shard.Name, err)
		}
	}
	return nil
}

// OpenStore implements [StoreModule].
func (s *Store) OpenStore(name string) (store.Store, error) {
	config := redis.Options{
		KeyPrefix:     s.KeyPrefix,
		KeySecret:     []byte(s.KeySecret),
		ReadPrimary:   s.ReadFrom == readPrimary,
		LocalClock:    s.Clock == clockLocal,
		CheckTimeout:  time.Duration(s.CheckTimeout),
		ChargeTimeout: time.Duration(s.ChargeTimeout),
		OnUndelivered: func(shard string, op algorithm.Operation, err error) {
			s.reportUndelivered(name, shard, op, 1, err)
		},
	}
	var opened openShards
	shards, connections := make([]pooledShard, len(s.Shards)), map[string]*redis.Shard{}
	var names []string
	reached := map[string]shardKey{}
	for i, shard := range s.Shards {
		pooled, key, err := acquireShard(s.reach(shard))
		if err != nil {
			opened.release()
			return nil, fmt.Errorf("shard %s: %w", shard.Name, err)
		}
		shards[i] = pooled
		names = append(names, shard.Name)
		opened.keys = append(opened.keys, key)
		connections[shard.Name], reached[shard.Name] = pooled.Shard, key
	}
	var err error
	if config.Members, config.Previous, err = s.membersOf(connections); err != nil {
		opened.release()
		return nil, err
	}
	if len(config.Previous) > 0 {
		if config.Migrations, opened.migrations, err = acquireMigrations(config.Members, config.Previous, reached); err != nil {
			opened.release()
			return nil, err
		}
	}
	renewMigrations(opened.keys, opened.migrations)
	for _, members := range [][]redis.Member{config.Members, config.Previous} {
		for i := range members {
			members[i].Observe = observeShard(name, members[i].Name)
		}
	}
	remote := redis.New(config)
	opened.log = startShardLog(s.logger, s.events, name, remote)
	for i, shard := range s.Shards {
		opened.log.add(shard.Name, shards[i])
	}
	telemetry.Default.ExportUndelivered(name, names)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = append(s.open, opened)
	return remote, nil
}

// CloseStore implements [StoreModule]. The charges that are still waiting are
// delivered in the background, or, when the process ends, before it returns.
func (s *Store) CloseStore() {
	s.mu.Lock()
	closed := s.open[0]
	s.open = s.open[1:]
	s.mu.Unlock()
	closed.log.stop()
	closed.release()
}

// LedgerOptions implements [ledgerConfig].
func (s *Store) LedgerOptions(name string) ledger.Options {
	return ledger.Options{
		Trust:      time.Duration(s.LedgerTrust),
		MaxBuckets: s.LedgerMaxBuckets,
		Patience:   time.Duration(s.CheckTimeout),
		OnUndelivered: func(shard string, op algorithm.Operation, requests int64, err error) {
			s.reportUndelivered(name, shard, op, requests, err)
		},
	}
}

// NewBuckets implements [newcomerConfig].
func (s *Store) NewBuckets() int { return s.MaxNewBuckets }

// OnErrorDefault implements [StoreModule].
func (s *Store) OnErrorDefault() string {
	if s.OnError == "" {
		return stores.OnErrorAllow
	}
	return s.OnError
}

func (s *Store) reportUndelivered(name, shard string, op algorithm.Operation, requests int64, err error) {
	telemetry.Default.Undelivered.WithLabelValues(name, shard, op.String(), telemetry.OutcomeLabel(err)).Add(float64(requests))
	stores.NoteLost(requests)
	if times, log := s.undelivered.Report(time.Now()); log {
		s.logger.Error("charges or refunds failed",
			zap.String("store", name), zap.String("shard", shard), zap.String("operation", op.String()),
			zap.Int64("times", times), zap.Error(err))
	}
}

// Interface guards.
var (
	_ caddy.Provisioner     = (*Store)(nil)
	_ stores.StoreModule    = (*Store)(nil)
	_ stores.LedgerConfig   = (*Store)(nil)
	_ stores.NewcomerConfig = (*Store)(nil)
)

// shardDurations are the histograms of one shard of a store, each looked up when
// something is first measured.
type shardDurations struct {
	store, shard      string
	primary, replicas [algorithm.Peek + 1]atomic.Pointer[prometheus.Observer]
}

// observeShard returns what measures the commands of a shard for a store.
func observeShard(storeName, shard string) redis.Observer {
	d := &shardDurations{store: storeName, shard: shard}
	return func(role store.Role, op algorithm.Operation, took time.Duration, _ error) {
		d.histogram(role, op).Observe(took.Seconds())
	}
}

func (d *shardDurations) histogram(role store.Role, op algorithm.Operation) prometheus.Observer {
	cached := &d.primary[op]
	if role == store.RoleReplica {
		cached = &d.replicas[op]
	}
	if o := cached.Load(); o != nil {
		return *o
	}
	o := telemetry.Default.StoreDuration.WithLabelValues(d.store, d.shard, string(role), op.String())
	cached.Store(&o)
	return o
}
