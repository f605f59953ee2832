// Package simstore asks a simulated Redis server about buckets as the Redis store asks a
// real one: package ask of the store makes the commands and understands the replies, and
// there are no connections, lanes and timeouts. It is for tests.
package simstore

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// latency is how long a charge may take to reach the server.
const latency = 100 * time.Millisecond

// Server asks one server. It is made by [New], and not safe for concurrent use.
type Server struct {
	// Now returns the server's time as callers know it, in microseconds since 1970, or 0
	// while they do not. By default it is the server's own.
	Now func() int64
	// Execute runs commands, and gives them the replies. By default they run one by one.
	Execute func(cmds []*wire.Command)
	// Plain is the number of charges that ran without a script.
	Plain int

	do func(args ...string) (any, error)
}

// keys are those of all buckets.
var keys = ask.Keys{Prefix: "rl"}

// New returns a Server whose commands do runs: Do of a simredis.Server, or what behaves like it.
func New(do func(args ...string) (any, error)) *Server {
	s := &Server{do: do}
	s.Now, s.Execute = s.now, s.execute
	for _, script := range ask.Scripts() {
		script.Load(context.Background(), s.Pipe())
	}
	return s
}

// Run runs an operation, by the server's own clock. Where the window of r is known to be
// open, by its Until, most checks and charges need no script.
func (s *Server) Run(op algorithm.Operation, r store.Request) store.State {
	return s.RunAs(ask.Op{Operation: op, Role: store.RolePrimary}, r)
}

// RunAs is Run by the instant or the clock of op, if it has one.
func (s *Server) RunAs(op ask.Op, r store.Request) store.State {
	now := s.Now()
	reads := op.Operation == algorithm.Check && now != 0 && !op.Hears(&r)
	switch {
	case reads && r.Until > now && algorithm.Of(r.Limit.Algorithm).Windowed():
		if st := s.Look(r, op.Role, now); st.Err != nil || st.Holds(r.Limit) {
			return st
		}
	case reads && op.Now == 0 && ask.CanOpen(&r, latency):
		if st := s.Ask(ask.Opening(now, op.Clock), r)[0]; st.Err == nil && st.Holds(r.Limit) {
			return st
		}
	case op.Operation == algorithm.Charge && now != 0:
		op.Latest = now + (latency + wire.ReplyTimeout).Microseconds()
	}
	return s.Ask(op, r)[0]
}

// Look returns the state of a bucket as a check of r that opens nothing sees it at a server of
// that role, at the instant now in microseconds since 1970.
func (s *Server) Look(r store.Request, role store.Role, now int64) store.State {
	return s.Ask(ask.Reading(algorithm.Check, role, now), r)[0]
}

// Empty removes the bucket of r.
func (s *Server) Empty(r store.Request) error {
	var failed error
	for _, key := range keys.Like(r.Limit, r.ClientKey) {
		_, err := s.do("DEL", key, ask.Held(key))
		failed = errors.Join(failed, err)
	}
	return failed
}

// Ask runs an operation on several buckets, and returns their states.
func (s *Server) Ask(op ask.Op, reqs ...store.Request) []store.State {
	cmds := make([]*wire.Command, len(reqs))
	for i := range reqs {
		cmds[i] = op.Command(keys, &reqs[i], nil)
	}
	s.Execute(cmds)
	states := make([]store.State, len(reqs))
	for i, cmd := range cmds {
		if isPlain(cmd) {
			s.Plain++
		}
		var repair ask.Repair
		if states[i], repair = op.Outcome(cmd, &reqs[i]); repair.Needed {
			states[i] = s.repair(op, &reqs[i], repair.Rest(&reqs[i]))
		}
	}
	return states
}

// isPlain reports whether cmd is a charge without a script.
func isPlain(cmd *wire.Command) bool { return !cmd.Reads && !cmd.IsScript() }

// repair charges by the script what is left of r, and returns the state of r.
func (s *Server) repair(op ask.Op, r *store.Request, again store.Request) store.State {
	st := s.Ask(op, again)[0]
	if st.Err != nil {
		return st
	}
	// It says whether the cost of r was allowed, and not what was left of it.
	st = algorithm.View(&st.Content, r, st.Now, true)
	st.Receipt = store.Receipt{}
	return st
}

func (s *Server) execute(cmds []*wire.Command) {
	for _, cmd := range cmds {
		if isPlain(cmd) {
			cmd.CheckTime(s.Now())
		}
		cmd.AddTo(context.Background(), s.Pipe())
		cmd.SetOutcome(nil)
	}
}

// Pipe returns a pipeline that runs each command as it is added.
func (s *Server) Pipe() goredis.Pipeliner { return pipe{server: s} }

// pipe has the methods of a pipeline that package wire calls.
type pipe struct {
	goredis.Pipeliner
	server *Server
}

func (p pipe) ScriptLoad(_ context.Context, source string) *goredis.StringCmd {
	if err, failed := p.server.Send("SCRIPT", "LOAD", source).(error); failed {
		panic(fmt.Sprintf("simstore: load a script: %v", err))
	}
	return nil
}

func (p pipe) Process(_ context.Context, cmd goredis.Cmder) error {
	reply := p.server.Send(cmd.Args()...)
	if c, is := cmd.(*wire.Command); is {
		cmd = c.Cmder
	}
	if err, failed := reply.(error); failed {
		cmd.SetErr(err)
		return err
	}
	switch cmd := cmd.(type) {
	case *goredis.StringCmd:
		cmd.SetVal(reply.(string))
	case *goredis.IntCmd:
		cmd.SetVal(reply.(int64))
	case *goredis.StringSliceCmd:
		texts := make([]string, len(reply.([]any)))
		for i, text := range reply.([]any) {
			texts[i], _ = text.(string)
		}
		cmd.SetVal(texts)
	case interface{ SetVal(reply any) }:
		cmd.SetVal(reply)
	}
	return nil
}

// Send runs a command of Redis, and returns the reply, which may be an error.
func (s *Server) Send(words ...any) any {
	args := make([]string, len(words))
	for i, word := range words {
		args[i] = text(word)
	}
	reply, err := s.do(args...)
	if err != nil {
		return err
	}
	return reply
}

// text is what go-redis writes for a word.
func text(word any) string {
	switch word := word.(type) {
	case string:
		return word
	case *string:
		return *word
	case []byte:
		return string(word)
	case encoding.BinaryMarshaler:
		packed, _ := word.MarshalBinary()
		return string(packed)
	case int:
		return strconv.Itoa(word)
	case int64:
		return strconv.FormatInt(word, 10)
	}
	panic(fmt.Sprintf("simstore: no text for %T", word))
}

// now is the server's own time.
func (s *Server) now() int64 {
	reply := s.Send("TIME").([]any)
	seconds, _ := strconv.ParseInt(reply[0].(string), 10, 64)
	micros, _ := strconv.ParseInt(reply[1].(string), 10, 64)
	return seconds*1_000_000 + micros
}
