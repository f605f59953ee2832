package operate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

const (
	// examinePeriod is the time between two examinations of a server.
	examinePeriod = time.Second
	// infoTimeout bounds one inspection.
	infoTimeout = time.Second
	// clockTolerance bounds the difference between a server's clock and this
	// machine's that is not reported.
	clockTolerance = time.Second
)

// oldest is the oldest version that works, of any product: every Valkey says that it is a Redis
// of 7.2.
var oldest = version{7, 0}

// newestTested are the newest versions with which the tests run, by product.
var newestTested = map[string]version{redis: {8, 0}, valkey: {9, 1}}

// examine examines the servers regularly, until the shard is closed: their
// configuration, and the lag of replicas.
func (s *Shard) examine(ctx context.Context) {
	offsetsOf := map[*wire.Clock]*offsets{}
	for {
		known := offsetsOf
		offsetsOf = map[*wire.Clock]*offsets{}
		var groups sync.WaitGroup
		for _, at := range s.Servers() {
			primary := known[at.Clock]
			if primary == nil {
				primary = new(offsets)
			}
			offsetsOf[at.Clock] = primary
			groups.Go(func() { s.examineServers(ctx, at, primary) })
		}
		groups.Wait()
		if !wire.Pause(ctx, examinePeriod) {
			return
		}
	}
}

func (s *Shard) examineServers(ctx context.Context, at *wire.Servers, primary *offsets) {
	i, err := s.examineOne(ctx, at.Checks, false)
	if err == nil && !i.isReplica() {
		primary.note(i, time.Now(), 2*s.Options.MaxReplicaLag)
	}
	// A server that refuses INFO shows no mode, and may be another one than before.
	if err == nil || wire.IsReply(err) {
		unfit := modeFault(i, s.Finds())
		at.Checks.SetUnfit(unfit)
		at.Charges.SetUnfit(unfit)
		learning, cancel := context.WithTimeout(ctx, infoTimeout)
		at.Checks.LearnExpiry(learning)
		cancel()
	}
	var replicas sync.WaitGroup
	for _, l := range at.Replicas {
		replicas.Go(func() {
			i, err := s.examineOne(ctx, l, true)
			if err == nil || wire.IsReply(err) {
				l.SetUnfit(modeFault(i, s.Finds()))
			}
			if err == nil {
				s.judgeLag(primary, l, i)
			}
		})
	}
	replicas.Wait()
}

func (s *Shard) lags(lag time.Duration) bool { return lag > s.Options.MaxReplicaLag }

// judgeLag leaves out a replica that is too far behind, and takes it back.
func (s *Shard) judgeLag(primary *offsets, l *wire.Lane, i info) {
	lag, ok := primary.lagOf(i)
	if !ok {
		return
	}
	lagged := s.lags(time.Duration(l.Lag.Swap(int64(lag))))
	switch {
	case s.lags(lag) == lagged:
	case lagged:
		s.Emit(wire.Event{Kind: wire.ReplicaCaughtUp, Addr: l.Addr, Purpose: wire.PurposeChecks})
	case lag == foreign:
		s.Emit(wire.Event{Kind: wire.ReplicaLags, Addr: l.Addr, Purpose: wire.PurposeChecks, Err: errForeign})
	case lag == unsynced:
		s.Emit(wire.Event{Kind: wire.ReplicaLags, Addr: l.Addr, Purpose: wire.PurposeChecks, Err: errUnsynced})
	default:
		s.Emit(wire.Event{Kind: wire.ReplicaLags, Addr: l.Addr, Purpose: wire.PurposeChecks, Err: fmt.Errorf("it is %s behind its primary", lag.Round(time.Second))})
	}
}

var errForeign = &wire.Fault{Problem: "it replicates another primary than the shard's", Remedy: "correct the address, or make it a replica of that (REPLICAOF)"}

var errUnsynced = errors.New("it does not have its primary's data, and its link to it is down")

// The faults that an inspection finds.
const (
	faultAccess = iota
	faultVersion
	faultPolicy
	faultRole
	faultMode
	faultClock
	faultKinds
)

// sight is what the last inspection of a server found: its run ID, which is new
// after each start, and its faults.
type sight struct {
	id     string
	faults [faultKinds]error
}

