package shardlimit

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

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
