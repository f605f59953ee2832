package redis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// reply is an error that a server has said.
type reply string

func (r reply) Error() string { return string(r) }

// RedisError implements [redis.Error].
func (reply) RedisError() {}

func TestKindOf(t *testing.T) {
	var _ redis.Error = reply("")
	for want, errs := range map[string][]error{
		KindTimeout:     {ErrTimeout, context.DeadlineExceeded, os.ErrDeadlineExceeded, &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}},
		KindConnection:  {io.EOF, net.ErrClosed, redis.ErrClosed, errNoReply, errClosed, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, &net.OpError{Op: "write", Err: errors.New("broken pipe")}, reply("ERR max number of clients reached")},
		KindBreaker:     {ErrShardDown},
		KindOverload:    {errOverload},
		KindLoading:     {reply("LOADING Redis is loading the dataset in memory")},
		KindReadOnly:    {reply("READONLY You can't write against a read only replica.")},
		KindMemory:      {reply("OOM command not allowed when used memory > 'maxmemory'.")},
		KindMisconf:     {reply("MISCONF Redis is configured to save RDB snapshots")},
		KindAuth:        {reply("NOAUTH Authentication required."), reply("WRONGPASS invalid username-password pair"), reply("NOPERM User limiter has no permissions to run the 'del' command")},
		KindForeignData: {errReply, reply("WRONGTYPE the key holds something else than a fixed window")},
		KindUnfound:     {errNoServers, reply("CLUSTERDOWN Hash slot not served"), reply("MASTERDOWN Link with MASTER is down")},
		KindOther:       {nil, errors.New("anything"), context.Canceled, reply("ERR unknown command")},
	} {
		for _, err := range errs {
			wrapped := fmt.Errorf("redis 127.0.0.1:6379: %w: %w", store.ErrNotExecuted, err)
			for _, err := range []error{err, wrapped} {
				if got := KindOf(err); got != want {
					t.Errorf("%v is %s, want %s", err, got, want)
				}
			}
		}
	}
}
