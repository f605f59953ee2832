package shardlimit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// RedisStore counts in Redis (7.0 or later) or Valkey (7.2 or later), where
// all Caddy instances that use the same shards share the counts. Each client's
// counts live on one shard. Checks are answered by its replicas; charges go to
// its primary, off the request's path.
type RedisStore struct {
	// The shards: independent Redis servers, each with its replicas, over
	// which the clients are spread. Adding one moves only the clients it gets.
	// Required.
	Shards []*RedisShard `json:"shards,omitempty"`

	// The ACL user. Placeholders such as `{env.REDIS_USERNAME}` work.
	// Default: Redis's default user.
	Username string `json:"username,omitempty"`

	// The password. Placeholders such as `{env.REDIS_PASSWORD}` and
	// `{file./run/secrets/redis}` work. Default: none.
	Password string `json:"password,omitempty"`

	// The number of the database. Default: 0.
	DB int `json:"db,omitempty"`

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

	// How long connecting may take. Default: 200ms.
	DialTimeout caddy.Duration `json:"dial_timeout,omitempty"`

	// How many connections are kept to each server, once for checks and once
	// for charges. Each carries many requests at a time, so few are needed; on
	// a slow network more shorten the wait. Default: 4, or 64 if `pipelining`
	// is `off`.
	PoolSize int `json:"pool_size,omitempty"`

	// `on`: what waits at the same time is sent together. `off`: each call
	// is sent by itself. Default: `on`.
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

	// What zones do while a shard cannot answer, unless they say otherwise:
	// `allow`, `deny` (status 503) or `local` (this process counts alone).
	// Default: `allow`.
	OnError string `json:"on_error,omitempty"`

	logger      *zap.Logger
	undelivered throttle

	mu sync.Mutex
	// open are the shards of each call of OpenStore.
	open [][]string
}

const (
	readReplicas = "replicas"
	readPrimary  = "primary"
	clockRedis   = "redis"
	clockLocal   = "local"
	pipeliningOn = "on"
	pipelineOff  = "off"

	maxPoolSize = 1000
)

// CaddyModule returns the Caddy module information.
func (*RedisStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit.stores.redis",
		New: func() caddy.Module { return new(RedisStore) },
	}
}

// Provision implements [caddy.Provisioner]. It resolves placeholders and does
// not connect.
func (s *RedisStore) Provision(ctx caddy.Context) error {
	s.logger = ctx.Logger()
	repl := caddy.NewReplacer()
	for _, option := range []struct {
		name  string
		value *string
	}{{"username", &s.Username}, {"password", &s.Password}, {"key_secret", &s.KeySecret}} {
		if err := resolve(repl, option.value); err != nil {
			return fmt.Errorf("redis store: %s: %w", option.name, err)
		}
	}
	for _, shard := range s.Shards {
		if shard == nil {
			continue // for Validate to refuse
		}
		if err := shard.resolve(repl); err != nil {
			return fmt.Errorf("redis store: %w", err)
		}
	}
	return nil
}

// resolve replaces the placeholders in a value, all of which must yield
// something.
func resolve(repl *caddy.Replacer, value *string) error {
	resolved, err := repl.ReplaceOrErr(*value, true, true)
	if err != nil {
		return fmt.Errorf("%w: set it, or write \\{ for a brace that begins no placeholder", err)
	}
	*value = resolved
	return nil
}

// Validate implements [caddy.Validator].
func (s *RedisStore) Validate() error {
	if err := s.validate(); err != nil {
		return fmt.Errorf("redis store: %w", err)
	}
	return nil
}

