// Package shards starts the kinds of shards that the programs of the laboratory count in
// and break: static ones, static ones behind proxies, ones that sentinels watch, and a
// Redis Cluster. A Shard returns its part of a Caddyfile, and the counts that its
// primaries hold. The package is built on redistest.
package shards

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const master = "limits"

// Shard is some servers.
type Shard struct {
	Servers   []*redistest.Server // Servers hold the data; at first the first is the primary
	Proxies   []*redistest.Proxy  // between Caddy and the servers; there may be none
	Sentinels *redistest.Sentinels
	Cluster   *redistest.Cluster
	Config    []string // the lines of its block in the Caddyfile
	stops     []func() error
}

// Primary is the first of the servers.
func (s *Shard) Primary() *redistest.Server { return s.Servers[0] }

// Replicas are the others.
func (s *Shard) Replicas() []*redistest.Server { return s.Servers[1:] }

// Stop stops everything, the last first.
func (s *Shard) Stop() (err error) {
	for _, stop := range slices.Backward(s.stops) {
		err = errors.Join(err, stop())
	}
	return err
}

// Text is the shard in a Caddyfile.
func (s *Shard) Text(name string) string {
	return "shard " + name + " {\n" + strings.Join(s.Config, "\n") + "\n}\n"
}

// add adds a server to the block of the Caddyfile, the primary first.
func (s *Shard) add(addr string) {
	role := "primary "
	if len(s.Config) > 0 {
		role = "replica "
	}
	s.Config = append(s.Config, role+addr)
}

// lasting makes servers keep what they have acknowledged when their process is killed.
// With everysec a server may reply before it has written.
var lasting = redistest.Args("--appendonly", "yes", "--appendfsync", "no")

func launch(replicas int, opts ...redistest.Option) (*Shard, error) {
	servers, err := redistest.LaunchShard(replicas, append([]redistest.Option{lasting}, opts...)...)
	if err != nil {
		return nil, err
	}
	return &Shard{
		Servers: append([]*redistest.Server{servers.Primary}, servers.Replicas...),
		stops:   []func() error{servers.Stop},
	}, nil
}

// Static starts a primary and replicas that Caddy knows by address.
func Static(replicas int, opts ...redistest.Option) (*Shard, error) {
	s, err := launch(replicas, opts...)
	if err != nil {
		return nil, err
	}
	for _, server := range s.Servers {
		s.add(server.Addr())
	}
	return s, nil
}

// Proxied starts a primary and replicas that Caddy reaches through proxies.
func Proxied(replicas int) (*Shard, error) {
	s, err := launch(replicas)
	if err != nil {
		return nil, err
	}
	for _, server := range s.Servers {
		proxy, err := redistest.NewProxy(server.Addr())
		if err != nil {
			return nil, errors.Join(err, s.Stop())
		}
		s.Proxies, s.stops = append(s.Proxies, proxy), append(s.stops, proxy.Close)
		s.add(proxy.Addr())
	}
	return s, nil
}

// Watched starts a primary and two replicas that three sentinels watch. They consider a
// primary down after it has been silent for that time.
func Watched(downAfter time.Duration) (*Shard, error) {
	s, err := launch(2)
	if err != nil {
		return nil, err
	}
	s.Sentinels, err = redistest.LaunchSentinels(master, s.Primary(), 3, redistest.SentinelOptions{DownAfter: downAfter})
	if err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	s.stops = append(s.stops, s.Sentinels.Stop)
	s.Config = []string{"sentinel " + master + " " + strings.Join(s.Sentinels.Addrs(), " ")}
	return s, nil
}

// Clustered starts a Redis Cluster of three nodes, each with a replica and a third of
// the slots.
func Clustered(args ...string) (*Shard, error) {
	cluster, err := redistest.LaunchCluster(3, 1, lasting, redistest.Args(args...))
	if err != nil {
		return nil, err
	}
	return &Shard{
		Servers: cluster.Nodes, Cluster: cluster, stops: []func() error{cluster.Stop},
		Config: []string{"cluster " + strings.Join(cluster.Addrs(), " ")},
	}, nil
}

// Primaries are the servers that report the role of a primary. Servers that do not
// answer are left out.
func (s *Shard) Primaries() (some []*redistest.Server) {
	for _, server := range s.Servers {
		if !server.Running() {
			continue
		}
		if info, err := server.Info("replication"); err == nil && info["role"] == "master" {
			some = append(some, server)
		}
	}
	return some
}

// Bucket is the bucket of a client in Redis.
type Bucket struct {
	Key   string
	Count int64
	Reset string // the end of its window, as clients see it
}

// Buckets are the buckets of a zone on the primaries, by client.
func (s *Shard) Buckets(ctx context.Context, zone string) (map[string]Bucket, error) {
	buckets := map[string]Bucket{}
	for _, server := range s.Primaries() {
		keys, err := server.Client().Keys(ctx, "rl:*:"+zone+":*").Result()
		if err != nil {
			return nil, fmt.Errorf("list buckets: %w", err)
		}
		for _, key := range keys {
			if strings.Contains(key, " ") {
				// What takes hold is beside its bucket.
				continue
			}
			var content struct {
				Count int64 `redis:"c"`
				Reset int64 `redis:"r"` // in microseconds
			}
			if err := server.Client().HMGet(ctx, key, "c", "r").Scan(&content); err != nil {
				return nil, fmt.Errorf("read %s: %w", key, err)
			}
			client := strings.TrimSuffix(key[strings.LastIndexByte(key, ':')+1:], "}")
			buckets[client] = Bucket{key, content.Count, strconv.FormatInt((content.Reset+999_999)/1_000_000, 10)}
		}
	}
	return buckets, nil
}
