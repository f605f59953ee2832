package simredis

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// replication is what a server has to do with others.
type replication struct {
	// primary is nil of a primary.
	primary  *Server
	replicas []*Server
	// effects are those of the call that runs.
	effects [][]string
	// waiting are the transactions of the primary that are still to be applied.
	waiting []transaction
	// applying is set while one is.
	applying bool
}

// transaction is the effects of a call at the primary, which replicas apply at once.
type transaction struct {
	// at is by the simulation's clock.
	at      time.Time
	effects [][]string
}

// changed records a command that has the effect of the one that runs.
func (s *Server) changed(args ...string) {
	if len(s.replicas) > 0 {
		s.effects = append(s.effects, slices.Clone(args))
	}
}

// commit ends a call, and sends its effects to the replicas.
func (s *Server) commit(at time.Time) {
	if len(s.effects) == 0 {
		return
	}
	for _, r := range s.replicas {
		r.waiting = append(r.waiting, transaction{at, s.effects})
	}
	s.effects = nil
}

// ReplicaOf makes s a replica, and replaces what it holds by what the primary holds now.
// What the primary changes from now on waits until [Server.Apply]. Neither the primary nor a
// server that it replicates may be a replica of s.
func (s *Server) ReplicaOf(primary *Server) {
	s.Promote()
	s.primary, s.keys = primary, make(map[string]*entry, len(primary.keys))
	primary.replicas = append(primary.replicas, s)
	for key, e := range primary.keys {
		s.keys[key] = &entry{copyOf(e.value), e.expiry}
	}
	for _, r := range slices.Clone(s.replicas) {
		r.ReplicaOf(s)
	}
}

func copyOf(value any) any {
	switch value := value.(type) {
	case *hash:
		return &hash{slices.Clone(value.fields)}
	case *sortedSet:
		return &sortedSet{slices.Clone(value.members), maps.Clone(value.scores)}
	}
	return value
}

// Promote makes s a primary. What was not applied is lost.
func (s *Server) Promote() {
	if s.primary == nil {
		return
	}
	s.primary.replicas = slices.DeleteFunc(s.primary.replicas, func(r *Server) bool { return r == s })
	s.primary, s.waiting = nil, nil
}

// Apply applies what the primary changed up to an instant of the simulation's clock.
func (s *Server) Apply(upTo time.Time) {
	done := 0
	for _, t := range s.waiting {
		if t.at.After(upTo) {
			break
		}
		s.apply(t)
		done++
	}
	s.waiting = slices.Delete(s.waiting, 0, done)
}

func (s *Server) apply(t transaction) {
	s.applying = true
	defer func() { s.applying = false }()
	now := s.begin()
	for _, args := range t.effects {
		if _, err := commandOf(args[0]).run(s, args); err != nil {
			panic(fmt.Sprintf("simredis: a replica cannot apply %q: %v", args, err))
		}
	}
	s.commit(now)
}
