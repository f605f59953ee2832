package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// inspectPeriod is how often servers are asked about themselves.
const inspectPeriod = time.Second

// inspect looks at the servers regularly, until the shard is closed: whether they
// are what they should be, and how far behind replicas are.
func (s *Shard) inspect() {
	for {
		var groups sync.WaitGroup
		if t := s.topology.Load(); t != nil {
			for _, at := range t.servers {
				groups.Go(func() { s.inspectServers(s.life, at) })
			}
		}
		groups.Wait()
		if !pause(s.life, inspectPeriod) {
			return
		}
	}
}

// inspectServers looks at a primary and its replicas.
func (s *Shard) inspectServers(ctx context.Context, at *servers) {
	if i, ok := s.look(ctx, at.checks, false); ok && !i.isReplica() {
		at.offsets.note(i, time.Now(), 2*s.opts.maxReplicaLag())
	}
	var replicas sync.WaitGroup
	for _, l := range at.replicas {
		replicas.Go(func() {
			if i, ok := s.look(ctx, l, true); ok {
				s.judgeLag(at, l, i)
			}
		})
	}
	replicas.Wait()
}

// judgeLag leaves a replica out that is too far behind, and takes it back.
func (s *Shard) judgeLag(at *servers, l *lane, i info) {
	age, ok := at.offsets.ageOf(i)
	if !ok {
		return
	}
	lags := age.least > s.opts.maxReplicaLag()
	l.lag.Store(int64(age.least))
	l.lags.Store(lags)
	switch {
	case l.lagTold.Swap(lags) == lags:
	case !lags:
		s.tell(Event{Kind: ReplicaCaughtUp, Addr: l.addr, Role: RoleChecks})
	case age.least == foreign:
		s.tell(Event{Kind: ReplicaLags, Addr: l.addr, Role: RoleChecks, Err: errForeign})
	default:
		s.tell(Event{Kind: ReplicaLags, Addr: l.addr, Role: RoleChecks, Err: fmt.Errorf("it is %s behind its primary", age.least.Round(time.Second))})
	}
}

var errForeign = errors.New("it replicates another primary than the shard's: correct the address, or make it a replica of that (REPLICAOF)")

const (
	// clockTolerance is how far a server's clock may be from this machine's
	// before that is worth telling.
	clockTolerance = time.Second
	oldestMajor    = 7
	oldestMinor    = 0
)

// What can be wrong with a server.
const (
	wrongAccess = iota
	wrongVersion
	wrongPolicy
	wrongRole
	wrongClock
	wrongThings
)

// sight is how a server was when it was last looked at: what it calls itself,
// which is another name after each start, and what was wrong with it.
type sight struct {
	id    string
	wrong [wrongThings]error
}

// look asks a server about itself, and tells what is wrong with it, and what no
// longer is, whenever that has changed.
func (s *Shard) look(ctx context.Context, l *lane, isReplica bool) (i info, ok bool) {
	before := time.Now()
	i, err := l.info(ctx)
	middle := before.Add(time.Since(before) / 2)
	s.mu.Lock()
	was, met := s.met[l.addr]
	s.mu.Unlock()
	now := was
	switch {
	case err == nil:
		now = sight{id: i["run_id"], wrong: s.wrongBy(i, isReplica)}
		if now.wrong[wrongClock] = was.wrong[wrongClock]; !met || now.id != was.id {
			// Once for each start: where it is about as much as is tolerated, that
			// would be told again and again.
			now.wrong[wrongClock] = wrongClockBy(i, middle)
		}
	default:
		problem := wrongAccessBy(err)
		if problem == nil {
			// Whether it answers at all is for its breaker to say.
			return nil, false
		}
		now.wrong[wrongAccess] = problem
	}
	s.mu.Lock()
	s.met[l.addr] = now
	s.mu.Unlock()
	if err == nil && (!met || now.id != was.id) {
		s.tell(Event{Kind: Met, Addr: l.addr, ID: now.id})
	}
	s.tellWrong(l, was, now)
	return i, err == nil
}

// wrongAccessBy is what is wrong with the access to a server by err, with which INFO
// failed; nil if INFO may well work at another time.
func wrongAccessBy(err error) error {
	switch m, isReply := meaningOf(err); {
	case m.kind == KindAuth && m.hint&shut != 0:
		return fmt.Errorf("it refuses the credentials: check username and password: %w", err)
	case m.kind == KindAuth:
		return fmt.Errorf("%s: allow it (+info): %w", infoRefused, err)
	case isReply && m.fate != later:
		return fmt.Errorf("%s: %w", infoRefused, err)
	default:
		return nil
	}
}

const infoRefused = "INFO is refused, so that nobody sees whether it lags or is set up wrongly"

// tellWrong tells what differs between two sights of a server.
func (s *Shard) tellWrong(l *lane, was, now sight) {
	for what, problem := range now.wrong {
		switch before := was.wrong[what]; {
		case problem == nil && before != nil:
			s.tell(Event{Kind: Mended, Addr: l.addr, Err: before})
		case problem != nil && (before == nil || before.Error() != problem.Error()):
			s.tell(Event{Kind: Misconfigured, Addr: l.addr, Err: problem})
		}
	}
}

// wrongBy is what is wrong with a server by what it says, its clock apart.
func (s *Shard) wrongBy(i info, isReplica bool) (wrong [wrongThings]error) {
	if i.isBefore(oldestMajor, oldestMinor) {
		wrong[wrongVersion] = fmt.Errorf("it is Redis %s: use %d.%d or later", i["redis_version"], oldestMajor, oldestMinor)
	}
	if policy := i["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		wrong[wrongPolicy] = fmt.Errorf("its maxmemory-policy is %s, which lets it forget counts: set it to noeviction", policy)
	}
	switch {
	case s.finder != nil:
		// Servers that are found change their roles by themselves.
	case isReplica && !i.isReplica():
		wrong[wrongRole] = errors.New("it is given as a replica and is a primary: make it a replica (REPLICAOF), or remove it")
	case !isReplica && i.isReplica():
		wrong[wrongRole] = fmt.Errorf("it is given as a primary and is a replica of %s:%s: give that one, or use sentinel", i["master_host"], i["master_port"])
	}
	return wrong
}

// wrongClockBy is what is wrong with a server's clock, which it told at an instant.
func wrongClockBy(i info, at time.Time) error {
	skew, ok := i.skew(at)
	if !ok || skew <= clockTolerance && skew >= -clockTolerance {
		return nil
	}
	return fmt.Errorf("its clock differs from this machine's by %s: let both follow a time server (NTP)", skew.Round(time.Millisecond))
}

// Twins are the addresses of two servers of different shards that are the same
// one; empty if there are none.
func (s *Store) Twins() (first, second string) {
	owners := map[string]string{}
	for place, shard := range s.shards {
		if slices.Contains(s.shards[:place], shard) {
			continue
		}
		shard.mu.Lock()
		for addr, seen := range shard.met {
			if other, ok := owners[seen.id]; ok && seen.id != "" && first == "" {
				first, second = other, addr
			}
		}
		for addr, seen := range shard.met {
			owners[seen.id] = addr
		}
		shard.mu.Unlock()
	}
	return first, second
}
