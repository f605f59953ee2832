package redis

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"time"
)

const (
	// DefaultDialTimeout is the least time for which a connection may be dialled.
	DefaultDialTimeout = 200 * time.Millisecond
	// dialRoundTrips is how many round trips connecting takes, where a check takes one:
	// TCP, TLS, the login, and the ping.
	dialRoundTrips = 4
	// longDial bounds the dialling that takes longer than a check: a connection that is
	// dialled to a server that drops packets keeps its place in the pool.
	longDial = 5 * time.Second
	// maxDialTimeout bounds all dialling.
	maxDialTimeout = time.Minute
)

// DialTimeout returns how long connecting may take for a store with this check timeout:
// four times as long, from 200 ms to 5 s; a longer check timeout counts itself, up to a
// minute.
func DialTimeout(checkTimeout time.Duration) time.Duration {
	return max(DefaultDialTimeout, min(dialRoundTrips*min(checkTimeout, longDial), longDial), min(checkTimeout, maxDialTimeout))
}

// Use notes that a store with this check timeout uses the shard, until done is called.
// The most patient store decides how long connecting may take.
func (s *Shard) Use(checkTimeout time.Duration) (done func()) {
	return s.opts.patience.add(DialTimeout(checkTimeout))
}

// dialTimeout is how long connecting may take at present.
func (o *ShardOptions) dialTimeout() time.Duration {
	return max(o.DialTimeout, o.patience.longest())
}

// patience holds the dial timeouts of the stores that use a shard.
type patience struct {
	mu    sync.Mutex
	users map[*time.Duration]bool
}

func (p *patience) add(timeout time.Duration) (remove func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	user := &timeout
	p.users[user] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.users, user)
	}
}

func (p *patience) longest() (timeout time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for user := range p.users {
		timeout = max(timeout, *user)
	}
	return timeout
}

// keepAlive finds out within a minute that a peer is gone.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3}

// connect dials an address, and shakes hands if TLS is in use.
func (o *ShardOptions) connect(ctx context.Context, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, o.dialTimeout())
	defer cancel()
	if o.dial != nil {
		return o.dial(ctx, network, addr)
	}
	dialer := &net.Dialer{KeepAliveConfig: keepAlive}
	if o.TLS == nil {
		return dialer.DialContext(ctx, network, addr)
	}
	return (&tls.Dialer{NetDialer: dialer, Config: o.TLS}).DialContext(ctx, network, addr)
}
