package shardlimit

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// shardKey is the key in the pool of a shard: a digest of how it is reached.
type shardKey string

// pooledShard is a shard in the pool, and the certificate that its connections
// show, or nil.
type pooledShard struct {
	*redis.Shard
	certificate *clientCertificate
}

// Destruct implements [caddy.Destructor]: it delivers what is waiting, then
// closes the connections.
func (s pooledShard) Destruct() error {
	flush(s)
	return nil
}

// acquireShard returns the shard that is reached as said, and its key in the
// pool. Shards that are reached in the same way share their connections.
func acquireShard(r reach) (shard pooledShard, key shardKey, err error) {
	if key, err = r.key(); err != nil {
		return pooledShard{}, "", err
	}
	pooled, _, err := pool.LoadOrNew(key, func() (caddy.Destructor, error) {
		return pooledShard{redis.NewShard(r.options()), r.certificate()}, nil
	})
	if err != nil {
		return pooledShard{}, "", fmt.Errorf("connect: %w", err)
	}
	return pooled.(pooledShard), key, nil
}

func releaseShards(keys []shardKey) {
	for _, key := range keys {
		_, _ = pool.Delete(key)
	}
}

var _ caddy.Destructor = pooledShard{}
