package redisstore

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// Shard is one independent Redis of a store. Its servers are given by
// their addresses, or found through Redis Sentinel, or are a Redis Cluster:
// exactly one of `primary`, `sentinel` and `cluster` has to be there.
type Shard struct {
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
	Sentinel *Sentinel `json:"sentinel,omitempty"`

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

	Connection
}

// Sentinel is how a primary and its replicas are found through Redis
// Sentinel.
type Sentinel struct {
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
func (s *Shard) addresses() []address {
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
func (s *Shard) provision(repl *caddy.Replacer) error {
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
	return s.Connection.provision(repl)
}

func (s *Shard) validate() error {
	switch {
	case s == nil:
		return errors.New("a shard is null: define or remove it")
	case s.Name == "":
		return errors.New("a shard has no name: give it one")
	case !option.ValidName(s.Name):
		return fmt.Errorf("shard name %q: use only letters, digits and the characters _ . -", s.Name)
	case len(s.kinds()) == 0:
		return fmt.Errorf("shard %s has no primary: add sentinel <master> <addr>..., cluster <addr>..., or its address, such as primary localhost:6379", s.Name)
	}
	for _, rule := range []func() error{s.validateServers, s.validateWeight, s.Connection.validate, s.validateConnection} {
		if err := rule(); err != nil {
			return fmt.Errorf("shard %s: %w", s.Name, err)
		}
	}
	return nil
}

// kinds are those of the three that are given.
func (s *Shard) kinds() (given []string) {
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
func (s *Shard) validateServers() error {
	switch kinds := s.kinds(); {
	case len(kinds) > 1:
		return option.Errorf(kinds[1], "does not go with %s: a shard is found in one way, so keep one of them", kinds[0])
	case len(s.Replicas) > 0 && s.Sentinel != nil:
		return option.Errorf("replica", "does not go with sentinel: the sentinels tell who the replicas are, so remove it")
	case len(s.Replicas) > 0 && len(s.Cluster) > 0:
		return option.Errorf("replica", "does not go with cluster: the nodes tell who the replicas are, so remove it")
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

func (s *Sentinel) validate() error {
	switch {
	case s == nil:
		return nil
	case s.Master == "":
		return option.Errorf("sentinel", "has no master: add the name under which the sentinels watch the primary, such as mymaster")
	case !isDynamic(s.Master) && !option.ValidName(s.Master):
		return option.Errorf("sentinel", "has the master %q: write the name under which the sentinels watch the primary, such as mymaster, of letters, digits and the characters _ . -", s.Master)
	case len(s.Addrs) == 0:
		return option.Errorf("sentinel", "has no addresses: add those of the sentinels, such as sentinel-1 sentinel-2 sentinel-3")
	}
	return nil
}

func (s *Shard) validateWeight() error {
	if s.Weight < 0 || s.Weight > maxWeight {
		return option.Errorf("weight", "%d: it must be from 1 to %d", s.Weight, maxWeight)
	}
	return nil
}

// validateConnection checks the shard's own settings against its kind.
func (s *Shard) validateConnection() error {
	switch {
	case len(s.Cluster) > 0 && s.DB != nil && *s.DB != 0:
		return option.Errorf("db", "%d: a Redis Cluster has database 0 only, so remove it", *s.DB)
	case s.TLS != nil && s.path() != "":
		return option.Errorf("tls", "does not go with the address %s: Redis speaks no TLS on unix sockets, so remove it", s.path())
	case s.Sentinel == nil && s.SentinelUsername != "":
		return option.Errorf("sentinel_username", "goes with sentinel only: remove it")
	case s.Sentinel == nil && s.SentinelPassword != "":
		return option.Errorf("sentinel_password", "goes with sentinel only: remove it")
	}
	return nil
}

// path is the first address that is a unix socket's, if there is one.
func (s *Shard) path() string {
	all := s.addresses()
	if i := slices.IndexFunc(all, func(a address) bool { return isPath(*a.given) }); i >= 0 {
		return *all[i].given
	}
	return ""
}

const (
	redisPort    = "6379"
	sentinelPort = "26379"
	unixPrefix   = "unix/"
)

// address is one server of a shard, as the config has it.
type address struct {
	given *string
	// port is the default.
	port string
	// noPath refuses unix sockets.
	noPath bool
}

// complete is the address with its port.
func (a address) complete() string {
	addr := *a.given
	if addr == "" || isDynamic(addr) || isPath(addr) {
		return addr
	}
	if _, _, err := net.SplitHostPort(addr); err == nil {
		return addr
	}
	return net.JoinHostPort(strings.Trim(addr, "[]"), a.port)
}

// isDynamic tells whether an address is yet to be resolved.
func isDynamic(addr string) bool { return strings.Contains(addr, "{") }

// isPath tells whether an address is that of a unix socket.
func isPath(addr string) bool { return strings.HasPrefix(addr, unixPrefix) }

func (a address) validate() error {
	switch {
	case a.noPath && isPath(*a.given):
		return fmt.Errorf("address %q: it must be host or host:port, for the nodes of a Redis Cluster are found by that", *a.given)
	case !isAddr(a.complete()):
		return fmt.Errorf("address %q: it must be host, host:port or unix/path, with a port from 1 to 65535", *a.given)
	}
	return nil
}

// isAddr tells a complete address apart from such as a URL.
func isAddr(addr string) bool {
	switch {
	case !utf8.ValidString(addr):
		return false
	case isPath(addr):
		return addr != unixPrefix
	case isDynamic(addr):
		return true
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return false
	}
	return isHost(host)
}

// isHost tells whether a text is an IP address, or could be a host's name.
func isHost(text string) bool {
	if _, err := netip.ParseAddr(text); err == nil {
		return true
	}
	return text != "" && strings.IndexFunc(text, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("_.-", r)
	}) < 0
}

// previousShard is one of a store's shards before a resharding: a name and, if
// it was another one then, a weight.
type previousShard struct {
	name   string
	weight int
}

// parsePrevious reads name or name:weight. The weight is 0 if none is given.
func parsePrevious(text string) (previousShard, error) {
	name, weight, isWeighted := strings.Cut(text, ":")
	if !isWeighted {
		return previousShard{name: name}, nil
	}
	n, err := strconv.Atoi(weight)
	if err != nil || n < 1 || n > maxWeight {
		return previousShard{}, option.Errorf("previous_shards", "%s: the weight must be from 1 to %d, as in %s:2", text, maxWeight, name)
	}
	return previousShard{name, n}, nil
}

// validatePrevious checks the shards before a resharding against those there
// are.
func (s *Store) validatePrevious() error {
	owning, same := 0, 0
	for _, shard := range s.Shards {
		switch isPrevious, err := s.wasPrevious(shard); {
		case err != nil:
			return err
		case !shard.Retired:
			owning++
			if isPrevious {
				same++
			}
		case !s.names(shard.Name):
			return option.Errorf("shard "+shard.Name, "is retired, and previous_shards does not name it: remove the shard, or name it there")
		}
	}
	seen := map[string]bool{}
	for _, text := range s.PreviousShards {
		previous, err := parsePrevious(text)
		if err != nil {
			return err
		}
		switch {
		case s.shard(previous.name) == nil:
			return option.Errorf("previous_shards", "%s is no shard of the store: define it, with the option retired if it shall own no clients any more", previous.name)
		case seen[previous.name]:
			return option.Errorf("previous_shards", "%s is named twice: remove one", previous.name)
		}
		seen[previous.name] = true
	}
	switch {
	case owning == 0:
		return errors.New("all its shards are retired: leave one that owns the clients")
	case len(s.PreviousShards) > 0 && same == owning && same == len(s.PreviousShards):
		return option.Errorf("previous_shards", "has no effect, for the shards are the same: remove it")
	}
	return nil
}

// wasPrevious tells whether a shard was there before, with the same weight.
func (s *Store) wasPrevious(shard *Shard) (bool, error) {
	for _, text := range s.PreviousShards {
		previous, err := parsePrevious(text)
		if err != nil {
			return false, err
		}
		if previous.name == shard.Name {
			return previous.weight == 0 || previous.weight == max(shard.Weight, 1), nil
		}
	}
	return false, nil
}

func (s *Store) names(shard string) bool {
	return slices.ContainsFunc(s.PreviousShards, func(text string) bool {
		previous, err := parsePrevious(text)
		return err == nil && previous.name == shard
	})
}

// shard returns the shard of a name, or nil.
func (s *Store) shard(name string) *Shard {
	if i := slices.IndexFunc(s.Shards, func(shard *Shard) bool { return shard.Name == name }); i >= 0 {
		return s.Shards[i]
	}
	return nil
}

// membersOf parts connections to all shards into those that own clients and
// those that did before a resharding.
func (s *Store) membersOf(connections map[string]*redis.Shard) (members, previous []redis.Member, err error) {
	for _, shard := range s.Shards {
		if !shard.Retired {
			members = append(members, redis.Member{Name: shard.Name, Weight: shard.Weight, Shard: connections[shard.Name]})
		}
	}
	for _, text := range s.PreviousShards {
		was, err := parsePrevious(text)
		if err != nil {
			return nil, nil, err
		}
		shard := s.shard(was.name)
		if shard == nil {
			return nil, nil, fmt.Errorf("previous_shards: %s is no shard of the store", was.name)
		}
		weight := was.weight
		if weight == 0 {
			weight = shard.Weight
		}
		previous = append(previous, redis.Member{Name: shard.Name, Weight: weight, Shard: connections[shard.Name]})
	}
	return members, previous, nil
}
