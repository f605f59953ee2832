package redis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// ErrTimeout is the error, possibly wrapped, of a call without an answer before its
// deadline.
var ErrTimeout = errors.New("no answer in time")

// ErrShardDown is the error, possibly wrapped, of a call that was not made because
// the previous calls failed.
var ErrShardDown = errors.New("server is left out after repeated failures")

var (
	errOverload = errors.New("too many calls are waiting")
	errClosed   = errors.New("connections are closed")
	errNoReply  = errors.New("connection gave no reply")
)

// The kinds of errors, as labels of a metric.
const (
	KindTimeout     = "timeout"
	KindConnection  = "connection"
	KindBreaker     = "breaker"
	KindOverload    = "overload"
	KindLoading     = "loading"
	KindBusy        = "busy"
	KindReadOnly    = "readonly"
	KindMemory      = "memory"
	KindMisconf     = "misconf"
	KindAuth        = "auth"
	KindForeignData = "foreign_data"
	KindUnfound     = "unfound"
	KindOther       = "other"
)

// fate is what an error reply says of its command.
type fate uint8

const (
	// uncertain: it may have run in part, so it is never repeated.
	uncertain fate = iota
	// final: it did not run, and would be refused again.
	final
	// later: it did not run, and may run at another time.
	later
)

// hint is what an error reply says of the server.
type hint uint8

const (
	// elsewhere: another server may be the primary by now.
	elsewhere hint = 1 << iota
	// demoted: this server is not the primary. Its address may be a name or a
	// virtual IP that leads to the primary by now; the connection does not.
	demoted
	// unfit: the server can run no command.
	unfit
	// shut: the server can run no command on this connection.
	shut
	// scriptless: the server lacks the script.
	scriptless
	// splitting: a call may have only one key, or keys of one slot.
	splitting
	// oneKey: a call may have only one key while the node imports the slot.
	oneKey
	// lacking: the server does not know the command, or the user may not call it. A script
	// may.
	lacking
)

type meaning struct {
	kind string
	fate fate
	hint hint
}

// replies are the error replies of servers, by their first words. Any other reply is
// a proxy's, or that of an untested server: whether the command ran is unknown.
var replies = []struct {
	text string
	meaning
}{
	// The server, or its successor, will be ready later.
	{"READONLY", meaning{KindReadOnly, later, elsewhere | demoted}},
	{"MASTERDOWN", meaning{KindUnfound, later, elsewhere | demoted | unfit}},
	{"LOADING", meaning{KindLoading, later, unfit}},
	// The cluster elects, or moves a slot.
	{"CLUSTERDOWN", meaning{KindUnfound, later, elsewhere}},
	{"MOVED ", meaning{KindOther, later, 0}},
	{"ASK ", meaning{KindOther, later, 0}},
	{"TRYAGAIN", meaning{KindOther, later, oneKey}},
	// The server refuses writes for now.
	{"OOM", meaning{KindMemory, later, 0}},
	{"MISCONF", meaning{KindMisconf, later, 0}},
	{"NOREPLICAS", meaning{KindMisconf, later, 0}},
	// A script takes long.
	{"BUSY ", meaning{KindBusy, later, 0}},
	// The next try loads the script, or has one key in each call.
	{"NOSCRIPT", meaning{KindOther, later, scriptless}},
	{"CROSSSLOT", meaning{KindOther, later, splitting}},
	// The server accepts no client, or not this password, which operators change at
	// run time.
	{"max number of clients", meaning{KindConnection, later, shut}},
	{"NOAUTH", meaning{KindAuth, later, unfit | shut}},
	{"WRONGPASS", meaning{KindAuth, later, unfit | shut}},
	{"unauthenticated", meaning{KindAuth, later, unfit | shut}},
	{"DENIED", meaning{KindAuth, later, unfit | shut}},
	// The user lacks a right. In scripts the words depend on the version of Redis.
	{"NOPERM this user has no permissions to access one of the keys", meaning{KindAuth, final, 0}},
	{"NOPERM No permissions to access a key", meaning{KindAuth, final, 0}},
	{"NOPERM", meaning{KindAuth, final, lacking}},
	{"The user executing the script", meaning{KindAuth, final, 0}},
	{"ACL failure in script", meaning{KindAuth, final, 0}},
	// The key does not hold a bucket.
	{"WRONGTYPE", meaning{KindForeignData, final, 0}},
	{"hash value is not an integer", meaning{KindForeignData, final, 0}},
	// The server, or a proxy, lacks the command.
	{"unknown command", meaning{KindOther, final, lacking}},
	{"unsupported command '", meaning{KindOther, final, lacking}},
	{"Unknown Redis command", meaning{KindOther, final, 0}},
}