func (s *RedisStore) validate() error {
	if len(s.Shards) == 0 {
		return errors.New("it has no shard: add one, such as shard a { primary localhost:6379 }")
	}
	names, owners := map[string]bool{}, map[string]string{}
	for _, shard := range s.Shards {
		if err := shard.validate(); err != nil {
			return err
		}
		if names[shard.Name] {
			return badOption("shard "+shard.Name, "is defined twice: give each its own name")
		}
		names[shard.Name] = true
		for _, given := range shard.addrs() {
			addr := complete(*given)
			if other, ok := owners[addr]; ok {
				return badOption("shard "+shard.Name, "has the address %s of shard %s: give each its own servers", addr, other)
			}
			owners[addr] = shard.Name
		}
	}
	switch {
	case s.DB < 0:
		return badOption("db", "%d: it must not be negative", s.DB)
	case s.KeyPrefix != "" && !keyPrefix.MatchString(s.KeyPrefix):
		return badOption("key_prefix", "%q: use only letters, digits and the characters _ . : -", s.KeyPrefix)
	case s.PoolSize < 0 || s.PoolSize > maxPoolSize:
		return badOption("pool_size", "%d: it must be from 1 to %d", s.PoolSize, maxPoolSize)
	case s.LedgerMaxBuckets < 0:
		return badOption("ledger_max_buckets", "%d: it must be at least 1", s.LedgerMaxBuckets)
	}
	if err := oneOf("read_from", s.ReadFrom, readReplicas, readPrimary); err != nil {
		return err
	}
	if err := oneOf("clock", s.Clock, clockRedis, clockLocal); err != nil {
		return err
	}
	if err := oneOf("pipelining", s.Pipelining, pipeliningOn, pipelineOff); err != nil {
		return err
	}
	for _, duration := range []struct {
		name  string
		value caddy.Duration
	}{
		{"check_timeout", s.CheckTimeout}, {"charge_timeout", s.ChargeTimeout}, {"dial_timeout", s.DialTimeout},
		{"ledger_trust", s.LedgerTrust},
	} {
		if duration.value < 0 {
			return badOption(duration.name, "%s: it must be positive", time.Duration(duration.value))
		}
	}
	return validateOnError(s.OnError)
}

func oneOf(option, value, first, second string) error {
	if value == "" || value == first || value == second {
		return nil
	}
	return badOption(option, "%q: it must be %s or %s", value, first, second)
}

// OpenStore implements [StoreModule].
func (s *RedisStore) OpenStore(name string) (store.Store, error) {
	var keys []string
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
	for _, shard := range s.Shards {
		opts := redis.ShardOptions{
			Primary:      complete(shard.Primary),
			Credentials:  s.credentials,
			DB:           s.DB,
			DialTimeout:  time.Duration(s.DialTimeout),
			PoolSize:     s.PoolSize,
			NoPipelining: s.Pipelining == pipelineOff,
		}
		for _, addr := range shard.Replicas {
			opts.Replicas = append(opts.Replicas, complete(addr))
		}
		pooled, key, err := acquireShard(opts, []any{
			opts.Primary, opts.Replicas, opts.DB, opts.DialTimeout, opts.PoolSize, opts.NoPipelining, s.Username, s.Password,
		})
		if err != nil {
			releaseShards(keys)
			return nil, fmt.Errorf("shard %s: %w", shard.Name, err)
		}
		keys = append(keys, key)
		config.Members = append(config.Members, redis.Member{Name: shard.Name, Weight: shard.Weight, Shard: pooled})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = append(s.open, keys)
	return redis.New(config), nil
}

func (s *RedisStore) credentials(context.Context) (username, password string, err error) {
	return s.Username, s.Password, nil
}

// CloseStore implements [StoreModule]. The charges that are still waiting are
// delivered in the background, or, when the process ends, before it returns.
func (s *RedisStore) CloseStore() {
	s.mu.Lock()
	keys := s.open[0]
	s.open = s.open[1:]
	s.mu.Unlock()
	releaseShards(keys)
}

// ledgerOptions implements [ledgerConfig].
func (s *RedisStore) ledgerOptions(name string) ledger.Options {
	return ledger.Options{
		Trust:      time.Duration(s.LedgerTrust),
		MaxBuckets: s.LedgerMaxBuckets,
		Patience:   time.Duration(s.CheckTimeout),
		OnUndelivered: func(shard string, op algorithm.Operation, requests int64, err error) {
			s.reportUndelivered(name, shard, op, requests, err)
		},
	}
}

// OnErrorDefault implements [StoreModule].
func (s *RedisStore) OnErrorDefault() string {
	if s.OnError == "" {
		return onErrorAllow
	}
	return s.OnError
}

func (s *RedisStore) reportUndelivered(name, shard string, op algorithm.Operation, requests int64, err error) {
	metrics.undelivered.WithLabelValues(name, shard, op.String(), outcomeLabel(err)).Add(float64(requests))
	if caddy.Exiting() {
		lostAtExit.Add(requests)
	}
	if times, log := s.undelivered.report(time.Now()); log {
		s.logger.Error("charges or refunds failed",
			zap.String("store", name), zap.String("shard", shard), zap.String("operation", op.String()),
			zap.Int64("times", times), zap.Error(err))
	}
}

// Interface guards.
var (
	_ caddy.Provisioner = (*RedisStore)(nil)
	_ caddy.Validator   = (*RedisStore)(nil)
	_ StoreModule       = (*RedisStore)(nil)
	_ ledgerConfig      = (*RedisStore)(nil)
)
