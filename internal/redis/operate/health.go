package operate

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// examinePeriod is the time between two examinations of a server.
	examinePeriod = time.Second
	// infoTimeout is the least time for one inspection.
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
			groups.Go(func() {
				_ = s.Contain(at.Primary, func() error {
					s.examineServers(ctx, at, primary)
					return nil
				})
			})
		}
		groups.Wait()
		if !wire.Pause(ctx, examinePeriod) {
			return
		}
	}
}

func (s *Shard) examineServers(ctx context.Context, at *wire.Servers, primary *offsets) {
	i, err := s.examineOne(ctx, at, at.Checks, at.Charges)
	if err == nil && !i.isReplica() {
		primary.note(i, time.Now(), 2*s.Options.MaxReplicaLag)
	} else {
		primary.leave()
	}
	if err == nil || wire.IsReply(err) {
		learning, cancel := context.WithTimeout(ctx, s.Options.ReplyWithin(infoTimeout))
		at.Checks.LearnExpiry(learning)
		cancel()
	}
	var replicas sync.WaitGroup
	for _, l := range at.Replicas {
		replicas.Go(func() {
			_ = s.Contain(l.Addr, func() error {
				i, err := s.examineOne(ctx, at, l)
				if err == nil {
					s.judgeLag(primary, l, i)
				}
				return err
			})
		})
	}
	replicas.Wait()
	if err == nil {
		// Last, because the lag of replicas is judged by the INFO before.
		looking, cancel := context.WithTimeout(ctx, s.Options.ConnectTimeout()+s.Options.ReplyWithin(infoTimeout))
		at.Checks.Revisit(looking)
		cancel()
	}
}

// modeOf returns the fault of the kind of a server with that INFO, if it may be read, or nil.
func (s *Shard) modeOf(ctx context.Context, i info, redirects func(ctx context.Context) bool) error {
	if s.InCluster || i.mode() != "" {
		return modeFault(i, s.InCluster)
	}
	ctx, cancel := context.WithTimeout(ctx, s.Options.ReplyWithin(infoTimeout))
	defer cancel()
	if redirects(ctx) {
		return errNode
	}
	return nil
}

// unfitness returns why no calls are made of a server with that fault of its kind, or nil. The only
// node of a Redis Cluster has all slots, until the cluster grows.
func (s *Shard) unfitness(ctx context.Context, l *wire.Lane, fault error) error {
	switch {
	case errors.Is(fault, wire.ErrTurns) && !s.CountApart(l.Addr):
		return nil
	case !errors.Is(fault, errNode):
		return fault
	}
	ctx, cancel := context.WithTimeout(ctx, s.Options.ReplyWithin(infoTimeout))
	defer cancel()
	if n, err := l.ClusterSize(ctx); err == nil && n == 1 {
		return nil
	}
	return fault
}

