package wire

import (
	"errors"
	"fmt"
	"net"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// ErrTimeout is the error, possibly wrapped, of a call without an answer before its
// deadline.
var ErrTimeout = store.WithKind(store.KindTimeout, errors.New("no answer in time"))

// ErrShardDown is the error, possibly wrapped, of a call that was not made because
// the previous calls failed.
var ErrShardDown = store.WithKind(store.KindBreaker, errors.New("server is left out after repeated failures"))

// ErrUnfit is the error, possibly wrapped, of a call that was not made because the server answers, and
// is of a kind that cannot keep buckets.
var ErrUnfit = store.WithKind(store.KindMisconf, errors.New("server cannot keep buckets"))

// Errors, possibly wrapped, of calls that were not made or had no reply.
var (
	// ErrOverload: the queue is full.
	ErrOverload = store.WithKind(store.KindOverload, errors.New("too many calls are waiting"))
	// ErrClosed: the shard is closed.
	ErrClosed  = store.WithKind(store.KindConnection, errors.New("connections are closed"))
	errNoReply = store.WithKind(store.KindConnection, errors.New("connection gave no reply"))
	// ErrNoServers is the error of calls while no primary is known.
	ErrNoServers = store.WithKind(store.KindUnfound, errors.New("no primary is known"))
	// ErrReply is the error of a reply, or a key, with other content than a bucket's.
	ErrReply = store.WithKind(store.KindForeignData, errors.New("this is not a bucket of ours"))
)

// Fate is what an error reply says of its command.
type Fate uint8

const (
	// Uncertain says that it may have run in part, so it is never repeated.
	Uncertain Fate = iota
	// Final says that it did not run, and would be refused again.
	Final
	// Later says that it did not run, and may run at another time.
	Later
)

// Hint is what an error reply says of the server.
type Hint uint16

const (
	// elsewhere: another server may be the primary by now.
	elsewhere Hint = 1 << iota
	// demoted: this server is not the primary. Its address may be a name or a
	// virtual IP that leads to the primary by now; the connection does not.
	demoted
	// unfit: the server can run no command.
	unfit
	// Shut says that the server can run no command on this connection.
	Shut
	// scriptless: the server lacks the script.
	scriptless
	// splitting: a call may have only one key, or keys of one slot.
	splitting
	// OneKey says that a call may have only one key while the node imports the slot.
	OneKey
	// login: the server refuses the credentials.
	login
	// Lacking says that the server does not know the command, or the user may not call it. A script
	// may.
	Lacking
	// Uncountable says that Redis cannot add to what is there, which is no number of a bucket.
	Uncountable
	// LackingInside says that a script calls a command that the server does not know.
	LackingInside
	// clusterless: the server is no node of a Redis Cluster.
	clusterless
)

// Meaning is what an error reply says: its kind in metrics, and of command and server.
type Meaning struct {
	Kind store.ErrorKind
	Fate Fate
	Hint Hint
}

// replies are the error replies of servers, by their first words. Any other reply is
// a proxy's, or that of an untested server: whether the command ran is unknown.
var replies = []struct {
	text string
	Meaning
}{
	// The server, or its successor, will be ready later.
	{"READONLY", Meaning{store.KindReadOnly, Later, elsewhere | demoted}},
	{"MASTERDOWN", Meaning{store.KindUnfound, Later, elsewhere | demoted | unfit}},
	{"LOADING", Meaning{store.KindLoading, Later, unfit}},
	// The cluster elects, or moves a slot.
	{"CLUSTERDOWN", Meaning{store.KindUnfound, Later, elsewhere}},
	{"MOVED ", Meaning{store.KindOther, Later, 0}},
	{"ASK ", Meaning{store.KindOther, Later, 0}},
	{"TRYAGAIN", Meaning{store.KindOther, Later, OneKey}},
	// The server refuses writes for now.
	{"OOM", Meaning{store.KindMemory, Later, 0}},
	{"MISCONF", Meaning{store.KindMisconf, Later, 0}},
	{"NOREPLICAS", Meaning{store.KindMisconf, Later, 0}},
	// A script takes long.
	{"BUSY ", Meaning{store.KindBusy, Later, 0}},
	// The next try loads the script, or has one key in each call.
	{"NOSCRIPT", Meaning{store.KindOther, Later, scriptless}},
	{"CROSSSLOT", Meaning{store.KindOther, Later, splitting}},
	// The server accepts no client, or not this password, which operators change at
	// run time.
	{"max number of clients", Meaning{store.KindConnection, Later, unfit | Shut}},
	{"NOAUTH", Meaning{store.KindAuth, Later, unfit | Shut | login}},
	{"WRONGPASS", Meaning{store.KindAuth, Later, unfit | Shut | login}},
	{"unauthenticated", Meaning{store.KindAuth, Later, unfit | Shut | login}},
	{"DENIED", Meaning{store.KindAuth, Later, unfit | Shut}},
	// The user lacks a right. In scripts the words depend on the version of Redis.
	{"NOPERM the user may not run", Meaning{store.KindAuth, Final, 0}},
	{"NOPERM this user has no permissions to access one of the keys", Meaning{store.KindAuth, Final, 0}},
	{"NOPERM No permissions to access a key", Meaning{store.KindAuth, Final, 0}},
	{"NOPERM", Meaning{store.KindAuth, Final, Lacking}},
	{"The user executing the script", Meaning{store.KindAuth, Final, 0}},
	{"ACL failure in script", Meaning{store.KindAuth, Final, 0}},
	// The key does not hold a bucket.
	{"WRONGTYPE", Meaning{store.KindForeignData, Final, 0}},
	{"hash value is not an integer", Meaning{store.KindForeignData, Final, Uncountable}},
	{"increment or decrement would overflow", Meaning{store.KindForeignData, Final, Uncountable}},
	// The server, or a proxy, lacks the command.
	{"unknown command", Meaning{store.KindOther, Final, Lacking}},
	{"This instance has cluster support disabled", Meaning{store.KindOther, Final, clusterless}},
	{"unsupported command '", Meaning{store.KindOther, Final, Lacking}},
	{"Unknown Redis command", Meaning{store.KindOther, Final, LackingInside}},
	{"Unknown command called from script", Meaning{store.KindOther, Final, LackingInside}},
}

// The first words of a script's error before, or after, its first write.
const (
	wordRefused = "REFUSED "
	wordPartial = "PARTIAL "
)

// MeaningOf returns the meaning of err, and whether it is, or wraps, an error reply.
func MeaningOf(err error) (m Meaning, ok bool) {
	if err == nil {
		return Meaning{}, false
	}
	var e goredis.Error
	if !errors.As(err, &e) {
		return Meaning{}, false
	}
	text, partial := strings.CutPrefix(e.Error(), wordPartial)
	text, refused := strings.CutPrefix(text, wordRefused)
	m = Meaning{Kind: store.KindOther}
	if refused {
		// The script failed on the content of the key.
		m.Fate = Final
	}
	if refused || partial {
		// Lua puts the place before the text of an assertion.
		if place, rest, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(place, "user_script:") {
			text = rest
		}
	}
	text = strings.TrimPrefix(text, "ERR ")
	for i := range replies {
		if strings.HasPrefix(text, replies[i].text) {
			m = replies[i].Meaning
			break
		}
	}
	if partial {
		m.Fate = Uncertain
	}
	return m, true
}

// Says reports whether err is an error reply that says that of the server.
func Says(err error, h Hint) bool {
	m, ok := MeaningOf(err)
	return ok && m.Hint&h != 0
}

// classified gives an error of go-redis the kind that only this package knows.
func classified(err error) error {
	switch m, isReply := MeaningOf(err); {
	case isReply:
		return store.WithKind(m.Kind, err)
	case errors.Is(err, goredis.ErrClosed):
		return store.WithKind(store.KindConnection, err)
	}
	return err
}

// IsDialError reports whether err is the failure of a connection attempt.
func IsDialError(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// neverLeft reports whether err shows that nothing of a call was written to a server.
func neverLeft(err error) bool {
	_, isUnwritten := errors.AsType[unwrittenError](err)
	return isUnwritten || IsDialError(err)
}

// IsReply reports whether err is a server's error reply.
func IsReply(err error) bool {
	_, ok := MeaningOf(err)
	return ok
}

// pointsElsewhere reports whether err suggests that the shard has another primary.
func pointsElsewhere(err error) bool { return isServerFault(err) || Says(err, elsewhere) }

// refused is the error of a command that did not run because of err.
func refused(err error) error {
	if m, ok := MeaningOf(err); ok && m.Fate == Final {
		return fmt.Errorf("%w: %w", store.ErrFinal, err)
	}
	return store.NotExecuted(err)
}
