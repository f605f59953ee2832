package shardlimit

import (
	"cmp"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// RedisConnection is how connections to the servers of a shard are made. A
// shard has what its store says, except for what it says itself. Connections
// whose settings are equal are shared, and kept when the config is replaced.
type RedisConnection struct {
	// The ACL user, which needs a password. Placeholders such as
	// `{env.REDIS_USERNAME}` and `{file./run/secrets/user}` are resolved for
	// each new connection. Default: Redis's default user.
	Username string `json:"username,omitempty"`

	// The password. Placeholders such as `{env.REDIS_PASSWORD}` and
	// `{file./run/secrets/redis}` are resolved for each new connection, so that
	// a file may change while Caddy runs; a line end at the end of the file does
	// not count. Caddy's admin API shows what is written here, so write a
	// placeholder and not the password. Default: none.
	Password string `json:"password,omitempty"`

	// The ACL user for the sentinels, like `username`. Default: the default
	// user.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// The password for the sentinels, like `password`. Default: none, even if
	// there is a `password`.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// The number of the database; 0 for a Redis Cluster, which has no other.
	// Default: 0.
	DB *int `json:"db,omitempty"`

	// Use TLS, to sentinels as well; `{}` trusts the authorities that the
	// system trusts. Default: no TLS; passwords and client keys can then be read
	// on the network.
	TLS *RedisTLS `json:"tls,omitempty"`

	// How long connecting may take, TLS included. Default: 200ms.
	DialTimeout caddy.Duration `json:"dial_timeout,omitempty"`

	// How many connections are kept to each server, once for checks and once
	// for charges, 1 to 1000; one more each asks for its health. Each carries many requests at a time, so few are
	// needed; on a slow network more shorten the wait. Default: 4, or 64 if
	// `pipelining` is `off`.
	PoolSize int `json:"pool_size,omitempty"`

	// How far a replica may be behind its primary to be asked. Default: 5s.
	MaxReplicaLag caddy.Duration `json:"max_replica_lag,omitempty"`
}

const maxPoolSize = 1000

// over returns the settings of a shard of a store that has these defaults.
func (c RedisConnection) over(defaults RedisConnection) RedisConnection {
	return RedisConnection{
		Username:         cmp.Or(c.Username, defaults.Username),
		Password:         cmp.Or(c.Password, defaults.Password),
		SentinelUsername: cmp.Or(c.SentinelUsername, defaults.SentinelUsername),
		SentinelPassword: cmp.Or(c.SentinelPassword, defaults.SentinelPassword),
		DB:               cmp.Or(c.DB, defaults.DB),
		TLS:              cmp.Or(c.TLS, defaults.TLS),
		DialTimeout:      cmp.Or(c.DialTimeout, defaults.DialTimeout),
		PoolSize:         cmp.Or(c.PoolSize, defaults.PoolSize),
		MaxReplicaLag:    cmp.Or(c.MaxReplicaLag, defaults.MaxReplicaLag),
	}
}

// database is the number of the database.
func (c *RedisConnection) database() int {
	if c.DB == nil {
		return 0
	}
	return *c.DB
}

func (c *RedisConnection) credentials() credentials {
	return credentials{username: c.Username, password: c.Password}
}

func (c *RedisConnection) sentinelCredentials() credentials {
	return credentials{username: c.SentinelUsername, password: c.SentinelPassword}
}

// provision reads what is in files, and looks whether the secrets are there.
func (c *RedisConnection) provision(repl *caddy.Replacer) error {
	for _, secret := range []struct{ name, text string }{
		{"username", c.Username}, {"password", c.Password},
		{"sentinel_username", c.SentinelUsername}, {"sentinel_password", c.SentinelPassword},
	} {
		if _, err := reveal(repl, secret.text); err != nil {
			return fmt.Errorf("%s: %w", secret.name, err)
		}
	}
	if c.TLS == nil {
		return nil
	}
	if err := c.TLS.provision(repl); err != nil {
		return fmt.Errorf("tls: %w", err)
	}
	return nil
}

func (c *RedisConnection) validate() error {
	switch {
	case c.DB != nil && *c.DB < 0:
		return badOption("db", "%d: it must not be negative", *c.DB)
	case c.PoolSize < 0 || c.PoolSize > maxPoolSize:
		return badOption("pool_size", "%d: it must be from 1 to %d", c.PoolSize, maxPoolSize)
	case c.DialTimeout < 0:
		return badOption("dial_timeout", "%s: it must be positive", time.Duration(c.DialTimeout))
	case c.MaxReplicaLag < 0:
		return badOption("max_replica_lag", "%s: it must be positive", time.Duration(c.MaxReplicaLag))
	case c.TLS != nil:
		if err := c.TLS.validate(); err != nil {
			return fmt.Errorf("tls: %w", err)
		}
	}
	return nil
}