func (s *Shard) lackOfTime(ctx context.Context, l, sample *wire.Lane) error {
	ctx, cancel := context.WithTimeout(ctx, s.Options.ReplyWithin(infoTimeout))
	defer cancel()
	return l.LackOfTime(ctx, sample)
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

var errForeign = &wire.Fault{Problem: "it replicates another primary than the shard's, or was made one", Remedy: strayRemedy}

const strayRemedy = "correct the address, or remove it; REPLICAOF (in a cluster, CLUSTER REPLICATE) would delete what it has"

var errUnsynced = errors.New("it does not have its primary's data, and its link to it is down")

// The faults that an inspection finds.
const (
	faultAccess = iota
	faultVersion
	faultPolicy
	faultRole
	faultMode
	faultCommands
	faultClock
	faultIdentity
	faultWritable
	faultStale
	faultKinds
)

// sight is what the last inspection of a server found: its run ID, which is new
// after each start, and its faults.
type sight struct {
	id string
	// replID is the ID of its present replication history.
	replID    string
	isReplica bool
	faults    [faultKinds]error
	// demoted is how many inspections in a row have shown that the primary that was found is a replica.
	demoted int
	// isClockRight is set once the clock was found to be right.
	isClockRight bool
}

// sight returns the sight of a server with that INFO, without its faults.
func (i info) sight() sight {
	return sight{id: i["run_id"], replID: i["master_replid"], isReplica: i.isReplica()}
}

// sightOf returns what the last inspection of a server found.
func (s *Shard) sightOf(addr string) sight {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.met[addr]
}

// mostDemoted is how many these are from which that is a fault: a failover takes a few.
const mostDemoted = 5

// demotedAfter returns the sight of a server with that INFO after another one, with the fault of a primary that
// keeps being found and is a replica.
func (n sight) demotedAfter(was sight, i info, inCluster bool) sight {
	remedy := "see why the sentinels do not follow; if no other primary runs: REPLICAOF NO ONE"
	if inCluster {
		remedy = "CLUSTER FAILOVER on it, or see why the nodes do not follow"
	}
	if n.demoted = was.demoted + 1; n.demoted >= mostDemoted {
		n.faults[faultRole] = &wire.Fault{
			Problem: fmt.Sprintf("it keeps being found as the primary, and is a replica of %s:%s", i["master_host"], i["master_port"]),
			Remedy:  remedy,
		}
	}
	return n
}

// examineOne reads INFO of one of these servers, to which the lanes lead, emits the faults that have
// come or gone, and lets no calls be made if it is unfit.
func (s *Shard) examineOne(ctx context.Context, at *wire.Servers, lanes ...*wire.Lane) (i info, err error) {
	l := lanes[0]
	before := time.Now()
	i, err = infoOf(ctx, l)
	took := time.Since(before)
	for _, l := range lanes {
		l.NoteHidden(err)
	}
	s.mu.Lock()
	was, met := s.met[l.Addr]
	s.mu.Unlock()
	now := was
	if err == nil {
		server := wire.ServerIn(i.field)
		s.Hear(l.Addr, &server)
		now = i.sight()
		now.faults = faultsOf(i, l != at.Checks, s.Shard)
		if l == at.Checks {
			now.faults[faultIdentity] = s.IdentityFault(l.Addr, i["run_id"])
		} else {
			s.judgeReplica(&now, i, at, l)
		}
		if s.Finds() && l == at.Checks && i.isReplica() {
			now = now.demotedAfter(was, i, s.InCluster)
		}
		if now.id == was.id {
			// Once for each start: a difference near the tolerance would come and go.
			now.isClockRight, now.faults[faultClock] = was.isClockRight, was.faults[faultClock]
		}
		now.judgeClock(i, before, took)
	} else if now.faults[faultAccess] = s.databaseFault(err); now.faults[faultAccess] == nil {
		now.faults[faultAccess] = accessFault(err)
	}
	if err == nil || wire.IsReply(err) {
		// A server that refuses INFO shows no mode, and may be another one than before.
		now.faults[faultMode] = s.modeOf(ctx, i, func(ctx context.Context) bool { return l.Redirects(ctx, at.Checks) })
		if now.faults[faultMode] == nil && l == at.Checks {
			now.faults[faultMode] = s.TurnFault(l.Addr)
		}
		unfit := s.unfitness(ctx, l, now.faults[faultMode])
		now.faults[faultCommands] = nil
		for _, l := range lanes {
			l.SetUnfit(unfit)
			if cause := s.lackOfTime(ctx, l, at.Checks); cause != nil {
				now.faults[faultCommands] = &wire.Fault{Problem: "it does not have the command TIME, without which scripts fail", Remedy: "undo its rename-command", Cause: cause}
			}
		}
	}
	if err != nil && now.faults[faultAccess] == nil {
		// The breaker decides whether it answers at all.
		return nil, err
	}
	s.mu.Lock()
	s.met[l.Addr] = now
	s.mu.Unlock()
	if err == nil && met && now.id != was.id {
		for _, l := range lanes {
			l.Restarted()
		}
	}
	if err == nil && (!met || now.id != was.id) {
		s.Emit(wire.Event{Kind: wire.Met, Addr: l.Addr, ID: now.id})
	}
	for what, problem := range now.faults {
		switch before := was.faults[what]; {
		case what == faultIdentity:
			// It is no mistake, and listed all the same.
		case problem == nil && before != nil:
			s.Emit(wire.Event{Kind: wire.Mended, Addr: l.Addr, Err: before})
		case problem != nil && (before == nil || before.Error() != problem.Error()):
			s.Emit(wire.Event{Kind: wire.Misconfigured, Addr: l.Addr, Err: problem})
		}
	}
	return i, err
}

// databaseFault returns the fault of a server that refuses a connection because of its database
// with err, or nil.
func (s *Shard) databaseFault(err error) error {
	if !wire.IsReply(err) || s.Options.DB == 0 || !refusesDatabase.MatchString(err.Error()) {
		return nil
	}
	f := &wire.Fault{Problem: fmt.Sprintf("database %d cannot be used: %s", s.Options.DB, err), Remedy: "correct db, or raise databases in the server's configuration"}
	switch m, _ := wire.MeaningOf(err); {
	case m.Kind == store.KindAuth:
		f.Remedy = "ACL SETUSER <user> +select"
	case s.InCluster:
		f.Remedy = "leave db out: a cluster has database 0 only, unless it is of Valkey 9 and sets cluster-databases"
	}
	return f
}

var refusesDatabase = regexp.MustCompile("'select'|DB index|SELECT is not allowed")

// accessFault returns the fault that made INFO fail with err; nil if INFO may work
// at another time.
func accessFault(err error) error {
	switch m, isReply := wire.MeaningOf(err); {
	case m.Kind == store.KindAuth && m.Hint&wire.Shut != 0:
		return &wire.Fault{Problem: loginRefused, Remedy: "check username and password", Cause: err}
	case m.Kind == store.KindAuth:
		return &wire.Fault{Problem: infoRefused, Remedy: "allow it (+info)", Cause: err}
	case isReply && m.Fate != wire.Later:
		return fmt.Errorf("%s: %w", infoRefused, err)
	default:
		return nil
	}
}

const (
	loginRefused = "it refuses the login"
	infoRefused  = "INFO is refused, so nothing shows whether it lags, is set up wrongly, or is another server than before"
)

// faultsOf returns the faults of a server, apart from its clock, as one of a shard.
func faultsOf(i info, isReplica bool, s *wire.Shard) (found [faultKinds]error) {
	if i.isTooOld() {
		found[faultVersion] = &wire.Fault{Problem: "it is Redis " + i["redis_version"], Remedy: fmt.Sprintf("use %v or later", oldest)}
	}
	if policy := i["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		found[faultPolicy] = &wire.Fault{Problem: fmt.Sprintf("its maxmemory-policy is %s, which lets it forget counts", policy), Remedy: "set it to noeviction"}
	}
	found[faultMode] = modeFault(i, s.InCluster)
	switch {
	case found[faultMode] != nil:
	case s.Finds():
		// Servers that are found change their roles by themselves: see demotedAfter.
	case !isReplica && i.isReplica():
		found[faultRole] = &wire.Fault{
			Problem: fmt.Sprintf("it is given as a primary and is a replica of %s:%s", i["master_host"], i["master_port"]),
			Remedy:  "give that one as the primary and this one as a replica, or use sentinel",
		}
	}
	if !s.InCluster && i.isReplica() && i["slave_read_only"] == "0" {
		found[faultWritable] = &wire.Fault{
			Problem: "it takes writes although it is a replica, so charges that reach it in a failover are lost",
			Remedy:  "set replica-read-only yes (CONFIG SET, and in its configuration)",
		}
	}
	return found
}

// judgeReplica adds the faults of a server as a replica of a primary.
func (s *Shard) judgeReplica(now *sight, i info, at *wire.Servers, l *wire.Lane) {
	if !s.Finds() && !now.isReplica && now.faults[faultMode] == nil {
		now.faults[faultRole] = strayFault(*now, s.sightOf(at.Primary), !at.Checks.IsUp())
	}
	if i.isDetached() && refusesStale(l) {
		now.faults[faultStale] = errStale
	}
}

// strayFault returns the fault of a server that is given as a replica of a primary, which may be away, and is a primary.
func strayFault(it, primary sight, isAway bool) error {
	switch {
	case it.id != "" && it.id == primary.id:
		return &wire.Fault{Problem: "it is given as a replica and is the primary itself", Remedy: "remove it"}
	case primary.isReplica && it.replID != "" && it.replID == primary.replID:
		return &wire.Fault{Problem: "it is given as a replica, and the given primary is its replica", Remedy: "exchange the two"}
	}
	f := &wire.Fault{Problem: "it is given as a replica and is a primary", Remedy: strayRemedy}
	if isAway {
		f.Remedy = "give it as the primary, or correct the address"
	}
	return f
}

var errStale = &wire.Fault{
	Problem: "its replica-serve-stale-data is no, so it answers no checks while its primary is away",
	Remedy:  "set replica-serve-stale-data yes (CONFIG SET, and in its configuration)",
}

// refusesStale reports whether a replica that is left out refuses calls because its link is down.
func refusesStale(l *wire.Lane) bool {
	fault := l.Figures().Fault
	return !l.IsUp() && fault != nil && strings.Contains(fault.Error(), "MASTERDOWN")
}

var (
	errNode     = &wire.Fault{Problem: "it is a node of a Redis Cluster, which keeps only the buckets of its slots", Remedy: "write cluster in place of primary and replica, url or sentinel"}
	errSentinel = &wire.Fault{Problem: "it is a sentinel, which keeps no buckets", Remedy: "write sentinel, and the name of the master, in place of primary and replica"}
)

// modeFault returns the fault of a server that answers, and is of a kind that cannot keep the
// buckets of a shard that is no Redis Cluster, or nil.
func modeFault(i info, inCluster bool) error {
	switch mode := i.mode(); {
	case inCluster:
	case mode == "cluster":
		return errNode
	case mode == "sentinel":
		return errSentinel
	}
	return nil
}

// judgeClock judges the server's clock by an INFO that was asked for at that instant, unless the clock was found to be
// right before. A pause of this machine or of the server looks like a wrong clock, so each INFO may end a fault.
func (n *sight) judgeClock(i info, asked time.Time, took time.Duration) {
	skew, ok := i.skew(asked.Add(took / 2))
	if n.isClockRight || !ok {
		return
	}
	if fault := clockFault(skew, took/2); fault == nil || n.faults[faultClock] == nil {
		// A fault keeps its text, although the difference varies: each text is logged.
		n.faults[faultClock] = fault
	}
	n.isClockRight = n.faults[faultClock] == nil && took <= clockTolerance
}

// clockFault returns the fault of a server whose clock has that lead, give or take doubt, or nil.
func clockFault(skew, doubt time.Duration) error {
	if skew.Abs()-doubt <= clockTolerance {
		return nil
	}
	return &wire.Fault{Problem: "its clock differs from this machine's by " + skew.Round(time.Millisecond).String(), Remedy: "let both follow a time server (NTP)"}
}
