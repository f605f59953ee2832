package redis

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// EventKind tells what has happened.
type EventKind int

// What happens to the servers of a shard.
const (
	// ServerDown: a server is left out, because calls of it failed.
	ServerDown EventKind = iota
	// ServerUp: it is back.
	ServerUp
	// ReplicaLags: a replica is left out, because it is too far behind.
	ReplicaLags
	// ReplicaCaughtUp: it is no longer.
	ReplicaCaughtUp
	// PrimaryChanged: the shard, or a slot of it, has another primary.
	PrimaryChanged
	// DiscoveryFailed: nobody tells who the servers are; the last ones known go
	// on being asked.
	DiscoveryFailed
	// Discovered: somebody does again.
	Discovered
	// Misconfigured: Err says what is wrong with a server, and what to do.
	Misconfigured
	// Mended: what Err says is no longer wrong with a server.
	Mended
	// Met: a server was reached for the first time, or has been started since; ID
	// is what it calls itself.
	Met
)

// Role is what a server is used for.
type Role string

// What servers are used for.
const (
	// RoleChecks: checks and takes.
	RoleChecks Role = "checks"
	// RoleCharges: charges, refunds and penalties.
	RoleCharges Role = "charges"
)

// Event is something that an operator wants to know of.
type Event struct {
	Kind EventKind
	// Addr is the server's; empty for what is about the whole shard.
	Addr string
	// Role is what it is used for, where that matters.
	Role Role
	// ID is the server's own name for itself, for Met.
	ID string
	// Err is what is wrong, if that is known.
	Err error
}

// eventRoom is how many events can wait to be told; more are dropped.
const eventRoom = 256

// Listen calls f for every event from now on, one after the other, until the
// function it returns is called.
func (s *Shard) Listen(f func(Event)) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listened++
	id := s.listened
	s.listeners[id] = f
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.listeners, id)
	}
}

// tell makes the listeners be told, without waiting for them.
func (s *Shard) tell(e Event) {
	select {
	case s.events <- e:
	default:
	}
}

// relay tells the listeners.
func (s *Shard) relay() {
	for {
		select {
		case <-s.life.Done():
			return
		case e := <-s.events:
			s.mu.Lock()
			listeners := slices.Collect(maps.Values(s.listeners))
			s.mu.Unlock()
			for _, listen := range listeners {
				listen(e)
			}
		}
	}
}

// tellPrimaries tells of primaries that were none before.
func (s *Shard) tellPrimaries(before, next *topology) {
	if before == nil {
		return
	}
	for _, now := range next.servers {
		if !slices.ContainsFunc(before.servers, func(was *servers) bool { return was.primary == now.primary }) {
			s.tell(Event{Kind: PrimaryChanged, Addr: now.primary})
		}
	}
}

// tellState tells that a lane's breaker has opened or closed.
func (l *lane) tellState(_ string, from, to gobreaker.State) {
	e := Event{Addr: l.addr, Role: RoleChecks}
	if l.persistent {
		e.Role = RoleCharges
	}
	switch {
	case from == gobreaker.StateClosed:
		e.Kind, e.Err = ServerDown, l.fault.load()
	case to == gobreaker.StateClosed:
		e.Kind = ServerUp
	default:
		return
	}
	l.shard.tell(e)
}

// Observer is told of a command: the role of the server, what it was asked, how
// long that took, waiting included, and the error, if there is one. Of commands
// that were not made, because the server is left out or too many wait, nothing
// is told. It must be quick, and is called by many at once.
type Observer func(role store.Role, op algorithm.Operation, took time.Duration, err error)

// observersOf are those of members, by their shard. Of two, the later one counts.
func observersOf(members ...[]Member) map[*Shard]Observer {
	all := map[*Shard]Observer{}
	for _, some := range members {
		for _, m := range some {
			all[m.Shard] = m.Observe
		}
	}
	return all
}

// tell tells of one command.
func (o Observer) tell(role store.Role, op algorithm.Operation, began time.Time, err error) {
	if o != nil && isMade(err) {
		o(role, op, time.Since(began), err)
	}
}

// tellAll tells of the commands of a call that has ended.
func (o Observer) tellAll(role store.Role, op algorithm.Operation, c *call) {
	if o == nil {
		return
	}
	took := time.Since(c.began)
	for _, cmd := range c.cmds {
		if isMade(cmd.outcome) {
			o(role, op, took, cmd.outcome)
		}
	}
}

// isMade tells whether a command that ended with err was made, or tried.
func isMade(err error) bool {
	return err == nil || !errors.Is(err, ErrShardDown) && !errors.Is(err, errOverload) && !errors.Is(err, errClosed)
}
