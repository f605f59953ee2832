package redis

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"slices"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// script is one Lua script. Its name is boxed once, because every request builds
// a command.
type script struct {
	source string
	sha    any
	// bundle does the same for several buckets; nil if there is no such script.
	bundle *script
}

// Those of the algorithms are in their layouts.
var (
	// A server loads these when the first bucket migrates.
	scriptDump    = newScript(luascripts.Dump, "")
	scriptRestore = newScript(luascripts.Restore, "")

	// A server loads this when overrides are first looked for.
	scriptOverride = newScript(luascripts.Override, "")
)

func newScript(source, bundle string) *script {
	sum := sha1.Sum([]byte(source)) // Redis names scripts by their SHA-1.
	s := &script{source: source, sha: hex.EncodeToString(sum[:])}
	if bundle != "" {
		s.bundle = newScript(bundle, "")
	}
	return s
}

// bundled returns a script of these files that is run for several buckets as well, and
// single one that is not.
func bundled(names ...string) *script {
	return newScript(luascripts.Single(names...), luascripts.Bundle(names...))
}
func single(names ...string) *script { return newScript(luascripts.Single(names...), "") }

// load adds to a pipeline what loads the script, for one bucket and for several.
func (s *script) load(ctx context.Context, pipe goredis.Pipeliner) {
	pipe.ScriptLoad(ctx, s.source)
	if s.bundle != nil {
		s.bundle.load(ctx, pipe)
	}
}

// command is one command in a pipeline: a call of a script, or a read.
type command struct {
	// Cmder is nil for a call of a script that was not sent by itself.
	goredis.Cmder
	// script is nil for a command that calls none.
	script *script
	// reply and failure are what a bundle got for its member.
	reply   string
	failure error
	// plain is set if the reply is not that of a bucket.
	plain bool
	// charge is what a charge that calls no script charges, or nil; window reads the
	// window that was charged, and follows in the same pipeline; windowArgs are its words.
	charge     *store.Request
	window     *goredis.StringSliceCmd
	windowArgs []any
	// reads is set if it may run twice, because it neither spends nor gives back.
	reads bool
	// mayGuess is set if the script may do without reading the clock.
	mayGuess bool
	// clock, if not nil, is the clock that decides, which is the server's. It
	// learns the time from replies.
	clock *primaryClock
	// asking is set if the node of a Redis Cluster runs it only after ASKING.
	asking bool
	// sent is set once a connection got the command: it may have run.
	sent bool
	// outcome is nil once the reply has arrived, and otherwise an error.
	outcome error
	// place is that of its request in the caller's slice.
	place int

	// args are its words. Those that differ from command to command are pointers,
	// so that they are not boxed one by one.
	args []any
	key  string
	// ints are a script's numbers, packed into one argument. A charge that calls no
	// script has only the instant.
	ints   []int64
	packed packed
	// numbers has the room of the reply's numbers.
	numbers []int64
}

// packed is numbers as one argument. go-redis gets its pointer, because boxing a
// slice allocates.
type packed []byte

func (p *packed) MarshalBinary() ([]byte, error) { return *p, nil }

