// Package redisstore is the Caddy module rate_limit.stores.redis: the configuration
// of a store in Redis, in JSON and as a Caddyfile. [Store] opens a store of package
// internal/redis; stores whose shards are reached in the same way share connections.
// A [Shard] is one independent Redis of a store, and a [Connection] has the settings
// of connections: credentials, [TLS], timeouts.
package redisstore

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Store counts in Redis or Valkey, of the [tested versions](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/servers.md#products-and-versions).
// All Caddy instances that use the same shards share the counts.
// Each client's counts live on one shard, whose replicas answer checks and whose
// primary takes charges, off the path of the request.
type Store struct {
	// The shards over which the clients are spread: independent Redis servers,
	// each with its replicas, or Redis Clusters. A new shard moves only the
	// clients that it gets. In a Caddyfile: `shard <name>`. Required.
	Shards []*Shard `json:"shards,omitempty"`

	// A primary as cloud providers give it: `redis://`, or `rediss://` for TLS,
	// then `<user>:<password>@<host>:<port>/<db>`. It replaces `primary`,
	// `username`, `password` and `db`, and may contain `{file.*}`. In the block of
	// a store, it is the only shard. Default: none.
	URL string `json:"url,omitempty"`

	Connection

	// The beginning of all keys in Redis. Default: `rl`.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// Replaces client keys in Redis by their HMAC. Default: off.
	KeySecret string `json:"key_secret,omitempty"`

	// Which servers answer checks. Default: `replicas`.
	ReadFrom string `json:"read_from,omitempty"`

	// How long a request waits for a check or, with `charge before`, for its take.
	// Connecting, TLS included, may take
	// [longer](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/redis.md#tls).
	// Default: 50ms.
	CheckTimeout caddy.Duration `json:"check_timeout,omitempty"`

	// How long a charge, refund or penalty is retried if it could not be sent or
	// Redis refused it. Default: 250ms.
	ChargeTimeout caddy.Duration `json:"charge_timeout,omitempty"`

	// Sends waiting calls together, as one script call for several keys where
	// possible. Write `off` behind a
	// [proxy](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/servers.md#proxies)
	// that spreads keys over servers. Default: `on`.
	Pipelining string `json:"pipelining,omitempty"`

	// How long charges of a `fixed_window` wait for others to be sent with them,
	// if their clients have at least half of their limit left. Other Caddys see
	// these charges that much later, and a Caddy that is killed loses that many
	// more. At most 1s; `0` sends each at once. Default: 50ms.
	ChargeDelay *caddy.Duration `json:"charge_delay,omitempty"`

	// How long this Caddy relies on the primary's last answer about a bucket.
	// Meanwhile it ignores a replica that shows less, refuses a client over its
	// limit without a call, and admits a client that comes to this Caddy alone
	// without a call while half of its limit is left. With 1s or more, one request
	// after [a longer
	// pause](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/failure-modes.md#what-several-instances-can-admit-together)
	// may pass unchecked too. `0` asks for every request. Default: 1s.
	LedgerTrust *caddy.Duration `json:"ledger_trust,omitempty"`

	// How many buckets this Caddy remembers, at less than 300 bytes each. Beyond
	// that it first forgets those that are not in use. Charges that wait for a
	// shard that is down and have to be dropped are logged and counted. Default:
	// 1000000.
	MaxBuckets int `json:"max_buckets,omitempty"`

	// How many new clients a second this Caddy lets open a bucket in each zone, so
	// that [made-up
	// keys](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/failure-modes.md#made-up-keys)
	// cannot fill Redis; further new clients share one bucket. Choose a number
	// well above what a busy second brings, and such that the new buckets of a
	// window fit into Redis at about 180 bytes each. Default: 0, any number.
	MaxNewBuckets int `json:"max_new_buckets,omitempty"`

	// The `on_error` of zones that have none of their own. Default: `local`.
	OnError string `json:"on_error,omitempty"`

	logger      *zap.Logger
	events      telemetry.Events
	undelivered telemetry.LogThrottle
	// hasOnlyShard is set if a Caddyfile has a url in place of shards.
	hasOnlyShard bool
	// missing is what the config names and this machine lacks.
	missing []string

	mu sync.Mutex
	// open has the shards of each call of OpenStore that is not closed yet.
	open []openShards
}

// openShards is the use of a store's shards: the pool's keys of the shards and of the overrides, and the log of events.
// done ends the uses of the shards and of the overrides.
type openShards struct {
	remote *redis.Store
	keys   []any
	done   []func()
	// shared are the shards that another store uses. Their bounds change once the config runs.
	shared []pooledShard
	log    *shardLog
}

// release ends the use of what is in the pool.
func (o *openShards) release() {
	for _, done := range o.done {
		done()
	}
	for _, key := range o.keys {
		_, _ = stores.Pool.Delete(key)
	}
}

func init() { caddy.RegisterModule(new(Store)) }

// CaddyModule returns the Caddy module information.
func (*Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit.stores.redis",
		New: func() caddy.Module { return new(Store) },
	}
}