// The first words of a script's error before, or after, its first write.
const (
	wordRefused = "REFUSED "
	wordPartial = "PARTIAL "
)

func meaningOf(err error) (m meaning, ok bool) {
	if err == nil {
		return meaning{}, false
	}
	var e goredis.Error
	if !errors.As(err, &e) {
		return meaning{}, false
	}
	text, partial := strings.CutPrefix(e.Error(), wordPartial)
	text, refused := strings.CutPrefix(text, wordRefused)
	text = strings.TrimPrefix(text, "ERR ")
	m = meaning{kind: KindOther}
	if refused {
		// The script failed on the content of the key.
		m.fate = final
	}
	for i := range replies {
		if strings.HasPrefix(text, replies[i].text) {
			m = replies[i].meaning
			break
		}
	}
	if partial {
		m.fate = uncertain
	}
	return m, true
}

func says(err error, h hint) bool {
	m, ok := meaningOf(err)
	return ok && m.hint&h != 0
}

// KindOf returns the kind of an error of a store.
func KindOf(err error) string {
	// These may wrap a server's reply.
	switch {
	case errors.Is(err, ErrShardDown):
		return KindBreaker
	case errors.Is(err, errOverload):
		return KindOverload
	case errors.Is(err, errNoServers):
		return KindUnfound
	case errors.Is(err, errReply):
		return KindForeignData
	}
	if m, ok := meaningOf(err); ok {
		return m.kind
	}
	var netErr net.Error
	isNetErr := errors.As(err, &netErr)
	switch {
	case isDialError(err):
		return KindConnection
	case errors.Is(err, ErrTimeout), errors.Is(err, context.DeadlineExceeded), isNetErr && netErr.Timeout():
		return KindTimeout
	case isNetErr, errors.Is(err, errClosed), errors.Is(err, errNoReply), errors.Is(err, io.EOF),
		errors.Is(err, net.ErrClosed), errors.Is(err, goredis.ErrClosed):
		return KindConnection
	default:
		return KindOther
	}
}

func isDialError(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

func isReply(err error) bool {
	_, ok := meaningOf(err)
	return ok
}

// isServerFault reports whether err speaks against the server, and not only against
// one command.
func isServerFault(err error) bool {
	m, isReply := meaningOf(err)
	return err != nil && (!isReply || m.hint&unfit != 0)
}

// pointsElsewhere reports whether err suggests that the shard has another primary.
func pointsElsewhere(err error) bool { return isServerFault(err) || says(err, elsewhere) }

func notExecuted(err error) error { return fmt.Errorf("%w: %w", store.ErrNotExecuted, err) }

// refused is the error of a command that did not run because of err.
func refused(err error) error {
	if m, ok := meaningOf(err); ok && m.fate == final {
		return fmt.Errorf("%w: %w", store.ErrFinal, err)
	}
	return notExecuted(err)
}

// settleOutcome sets the outcome of c after a pipeline that returned execErr.
func (c *command) settleOutcome(execErr error) {
	_, err := c.result()
	if err == nil {
		if c.answered() {
			c.outcome = nil
			return
		}
		// go-redis sets no error on commands if the setup of the connection failed, for
		// example because of the password.
		if err = execErr; err == nil {
			err = errNoReply
		}
	}
	m, isReply := meaningOf(err)
	switch {
	case !c.sent, isDialError(err):
		c.outcome = notExecuted(err)
	case c.reads, isReply && m.fate != uncertain:
		c.outcome = refused(err)
	default:
		c.outcome = fmt.Errorf("%w: %w", store.ErrUncertain, err)
	}
}

// isOpen reports whether c has to be sent, for the first time or again.
func (c *command) isOpen() bool {
	if c.outcome == nil {
		return !c.answered()
	}
	return errors.Is(c.outcome, store.ErrNotExecuted) && !errors.Is(c.outcome, store.ErrFinal)
}
