package wire

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// names keep all connections to a host name at one server: one with several records would lead them to each in turn.
type names struct {
	lookup func(ctx context.Context, host string) ([]string, error)

	mu sync.Mutex
	// peers are the servers reached, by address.
	peers map[string]named
}

// named is a server that a name has led to.
type named struct {
	peer string
	// missing is since when it is not among the name's records; zero while it is.
	missing time.Time
}

// dial dials the server that was reached before if it is among the records of the name in addr, or was until the look-up
// before; otherwise, or if it does not answer, the name.
func (n *names) dial(ctx context.Context, network, addr string, dial func(ctx context.Context, network, addr string) (net.Conn, error)) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if _, isIP := netip.ParseAddr(host); n == nil || network != "tcp" || err != nil || isIP == nil {
		return dial(ctx, network, addr)
	}
	if peer := n.peer(ctx, addr, host, port); peer != "" {
		end, _ := ctx.Deadline()
		half, cancel := context.WithTimeout(ctx, time.Until(end)/2)
		conn, err := dial(half, network, peer)
		cancel()
		if err == nil {
			return conn, nil
		}
	}
	conn, err := dial(ctx, network, addr)
	if err == nil && conn.RemoteAddr() != nil {
		n.mu.Lock()
		n.peers[addr] = named{peer: conn.RemoteAddr().String()}
		n.mu.Unlock()
	}
	return conn, err
}

// peer returns the address of the server that was reached before, or "" if the name leads elsewhere.
func (n *names) peer(ctx context.Context, addr, host, port string) string {
	n.mu.Lock()
	was, isKnown := n.peers[addr]
	n.mu.Unlock()
	if !isKnown {
		return ""
	}
	ips, err := n.lookup(ctx, host)
	if err != nil {
		return was.peer
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	switch isThere := slices.ContainsFunc(ips, func(ip string) bool { return net.JoinHostPort(ip, port) == was.peer }); {
	case isThere:
		was.missing = time.Time{}
	case was.missing.IsZero():
		was.missing = now
	case now.Sub(was.missing) >= revisitPeriod:
		return ""
	}
	n.peers[addr] = was
	return was.peer
}
