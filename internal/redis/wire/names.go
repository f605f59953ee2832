package wire

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// names keeps all connections to a host name at one server: a name with several records would spread them.
type names struct {
	lookup func(ctx context.Context, host string) ([]string, error)

	mu sync.Mutex
	// peers are the servers reached, by address.
	peers map[string]named
}

// named is the server behind a name.
type named struct {
	peer string
	// looked is when the name was looked up last.
	looked time.Time
	// missing is since when it is not among the name's records; zero while it is.
	missing time.Time
}

// dial dials the server that was reached before if it is among the records of the name in addr, or was until the look-up
// before; otherwise the name. If that server does not answer, the next connection takes the name.
func (n *names) dial(ctx context.Context, network, addr string, dial func(ctx context.Context, network, addr string) (net.Conn, error)) (net.Conn, error) {
	if network != "tcp" || n == nil {
		return dial(ctx, network, addr)
	}
	if peer := n.peer(ctx, addr, 0); peer != "" {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		conn, err := dial(ctx, network, peer)
		if err != nil {
			n.forget(addr, peer)
		}
		return conn, err
	}
	conn, err := dial(ctx, network, addr)
	if !isName(addr) || err != nil || conn.RemoteAddr() == nil {
		return conn, err
	}
	reached := conn.RemoteAddr().String()
	n.mu.Lock()
	was, isKnown := n.peers[addr]
	if !isKnown {
		for other := range n.peers {
			// A hostile sentinel may name ever new hosts. One that is forgotten is looked up again.
			if len(n.peers) < mostExpected {
				break
			}
			delete(n.peers, other)
		}
		n.peers[addr] = named{peer: reached, looked: time.Now()}
	}
	n.mu.Unlock()
	if !isKnown || was.peer == reached {
		return conn, nil
	}
	// Another connection was made at the same time.
	_ = conn.Close()
	return dial(ctx, network, was.peer)
}

func isName(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	_, isIP := netip.ParseAddr(host)
	return err == nil && isIP != nil
}

// forget lets the next connection to addr go where its name leads, if the server reached before is still that peer, which
// does not answer, or whatever it is if peer is empty.
func (n *names) forget(addr, peer string) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if peer == "" || n.peers[addr].peer == peer {
		delete(n.peers, addr)
	}
}

// hasMoved looks from time to time whether the name in addr leads elsewhere than to the server reached before, to which
// connections are open.
func (n *names) hasMoved(ctx context.Context, addr string) bool {
	if n == nil {
		return false
	}
	n.mu.Lock()
	_, wasKnown := n.peers[addr]
	n.mu.Unlock()
	return wasKnown && n.peer(ctx, addr, revisitPeriod) == ""
}

// peer returns the address of the server that was reached before, or "" if there is none or the name leads elsewhere. It
// looks that up if the last look-up is at least as long ago as pause, for half of the time, which leaves the rest to dial.
func (n *names) peer(ctx context.Context, addr string, pause time.Duration) string {
	n.mu.Lock()
	was, isKnown := n.peers[addr]
	n.mu.Unlock()
	if !isKnown || time.Since(was.looked) < pause {
		return was.peer
	}
	if end, ok := ctx.Deadline(); ok {
		half, cancel := context.WithTimeout(ctx, time.Until(end)/2)
		defer cancel()
		ctx = half
	}
	host, port, _ := net.SplitHostPort(addr)
	ips, err := n.lookup(ctx, host)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.peers[addr] != was {
		// It was forgotten or looked up meanwhile.
		return n.peers[addr].peer
	}
	now := time.Now()
	was.looked = now
	switch isThere := slices.ContainsFunc(ips, func(ip string) bool { return net.JoinHostPort(ip, port) == was.peer }); {
	case err != nil:
	case isThere:
		was.missing = time.Time{}
	case was.missing.IsZero():
		was.missing = now
	case now.Sub(was.missing) >= revisitPeriod:
		delete(n.peers, addr)
		return ""
	}
	n.peers[addr] = was
	return was.peer
}
