package wire

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// Script is one Lua script. Its name is boxed once, because every request builds
// a command.
type Script struct {
	source string
	sha    any
	// bundle does the same for several buckets; nil if there is no such script.
	bundle *Script
}

// NewScript returns the script with that source. bundle does the same for several buckets;
// empty for none.
func NewScript(source, bundle string) *Script {
	sum := sha1.Sum([]byte(source)) // Redis names scripts by their SHA-1.
	s := &Script{source: source, sha: hex.EncodeToString(sum[:])}
	if bundle != "" {
		s.bundle = NewScript(bundle, "")
	}
	return s
}

// Load adds to a pipeline what loads the script, for one bucket and for several. It is
// exported for internal/simstore only.
func (s *Script) Load(ctx context.Context, pipe goredis.Pipeliner) {
	pipe.ScriptLoad(ctx, s.source)
	if s.bundle != nil {
		s.bundle.Load(ctx, pipe)
	}
}

// Command is one command in a pipeline: a call of a script, a read, or a write without a
// script, which a read of what it has changed follows.
type Command struct {
	// Cmder is nil for a call of a script that was not sent by itself.
	goredis.Cmder
	// script is nil for a command that calls none.
	script *Script
	// reply and failure are what a bundle got for its member.
	reply   string
	failure error
	// write is a write that calls no script, or nil. expire, unless it is nil, bounds the life of
	// what it has written, size counts the fields, and follow reads it; expireArgs, sizeArgs and
	// followArgs are their words.
	write        Write
	expire, size *goredis.Cmd
	follow       *goredis.StringSliceCmd
	expireArgs   []any
	sizeArgs     []any
	followArgs   []any
	// Clock, if not nil, is the clock that decides, which is the server's. It
	// learns the time from replies.
	Clock *Clock
	// Outcome is nil once the reply has arrived, and otherwise an error.
	Outcome error
	// Place is that of its request in the caller's slice.
	Place int
	// Reads is set if it may run twice, because it neither spends nor gives back anything.
	Reads bool
	// MayGuess is set if the script may do without reading the clock.
	MayGuess bool
	// anyReply is set if the reply is not that of a bucket.
	anyReply bool
	// asking is set if the node of a Redis Cluster runs it only after ASKING.
	asking bool
	// sent is set once a connection got the command: it may have run.
	sent bool
	// countdown is a number that grows less while the command waits, or nil.
	countdown *countdown

	// args are its words. Those that differ from command to command are pointers,
	// so that they are not boxed one by one.
	args []any
	key  string
	// ints are a script's numbers, packed into one argument. A write that calls no
	// script has only the instant.
	ints   []int64
	packed packed
	// numbers has the room of the reply's numbers.
	numbers []int64
}

// countdown is the time until an instant, among a script's numbers.
type countdown struct {
	end   time.Time
	place int
}

// packed is numbers as one argument. go-redis gets its pointer, because boxing a
// slice allocates.
type packed []byte

func (p *packed) MarshalBinary() ([]byte, error) { return *p, nil }

type (
	// readCommand is a command that calls no script, with the room that it needs.
	readCommand struct {
		Command
		argsRoom [5]any
	}
	// plainWrite is a write without a script, with the room that it needs.
	plainWrite struct {
		Command
		nowRoom    [1]int64
		argsRoom   [4]any
		followRoom [4]any
	}
	// opening is a write that makes what expires, with the room that it needs.
	opening struct {
		Command
		nowRoom    [1]int64
		argsRoom   [4]any
		expireRoom [4]any
		sizeRoom   [2]any
		followRoom [5]any
	}
	// ScriptCall is a call of a script on one key, with the room that it needs: Begin, then
	// Add the numbers, then Ready.
	ScriptCall struct {
		Command
		id          string
		intsRoom    [12]int64
		packedRoom  [96]byte
		argsRoom    [7]any
		numbersRoom [10]int64
	}
)

// The words of commands, boxed.
var (
	wordEval      any = "eval"
	wordEvalSHA   any = "evalsha"
	wordEvalSHARO any = "evalsha_ro"
	wordAsking    any = "asking"
	wordPExpire   any = "pexpire"
	wordHLen      any = "hlen"
	wordHDel      any = "hdel"
	wordPersist   any = "persist"
	wordOneKey    any = 1
	wordEach      any = "each"
)

