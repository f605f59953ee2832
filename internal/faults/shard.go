package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// shard is the servers that faults happen to.
type shard struct {
	// servers hold the data; of a static shard the primary comes first.
	servers []*redistest.Server
	// proxies are between Caddy and the servers; there may be none.
	proxies     []*redistest.Proxy
	sentinels   *redistest.Sentinels
	cluster     *redistest.Cluster
	certificate *redistest.Certificate
	// secret is the file in which Caddy finds the password.
	secret string
	// config is what the Caddyfile says of it.
	config []string
	stops  []func() error
}

// launcher starts a shard. What it writes is in dir.
type launcher func(dir string) (*shard, error)

func (s *shard) primary() *redistest.Server { return s.servers[0] }

func (s *shard) replicas() []*redistest.Server { return s.servers[1:] }

// stop stops everything, the last first.
func (s *shard) stop() error {
	var errs []error
	for i := len(s.stops) - 1; i >= 0; i-- {
		errs = append(errs, s.stops[i]())
	}
	return errors.Join(errs...)
}

// addrs are where Caddy finds the servers.
func (s *shard) addrs() []string {
	var addrs []string
	for _, p := range s.proxies {
		addrs = append(addrs, p.Addr())
	}
	if len(addrs) == 0 {
		for _, server := range s.servers {
			addrs = append(addrs, server.Addr())
		}
	}
	return addrs
}

// describe names the servers in the Caddyfile.
func (s *shard) describe() {
	addrs := s.addrs()
	s.config = append(s.config, "primary "+addrs[0])
	for _, addr := range addrs[1:] {
		s.config = append(s.config, "replica "+addr)
	}
}

// lasting makes servers keep what they have replied to if their process is
// killed; not if the machine is, which is not tried. With everysec a server may
// reply before it has written.
var lasting = []string{"--appendonly", "yes", "--appendfsync", "no"}

// static launches a primary and replicas.
func static(replicas int, args ...string) launcher {
	return func(string) (*shard, error) {
		s, err := launchServers(replicas, redistest.Options{Args: args})
		if err != nil {
			return nil, err
		}
		s.describe()
		return s, nil
	}
}

func launchServers(replicas int, opts redistest.Options) (*shard, error) {
	opts.Args = append(lasting[:len(lasting):len(lasting)], opts.Args...)
	servers, err := redistest.LaunchShardWith(replicas, opts)
	if err != nil {
		return nil, err
	}
	return &shard{
		servers: append([]*redistest.Server{servers.Primary}, servers.Replicas...),
		stops:   []func() error{servers.Stop},
	}, nil
}

// proxied launches a primary and replicas that Caddy reaches through proxies.
func proxied(replicas int) launcher {
	return func(string) (*shard, error) {
		s, err := launchServers(replicas, redistest.Options{})
		if err != nil {
			return nil, err
		}
		for _, server := range s.servers {
			proxy, err := redistest.NewProxy(server.Addr())
			if err != nil {
				return nil, errors.Join(err, s.stop())
			}
			s.proxies = append(s.proxies, proxy)
			s.stops = append(s.stops, proxy.Close)
		}
		s.describe()
		return s, nil
	}
}

// primaries are the servers that are primaries by their own account. Those that
// do not answer are left out.
func (s *shard) primaries() (some []*redistest.Server) {
	for _, server := range s.servers {
		if !server.Running() {
			continue
		}
		if info, err := server.Info("replication"); err == nil && info["role"] == "master" {
			some = append(some, server)
		}
	}
	return some
}

// bucket is what Redis holds of a client.
type bucket struct {
	count int64
	// reset is when its window ends, as clients are told.
	reset string
}

// buckets are those of a zone at the primaries, by client.
func (s *shard) buckets(ctx context.Context, zone string) (map[string]bucket, error) {
	buckets := map[string]bucket{}
	for _, server := range s.primaries() {
		keys, err := server.Client().Keys(ctx, keysOf(zone)).Result()
		if err != nil {
			return nil, fmt.Errorf("list buckets: %w", err)
		}
		for _, key := range keys {
			content, err := server.Client().HMGet(ctx, key, "c", "r").Result()
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", key, err)
			}
			buckets[clientIn(key)] = bucketOf(content)
		}
	}
	return buckets, nil
}

// bucketOf reads a count, and a reset in microseconds.
func bucketOf(content []any) (b bucket) {
	texts := [2]string{}
	for i := range texts {
		texts[i], _ = content[i].(string)
	}
	const second = 1_000_000
	b.count, _ = strconv.ParseInt(texts[0], 10, 64)
	micros, _ := strconv.ParseInt(texts[1], 10, 64)
	b.reset = strconv.FormatInt((micros+second-1)/second, 10)
	return b
}

// clients are those that the primaries hold buckets of.
func (s *shard) clients(ctx context.Context, zone string) ([]string, error) {
	buckets, err := s.buckets(ctx, zone)
	return slices.Sorted(maps.Keys(buckets)), err
}

// keysOf matches the keys of a zone's buckets.
func keysOf(zone string) string { return "rl:*:" + zone + ":*" }

// clientIn is the client that a bucket's key is about.
func clientIn(key string) string {
	return strings.TrimSuffix(key[strings.LastIndexByte(key, ':')+1:], "}")
}
