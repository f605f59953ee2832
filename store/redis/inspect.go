package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// inspectPeriod is how often replicas are asked how far behind they are.
const inspectPeriod = time.Second

// inspect looks at the servers, until the shard is closed: at each for the first
// time, to see whether it is what it should be, and at replicas regularly.
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
	var meetings sync.WaitGroup
	meetings.Go(func() { s.meet(ctx, at.checks, false) })
	for _, l := range at.replicas {
		meetings.Go(func() { s.meet(ctx, l, true) })
	}
	meetings.Wait()
	if len(at.replicas) == 0 {
		return
	}
	if i, err := at.checks.info(ctx, "replication"); err == nil && !i.isReplica() {
		at.offsets.note(i, time.Now(), 2*s.opts.maxReplicaLag())
	}
	var replicas sync.WaitGroup
	for _, l := range at.replicas {
		replicas.Go(func() { s.inspectReplica(ctx, at, l) })
	}
	replicas.Wait()
}

// inspectReplica leaves a replica out that is too far behind, and takes it back.
func (s *Shard) inspectReplica(ctx context.Context, at *servers, l *lane) {
	i, err := l.info(ctx, "replication")
	if err != nil {
		// Whether it answers at all is for its breaker to say.
		return
	}
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

// meet looks at a server for the first time.
func (s *Shard) meet(ctx context.Context, l *lane, isReplica bool) {
	s.mu.Lock()
	_, met := s.met[l.addr]
	s.mu.Unlock()
	if met {
		return
	}
	before := time.Now()
	i, err := l.info(ctx)
	after := time.Now()
	if err != nil {
		if isRefusal(err) {
			s.noteMet(l.addr, "")
			s.complain(l, fmt.Errorf("INFO is refused, so that nobody sees whether it lags or is set up wrongly: allow it (+info): %w", err))
		}
		return
	}
	s.noteMet(l.addr, i["run_id"])
	s.tell(Event{Kind: Met, Addr: l.addr, ID: i["run_id"]})
	for _, problem := range problemsOf(i, isReplica) {
		s.complain(l, problem)
	}
	if skew, ok := i.skew(before.Add(after.Sub(before) / 2)); ok && (skew > clockTolerance || skew < -clockTolerance) {
		s.complain(l, fmt.Errorf("its clock differs from this machine's by %s: let both follow a time server (NTP)", skew.Round(time.Millisecond)))
	}
}

func (s *Shard) noteMet(addr, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.met[addr] = id
}

func (s *Shard) complain(l *lane, problem error) {
	s.tell(Event{Kind: Misconfigured, Addr: l.addr, Err: problem})
}

// problemsOf is what is wrong with a server by what it says.
func problemsOf(i info, isReplica bool) (problems []error) {
	if i.isBefore(oldestMajor, oldestMinor) {
		problems = append(problems, fmt.Errorf("it is Redis %s: use %d.%d or later", i["redis_version"], oldestMajor, oldestMinor))
	}
	if policy := i["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		problems = append(problems, fmt.Errorf("its maxmemory-policy is %s, which lets it forget counts: set it to noeviction", policy))
	}
	switch {
	case isReplica && !i.isReplica():
		problems = append(problems, errors.New("it is given as a replica and is a primary: make it a replica (REPLICAOF), or remove it"))
	case !isReplica && i.isReplica():
		problems = append(problems, fmt.Errorf("it is given as a primary and is a replica of %s:%s: give that one, or use sentinel", i["master_host"], i["master_port"]))
	}
	return problems
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
		for addr, id := range shard.met {
			if other, ok := owners[id]; ok && id != "" && first == "" {
				first, second = other, addr
			}
		}
		for addr, id := range shard.met {
			owners[id] = addr
		}
		shard.mu.Unlock()
	}
	return first, second
}
