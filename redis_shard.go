package shardlimit

import (
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/caddyserver/caddy/v2"
)

// RedisShard is one independent Redis of a store. Its servers are given by
// their addresses, or found through Redis Sentinel, or are a Redis Cluster:
// exactly one of `primary`, `sentinel` and `cluster` has to be there.
type RedisShard struct {
	// The name: letters, digits, `_`, `.` and `-`. It decides which clients
	// the shard owns; the addresses and the kind may change. Required.
	Name string `json:"name,omitempty"`

	// The address of the primary: host, host:port or unix/path. Placeholders
	// work. The default port is 6379. If the primary fails, nothing takes its
	// place until it is back.
	Primary string `json:"primary,omitempty"`

	// The addresses of its replicas, which answer checks in turn.
	Replicas []string `json:"replicas,omitempty"`

	// Find the primary and its replicas through Redis Sentinel, and follow its
	// failovers.
	Sentinel *RedisSentinel `json:"sentinel,omitempty"`

	// The addresses of some nodes of a Redis Cluster, host or host:port, which
	// tell the others. Placeholders work. The default port is 6379. Two or
	// three suffice, so that one can be away when Caddy starts.
	Cluster []string `json:"cluster,omitempty"`

	// The shard's share of the clients relative to the other shards', from 1
	// to 1000. Default: 1.
	Weight int `json:"weight,omitempty"`

	// Owns no clients any more, and is there for `previous_shards` alone. Default:
	// false.
	Retired bool `json:"retired,omitempty"`

	RedisConnection
}

// RedisSentinel is how a primary and its replicas are found through Redis
// Sentinel.
type RedisSentinel struct {
	// The name under which the sentinels watch the primary: letters, digits,
	// `_`, `.` and `-`. Placeholders work. Required.
	Master string `json:"master,omitempty"`

	// The addresses of the sentinels: host, host:port or unix/path.
	// Placeholders work. The default port is 26379. Name all of them: the one
	// that knows of the latest failover is believed. Required.
	Addrs []string `json:"addrs,omitempty"`
}

const maxWeight = 1000

var keyPrefix = regexp.MustCompile(`^[A-Za-z0-9_.:-]+$`)

// addresses are all that the shard has.
func (s *RedisShard) addresses() []address {
	var all []address
	if s.Primary != "" {
		all = append(all, address{given: &s.Primary, port: redisPort})
	}
	for i := range s.Replicas {
		all = append(all, address{given: &s.Replicas[i], port: redisPort})
	}
	if s.Sentinel != nil {
		for i := range s.Sentinel.Addrs {
			all = append(all, address{given: &s.Sentinel.Addrs[i], port: sentinelPort})
		}
	}
	for i := range s.Cluster {
		all = append(all, address{given: &s.Cluster[i], port: redisPort, noPath: true})
	}
	return all
}

// provision resolves placeholders, apart from those of secrets, and reads files.
func (s *RedisShard) provision(repl *caddy.Replacer) error {
	for _, addr := range s.addresses() {
		if err := resolve(repl, addr.given); err != nil {
			return fmt.Errorf("address: %w", err)
		}
	}
	if s.Sentinel != nil {
		if err := resolve(repl, &s.Sentinel.Master); err != nil {
			return fmt.Errorf("sentinel: %w", err)
		}
	}
	return s.RedisConnection.provision(repl)
}

func (s *RedisShard) validate() error {
	switch {
	case s == nil:
		return errors.New("a shard is null: define or remove it")
	case s.Name == "":
		return errors.New("a shard has no name: give it one")
	case !validName(s.Name):
		return fmt.Errorf("shard name %q: use only letters, digits and the characters _ . -", s.Name)
	case len(s.kinds()) == 0:
		return fmt.Errorf("shard %s has no primary: add sentinel <master> <addr>..., cluster <addr>..., or its address, such as primary localhost:6379", s.Name)
	}
	for _, rule := range []func() error{s.validateServers, s.validateWeight, s.RedisConnection.validate, s.validateConnection} {
		if err := rule(); err != nil {
			return fmt.Errorf("shard %s: %w", s.Name, err)
		}
	}
	return nil
}

// kinds are those of the three that are given.
func (s *RedisShard) kinds() (given []string) {
	if s.Primary != "" {
		given = append(given, "primary")
	}
	if s.Sentinel != nil {
		given = append(given, "sentinel")
	}
	if len(s.Cluster) > 0 {
		given = append(given, "cluster")
	}
	return given
}

// validateServers checks the servers given so far.
func (s *RedisShard) validateServers() error {
	switch kinds := s.kinds(); {
	case len(kinds) > 1:
		return badOption(kinds[1], "does not go with %s: a shard is found in one way, so keep one of them", kinds[0])
	case len(s.Replicas) > 0 && s.Sentinel != nil:
		return badOption("replica", "does not go with sentinel: the sentinels tell who the replicas are, so remove it")
	case len(s.Replicas) > 0 && len(s.Cluster) > 0:
		return badOption("replica", "does not go with cluster: the nodes tell who the replicas are, so remove it")
	}
	if err := s.Sentinel.validate(); err != nil {
		return err
	}
	taken := map[string]bool{}
	for _, addr := range s.addresses() {
		if err := addr.validate(); err != nil {
			return err
		}
		if taken[addr.complete()] {
			return fmt.Errorf("address %s is given twice: remove one", addr.complete())
		}
		taken[addr.complete()] = true
	}
	return nil
}

func (s *RedisSentinel) validate() error {
	switch {
	case s == nil:
		return nil
	case s.Master == "":
		return badOption("sentinel", "has no master: add the name under which the sentinels watch the primary, such as mymaster")
	case !isDynamic(s.Master) && !validName(s.Master):
		return badOption("sentinel", "has the master %q: write the name under which the sentinels watch the primary, such as mymaster, of letters, digits and the characters _ . -", s.Master)
	case len(s.Addrs) == 0:
		return badOption("sentinel", "has no addresses: add those of the sentinels, such as sentinel-1 sentinel-2 sentinel-3")
	}
	return nil
}

func (s *RedisShard) validateWeight() error {
	if s.Weight < 0 || s.Weight > maxWeight {
		return badOption("weight", "%d: it must be from 1 to %d", s.Weight, maxWeight)
	}
	return nil
}

// validateConnection checks the shard's own settings against its kind.
func (s *RedisShard) validateConnection() error {
	switch {
	case len(s.Cluster) > 0 && s.DB != nil && *s.DB != 0:
		return badOption("db", "%d: a Redis Cluster has database 0 only, so remove it", *s.DB)
	case s.TLS != nil && s.path() != "":
		return badOption("tls", "does not go with the address %s: Redis speaks no TLS on unix sockets, so remove it", s.path())
	case s.Sentinel == nil && s.SentinelUsername != "":
		return badOption("sentinel_username", "goes with sentinel only: remove it")
	case s.Sentinel == nil && s.SentinelPassword != "":
		return badOption("sentinel_password", "goes with sentinel only: remove it")
	}
	return nil
}

// path is the first address that is a unix socket's, if there is one.
func (s *RedisShard) path() string {
	all := s.addresses()
	if i := slices.IndexFunc(all, func(a address) bool { return isPath(*a.given) }); i >= 0 {
		return *all[i].given
	}
	return ""
}
