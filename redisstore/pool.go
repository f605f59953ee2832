package redisstore

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// shardKey is the key in the pool of a shard: a digest of how it is reached.
type shardKey string

// pooledShard is a shard in the pool, and the client certificate of its connections,
// or nil.
type pooledShard struct {
	*redis.Shard
	certificate *clientCertificate
}

// Destruct implements [caddy.Destructor]. It delivers waiting charges, then closes
// the connections.
func (s pooledShard) Destruct() error {
	stores.Flush(s)
	return nil
}

// acquireShard returns the shard that is reached through r, and its key in the pool.
// Equal reaches share their connections.
func acquireShard(r reach) (shard pooledShard, key shardKey, err error) {
	if key, err = r.key(); err != nil {
		return pooledShard{}, "", err
	}
	pooled, _, err := stores.Pool.LoadOrNew(key, func() (caddy.Destructor, error) {
		return pooledShard{redis.NewShard(r.options()), r.certificate()}, nil
	})
	if err != nil {
		return pooledShard{}, "", fmt.Errorf("connect: %w", err)
	}
	return pooled.(pooledShard), key, nil
}

var _ caddy.Destructor = pooledShard{}

// reach is the way to the servers of a shard: all settings in which connections can
// differ.
type reach struct {
	Primary      string     `json:"primary"`
	Replicas     []string   `json:"replicas"`
	Sentinel     *Sentinel  `json:"sentinel"`
	Cluster      []string   `json:"cluster"`
	Connection   Connection `json:"connection"`
	NoPipelining bool       `json:"no_pipelining"`
	// Roots is a digest of the authorities, whose file may change.
	Roots []byte `json:"roots"`
}

// reach returns the way to the servers of one of the store's shards.
func (s *Store) reach(shard *Shard) reach {
	r := reach{Connection: shard.over(s.Connection), NoPipelining: s.Pipelining == turnedOff}
	for _, addr := range shard.addresses() {
		switch complete := addr.complete(); {
		case shard.Sentinel != nil:
			if r.Sentinel == nil {
				r.Sentinel = &Sentinel{Master: shard.Sentinel.Master}
			}
			r.Sentinel.Addrs = append(r.Sentinel.Addrs, complete)
		case len(shard.Cluster) > 0:
			r.Cluster = append(r.Cluster, complete)
		case r.Primary == "":
			r.Primary = complete
		default:
			r.Replicas = append(r.Replicas, complete)
		}
	}
	if r.Connection.database() == 0 {
		r.Connection.DB = nil
	}
	if shard.Sentinel == nil {
		r.Connection.SentinelUsername, r.Connection.SentinelPassword = "", ""
	}
	if tls := r.Connection.TLS; tls != nil {
		r.Roots = tls.rootsDigest[:]
	}
	return r
}

// key returns a digest of r, which itself may hold secrets.
func (r reach) key() (shardKey, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("encode connection settings: %w", err)
	}
	sum := sha256.Sum256(text)
	return shardKey(hex.EncodeToString(sum[:])), nil
}

func (r reach) options() redis.ShardOptions {
	opts := redis.ShardOptions{
		Primary:       r.Primary,
		Replicas:      r.Replicas,
		Cluster:       r.Cluster,
		Credentials:   r.Connection.credentials().provider(),
		TLS:           r.Connection.TLS.config(),
		DB:            r.Connection.database(),
		DialTimeout:   time.Duration(r.Connection.DialTimeout),
		PoolSize:      r.Connection.PoolSize,
		NoPipelining:  r.NoPipelining,
		MaxReplicaLag: time.Duration(r.Connection.MaxReplicaLag),
	}
	if r.Sentinel != nil {
		opts.Sentinel = &redis.SentinelOptions{
			Master:      r.Sentinel.Master,
			Addrs:       r.Sentinel.Addrs,
			Credentials: r.Connection.sentinelCredentials().provider(),
		}
	}
	return opts
}

// certificate returns the client certificate, or nil.
func (r reach) certificate() *clientCertificate {
	if r.Connection.TLS == nil {
		return nil
	}
	return r.Connection.TLS.certificate
}

// migrationsKey is the key of migrations in the pool: a digest of the shards and of
// the previous ones.
type migrationsKey string

// pooledMigrations are the migrations between some shards, in the pool.
type pooledMigrations struct {
	current atomic.Pointer[redis.Migrations]
	// shards are the keys in the pool of the shards that lose or get clients.
	shards []shardKey
}

// Destruct implements [caddy.Destructor].
func (p *pooledMigrations) Destruct() error {
	p.current.Load().Close()
	return nil
}

// renew forgets the migrations. A request that outlasts its config still notes its
// own in the old ones, which nothing reads any more.
func (p *pooledMigrations) renew() { p.current.Swap(redis.NewMigrations()).Close() }

// acquireMigrations returns the migrations between members whose shards have these
// keys in the pool, and their own key there.
func acquireMigrations(members, previous []redis.Member, reached map[string]shardKey) (*redis.Migrations, migrationsKey, error) {
	digest := sha256.New()
	var shards []shardKey
	for _, side := range [][]redis.Member{members, previous} {
		for _, m := range side {
			fmt.Fprintf(digest, "%q %d %s\n", m.Name, max(m.Weight, 1), reached[m.Name])
			shards = append(shards, reached[m.Name])
		}
		fmt.Fprintln(digest)
	}
	key := migrationsKey(hex.EncodeToString(digest.Sum(nil)))
	pooled, _, err := stores.Pool.LoadOrNew(key, func() (caddy.Destructor, error) {
		p := &pooledMigrations{shards: shards}
		p.current.Store(redis.NewMigrations())
		return p, nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("previous_shards: %w", err)
	}
	return pooled.(*pooledMigrations).current.Load(), key, nil
}

// renewMigrations forgets the migrations to and from any of these shards, except
// those of key. Clients are spread in another way from now on, so the count of each
// has to be migrated from where it is.
func renewMigrations(shards []shardKey, key migrationsKey) {
	stores.Pool.Range(func(other, pooled any) bool {
		p, ok := pooled.(*pooledMigrations)
		if ok && other != key && slices.ContainsFunc(shards, func(shard shardKey) bool { return slices.Contains(p.shards, shard) }) {
			p.renew()
		}
		return true
	})
}

var _ caddy.Destructor = (*pooledMigrations)(nil)
