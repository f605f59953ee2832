package endtoend

import (
	"fmt"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// redisStore is a store of the Caddyfile with its servers, some of which other
// stores may use too, but at other times.
type redisStore struct {
	// name is empty for the default one.
	name   string
	shards []*redistest.Shard
	// relays stand before the servers of the only shard, the primary first, and
	// delay all that goes to and from them.
	relays []*relay
}

// servers are all of them.
func (s *redisStore) servers() (all []*redistest.Server) {
	for _, shard := range s.shards {
		all = append(append(all, shard.Primary), shard.Replicas...)
	}
	return all
}

// shardName is that of one of a store's shards.
func shardName(i int) string { return string(rune('a' + i)) }

// text is the store in the Caddyfile. The timeouts are such that none passes on
// a busy machine.
func (s *redisStore) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "store %s redis {\n", s.name)
	for i, shard := range s.shards {
		addrs := make([]string, 0, 3)
		for _, server := range append([]*redistest.Server{shard.Primary}, shard.Replicas...) {
			addrs = append(addrs, server.Addr())
		}
		for i, r := range s.relays {
			addrs[i] = r.addr()
		}
		fmt.Fprintf(&b, "shard %s {\nprimary %s\n", shardName(i), addrs[0])
		if len(addrs) > 1 {
			fmt.Fprintf(&b, "replica %s\n", strings.Join(addrs[1:], " "))
		}
		b.WriteString("}\n")
	}
	b.WriteString("check_timeout 5s\ncharge_timeout 5s\n}\n")
	return b.String()
}

// away returns a store on the same servers behind relays with a round trip of
// that much more.
func (s *redisStore) away(name string, roundTrip time.Duration) (*redisStore, error) {
	far := &redisStore{name: name, shards: s.shards}
	for _, server := range s.servers() {
		r, err := startRelay(server.Addr(), roundTrip/2)
		if err != nil {
			far.closeRelays()
			return nil, err
		}
		far.relays = append(far.relays, r)
	}
	return far, nil
}

func (s *redisStore) closeRelays() {
	for _, r := range s.relays {
		r.close()
	}
}

// launchShard starts a primary and replicas. Those of redistest reach their
// primary through a proxy in this process, which costs CPU that the load needs.
func launchShard(replicas int) (*redistest.Shard, error) {
	primary, err := redistest.Launch(redistest.Options{})
	if err != nil {
		return nil, fmt.Errorf("launch primary: %w", err)
	}
	shard := &redistest.Shard{Primary: primary}
	host, port, _ := strings.Cut(primary.Addr(), ":")
	for range replicas {
		replica, err := redistest.Launch(redistest.Options{Args: []string{"--replicaof", host, port}})
		if err != nil {
			_ = shard.Stop()
			return nil, fmt.Errorf("launch replica: %w", err)
		}
		shard.Replicas = append(shard.Replicas, replica)
	}
	return shard, nil
}
