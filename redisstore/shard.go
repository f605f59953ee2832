package redisstore

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// Shard is one independent Redis of a store. Its servers are listed, found
// through Redis Sentinel, or those of a Redis Cluster: exactly one of `primary`,
// `url`, `sentinel` and `cluster` is required.
type Shard struct {
	// The name of the shard: letters, digits, `_`, `.` and `-`. It decides which
	// clients the shard owns, whatever its addresses and kind. Required.
	Name string `json:"name,omitempty"`

	// The address of the primary: `host`, `host:port` or `unix/path`. Placeholders
	// work. If the primary fails, nothing takes its place until it is back.
	// Default: port 6379.
	Primary string `json:"primary,omitempty"`

	// A primary as cloud providers give it: `redis://`, or `rediss://` for TLS,
	// then `<user>:<password>@<host>:<port>/<db>`. It replaces `primary`,
	// `username`, `password` and `db`, and may contain `{file.*}`. In the block of
	// a store, it is the only shard. Default: none.
	URL string `json:"url,omitempty"`

	// The addresses of the primary's replicas, in the same form. They answer
	// checks in turn. Default: none; the primary answers. In a Caddyfile: `replica
	// <addr>...`.
	Replicas []string `json:"replicas,omitempty"`

	// The name under which the sentinels watch the primary, and the addresses of
	// all sentinels: `host`, `host:port` or `unix/path`. Default: port 26379.
	Sentinel *Sentinel `json:"sentinel,omitempty"`

	// Addresses of some nodes of a Redis Cluster, which name the others: `host` or
	// `host:port`. Default: port 6379.
	Cluster []string `json:"cluster,omitempty"`

	// The share of the clients, from 0 to 1000. 0 is for a shard that is being
	// removed, whose `previous_weights` say what it was: [the
	// steps](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/failure-modes.md#when-shards-are-added-or-removed).
	// Default: 1. In a Caddyfile: `weight <now> [was <before>...]`.
	Weight *int `json:"weight,omitempty"`

	// While shards are added, removed or weighted anew: the weight that this one
	// had before, 0 if it was new, and before each earlier step within the longest
	// window, the latest first: [the
	// steps](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/failure-modes.md#when-shards-are-added-or-removed).
	// Default: none; the weight is the same. In a Caddyfile: `weight <now> [was
	// <before>...]`.
	PreviousWeights []int `json:"previous_weights,omitempty"`

	Connection

	// server is what the URL says, once its placeholders are resolved.
	server *server
}

// Sentinel is the way to a primary and its replicas through Redis Sentinel.
type Sentinel struct {
	// The name under which the sentinels watch the primary: letters, digits,
	// `_`, `.` and `-`. Placeholders work. Required.
	Master string `json:"master,omitempty"`

	// The addresses of the sentinels: host, host:port or unix/path.
	// Placeholders work. The default port is 26379. Name all of them: the answer of
	// the sentinel that knows of the latest failover counts. Required.
	Addrs []string `json:"addrs,omitempty"`
}

const maxWeight = 1000

// addresses returns all addresses of the shard.
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
func (s *Shard) provision(l *loader) error {
	if err := s.provisionURL(l); err != nil {
		return err
	}
	for _, addr := range s.addresses() {
		if err := l.check("address", resolve(l.repl, addr.given)); err != nil {
			return err
		}
	}
	if s.Sentinel != nil {
		if err := l.check("sentinel", resolve(l.repl, &s.Sentinel.Master)); err != nil {
			return err
		}
	}
	if s.server != nil && s.Primary == "" {
		// What the URL says is missing. Nobody answers at that address.
		s.Primary = "{url of shard " + s.Name + "}"
	}
	return s.Connection.provision(l)
}

// validate returns what is wrong with the shard, which JSON has at the path.
func (s *Shard) validate(path string) error {
	switch {
	case s == nil:
		return option.Errorf("a shard", "is null: define or remove it").Field(path)
	case s.Name == "":
		return option.Errorf("a shard", "has no name: give it one").Field(path)
	case !option.ValidName(s.Name):
		return option.Errorf("shard", "name %q: use only letters, digits and the characters _ . -", s.Name).
			Field(path).JSONf("has the name %q: use only letters, digits and the characters _ . -", s.Name)
	case len(s.kinds()) == 0:
		return option.Errorf("shard "+s.Name, "has no primary: add sentinel <master> <addr>..., cluster <addr>..., a url, or its address, such as primary localhost:6379").
			Field(path).JSONf("has no primary: add that, with an address such as localhost:6379, or url, sentinel or cluster, in shard %s", s.Name)
	}
	if err := firstError(s.validateServers, s.validateURL, func() error { return option.Check(s.rows()) }, s.validateConnection); err != nil {
		return option.In("shard "+s.Name, path, err)
	}
	return nil
}

// kinds returns the options that are given of primary, url, sentinel and cluster.
func (s *Shard) kinds() (given []string) {
	if s.Primary != "" && s.server == nil {
		given = append(given, "primary")
	}
	if s.URL != "" {
		given = append(given, "url")
	}
	if s.Sentinel != nil {
		given = append(given, "sentinel")
	}
	if len(s.Cluster) > 0 {
		given = append(given, "cluster")
	}
	return given
}

