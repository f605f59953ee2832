package shardlimit

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// migrationsKey is the key in the pool of what was brought from previous shards: a
// digest of what the shards are and were.
type migrationsKey string

// pooledMigrations is what was brought between some shards, in the pool.
type pooledMigrations struct {
	current atomic.Pointer[redis.Migrations]
	// shards are the keys in the pool of those that clients leave or get.
	shards []shardKey
}

// Destruct implements [caddy.Destructor].
func (p *pooledMigrations) Destruct() error {
	p.current.Load().Close()
	return nil
}

// renew forgets what was brought. Who uses it still, as a request that outlasts its
// config does, notes what it brings where nobody looks.
func (p *pooledMigrations) renew() { p.current.Swap(redis.NewMigrations()).Close() }

// acquireMigrations returns what was brought between members, reached by the
// connections of these keys in the pool, and its own key there.
func acquireMigrations(members, former []redis.Member, reached map[string]shardKey) (*redis.Migrations, migrationsKey, error) {
	digest := sha256.New()
	var shards []shardKey
	for _, side := range [][]redis.Member{members, former} {
		for _, m := range side {
			fmt.Fprintf(digest, "%q %d %s\n", m.Name, max(m.Weight, 1), reached[m.Name])
			shards = append(shards, reached[m.Name])
		}
		fmt.Fprintln(digest)
	}
	key := migrationsKey(hex.EncodeToString(digest.Sum(nil)))
	pooled, _, err := pool.LoadOrNew(key, func() (caddy.Destructor, error) {
		p := &pooledMigrations{shards: shards}
		p.current.Store(redis.NewMigrations())
		return p, nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("previous_shards: %w", err)
	}
	return pooled.(*pooledMigrations).current.Load(), key, nil
}

// renewMigrations forgets what was brought to or from any of these shards other
// than under key: from now on clients are, or were, spread in another way, and what
// they spend has to be looked for where they spend it.
func renewMigrations(shards []shardKey, key migrationsKey) {
	pool.Range(func(other, pooled any) bool {
		p, ok := pooled.(*pooledMigrations)
		if ok && other != key && slices.ContainsFunc(shards, func(shard shardKey) bool { return slices.Contains(p.shards, shard) }) {
			p.renew()
		}
		return true
	})
}

var _ caddy.Destructor = (*pooledMigrations)(nil)
