package redisstore

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// shardKey is the key in the pool of a shard: a digest of how it is reached.
type shardKey string

// pooledShard is a shard in the pool, and the certificates and the token of its
// connections, or nil.
type pooledShard struct {
	*redis.Shard
	certificates *certificates
	token        *token
}

// Close delivers waiting charges until ctx ends, then closes the connections, and ends the
// command that prints the token.
func (s pooledShard) Close(ctx context.Context) {
	s.Shard.Close(ctx)
	if s.token != nil {
		s.token.stop()
	}
}

// Destruct implements [caddy.Destructor]. It delivers waiting charges, then closes
// the connections.
func (s pooledShard) Destruct() error {
	stores.Flush(s)
	return nil
}

// acquireShard returns the shard that is reached through r, its key in the pool, and whether
// another store uses it already. Equal reaches share their connections.
func acquireShard(r reach) (shard pooledShard, key shardKey, isShared bool, err error) {
	if key, err = r.key(); err != nil {
		return pooledShard{}, "", false, err
	}
	pooled, isShared, _ := stores.Pool.LoadOrNew(key, func() (caddy.Destructor, error) {
		t := r.token()
		return pooledShard{redis.NewShard(r.options(t)), r.certificates, t}, nil
	})
	return pooled.(pooledShard), key, isShared, nil
}

// overridesKey is the key of a store's overrides in the pool.
type overridesKey struct{ store, keyPrefix, secretID string }

// acquireOverrides returns the overrides of a store, which outlive a config, and their key in the pool.
func acquireOverrides(key overridesKey) (*redis.Overrides, overridesKey) {
	pooled, _ := stores.Pool.LoadOrStore(key, &redis.Overrides{})
	return pooled.(*redis.Overrides), key
}

// reach is the way to the servers of a shard: a copy of it with complete addresses and
// the settings that it inherits, without those in which connections do not differ.
type reach struct {
	Shard
	NoPipelining bool `json:"no_pipelining"`
	// Missing is what the config lacks: it will not start, and its requests make no connection until then.
	Missing      []string `json:"missing,omitempty"`
	certificates *certificates
}

// reach returns the way to the servers of one of the store's shards.
func (s *Store) reach(shard *Shard) reach {
	r := reach{NoPipelining: s.Pipelining == turnedOff, Missing: s.missing, Shard: Shard{
		URL: shard.URL, server: shard.server,
		Primary: shard.Primary, Replicas: slices.Clone(shard.Replicas), Cluster: slices.Clone(shard.Cluster), Connection: shard.over(s.Connection),
	}}
	if shard.Sentinel != nil {
		r.Sentinel = &Sentinel{shard.Sentinel.Master, slices.Clone(shard.Sentinel.Addrs)}
	} else {
		r.SentinelUsername, r.SentinelPassword = "", ""
	}
	for _, addr := range r.addresses() {
		*addr.given = addr.complete()
	}
	if r.database() == 0 {
		r.DB = nil
	}
	if r.server != nil && r.server.isTLS && r.TLS == nil {
		r.TLS = new(TLS)
	}
	if r.TLS != nil {
		r.certificates = r.TLS.certificates
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

func (r reach) options(t *token) redis.ShardOptions {
	opts := redis.ShardOptions{
		Primary:         r.Primary,
		Replicas:        r.Replicas,
		Cluster:         r.Cluster,
		Credentials:     r.credentials(t),
		TLS:             r.TLS.config(),
		DB:              r.database(),
		ConnMaxLifetime: r.connMaxLifetime(),
		PoolSize:        r.PoolSize,
		NoPipelining:    r.NoPipelining,
		MaxReplicaLag:   time.Duration(r.MaxReplicaLag),
	}
	if t != nil {
		opts.LoginRefused = t.refuse
	}
	if r.certificates != nil {
		opts.AddCertificates = r.certificates.addTo
	}
	if r.Sentinel != nil {
		opts.Sentinel = &redis.SentinelOptions{
			Master:      r.Sentinel.Master,
			Addrs:       r.Sentinel.Addrs,
			Credentials: credentials(r.SentinelUsername, r.SentinelPassword),
		}
	}
	return opts
}

// lifetime is how long what the command prints is valid.
func (c *PasswordCommand) lifetime() time.Duration {
	return cmp.Or(time.Duration(c.Lifetime), defaultTokenLifetime)
}

// connMaxLifetime is the age from which connections are replaced, because the token with
// which they were made expires; 0 without one.
func (c *Connection) connMaxLifetime() time.Duration {
	if c.PasswordCommand == nil {
		return 0
	}
	return c.PasswordCommand.lifetime() / tokenParts
}
