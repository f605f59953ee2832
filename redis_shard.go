package shardlimit

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
)

// RedisShard is one independent Redis of a store: a primary and its replicas.
type RedisShard struct {
	// The name: letters, digits, `_`, `.` and `-`. It decides which clients
	// the shard owns; the addresses may change. Required.
	Name string `json:"name,omitempty"`

	// The address of the primary: host, host:port or unix/path. Placeholders
	// work. The default port is 6379. Required.
	Primary string `json:"primary,omitempty"`

	// The addresses of its replicas, which answer checks in turn.
	Replicas []string `json:"replicas,omitempty"`

	// The shard's share of the clients relative to the other shards', from 1
	// to 1000. Default: 1.
	Weight int `json:"weight,omitempty"`
}

const (
	defaultRedisPort = "6379"
	unixPrefix       = "unix/"
	maxWeight        = 1000
)

var keyPrefix = regexp.MustCompile(`^[A-Za-z0-9_.:-]+$`)

// addrs are all addresses of the shard, the primary's first.
func (s *RedisShard) addrs() []*string {
	addrs := []*string{&s.Primary}
	for i := range s.Replicas {
		addrs = append(addrs, &s.Replicas[i])
	}
	return addrs
}

// resolve replaces the placeholders in the addresses.
func (s *RedisShard) resolve(repl *caddy.Replacer) error {
	for _, addr := range s.addrs() {
		if err := resolve(repl, addr); err != nil {
			return fmt.Errorf("shard %s: address: %w", s.Name, err)
		}
	}
	return nil
}

// isDynamic tells whether an address is yet to be resolved.
func isDynamic(addr string) bool { return strings.Contains(addr, "{") }

// complete adds the default port to an address that has none.
func complete(addr string) string {
	if addr == "" || isDynamic(addr) || strings.HasPrefix(addr, unixPrefix) {
		return addr
	}
	if _, _, err := net.SplitHostPort(addr); err == nil {
		return addr
	}
	return net.JoinHostPort(strings.Trim(addr, "[]"), defaultRedisPort)
}

func (s *RedisShard) validate() error {
	switch {
	case s == nil:
		return errors.New("a shard is null: define or remove it")
	case s.Name == "":
		return errors.New("a shard has no name: give it one")
	case !zoneName.MatchString(s.Name):
		return fmt.Errorf("shard name %q: use only letters, digits and the characters _ . -", s.Name)
	case s.Primary == "":
		return fmt.Errorf("shard %s has no primary: add its address, such as primary localhost:6379", s.Name)
	case s.Weight < 0 || s.Weight > maxWeight:
		return fmt.Errorf("shard %s: %w", s.Name, badOption("weight", "%d: it must be from 1 to %d", s.Weight, maxWeight))
	}
	return s.validateAddrs()
}

// validateAddrs checks the addresses given so far.
func (s *RedisShard) validateAddrs() error {
	taken := map[string]bool{}
	for i, given := range s.addrs() {
		addr := complete(*given)
		if i == 0 && addr == "" {
			continue
		}
		if taken[addr] {
			return fmt.Errorf("shard %s: address %s is given twice: remove one", s.Name, addr)
		}
		taken[addr] = true
		if !isAddr(addr) {
			return fmt.Errorf("shard %s: address %q: it must be host, host:port or unix/path, with a port from 1 to 65535", s.Name, *given)
		}
	}
	return nil
}

// isAddr tells a complete address apart from such as a URL.
func isAddr(addr string) bool {
	switch path, isUnix := strings.CutPrefix(addr, unixPrefix); {
	case !utf8.ValidString(addr):
		return false
	case isUnix:
		return path != ""
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
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return host != "" && strings.IndexFunc(host, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("_.-", r)
	}) < 0
}
