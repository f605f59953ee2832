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

// The kinds of errors, few enough for the label of a metric.
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

// fate is what an error reply says of the command that it answers.
type fate uint8

const (
	// uncertain: some of it may have run, so it is never repeated.
	uncertain fate = iota
	// final: nothing of it ran, and the same command would be refused again.
	final
	// later: nothing of it ran, and it may run at another time.
	later
)

// hint is what an error reply says beyond its command.
type hint uint8

const (
	// elsewhere: another server may be the primary by now.
	elsewhere hint = 1 << iota
	// demoted: this server is not the primary. Its address may be a name or a
	// virtual IP that leads to another one by now, unlike the connection.
	demoted
	// unfit: the server can run no command.
	unfit
	// shut: the server runs no command on this connection.
	shut
	// scriptless: the server does not know the script.
	scriptless
	// splitting: the server takes only one key in a call, or keys of one slot.
	splitting
	// oneKey: the node takes one key at a time, while a slot is on its way to it.
	oneKey
)

// meaning is what an error reply means.
type meaning struct {
	kind string
	fate fate
	hint hint
}

// replies are the error replies of servers, by how they begin. A reply that is not
// here is a proxy's, or one of a server that nobody has tried: whether the command
// has run is not known then.
var replies = []struct {
	text string
	meaning
}{
	// The server is not what it was; it or its successor will do.
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
	// Somebody's script takes long.
	{"BUSY ", meaning{KindBusy, later, 0}},
	// The next try brings the script, or is made key by key.
	{"NOSCRIPT", meaning{KindOther, later, scriptless}},
	{"CROSSSLOT", meaning{KindOther, later, splitting}},
	// The server lets nobody in, or nobody with this password, which operators change
	// while Caddy runs.
	{"max number of clients", meaning{KindConnection, later, shut}},
	{"NOAUTH", meaning{KindAuth, later, unfit | shut}},
	{"WRONGPASS", meaning{KindAuth, later, unfit | shut}},
	{"unauthenticated", meaning{KindAuth, later, unfit | shut}},
	{"DENIED", meaning{KindAuth, later, unfit | shut}},
	// The user lacks a right. Redis 7.0 and later ones word it differently in scripts.
	{"NOPERM", meaning{KindAuth, final, 0}},
	{"The user executing the script", meaning{KindAuth, final, 0}},
	{"ACL failure in script", meaning{KindAuth, final, 0}},
	// What the key holds is no bucket.
	{"WRONGTYPE", meaning{KindForeignData, final, 0}},
	{"hash value is not an integer", meaning{KindForeignData, final, 0}},
	// The server lacks the command.
	{"unknown command", meaning{KindOther, final, 0}},
	{"Unknown Redis command", meaning{KindOther, final, 0}},
}

// The words with which the scripts begin an error that came before, or after, their
// first write.
const (
	wordRefused = "REFUSED "
	wordPartial = "PARTIAL "
)

// meaningOf returns what err means if it is a server's reply.
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
		// The script has stumbled over what it found.
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

// says reports whether err is a reply with that hint.
func says(err error, h hint) bool {
	m, ok := meaningOf(err)
	return ok && m.hint&h != 0
}

// failure is a kind of errors that are not replies.
type failure struct {
	kind string
	is   func(err error) bool
}

var (
	// made are the errors that are made here and may wrap others.
	made = []failure{
		{KindBreaker, isError(ErrShardDown)},
		{KindOverload, isError(errOverload)},
		{KindUnfound, isError(errNoServers)},
		{KindForeignData, isError(errReply)},
	}
	// met are the others, looked through in order.
	met = []failure{
		{KindConnection, isDialError},
		{KindTimeout, isError(ErrTimeout)},
		{KindTimeout, isError(context.DeadlineExceeded)},
		{KindTimeout, isNetTimeout},
		{KindConnection, isError(errClosed)},
		{KindConnection, isError(errNoReply)},
		{KindConnection, isError(io.EOF)},
		{KindConnection, isError(net.ErrClosed)},
		{KindConnection, isError(goredis.ErrClosed)},
		{KindConnection, isNetError},
	}
)

// KindOf returns the kind of an error of a store.
func KindOf(err error) string {
	if kind, ok := kindIn(made, err); ok {
		return kind
	}
	if m, ok := meaningOf(err); ok {
		return m.kind
	}
	kind, _ := kindIn(met, err)
	return kind
}

func kindIn(failures []failure, err error) (kind string, ok bool) {
	for _, f := range failures {
		if f.is(err) {
			return f.kind, true
		}
	}
	return KindOther, false
}

func isError(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

func isNetError(err error) bool {
	var e net.Error
	return errors.As(err, &e)
}

func isNetTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// isDialError reports whether no connection could be made.
func isDialError(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// isRefusal reports whether err is a server's reply.
func isRefusal(err error) bool {
	_, ok := meaningOf(err)
	return ok
}

// isServerFault reports whether err speaks against the server as a whole, and not
// against one command.
func isServerFault(err error) bool {
	m, isReply := meaningOf(err)
	return err != nil && (!isReply || m.hint&unfit != 0)
}

// pointsElsewhere reports whether err suggests that a shard has another primary
// now.
func pointsElsewhere(err error) bool { return isServerFault(err) || says(err, elsewhere) }

func notExecuted(err error) error { return fmt.Errorf("%w: %w", store.ErrNotExecuted, err) }

// refused is the error of a command that err kept from being sent, or from being
// run, by what err means.
func refused(err error) error {
	if m, ok := meaningOf(err); ok && m.fate == final {
		return fmt.Errorf("%w: %w", store.ErrFinal, err)
	}
	return notExecuted(err)
}

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

// isOpen reports whether c is to be sent, for the first time or again.
func (c *command) isOpen() bool {
	if c.outcome == nil {
		return !c.answered()
	}
	return c.mayRunLater()
}

// mayRunLater reports whether c surely did not run and is worth another try.
func (c *command) mayRunLater() bool {
	return errors.Is(c.outcome, store.ErrNotExecuted) && !errors.Is(c.outcome, store.ErrFinal)
}
