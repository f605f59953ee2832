package redis

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"math"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// script is one Lua script. Its name is boxed once, because a command is built
// for every request.
type script struct {
	source string
	sha    any
	// bundle does the same for several buckets; nil if there is no such script.
	bundle *script
}

var (
	scriptFixedWindow   = newBundled(luascripts.FixedWindow, luascripts.FixedWindowBundle)
	scriptSlidingWindow = newBundled(luascripts.SlidingWindow, luascripts.SlidingWindowBundle)
	scriptSlidingLog    = newScript(luascripts.SlidingLog)
	scriptGCRA          = newBundled(luascripts.GCRA, luascripts.GCRABundle)
	scriptConcurrency   = newScript(luascripts.Concurrency)

	// Servers are given these when a bucket is brought for the first time.
	scriptDump    = newScript(luascripts.Dump)
	scriptRestore = newScript(luascripts.Restore)
)

var allScripts = []*script{scriptFixedWindow, scriptSlidingWindow, scriptSlidingLog, scriptGCRA, scriptConcurrency}

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source)) // SHA-1 is how Redis names scripts.
	return &script{source: source, sha: hex.EncodeToString(sum[:])}
}

func newBundled(source, bundle string) *script {
	s := newScript(source)
	s.bundle = newScript(bundle)
	return s
}

// load adds to a pipeline what makes a server know the script, for one bucket and
// for several.
func (s *script) load(ctx context.Context, pipe goredis.Pipeliner) {
	pipe.ScriptLoad(ctx, s.source)
	if s.bundle != nil {
		s.bundle.load(ctx, pipe)
	}
}

// command is what is asked about one bucket, in a pipeline: to run a script, or
// to read it.
type command struct {
	goredis.Cmder
	// script is nil for a command that reads by itself.
	script *script
	// plain is set if its reply is not that of a bucket.
	plain bool
	// reads is set if it spends nothing and gives nothing back: whether it ran does
	// not matter.
	reads bool
	// mayGuess is set if the script may do without reading the clock.
	mayGuess bool
	// clock, if not nil, is the server's clock, which then decides. It is told
	// the time where a reply carries it.
	clock *primaryClock
	// asking is set if the node of a Redis Cluster runs it only after ASKING.
	asking bool
	// sent is set once the command was given to a connection: from then on it
	// may have run.
	sent bool
	// outcome is what became of it: nil once the reply is there.
	outcome error
	// place is that of its request among those that its caller has.
	place int

	// args are its words. Those that differ from command to command are
	// pointed to, so that they are not boxed one by one.
	args     []any
	key      string
	firstKey int8
	// ints are the numbers that a script is given, packed into one of them.
	ints   []int64
	packed packed
}

// packed is numbers as one argument. Its pointer is what go-redis is given, for
// to box a slice is to allocate.
type packed []byte

// MarshalBinary implements [encoding.BinaryMarshaler].
func (p *packed) MarshalBinary() ([]byte, error) { return *p, nil }

// readCommand and scriptCommand have the room that a command needs.
type (
	readCommand struct {
		command
		argsRoom [5]any
	}
	scriptCommand struct {
		command
		id         string
		intsRoom   [6]int64
		packedRoom [48]byte
		argsRoom   [7]any
	}
)

// The words of commands, boxed.
var (
	wordEvalSHA   any = "evalsha"
	wordEvalSHARO any = "evalsha_ro"
	wordAsking    any = "asking"
	wordOneKey    any = 1
	wordHMGet     any = "hmget"
	wordMGet      any = "mget"
	wordCount     any = "c"
	wordReset     any = "r"
	wordPenalty   any = "p"
	operations        = [...]any{
		algorithm.Check: "check", algorithm.Charge: "charge", algorithm.Take: "take",
		algorithm.Refund: "refund", algorithm.Penalize: "penalize", algorithm.Peek: "peek",
	}
)

// newRead returns a command that reads a bucket by itself: word, the key, and
// what comes after it.
func newRead(word any, key string, rest ...any) *command {
	c := &readCommand{command: command{key: key, firstKey: 1, reads: true}}
	c.args = append(append(c.argsRoom[:0], word, &c.key), rest...)
	c.renew()
	return &c.command
}

