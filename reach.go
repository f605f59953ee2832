package shardlimit

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// reach is how the servers of a shard are reached: all that makes connections
// differ.
type reach struct {
	Primary      string          `json:"primary"`
	Replicas     []string        `json:"replicas"`
	Sentinel     *RedisSentinel  `json:"sentinel"`
	Cluster      []string        `json:"cluster"`
	Connection   RedisConnection `json:"connection"`
	NoPipelining bool            `json:"no_pipelining"`
	// Roots tells authorities apart that were read from the same file.
	Roots []byte `json:"roots"`
}

// reach is how the servers of one of the store's shards are reached.
func (s *RedisStore) reach(shard *RedisShard) reach {
	r := reach{Connection: shard.over(s.RedisConnection), NoPipelining: s.Pipelining == pipelineOff}
	for _, addr := range shard.addresses() {
		switch complete := addr.complete(); {
		case shard.Sentinel != nil:
			if r.Sentinel == nil {
				r.Sentinel = &RedisSentinel{Master: shard.Sentinel.Master}
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

// key is a digest, for what it is made of may hold secrets.
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

// certificate is what connections show, or nil.
func (r reach) certificate() *clientCertificate {
	if r.Connection.TLS == nil {
		return nil
	}
	return r.Connection.TLS.certificate
}