// UnmarshalJSON implements [json.Unmarshaler]. The errors for options that there are no
// longer say what to write instead.
func (s *Store) UnmarshalJSON(text []byte) error {
	type plain Store
	return option.Decode(text, (*plain)(s))
}

// Provision implements [caddy.Provisioner]. It resolves placeholders, reads
// files, and does not connect. Missing variables and files are no error yet:
// see [Store.Missing].
func (s *Store) Provision(ctx caddy.Context) error {
	s.logger = ctx.Logger()
	var err error
	if s.events, err = telemetry.NewEvents(ctx); err != nil {
		return err
	}
	l := &loader{repl: caddy.NewReplacer()}
	if err := s.provision(l); err != nil {
		return fmt.Errorf("redis store: %w", err)
	}
	s.missing = l.missing
	for _, what := range s.missing {
		s.logger.Warn("the config does not start on this machine, which lacks what it names", zap.String("problem", what))
	}
	return nil
}

func (s *Store) provision(l *loader) error {
	if err := s.Connection.provision(l); err != nil {
		return err
	}
	secret, err := reveal(l.repl, s.KeySecret)
	if err == nil {
		s.KeySecret = secret
	} else if err := l.check("key_secret", err); err != nil {
		return err
	}
	if s.URL != "" {
		if len(s.Shards) > 0 {
			return errURLAndShards
		}
		s.Shards = []*Shard{{Name: onlyShard, URL: s.URL}}
	}
	for _, shard := range s.Shards {
		if shard == nil {
			continue // for Validate to refuse
		}
		l.place = "shard " + shard.Name + ": "
		if err := shard.provision(l); err != nil {
			return err
		}
	}
	return nil
}

