package redis

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"strconv"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
)

// script is one Lua script. Its fields that go into commands are boxed once,
// because a command is built for every request.
type script struct {
	source string
	sha    any
}

var (
	scriptOpen   = newScript(luascripts.FixedWindowOpen)
	scriptCharge = newScript(luascripts.FixedWindowCharge)
)

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source)) // SHA-1 is how Redis names scripts.
	return &script{source: source, sha: hex.EncodeToString(sum[:])}
}

// The words of commands, boxed.
var (
	wordEvalSHA any = "evalsha"
	wordOneKey  any = 1
	wordHMGet   any = "hmget"
	wordCount   any = "c"
	wordReset   any = "r"
)

// command is what is asked about one bucket, in a pipeline: to run a script, or
// to read it.
type command struct {
	goredis.Cmder
	// script is nil for a command that reads.
	script *script
	// clock, if not nil, is the server's clock, which then decides. It is told
	// the time where a reply carries it.
	clock *primaryClock
	// sent is set once the command was given to a connection: from then on it
	// may have run.
	sent bool
	// outcome is what became of it: nil once the reply is there.
	outcome error

	// The arguments, pointed to by argv so that they are not boxed one by one.
	key  string
	ints [3]int64
	argv [7]any
	argc int
}

// The place of the instant among ints.
const argNow = 1

// newRead returns a command that reads the bucket of a fixed window, for a
// replica or the primary.
func newRead(key string) *command {
	c := &command{key: key, argc: 4}
	c.argv[0], c.argv[1], c.argv[2], c.argv[3] = wordHMGet, &c.key, wordCount, wordReset
	c.renew()
	return c
}

// newCommand returns a call of s on one key, with up to three arguments.
func newCommand(s *script, clock *primaryClock, key string, args ...int64) *command {
	c := &command{script: s, clock: clock, key: key, argc: 4 + len(args)}
	c.argv[0], c.argv[1], c.argv[2], c.argv[3] = wordEvalSHA, s.sha, wordOneKey, &c.key
	for i, arg := range args {
		c.ints[i] = arg
		c.argv[4+i] = &c.ints[i]
	}
	c.renew()
	return c
}

// renew makes c ready to be sent, again.
func (c *command) renew() {
	if c.script != nil {
		c.Cmder = goredis.NewIntSliceCmd(context.Background(), c.argv[:c.argc]...)
		c.SetFirstKeyPos(3)
	} else {
		// Texts, so that a bucket that somebody tampered with spoils its own
		// answer and not what comes after it on the connection.
		c.Cmder = goredis.NewStringSliceCmd(context.Background(), c.argv[:c.argc]...)
		c.SetFirstKeyPos(1)
	}
	c.sent, c.outcome = false, nil
}

// stamp tells a charge an instant that the server's clock has passed, which may
// save it the reading; 0 makes it read the clock.
func (c *command) stamp(now int64) {
	if c.script == scriptCharge && c.clock != nil {
		c.ints[argNow] = -now
	}
}

// answered tells whether there is a reply.
func (c *command) answered() bool {
	switch cmd := c.Cmder.(type) {
	case *goredis.IntSliceCmd:
		return cmd.Val() != nil
	case *goredis.StringSliceCmd:
		return cmd.Val() != nil
	}
	return false
}

// reply returns the numbers of the reply.
func (c *command) reply() ([]int64, error) {
	if cmd, ok := c.Cmder.(*goredis.IntSliceCmd); ok {
		return cmd.Val(), nil
	}
	numbers := make([]int64, 0, 2)
	for _, text := range c.Cmder.(*goredis.StringSliceCmd).Val() {
		if text == "" {
			// No such field.
			numbers = append(numbers, 0)
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: %q", errReply, text)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
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
