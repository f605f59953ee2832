package redis

import (
	"context"
	"fmt"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
)

func init() {
	// go-redis prints a line to stderr for each connection that fails, which
	// for a server that is down is many times a second. The error is returned
	// as well, and reported by whoever uses the store.
	goredis.SetLogger(logging.NewBlacklistLogger([]string{"failed to dial"}))
}

// poolTimeout is not met: there are as many connections as workers, and few
// that ask for a server's health.
const poolTimeout = 5 * time.Second

// clientOptions are those of a client that connects when it is first used. It
// never repeats a command by itself, and every wait of it is bounded.
func clientOptions(addr string, opts *ShardOptions) *goredis.Options {
	o := &goredis.Options{
		Network: "tcp",
		Addr:    addr,
		// RESP2 saves the push machinery of RESP3, which nothing here uses.
		Protocol:                   2,
		CredentialsProviderContext: opts.Credentials,
		TLSConfig:                  opts.TLS,
		Dialer:                     opts.dial,
		DB:                         opts.DB,
		MaxRetries:                 -1,
		DialTimeout:                opts.dialTimeout(),
		DialerRetries:              1,
		// Every call brings its deadline, which may be a long one.
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		ContextTimeoutEnabled: true,
		PoolTimeout:           poolTimeout,
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

// newClient returns a client for one server.
func newClient(addr string, opts *ShardOptions, persistent bool) *goredis.Client {
	o := clientOptions(addr, opts)
	o.OnConnect = func(ctx context.Context, cn *goredis.Conn) error {
		// A server that wants a password closes a connection that sends it a bundle
		// without one, and then nobody knows what ran. What else it may say to this
		// is not what was asked for.
		if err := cn.Ping(ctx).Err(); err != nil && (!isRefusal(err) || says(err, shut)) {
			return fmt.Errorf("ping at connecting: %w", err)
		}
		if len(opts.Cluster) > 0 && !persistent {
			// A replica in a Redis Cluster answers only who asks for that.
			return cn.ReadOnly(ctx).Err()
		}
		return nil
	}
	return goredis.NewClient(o)
}

// reconnect makes calls use new connections, for a name or a virtual IP may lead to
// another server by now. What is on its way ends on the old ones.
func (l *lane) reconnect() {
	last, now := l.reconnected.Load(), time.Now().UnixNano()
	if now-last < int64(reconnectPause) || !l.reconnected.CompareAndSwap(last, now) {
		return
	}
	old := l.client.Swap(newClient(l.addr, &l.shard.opts, l.persistent))
	l.shard.retired.Go(func() {
		// Whoever has chosen them already may use them still.
		for pause(l.life, retirePause) {
			if used := old.PoolStats(); used.TotalConns == used.IdleConns {
				break
			}
		}
		_ = old.Close()
	})
}