// OpenStore implements [stores.Module].
func (s *Store) OpenStore(name string) (_ store.Store, err error) {
	var opened openShards
	defer func() {
		if err != nil {
			opened.release()
		}
	}()
	pooled := map[string]pooledShard{}
	for _, shard := range s.Shards {
		acquired, key, isShared, err := acquireShard(s.reach(shard))
		if err != nil {
			return nil, fmt.Errorf("shard %s: %w", shard.Name, err)
		}
		pooled[shard.Name], opened.keys = acquired, append(opened.keys, key)
		if isShared {
			opened.shared = append(opened.shared, acquired)
		} else {
			opened.done = append(opened.done, acquired.Use(time.Duration(s.CheckTimeout)))
		}
	}
	members, previous := s.membersOf(name, pooled)
	overrides, key := acquireOverrides(overridesKey{name, s.KeyPrefix, ask.Keys{Secret: []byte(s.KeySecret)}.SecretID()})
	opened.keys = append(opened.keys, key)
	remote := redis.New(redis.Options{
		Members:       members,
		Previous:      previous,
		KeyPrefix:     s.KeyPrefix,
		KeySecret:     []byte(s.KeySecret),
		Overrides:     overrides,
		ReadPrimary:   s.ReadFrom == readPrimary,
		CheckTimeout:  time.Duration(s.CheckTimeout),
		ChargeTimeout: time.Duration(s.ChargeTimeout),
		OnUndelivered: func(shard string, limit *store.Limit, op algorithm.Operation, err error) {
			s.reportUndelivered(name, shard, limit, op, 1, err)
		},
	})
	opened.remote, opened.log = remote, startShardLog(s.logger, s.events, name, remote)
	for _, shard := range s.Shards {
		opened.log.add(shard.Name, pooled[shard.Name])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = append(s.open, opened)
	return remote, nil
}

// RunStore implements [stores.Runner].
func (s *Store) RunStore(name string, open store.Store) {
	for _, shard := range s.Shards {
		telemetry.Default.ExportUndelivered(name, shard.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.open {
		if o := &s.open[i]; o.remote == open {
			o.done = append(o.done, o.remote.Follow())
			for _, shard := range o.shared {
				o.done = append(o.done, shard.Use(time.Duration(s.CheckTimeout)))
			}
			o.shared = nil
		}
	}
}

// membersOf returns the shards that own clients, and those that did before each step of a
// resharding, as members of the store with that name. Validate has checked all of them.
func (s *Store) membersOf(storeName string, pooled map[string]pooledShard) (members []redis.Member, previous [][]redis.Member) {
	member := func(shard *Shard, weight int) redis.Member {
		return redis.Member{Name: shard.Name, Weight: weight, Shard: pooled[shard.Name].Shard, Observe: observeShard(storeName, shard.Name)}
	}
	previous = make([][]redis.Member, s.steps())
	for _, shard := range s.Shards {
		if weight := shard.weight(); weight > 0 {
			members = append(members, member(shard, weight))
		}
		for step := range previous {
			if weight := shard.weightBefore(step); weight > 0 {
				previous[step] = append(previous[step], member(shard, weight))
			}
		}
	}
	return members, previous
}

// CloseStore implements [stores.Module]. It ends one use of the shards; the last use
// of a shard flushes it in the background, and [stores.End] waits for that.
func (s *Store) CloseStore() {
	s.mu.Lock()
	closed := s.open[0]
	s.open = s.open[1:]
	s.mu.Unlock()
	closed.log.stop()
	closed.release()
}

// LedgerOptions implements [stores.LedgerConfig].
func (s *Store) LedgerOptions(name string) ledger.Options {
	trust := orUsual(s.LedgerTrust, ledger.DefaultTrust)
	if trust == 0 {
		trust = ledger.NoTrust
	}
	return ledger.Options{
		Trust:       trust,
		MaxBuckets:  s.MaxBuckets,
		Timeout:     time.Duration(s.CheckTimeout),
		ChargeDelay: s.chargeDelay(),
		Servers:     s.servers(),
		OnUndelivered: func(shard string, limit *store.Limit, op algorithm.Operation, requests int64, err error) {
			s.reportUndelivered(name, shard, limit, op, requests, err)
		},
	}
}

// servers identifies the servers of each shard, by its name, whatever the credentials and timeouts are.
func (s *Store) servers() map[string]string {
	all := map[string]string{}
	for _, shard := range s.Shards {
		r := s.reach(shard)
		all[shard.Name] = fmt.Sprint(r.Primary, r.Cluster, r.Sentinel, r.database())
	}
	return all
}

// DeliveryTime implements [stores.LedgerConfig].
func (s *Store) DeliveryTime() time.Duration {
	return cmp.Or(time.Duration(s.ChargeTimeout), redis.DefaultChargeTimeout) + wire.ReplyTimeout
}

func (s *Store) chargeDelay() time.Duration {
	return orUsual(s.ChargeDelay, ledger.UsualChargeDelay)
}

// orUsual returns the value of an option for which 0 is a value, or the usual one.
func orUsual(option *caddy.Duration, usual time.Duration) time.Duration {
	if option == nil {
		return usual
	}
	return time.Duration(*option)
}

// NewBuckets implements [stores.NewcomerConfig].
func (s *Store) NewBuckets() int { return s.MaxNewBuckets }

// OnErrorDefault implements [stores.Module].
func (s *Store) OnErrorDefault() string {
	return cmp.Or(s.OnError, stores.OnErrorLocal)
}

func (s *Store) reportUndelivered(name, shard string, limit *store.Limit, op algorithm.Operation, requests int64, err error) {
	telemetry.Default.Undelivered.WithLabelValues(name, shard, op.String(), telemetry.OutcomeLabel(err)).Add(float64(requests))
	stores.NoteLost(name, shard, limit, op, requests, err)
	if times, log := s.undelivered.Report(time.Now()); log {
		s.logger.Error("charges or refunds failed",
			zap.String("store", name), zap.String("shard", shard), zap.String("zone", limit.Zone), zap.String("operation", op.String()),
			zap.Int64("times", times), zap.Error(err))
	}
}

// Interface guards.
var (
	_ caddy.Provisioner     = (*Store)(nil)
	_ stores.Module         = (*Store)(nil)
	_ stores.Runner         = (*Store)(nil)
	_ stores.LedgerConfig   = (*Store)(nil)
	_ stores.NewcomerConfig = (*Store)(nil)
)

// shardDurations has the histograms of one shard of a store, each looked up at its
// first use.
type shardDurations struct {
	store, shard      string
	primary, replicas [algorithm.Peek + 1]atomic.Pointer[prometheus.Observer]
}

// observeShard returns an observer of the durations of a shard's commands.
func observeShard(storeName, shard string) ask.Observer {
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