// validateServers checks the servers that the shard has so far.
func (s *Shard) validateServers() error {
	switch kinds := s.kinds(); {
	case len(kinds) > 1:
		return option.Errorf(kinds[1], "does not go with %s: a shard is found in one way, so keep one of them", kinds[0])
	case len(s.Replicas) > 0 && s.Sentinel != nil:
		return option.Errorf("replica", "does not go with sentinel: the sentinels name the replicas, so remove it").Field("replicas")
	case len(s.Replicas) > 0 && len(s.Cluster) > 0:
		return option.Errorf("replica", "does not go with cluster: the nodes name the replicas, so remove it").Field("replicas")
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
		return option.Errorf("sentinel", "has no master: add the name under which the sentinels watch the primary, such as mymaster").
			Field("sentinel.master").JSONf("is missing: add the name under which the sentinels watch the primary, such as mymaster")
	case !isDynamic(s.Master) && !option.ValidName(s.Master):
		return option.Errorf("sentinel", "has the master %q: write the name under which the sentinels watch the primary, such as mymaster, of letters, digits and the characters _ . -", s.Master)
	case len(s.Addrs) == 0:
		return option.Errorf("sentinel", "has no addresses: add those of the sentinels, such as sentinel-1 sentinel-2 sentinel-3").
			Field("sentinel.addrs").JSONf(`is missing: add the addresses of the sentinels, such as "sentinel-1"`)
	}
	return nil
}

// weight is the shard's share of the clients.
func (s *Shard) weight() int {
	if s.Weight == nil {
		return 1
	}
	return *s.Weight
}

// weightBefore is what weight was before a step of a resharding, of which 0 is the latest. Before steps that the
// shard does not name, it was what it was before the earliest that it does.
func (s *Shard) weightBefore(step int) int {
	if len(s.PreviousWeights) == 0 {
		return s.weight()
	}
	return s.PreviousWeights[min(step, len(s.PreviousWeights)-1)]
}

func (s *Shard) validateWeight() error {
	now, was := s.weight(), s.PreviousWeights
	if now < 0 || now > maxWeight {
		return option.Errorf("weight", "%d: it must be from 1 to %d, or 0 for a shard that is on its way out", now, maxWeight)
	}
	for _, before := range was {
		if before < 0 || before > maxWeight {
			return option.Errorf("weight", "%d was %d: the weight before must be from 1 to %d, or 0 for a new shard", now, before, maxWeight).
				Field("previous_weights").JSONf("%d: it must be from 1 to %d, or 0 for a new shard", before, maxWeight)
		}
	}
	switch {
	case now == 0 && !slices.ContainsFunc(was, func(before int) bool { return before > 0 }):
		return option.Errorf("weight", "0: say what it was, as in weight 0 was 1, so that the shard's clients keep their counts, or remove the shard").
			JSONf("0: say what it was, as in \"previous_weights\": [1], so that the shard's clients keep their counts, or remove the shard")
	case len(was) > 0 && !slices.ContainsFunc(was, func(before int) bool { return before != now }):
		return option.Errorf("weight", "%d was %d: nothing changes, so remove was %[2]d", now, was[0]).
			Field("previous_weights").JSONf("%d is the weight itself, so nothing changes: remove it", was[0])
	}
	return nil
}

// validateConnection checks the shard's own settings against its kind.
func (s *Shard) validateConnection() error {
	switch {
	case s.TLS != nil && s.path() != "":
		return option.Errorf("tls", "does not go with the address %s: Redis speaks no TLS on unix sockets, so remove it", s.path())
	case s.Sentinel == nil && s.SentinelUsername != "":
		return option.Errorf("sentinel_username", "goes with sentinel only: remove it")
	case s.Sentinel == nil && s.SentinelPassword != "":
		return option.Errorf("sentinel_password", "goes with sentinel only: remove it")
	}
	return nil
}

// path returns the first address that is a unix socket's, or "".
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

// address is an address of a shard in the config.
type address struct {
	given *string
	// port is the default port.
	port string
	// noPath is set if a unix socket is an error.
	noPath bool
}

// complete returns the address with its port.
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

// isDynamic reports whether an address has placeholders that are not resolved.
func isDynamic(addr string) bool { return strings.Contains(addr, "{") }

// isPath reports whether an address is that of a unix socket.
func isPath(addr string) bool { return strings.HasPrefix(addr, unixPrefix) }

func (a address) validate() error {
	switch {
	case strings.Contains(*a.given, "://"):
		// A URL may have a password.
		return errors.New("an address is a URL: write it as url, in place of that option")
	case strings.Contains(*a.given, "@") && !isPath(*a.given):
		// It may contain a password, so the error does not quote it.
		return errors.New("an address has an @: write what is before it as username and password, or all as url redis://<user>:<password>@<host>:<port>")
	case a.noPath && isPath(*a.given):
		return fmt.Errorf("address %q: it must be host or host:port, because the nodes of a Redis Cluster are found by that", *a.given)
	case !isAddr(a.complete()):
		return fmt.Errorf("address %q: it must be host, host:port or unix/path, with a port from 1 to 65535", *a.given)
	}
	return nil
}

// isAddr reports whether a complete address is one that can be dialed; a URL is not.
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

// isHost reports whether a text is an IP address or could be the name of a host.
func isHost(text string) bool {
	if _, err := netip.ParseAddr(text); err == nil {
		return true
	}
	return text != "" && strings.IndexFunc(text, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("_.-", r)
	}) < 0
}
