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

// EventKind is the kind of an Event.
type EventKind int

// The kinds of events.
const (
	// ServerDown: a server is left out, because calls of it failed.
	ServerDown EventKind = iota
	// ServerUp: it is back.
	ServerUp
	// ReplicaLags: a replica is left out, because it is too far behind.
	ReplicaLags
	// ReplicaCaughtUp: it has caught up.
	ReplicaCaughtUp
	// PrimaryChanged: the shard, or a slot of it, has another primary.
	PrimaryChanged
	// DiscoveryFailed: the servers cannot be found; those last found stay in use.
	DiscoveryFailed
	// Discovered: they can be found again.
	Discovered
	// Misconfigured: Err says what is wrong with a server, and the remedy.
	Misconfigured
	// Mended: what Err says is no longer wrong with a server.
	Mended
	// Met: a server was reached for the first time, or after a restart; ID is its
	// run ID.
	Met
	// ClockJumped: a primary's clock was set, as Err says.
	ClockJumped
)

// Purpose is what calls of a server are for.
type Purpose string

// The purposes of calls.
const (
	// PurposeChecks is for checks and takes.
	PurposeChecks Purpose = "checks"
	// PurposeCharges is for charges, refunds and penalties.
	PurposeCharges Purpose = "charges"
)

// Event is a change that an operator wants to know of.
type Event struct {
	Kind EventKind
	// Addr is the server's address; empty for an event of the whole shard.
	Addr string
	// Purpose is that of the calls, where it matters.
	Purpose Purpose
	// ID is the server's run ID, for Met.
	ID string
	// Err is the cause, if known.
	Err error
}

// eventRoom bounds the events that wait for listeners; more are dropped.
const eventRoom = 256

// Listen calls f for every event from now on, one after the other, until stop is
// called.
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

// emit queues an event for the listeners.
func (s *Shard) emit(e Event) {
	select {
	case s.events <- e:
	default:
	}
}

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

func (l *lane) purpose() Purpose {
	if l.persistent {
		return PurposeCharges
	}
	return PurposeChecks
}

func (l *lane) emitState(_ string, from, to gobreaker.State) {
	switch {
	case from == gobreaker.StateClosed:
		l.shard.emit(Event{Kind: ServerDown, Addr: l.addr, Purpose: l.purpose(), Err: l.fault.load()})
	case to == gobreaker.StateClosed:
		l.shard.emit(Event{Kind: ServerUp, Addr: l.addr, Purpose: l.purpose()})
	}
}

// Observer receives a command: the role of the server, the operation, the time it
// took, waiting included, and the error, if any. Commands that were not made,
// because the server is left out or the queue is full, are not observed. It must
// be quick and safe for concurrent use.
type Observer func(role store.Role, op algorithm.Operation, took time.Duration, err error)

// observe observes one command, if it was made, or tried.
func (o Observer) observe(role store.Role, op algorithm.Operation, took time.Duration, err error) {
	if o != nil && !errors.Is(err, ErrShardDown) && !errors.Is(err, errOverload) && !errors.Is(err, errClosed) {
		o(role, op, took, err)
	}
}

func (o Observer) observeAll(role store.Role, op algorithm.Operation, c *call) {
	took := time.Since(c.began)
	for _, cmd := range c.cmds {
		o.observe(role, op, took, cmd.outcome)
	}
}
