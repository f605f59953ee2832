package redis

import (
	"errors"
	"fmt"
	"net"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// ErrTimeout is the error, possibly wrapped, of a call that had no answer
// before its deadline.
var ErrTimeout = errors.New("no answer in time")

// ErrShardDown is the error, possibly wrapped, of a call that was not made
// because the calls before it failed.
var ErrShardDown = errors.New("server is left out after repeated failures")

var (
	errOverload = errors.New("too many calls are waiting")
	errClosed   = errors.New("connections are closed")
	errNoReply  = errors.New("connection gave no reply")
)

// refusals are the replies by which a server says that it did not run a
// command, and may run it later.
var refusals = []func(error) bool{
	isReadOnly,
	hasPrefix("LOADING"),
	hasPrefix("MASTERDOWN"),
	hasPrefix("NOREPLICAS"),
	hasPrefix("TRYAGAIN"),
	isClusterDown,
	hasPrefix("OOM"),
	isMisconfError,
	goredis.IsMaxClientsError,
	// The scripts were flushed again, after they had been loaded.
	isNoScript,
}

// What a server says of one bucket of a bundle has ERR before it, which these skip
// and go-redis's own functions do not.
var (
	isReadOnly     = hasPrefix("READONLY")
	isClusterDown  = hasPrefix("CLUSTERDOWN")
	isMisconfError = hasPrefix("MISCONF")
	isNoScript     = hasPrefix("NOSCRIPT")
	isCrossSlot    = hasPrefix("CROSSSLOT")
)

// settleOutcome sets what became of c after a pipeline that returned execErr.
func (c *command) settleOutcome(execErr error) {
	err := c.Err()
	if err == nil {
		if c.answered() {
			c.outcome = nil
			return
		}
		// go-redis leaves commands unmarked where a connection could not be
		// set up, as when the server refuses the password.
		if err = execErr; err == nil {
			err = errNoReply
		}
	}
	var reply goredis.Error
	switch {
	case !c.sent, c.reads, isDialError(err), errors.As(err, &reply):
		c.outcome = notExecuted(err)
	default:
		c.outcome = fmt.Errorf("%w: %w", store.ErrUncertain, err)
	}
}

// isDialError reports whether no connection could be made.
func isDialError(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

func notExecuted(err error) error { return fmt.Errorf("%w: %w", store.ErrNotExecuted, err) }

// mayRunLater tells whether c surely did not run and is worth another try.
func (c *command) mayRunLater() bool {
	if c.outcome == nil || !errors.Is(c.outcome, store.ErrNotExecuted) {
		return false
	}
	if !c.sent {
		return true
	}
	for _, is := range refusals {
		if is(c.outcome) {
			return true
		}
	}
	return false
}

// pointsElsewhere tells whether err suggests that a shard has another primary
// now.
func pointsElsewhere(err error) bool {
	return isServerFault(err) || isReadOnly(err) || isClusterDown(err)
}

// isRefusal tells whether err is a server's reply.
func isRefusal(err error) bool {
	var reply goredis.Error
	return errors.As(err, &reply)
}

// isServerFault tells whether err speaks against the server as a whole, and
// not against one command.
func isServerFault(err error) bool {
	if err == nil {
		return false
	}
	var reply goredis.Error
	if !errors.As(err, &reply) {
		return true
	}
	return goredis.IsLoadingError(err) || goredis.IsMasterDownError(err) || goredis.IsAuthError(err)
}
