package wire

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/store"
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
	// Replaced: unrelated servers have taken the place of the former ones.
	Replaced
	// Met: a server was reached for the first time, or after a restart; ID is its
	// run ID.
	Met
	// ClockJumped: a primary's clock was set, as Err says.
	ClockJumped
	// WrittenBack: the shard lacked overrides, as Err says, and has them again.
	WrittenBack
	// Panicked: this program, or a library, has panicked at what a server said, as Err says.
	Panicked
)

// Purpose is what calls of a server are for.
type Purpose string

// The purposes of calls.
const (
	// PurposeChecks is for checks and takes.
	PurposeChecks Purpose = store.PurposeChecks
	// PurposeCharges is for charges, refunds and penalties.
	PurposeCharges Purpose = store.PurposeCharges
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

// Emit queues an event for the listeners.
func (s *Shard) Emit(e Event) {
	select {
	case s.events <- e:
	default:
	}
}

// panicPeriod is the least time between two events of panics: each reply of a server may cause one.
const panicPeriod = time.Minute

// Contain runs f, and returns its error. A panic of f becomes an error and, unless there was one just before,
// an event.
func (s *Shard) Contain(addr string, f func() error) error {
	err := contain.Run(f)
	if errors.Is(err, contain.ErrPanic) {
		if addr != "" {
			err = fmt.Errorf("redis %s: %w", addr, err)
		}
		now := time.Now()
		if last := s.panicked.Load(); last == nil || now.Sub(*last) >= panicPeriod {
			s.panicked.Store(&now)
			s.Emit(Event{Kind: Panicked, Addr: addr, Err: err})
		}
	}
	return err
}

// Fault is what is wrong with a server, and the remedy.
type Fault struct {
	Problem, Remedy string
	// Code is the code of its finding, if the place of the fault does not determine it.
	Code string
	// Cause is the reply that shows it, or nil.
	Cause error
}

// Error implements error.
func (f *Fault) Error() string {
	if f.Cause != nil {
		return f.Problem + ": " + f.Remedy + ": " + f.Cause.Error()
	}
	return f.Problem + ": " + f.Remedy
}

// HasRemedy says that the text has a remedy already.
func (f *Fault) HasRemedy() {}

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Cause }

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
				_ = s.Contain(e.Addr, func() error {
					listen(e)
					return nil
				})
			}
		}
	}
}