// examineOne reads INFO of a server and emits the faults that have come or gone.
func (s *Shard) examineOne(ctx context.Context, l *wire.Lane, isReplica bool) (i info, err error) {
	before := time.Now()
	i, err = infoOf(ctx, l)
	middle := before.Add(time.Since(before) / 2)
	s.mu.Lock()
	was, met := s.met[l.Addr]
	s.mu.Unlock()
	now := was
	if err == nil {
		now = sight{id: i["run_id"], faults: faultsOf(i, isReplica, s.Finds())}
		if now.faults[faultClock] = was.faults[faultClock]; !met || now.id != was.id {
			// Once for each start: a difference near the tolerance would be reported
			// repeatedly.
			if skew, ok := i.skew(middle); ok {
				now.faults[faultClock] = clockFault(skew)
			}
		}
	} else if now.faults[faultAccess] = accessFault(err); now.faults[faultAccess] == nil {
		// The breaker decides whether it answers at all.
		return nil, err
	}
	s.mu.Lock()
	s.met[l.Addr] = now
	s.mu.Unlock()
	if err == nil && (!met || now.id != was.id) {
		s.Emit(wire.Event{Kind: wire.Met, Addr: l.Addr, ID: now.id})
	}
	for what, problem := range now.faults {
		switch before := was.faults[what]; {
		case problem == nil && before != nil:
			s.Emit(wire.Event{Kind: wire.Mended, Addr: l.Addr, Err: before})
		case problem != nil && (before == nil || before.Error() != problem.Error()):
			s.Emit(wire.Event{Kind: wire.Misconfigured, Addr: l.Addr, Err: problem})
		}
	}
	return i, err
}

// accessFault returns the fault that made INFO fail with err; nil if INFO may work
// at another time.
func accessFault(err error) error {
	switch m, isReply := wire.MeaningOf(err); {
	case m.Kind == wire.KindAuth && m.Hint&wire.Shut != 0:
		return &wire.Fault{Problem: loginRefused, Remedy: "check username and password", Cause: err}
	case m.Kind == wire.KindAuth:
		return &wire.Fault{Problem: infoRefused, Remedy: "allow it (+info)", Cause: err}
	case isReply && m.Fate != wire.Later:
		return fmt.Errorf("%s: %w", infoRefused, err)
	default:
		return nil
	}
}

const (
	loginRefused = "it refuses the login"
	infoRefused  = "INFO is refused, so nothing shows whether it lags or is set up wrongly"
)

// faultsOf returns the faults of a server, apart from its clock. isFound is set if it was
// not given by its address.
func faultsOf(i info, isReplica, isFound bool) (found [faultKinds]error) {
	if i.isTooOld() {
		found[faultVersion] = &wire.Fault{Problem: "it is Redis " + i["redis_version"], Remedy: fmt.Sprintf("use %v or later", oldest)}
	}
	if policy := i["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		found[faultPolicy] = &wire.Fault{Problem: fmt.Sprintf("its maxmemory-policy is %s, which lets it forget counts", policy), Remedy: "set it to noeviction"}
	}
	found[faultMode] = modeFault(i, isFound)
	switch {
	case found[faultMode] != nil:
	case isFound:
		// Servers that are found change their roles by themselves.
	case isReplica && !i.isReplica():
		found[faultRole] = &wire.Fault{Problem: "it is given as a replica and is a primary", Remedy: "make it a replica (REPLICAOF), or remove it"}
	case !isReplica && i.isReplica():
		found[faultRole] = &wire.Fault{
			Problem: fmt.Sprintf("it is given as a primary and is a replica of %s:%s", i["master_host"], i["master_port"]),
			Remedy:  "give that one, or use sentinel",
		}
	}
	return found
}

// modeFault returns the fault of a server that answers, and is of a kind that cannot keep the
// buckets of a shard that is given by its address, or nil.
func modeFault(i info, isFound bool) error {
	switch {
	case isFound:
	case i.mode() == "cluster":
		return &wire.Fault{Problem: "it is a node of a Redis Cluster, which keeps only the buckets of its slots", Remedy: "write cluster in place of primary or url"}
	case i.mode() == "sentinel":
		return &wire.Fault{Problem: "it is a sentinel, which keeps no buckets", Remedy: "write sentinel, and the name of the master, in place of primary"}
	}
	return nil
}

// clockFault returns the fault of a server's clock with that lead, or nil.
func clockFault(skew time.Duration) error {
	if skew.Abs() <= clockTolerance {
		return nil
	}
	return &wire.Fault{Problem: "its clock differs from this machine's by " + skew.Round(time.Millisecond).String(), Remedy: "let both follow a time server (NTP)"}
}