// The places of the command's name and of the operation among a script's words.
const (
	placeOfWord      = 0
	placeOfOperation = 4
)

// placeOfNow is that of the instant among a script's numbers, and in its reply.
const placeOfNow = 0

// NewRead returns a command that reads texts from a key. Boxed words cost it no memory.
func NewRead(word any, key string, rest ...any) *Command {
	c := &readCommand{Command: Command{key: key, Reads: true}}
	c.args = append(append(c.argsRoom[:0], word, &c.key), rest...)
	c.Ready()
	return &c.Command
}

// Write is a write without a script.
type Write interface {
	// Latest is the instant by which it has to run.
	Latest() int64
	// CallScript makes call the call of a script that writes the same, by that clock. It
	// takes its place if Latest may pass before, or the server refuses the command.
	CallScript(call *ScriptCall, key string, clock *Clock)
}

// NewWrite returns a command that writes to a key at an instant and has a number for reply,
// and one that reads it: a word, and what follows the key.
func NewWrite(w Write, key string, write, read [3]any, now int64, clock *Clock) *Command {
	c := &plainWrite{Command: Command{key: key, Clock: clock, write: w}}
	c.nowRoom[placeOfNow] = -now
	c.ints = c.nowRoom[:]
	c.args = append(c.argsRoom[:0], write[0], &c.key, write[1], write[2])
	c.followArgs = append(c.followRoom[:0], read[0], &c.key, read[1], read[2])
	c.Ready()
	return &c.Command
}

// Opening is a write that makes something where nothing is.
type Opening interface {
	Write
	// IsForeign reports whether something was there before that is not ours, by whether the write
	// was made, and by what is there now: so many fields, and these texts.
	IsForeign(made bool, fields int64, texts []string) bool
}

// NewOpening returns a command that writes to a key unless something is there, bounds its life, and
// reads it. It may run twice. The lane undoes it where something foreign is, and shows nothing there.
func NewOpening(w Opening, key string, write, expire [3]any, read [4]any, now int64, clock *Clock) *Command {
	c := &opening{Command: Command{key: key, Clock: clock, write: w, Reads: true}}
	c.nowRoom[placeOfNow] = -now
	c.ints = c.nowRoom[:]
	c.args = append(c.argsRoom[:0], write[0], &c.key, write[1], write[2])
	c.expireArgs = append(c.expireRoom[:0], expire[0], &c.key, expire[1], expire[2])
	c.sizeArgs = append(c.sizeRoom[:0], wordHLen, &c.key)
	c.followArgs = append(append(c.followRoom[:0], read[0], &c.key), read[1:]...)
	c.Ready()
	return &c.Command
}

// Begin makes c a call of s on one key, to which arguments are added.
func (c *ScriptCall) Begin(s *Script, op any, readOnly bool, key string) {
	*c = ScriptCall{Command: Command{script: s, key: key}}
	word := wordEvalSHA
	if readOnly {
		word = wordEvalSHARO
	}
	c.args = append(c.argsRoom[:0], word, s.sha, wordOneKey, &c.key, op, &c.packed)
	c.ints, c.packed, c.numbers = c.intsRoom[:0], c.packedRoom[:0], c.numbersRoom[:0]
}

// Add adds numbers. They are packed into one argument, because Redis spends more
// time on the conversion of arguments and replies than on the script.
func (c *ScriptCall) Add(numbers ...int64) { c.ints = append(c.ints, numbers...) }

// AddCountdown adds minus the time until an instant that is left microseconds away: what is left of it
// whenever the command is sent or, if nothing is, 1, an instant that is long over.
func (c *ScriptCall) AddCountdown(left int64) {
	c.countdown = &countdown{time.Now().Add(time.Duration(left) * time.Microsecond), len(c.ints)}
	c.Add(-left)
}

// countDown makes the countdown say what is left at an instant.
func (c *Command) countDown(at time.Time) {
	if d := c.countdown; d != nil {
		if c.ints[d.place] = 1; at.Before(d.end) {
			c.ints[d.place] = min(at.Sub(d.end).Microseconds(), -1)
		}
		c.packed = AppendPacked(c.packed[:0], c.ints...)
	}
}

// AddID adds the ID of the request, after all numbers.
func (c *ScriptCall) AddID(id string) {
	c.id = id
	c.args = append(c.args, &c.id)
}