// readCommand, plainCharge and scriptCommand have the room that a command needs.
type (
	readCommand struct {
		command
		argsRoom [5]any
	}
	plainCharge struct {
		command
		nowRoom     [1]int64
		numbersRoom [3]int64
		argsRoom    [4]any
		windowRoom  [4]any
	}
	scriptCommand struct {
		command
		id          string
		intsRoom    [10]int64
		packedRoom  [80]byte
		argsRoom    [7]any
		numbersRoom [9]int64
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
	wordHIncrBy   any = "hincrby"
	wordCount     any = "c"
	wordReset     any = "r"
	wordPenalty   any = "p"
	wordEach      any = "each"
	operations        = [...]any{
		algorithm.Check: "check", algorithm.Charge: "charge", algorithm.Take: "take",
		algorithm.Refund: "refund", algorithm.Penalize: "penalize", algorithm.Peek: "peek",
	}
)

// newRead returns a command that reads a bucket without a script.
func newRead(word any, key string, rest ...any) *command {
	c := &readCommand{command: command{key: key, reads: true}}
	c.args = append(append(c.argsRoom[:0], word, &c.key), rest...)
	c.renew()
	return &c.command
}

// newPlainCharge returns a charge of an open window: HINCRBY, and HMGET of the window.
func newPlainCharge(key string, r *store.Request, now int64, clock *primaryClock) *command {
	c := &plainCharge{command: command{key: key, clock: clock, charge: r}}
	c.nowRoom[placeOfNow] = -now
	c.ints, c.numbers = c.nowRoom[:], c.numbersRoom[:0]
	c.args = append(c.argsRoom[:0], wordHIncrBy, &c.key, wordCount, r.Cost)
	c.windowArgs = append(c.windowRoom[:0], wordHMGet, &c.key, wordReset, wordPenalty)
	c.renew()
	return &c.command
}

// becomeScript makes a plain charge a call of the script, which decides by the clock of
// the server that runs it.
func (c *command) becomeScript() {
	var numbers scriptCommand
	numbers.clock = c.clock
	numbers.add(0)
	l := layoutOf(c.charge.Limit.Algorithm)
	l.arguments(&numbers, algorithm.Charge, c.charge)
	c.charge, c.script, c.ints = nil, l.script, numbers.ints
	c.args = []any{wordEvalSHA, c.script.sha, wordOneKey, &c.key, operations[algorithm.Charge], &c.packed}
	c.renew()
}

// newScriptCall returns a call of a script that may run twice.
func newScriptCall(s *script, word any, keys []any, args ...any) *command {
	c := &command{script: s, reads: true, args: slices.Concat([]any{word, s.sha, len(keys)}, keys, args)}
	c.renew()
	return c
}

// newPlain returns a command that calls no script, has any reply, and may run twice.
func newPlain(word, key string, rest ...any) *command {
	c := &command{key: key, plain: true, reads: true}
	c.args = append([]any{word, &c.key}, rest...)
	c.renew()
	return c
}

// The places of the command's name and of the operation among a script's words.
const (
	placeOfWord      = 0
	placeOfOperation = 4
)

// placeOfNow is that of the instant among a script's numbers, and in its reply.
const placeOfNow = 0

// begin makes c a call of s on one key, to which arguments are added.
func (c *scriptCommand) begin(s *script, op algorithm.Operation, readOnly bool, key string) {
	*c = scriptCommand{command: command{script: s, key: key}}
	word := wordEvalSHA
	if readOnly {
		word, op = wordEvalSHARO, algorithm.Peek
	}
	c.args = append(c.argsRoom[:0], word, s.sha, wordOneKey, &c.key, operations[op], &c.packed)
	c.ints, c.packed, c.numbers = c.intsRoom[:0], c.packedRoom[:0], c.numbersRoom[:0]
}

// add adds numbers. They are packed into one argument, because Redis spends more
// time on the conversion of arguments and replies than on the script.
func (c *scriptCommand) add(numbers ...int64) { c.ints = append(c.ints, numbers...) }

func (c *scriptCommand) addID(id string) {
	c.id = id
	c.args = append(c.args, &c.id)
}

// renew makes c ready to be sent, again.
func (c *command) renew() {
	switch {
	case c.script != nil:
		if c.mayGuess {
			// The guess of an earlier try is too old.
			c.ints[placeOfNow] = 0
		}
		c.packed = appendPacked(c.packed[:0], c.ints...)
		c.Cmder, c.reply, c.failure = nil, "", nil
	case c.charge != nil:
		c.Cmder = goredis.NewIntCmd(context.Background(), c.args...)
		c.window = goredis.NewStringSliceCmd(context.Background(), c.windowArgs...)
	case c.plain:
		c.Cmder = goredis.NewCmd(context.Background(), c.args...)
	default:
		// With texts, a bucket with foreign content spoils only its own answer, and
		// none that follow on the connection.
		c.Cmder = goredis.NewStringSliceCmd(context.Background(), c.args...)
	}
	c.sent, c.outcome = false, nil
}

// single makes the command to send of a call of a script that is in no bundle.
func (c *command) single() {
	if c.script != nil {
		c.Cmder = goredis.NewStringCmd(context.Background(), c.args...)
	}
}

// result is the reply to a command that was sent, and its error.
func (c *command) result() (text string, err error) {
	if c.Cmder == nil {
		return c.reply, c.failure
	}
	if cmd, ok := c.Cmder.(*goredis.StringCmd); ok {
		text = cmd.Val()
	}
	return text, c.Err()
}

// forgetClock makes c use the clock of whichever server runs it: c goes to another
// server than that of c.clock.
func (c *command) forgetClock() {
	c.clock = nil
	if c.charge != nil {
		c.becomeScript()
	}
	if c.mayGuess {
		c.mayGuess = false
		c.ints[placeOfNow] = 0
	}
}

// asksClock reports whether c calls a script that may read the clock that decides.
func (c *command) asksClock() bool { return c.script != nil && c.clock != nil }

// stamp gives a script an instant that the server's clock has passed, which may
// save it the reading; 0 makes it read the clock.
func (c *command) stamp(now int64) {
	if c.mayGuess {
		c.ints[placeOfNow] = -now
		c.packed = appendPacked(c.packed[:0], c.ints...)
	}
}

func (c *command) answered() bool {
	switch cmd := c.Cmder.(type) {
	case nil, *goredis.StringCmd:
		text, _ := c.result()
		return text != ""
	case *goredis.StringSliceCmd:
		return cmd.Val() != nil
	case *goredis.IntCmd:
		// A charge adds to its count.
		return cmd.Val() != 0
	case *goredis.Cmd:
		return cmd.Val() != nil
	}
	return false
}

func (c *command) texts() []string { return c.Cmder.(*goredis.StringSliceCmd).Val() }

// integers is the reply of a script, or nil if it is malformed.
func (c *command) integers() []int64 {
	text, _ := c.result()
	numbers, err := unpack(c.numbers[:0], text)
	if err != nil {
		return nil
	}
	return numbers
}

// NoRetry keeps go-redis from repeating a command that may have spent something.
func (c *command) NoRetry() bool { return c.script != nil || c.charge != nil }

// Args is called by go-redis to write the command to a connection: until then it
// certainly did not run.
func (c *command) Args() []any {
	c.sent = true
	return c.Cmder.Args()
}
