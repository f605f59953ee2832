// Package simredis is a Redis server for simulations: it runs the scripts and the commands
// of the Redis store on one goroutine, by a clock that its owner sets. There is no
// network, and nothing happens between two calls, so a simulation of it is deterministic,
// and as fast as the scripts are. It is for tests.
//
// It replies as Redis 7.0 does, by RESP2, and its replicas get what Redis replicates: the
// effects of scripts. A test compares it with a real server. These differ:
//
//   - It knows only the commands that the store and its scripts send, and of these the
//     options that they use. Any other is an error.
//   - Lua words its own errors otherwise. A number that Lua itself turns into a text has up to 17
//     digits instead of 14.
//   - The content that DUMP returns is in a form of its own, and HGETALL always returns the
//     fields in the order in which they were added.
//   - Every user may do everything, and memory has no limit.
//
// miniredis does not suffice: it lacks Lua's struct and redis.acl_check_cmd, has no
// replicas, and makes an interpreter, and compiles the script, for each call, which takes
// 0.7 milliseconds of fixed_window.lua instead of some microseconds.
package simredis

import (
	"maps"
	"slices"
	"time"
)

// Server is a server. It is made by [New], and starts as an empty primary. It is not safe
// for concurrent use, nor are servers that share an [Interpreter] or replicate each other.
type Server struct {
	// Ahead is by how much the server's own clock, by which it decides, is ahead of the
	// simulation's; less than 0 if it is behind.
	Ahead time.Duration

	now         func() time.Time
	interpreter *Interpreter
	// scripts are the SHA-1 sums of the scripts that were loaded.
	scripts map[string]bool

	keys map[string]*entry
	// crowd is the number of keys from which on a new one makes the server remove those
	// that have expired.
	crowd int

	// at is the instant of the call that runs, by the server's clock. As in Redis, time
	// stands still in it.
	at time.Time
	replication
}

// entry is the value of a key.
type entry struct {
	// value is a string, a *hash or a *sortedSet.
	value any
	// expiry is in milliseconds since the epoch; 0 is never.
	expiry int64
}

// New returns a server in a simulation with that clock, which never runs backwards. It runs
// scripts in that interpreter.
func New(now func() time.Time, interpreter *Interpreter) *Server {
	return &Server{now: now, interpreter: interpreter, scripts: map[string]bool{}, keys: map[string]*entry{}}
}

// Status is a reply that is no data, such as OK.
type Status string

// Error is an error reply.
type Error string

func (e Error) Error() string { return string(e) }

// RedisError makes it an Error of go-redis.
func (Error) RedisError() {}

const (
	ok Status = "OK"

	errWrongType   Error = "WRONGTYPE Operation against a key holding the wrong kind of value"
	errSyntax      Error = "ERR syntax error"
	errNotInteger  Error = "ERR value is not an integer or out of range"
	errNotFloat    Error = "ERR value is not a valid float"
	errReadOnly    Error = "READONLY You can't write against a read only replica."
	errNoScript    Error = "NOSCRIPT No matching script. Please use EVAL."
	errManyKeys    Error = "ERR Number of keys can't be greater than number of args"
	errFewKeys     Error = "ERR Number of keys can't be negative"
	errMayNotWrite Error = "ERR Write commands are not allowed from read-only scripts."
)

// Do runs a command as a client sends it, EVAL, EVALSHA, their read-only variants and SCRIPT
// LOAD included. A reply is an int64, a string, a [Status], a slice of replies, or nil; an
// [Error] among the replies of a slice is one, and every other one is returned as the
// error.
func (s *Server) Do(args ...string) (reply any, err error) {
	if len(args) == 0 {
		return nil, errUnknown(args)
	}
	if run := scriptCommandOf(args[0]); run != nil {
		return run(s, args)
	}
	c := commandOf(args[0])
	switch {
	case c == nil:
		return nil, errUnknown(args)
	case !c.takes(len(args)):
		return nil, errArity(args[0])
	case c.writes && s.primary != nil:
		return nil, errReadOnly
	}
	defer s.commit(s.begin())
	if reply, err = c.run(s, args); err != nil {
		return nil, err
	}
	return reply, nil
}

// Keys returns the keys that have not expired, in order.
func (s *Server) Keys() []string {
	defer s.commit(s.begin())
	return slices.DeleteFunc(slices.Sorted(maps.Keys(s.keys)), func(key string) bool { return s.find(key) == nil })
}

// begin begins a call, and returns its instant by the simulation's clock.
func (s *Server) begin() time.Time {
	now := s.now()
	s.at = now.Add(s.Ahead)
	return now
}

// find returns what is under a key, or nil. An expired key is removed, but on a replica, which
// waits until the primary says so.
func (s *Server) find(key string) *entry {
	e := s.keys[key]
	if e == nil || s.applying || e.expiry == 0 || s.at.UnixMilli() <= e.expiry {
		return e
	}
	if s.primary == nil {
		s.expire(key)
	}
	return nil
}

// get returns what is under a key, which has to be of that type; the zero value if there is
// nothing.
func get[T any](s *Server, key string) (value T, err error) {
	e := s.find(key)
	if e == nil {
		return value, nil
	}
	value, isType := e.value.(T)
	if !isType {
		return value, errWrongType
	}
	return value, nil
}

// put makes a value that of a key.
func (s *Server) put(key string, value any, expiry int64) {
	if len(s.keys) >= s.crowd && s.primary == nil {
		s.sweep()
	}
	s.keys[key] = &entry{value, expiry}
}

// sweep removes expired keys, in order, so that what replicas get depends on nothing else.
func (s *Server) sweep() {
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		s.find(key)
	}
	s.crowd = 2*len(s.keys) + 1000
}

// expire removes a key, and replicas with it.
func (s *Server) expire(key string) {
	delete(s.keys, key)
	s.changed("DEL", key)
}