// NewEval returns a call of a script, with any keys and arguments, that may run twice.
func NewEval(s *Script, readOnly bool, keys []any, args ...any) *Command {
	word := wordEvalSHA
	if readOnly {
		word = wordEvalSHARO
	}
	c := &Command{script: s, Reads: true, args: slices.Concat([]any{word, s.sha, len(keys)}, keys, args)}
	c.Ready()
	return c
}

// NewCommand returns a command with these words, and any reply, that may run twice.
func NewCommand(word, key string, rest ...any) *Command {
	c := &Command{key: key, anyReply: true, Reads: true}
	c.args = append([]any{word, &c.key}, rest...)
	c.Ready()
	return c
}

// Ready makes c ready to be sent, again.
func (c *Command) Ready() {
	switch {
	case c.script != nil:
		if c.MayGuess {
			// The guess of an earlier try is too old.
			c.ints[placeOfNow] = 0
		}
		c.packed = AppendPacked(c.packed[:0], c.ints...)
		c.Cmder, c.reply, c.failure = nil, "", nil
	case c.write != nil:
		c.Cmder = goredis.NewIntCmd(context.Background(), c.args...)
		if c.expireArgs != nil {
			// Its number may be 0, which an IntCmd without a reply has as well.
			c.Cmder = goredis.NewCmd(context.Background(), c.args...)
			c.expire = goredis.NewCmd(context.Background(), c.expireArgs...)
			c.size = goredis.NewCmd(context.Background(), c.sizeArgs...)
		}
		c.follow = goredis.NewStringSliceCmd(context.Background(), c.followArgs...)
	case c.anyReply:
		c.Cmder = goredis.NewCmd(context.Background(), c.args...)
	default:
		// With texts, a bucket with foreign content spoils only its own answer, and
		// none that follow on the connection.
		c.Cmder = goredis.NewStringSliceCmd(context.Background(), c.args...)
	}
	c.sent, c.Outcome = false, nil
}

// becomeScript makes a plain write a call of the script, which decides by the clock of
// the server that runs it.
func (c *Command) becomeScript() {
	room := new(ScriptCall)
	c.write.CallScript(room, c.key, c.Clock)
	c.write, c.expireArgs, c.script, c.ints = nil, nil, room.script, room.ints
	c.countdown = room.countdown
	c.args = []any{wordEvalSHA, c.script.sha, wordOneKey, &c.key, room.args[placeOfOperation], &c.packed}
	c.Ready()
}

// callBySource makes a call of a script have its source in place of its name.
func (c *Command) callBySource() {
	c.args = slices.Clone(c.args)
	c.args[placeOfWord], c.args[placeOfWord+1] = wordEval, c.script.source
}

// IsScript reports whether c calls a script.
func (c *Command) IsScript() bool { return c.script != nil }

// Passed is the instant that the script was told has passed, 0 if it was told none, or that
// decided whether the write could be plain.
func (c *Command) Passed() int64 { return -c.ints[placeOfNow] }

// forgetClock makes c use the clock of whichever server runs it: c goes to another
// server than that of c.Clock.
func (c *Command) forgetClock() {
	c.Clock = nil
	if c.write != nil {
		c.becomeScript()
	}
	if c.MayGuess {
		c.MayGuess = false
		c.ints[placeOfNow] = 0
	}
}

// Number is the reply to a write without a script.
func (c *Command) Number() int64 { return c.Cmder.(*goredis.IntCmd).Val() }

// Texts is the reply to a read, or to the one that follows a write, or its error.
func (c *Command) Texts() ([]string, error) {
	reply := c.follow
	if c.write == nil {
		reply = c.Cmder.(*goredis.StringSliceCmd)
	}
	return reply.Val(), classified(reply.Err())
}

// Unpack appends packed doubles that are integers.
func Unpack(numbers []int64, packed string) ([]int64, error) {
	if len(packed)%8 != 0 {
		return nil, fmt.Errorf("%w: %q", ErrReply, packed)
	}
	numbers = slices.Grow(numbers, len(packed)/8)
	for ; packed != ""; packed = packed[8:] {
		var b [8]byte
		copy(b[:], packed)
		f := math.Float64frombits(binary.LittleEndian.Uint64(b[:]))
		n := int64(f)
		if float64(n) != f {
			return nil, fmt.Errorf("%w: %v", ErrReply, f)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// AppendPacked appends numbers as the scripts read them: doubles, little-endian.
func AppendPacked(b []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(n)))
	}
	return b
}
