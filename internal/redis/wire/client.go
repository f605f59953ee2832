package wire

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
)

func init() {
	// go-redis prints a line to stderr for each connection that fails: many a second
	// for a server that is down. The errors are returned as well.
	goredis.SetLogger(logging.NewBlacklistLogger([]string{"failed to dial"}))
}

// clientOptions returns the options of a client that connects at its first use,
// never repeats a command, and bounds every wait.
func clientOptions(addr string, opts *Options) *goredis.Options {
	o := &goredis.Options{
		Network: "tcp",
		Addr:    addr,
		// RESP2 avoids the push machinery of RESP3, which is not needed.
		Protocol:                   2,
		CredentialsProviderContext: opts.Credentials,
		Dialer:                     opts.connect,
		DB:                         opts.DB,
		MaxRetries:                 -1,
		// In turn, so that the INFO of each second keeps all from being closed for idleness.
		PoolFIFO: true,
		// The dialler has a bound of its own, which changes.
		DialTimeout:   max(opts.DialTimeout, maxDialTimeout),
		DialerRetries: 1,
		// Every call has a deadline, which may be a long one.
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		ContextTimeoutEnabled: true,
		PoolTimeout:           poolTimeout,
		ConnMaxLifetime:       opts.ConnMaxLifetime,
		PoolSize:              opts.connections(),
		MaxActiveConns:        opts.connections(),
		PipelinePoolSize:      -1,
		DisableIdentity:       true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	}
	if path, ok := strings.CutPrefix(addr, "unix/"); ok {
		o.Network, o.Addr = "unix", path
	}
	return o
}

// NewClient returns a client of one server, for charges if persistent is set. It connects
// at its first use.
func NewClient(addr string, opts *Options, persistent bool) *goredis.Client {
	return newClient(addr, opts, persistent, nil)
}

// newClient is NewClient, and tells a shard that is not nil about the server of each connection.
func newClient(addr string, opts *Options, persistent bool, shard *Shard) *goredis.Client {
	o := clientOptions(addr, opts)
	if persistent {
		// What is lost on a connection that was cut may have run; what is not sent is sent again.
		o.PoolFIFO, o.Dialer = false, opts.connectToCharge
	}
	o.OnConnect = func(ctx context.Context, cn *goredis.Conn) error {
		pipe := cn.Pipeline()
		ping := pipe.Ping(ctx)
		var who *goredis.StringCmd
		if shard != nil && shard.asksWho(addr) {
			who = pipe.Info(ctx)
		}
		_, _ = pipe.Exec(ctx)
		// A server that requires a password closes a connection on which a bundle
		// arrives without it, and then the outcome is unknown. Other refusals of this
		// ping do not matter.
		if err := ping.Err(); err != nil && (!IsReply(err) || Says(err, Shut)) {
			return fmt.Errorf("ping at connecting: %w", err)
		}
		if who != nil && who.Err() == nil {
			shard.meet(addr, who.Val())
		}
		if len(opts.Cluster) > 0 && !persistent {
			// A replica in a Redis Cluster answers only after READONLY.
			return cn.ReadOnly(ctx).Err()
		}
		return nil
	}
	return goredis.NewClient(o)
}

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

// closeWith closes a client when ctx ends or the function is called: connecting waits for replies even though ctx has ended,
// and a shard that closes would wait for it.
func closeWith(ctx context.Context, client *goredis.Client) func() {
	end := sync.OnceFunc(func() { _ = client.Close() })
	stop := context.AfterFunc(ctx, end)
	return func() {
		stop()
		end()
	}
}

// DialTimeout returns how long connecting may take for a store with this check timeout:
// four times as long, from 200 ms to 5 s; a longer check timeout counts itself, up to a
// minute.
func DialTimeout(checkTimeout time.Duration) time.Duration {
	return max(DefaultDialTimeout, min(dialRoundTrips*min(checkTimeout, longDial), longDial), min(checkTimeout, maxDialTimeout))
}

// Use notes that a store with this check timeout uses the shard, until done is called.
// The most patient store decides how long connecting, and what the shard asks by itself, may take.
func (s *Shard) Use(checkTimeout time.Duration) (done func()) {
	return s.Options.patience.add(checkTimeout)
}

// ConnectTimeout is how long connecting may take at present.
func (o *Options) ConnectTimeout() time.Duration {
	return max(o.DialTimeout, DialTimeout(o.patience.longest()))
}

// ReplyWithin is how long a reply that no request waits for may take at present: that long at least,
// or a check timeout, up to 5 s.
func (o *Options) ReplyWithin(least time.Duration) time.Duration {
	return max(least, min(o.patience.longest(), longDial))
}

// SearchTimeout is how long a search for servers may take at present.
func (o *Options) SearchTimeout() time.Duration { return searchReplies * o.NodeTimeout() }

// NodeTimeout is how long a search waits for a reply at present.
func (o *Options) NodeTimeout() time.Duration { return o.ReplyWithin(findTimeout) }

// hasMoved reports whether the name in an address has moved away from the connected server. Then the shard's connections
// to the address are replaced.
func (o *Options) hasMoved(ctx context.Context, addr string) bool {
	ctx, cancel := context.WithTimeout(ctx, o.NodeTimeout())
	defer cancel()
	if !o.names.hasMoved(ctx, addr) {
		return false
	}
	o.moved(addr)
	return true
}

// patience holds the check timeouts of the stores that use a shard.
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
func (o *Options) connect(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := o.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return guard(conn, nil), nil
}

// connectToCharge connects as connect does. On the connection a PING is awaited before what follows a
// pause.
func (o *Options) connectToCharge(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := o.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	// The charge behind it must not run later than its time allows.
	return guard(conn, func() time.Duration { return min(o.ConnectTimeout(), ReplyTimeout/2) }), nil
}

// TLSConfig returns the TLS configuration of a new connection.
func (o *Options) TLSConfig() *tls.Config {
	config := o.TLS.Clone()
	if o.AddCertificates != nil {
		o.AddCertificates(config)
	}
	return config
}

func (o *Options) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, o.ConnectTimeout())
	defer cancel()
	dial := (&net.Dialer{KeepAliveConfig: keepAlive}).DialContext
	switch {
	case o.Dial != nil:
		dial = o.Dial
	case o.TLS != nil:
		config := o.TLSConfig()
		if host, _, err := net.SplitHostPort(addr); err == nil && config.ServerName == "" {
			// dial may replace the name by the address of a record.
			config.ServerName = host
		}
		dial = (&tls.Dialer{NetDialer: &net.Dialer{KeepAliveConfig: keepAlive}, Config: config}).DialContext
	}
	return o.names.dial(ctx, network, addr, dial)
}