// newScriptCall returns a call of a script that it does no harm to repeat, with the
// arguments that it takes.
func newScriptCall(s *script, word any, keys []string, args ...any) *command {
	c := &command{script: s, firstKey: 3, reads: true, args: []any{word, s.sha, len(keys)}}
	for _, key := range keys {
		c.args = append(c.args, key)
	}
	c.args = append(c.args, args...)
	c.renew()
	return c
}

// newPlain returns a command that is no script's, has any reply, and may run
// twice.
func newPlain(word, key string, rest ...any) *command {
	c := &command{key: key, firstKey: 1, plain: true, reads: true}
	c.args = append([]any{word, &c.key}, rest...)
	c.renew()
	return c
}

// Where in a script's words are the command's name and the operation.
const (
	placeOfWord      = 0
	placeOfOperation = 4
)

// begin makes c a call of s on one key, to which arguments are added.
func (c *scriptCommand) begin(s *script, op algorithm.Operation, readOnly bool, key string) {
	*c = scriptCommand{command: command{script: s, key: key, firstKey: 3}}
	word := wordEvalSHA
	if readOnly {
		word, op = wordEvalSHARO, algorithm.Peek
	}
	c.args = append(c.argsRoom[:0], word, s.sha, wordOneKey, &c.key, operations[op], &c.packed)
	c.ints, c.packed = c.intsRoom[:0], c.packedRoom[:0]
}

// add adds numbers. They are packed into one argument: Redis turns each into a
// text and each number of a reply into one more, which costs it more than the
// script does.
func (c *scriptCommand) add(numbers ...int64) { c.ints = append(c.ints, numbers...) }

// addID adds an argument that is a text.
func (c *scriptCommand) addID(id string) {
	c.id = id
	c.args = append(c.args, &c.id)
}

// renew makes c ready to be sent, again.
func (c *command) renew() {
	switch {
	case c.script != nil:
		c.packed = appendPacked(c.packed[:0], c.ints...)
		c.Cmder = goredis.NewStringCmd(context.Background(), c.args...)
	case c.plain:
		c.Cmder = goredis.NewCmd(context.Background(), c.args...)
	default:
		// Texts, so that a bucket that somebody tampered with spoils its own
		// answer and not what comes after it on the connection.
		c.Cmder = goredis.NewStringSliceCmd(context.Background(), c.args...)
	}
	c.SetFirstKeyPos(c.firstKey)
	c.sent, c.outcome = false, nil
}

func appendPacked(b []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(n)))
	}
	return b
}

// forgetClock makes c run by the clock of whatever server runs it, for c goes to
// another one than that of c.clock.
func (c *command) forgetClock() {
	c.clock = nil
	if c.mayGuess {
		c.mayGuess = false
		c.ints[placeOfNow] = 0
	}
}

// The first number of a script's arguments, and of its reply, is the instant.
const placeOfNow = 0

// stamp tells a script an instant that the server's clock has passed, which may
// save it the reading; 0 makes it read the clock.
func (c *command) stamp(now int64) {
	if c.mayGuess {
		c.ints[placeOfNow] = -now
		binary.LittleEndian.PutUint64(c.packed, math.Float64bits(float64(-now)))
	}
}

// answered tells whether there is a reply.
func (c *command) answered() bool {
	switch cmd := c.Cmder.(type) {
	case *goredis.StringCmd:
		return cmd.Val() != ""
	case *goredis.StringSliceCmd:
		return cmd.Val() != nil
	case *goredis.Cmd:
		return cmd.Val() != nil
	}
	return false
}

// texts is the reply of a command that reads by itself.
func (c *command) texts() []string { return c.Cmder.(*goredis.StringSliceCmd).Val() }

// integers is the reply of a script, or nil if that is none of ours.
func (c *command) integers() []int64 {
	numbers, err := unpack(c.Cmder.(*goredis.StringCmd).Val())
	if err != nil {
		return nil
	}
	return numbers
}

// NoRetry keeps go-redis from sending a script again that may already have
// spent something.
func (c *command) NoRetry() bool { return c.script != nil }

// Args is what go-redis calls to write the command to a connection, which is
// the last moment at which it surely did not run.
func (c *command) Args() []any {
	c.sent = true
	return c.Cmder.Args()
}

var _ goredis.Cmder = (*command)(nil)
