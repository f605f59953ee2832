package redis

import (
	"context"
	"crypto/sha1" //nolint:gosec // SHA-1 is how Redis names scripts
	"encoding/hex"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
)

// script is one Lua script. Its fields that go into commands are boxed once,
// because a command is built for every request.
type script struct {
	source string
	sha    any
	verb   any
	writes bool
}

var (
	scriptCheck  = newScript(luascripts.FixedWindowCheck, false)
	scriptOpen   = newScript(luascripts.FixedWindowOpen, true)
	scriptCharge = newScript(luascripts.FixedWindowCharge, true)
)

func newScript(source string, writes bool) *script {
	sum := sha1.Sum([]byte(source)) //nolint:gosec // see the import
	s := &script{source: source, sha: hex.EncodeToString(sum[:]), verb: "evalsha", writes: writes}
	if !writes {
		// A replica refuses EVALSHA of a script that could write.
		s.verb = "evalsha_ro"
	}
	return s
}

var boxedOne any = 1

// command is one script call in a pipeline.
type command struct {
	*goredis.IntSliceCmd
	script *script
	// clock is told the server's time if the reply carries it; nil if the
	// script was given a time.
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
}

// newCommand returns a call of s on one key, with up to three arguments.
func newCommand(s *script, clock *primaryClock, key string, args ...int64) *command {
	c := &command{script: s, clock: clock, key: key}
	c.argv[0], c.argv[1], c.argv[2], c.argv[3] = s.verb, s.sha, boxedOne, &c.key
	for i, arg := range args {
		c.ints[i] = arg
		c.argv[4+i] = &c.ints[i]
	}
	c.bind(4 + len(args))
	return c
}

func (c *command) bind(args int) {
	c.IntSliceCmd = goredis.NewIntSliceCmd(context.Background(), c.argv[:args]...)
	c.SetFirstKeyPos(3)
	c.sent, c.outcome = false, nil
}

// renew makes c ready to be sent again.
func (c *command) renew() { c.bind(len(c.IntSliceCmd.Args())) }

// tellTime makes a charge read the server's clock even if it could do without.
func (c *command) tellTime() {
	if c.script == scriptCharge && c.clock != nil {
		c.ints[1] = 0
	}
}

// NoRetry keeps go-redis from sending a script again that may already have
// spent something.
func (c *command) NoRetry() bool { return c.script.writes }

// Args is what go-redis calls to write the command to a connection, which is
// the last moment at which it surely did not run.
func (c *command) Args() []any {
	c.sent = true
	return c.IntSliceCmd.Args()
}

var _ goredis.Cmder = (*command)(nil)
