package redis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// probePeriod is the time between pings of servers that are left out.
	probePeriod = 250 * time.Millisecond
	// probeTimeout bounds a ping, apart from connecting.
	probeTimeout = 500 * time.Millisecond
	// examinePeriod is the time between two looks at a server.
	examinePeriod = time.Second
	// infoTimeout bounds one inspection.
	infoTimeout = time.Second
	// clockTolerance bounds the difference between a server's clock and this
	// machine's that is not reported.
	clockTolerance = time.Second
	// oldestMajor and oldestMinor are the oldest version of Redis that works.
	oldestMajor = 7
	oldestMinor = 0
	// testedVersion is the version of Redis that the tests run with.
	testedVersion = "7.0"
)

// probe pings the servers that are left out, until the shard is closed, so that no
// request waits to find out whether a server is back.
func (s *Shard) probe() {
	for pause(s.life, probePeriod) {
		var pings sync.WaitGroup
		s.mu.Lock()
		// Also those of redirections only.
		lanes := slices.Collect(maps.Values(s.lanes))
		s.mu.Unlock()
		for _, l := range lanes {
			if !l.isUp() {
				pings.Go(func() { l.ping(s.life) })
			}
		}
		pings.Wait()
	}
}

// ping lets the breaker close if it allows a try and the server answers.
func (l *lane) ping(ctx context.Context) {
	reported, err := l.breaker.Allow()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err = l.client.Load().Ping(ctx).Err()
	l.fault.note(err)
	reported(err)
}

// examine examines the servers regularly, until the shard is closed: their
// configuration, and the lag of replicas.
func (s *Shard) examine() {
	for {
		var groups sync.WaitGroup
		if t := s.topology.Load(); t != nil {
			for _, at := range t.servers {
				groups.Go(func() { s.examineServers(s.life, at) })
			}
		}
		groups.Wait()
		if !pause(s.life, examinePeriod) {
			return
		}
	}
}

func (s *Shard) examineServers(ctx context.Context, at *servers) {
	if i, ok := s.look(ctx, at.checks, false); ok && !i.isReplica() {
		at.offsets.note(i, time.Now(), 2*s.opts.MaxReplicaLag)
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

// judgeLag leaves out a replica that is too far behind, and takes it back.
func (s *Shard) judgeLag(at *servers, l *lane, i info) {
	lag, ok := at.offsets.lagOf(i)
	if !ok {
		return
	}
	lagged := s.lags(time.Duration(l.lag.Swap(int64(lag))))
	switch {
	case s.lags(lag) == lagged:
	case lagged:
		s.emit(Event{Kind: ReplicaCaughtUp, Addr: l.addr, Purpose: PurposeChecks})
	case lag == foreign:
		s.emit(Event{Kind: ReplicaLags, Addr: l.addr, Purpose: PurposeChecks, Err: errForeign})
	case lag == unsynced:
		s.emit(Event{Kind: ReplicaLags, Addr: l.addr, Purpose: PurposeChecks, Err: errUnsynced})
	default:
		s.emit(Event{Kind: ReplicaLags, Addr: l.addr, Purpose: PurposeChecks, Err: fmt.Errorf("it is %s behind its primary", lag.Round(time.Second))})
	}
}

// fault is what is wrong with a server, and the remedy.
type fault struct {
	problem, remedy string
	// cause is the reply that shows it, or nil.
	cause error
}

// Error implements error.
func (f *fault) Error() string {
	if f.cause != nil {
		return f.problem + ": " + f.remedy + ": " + f.cause.Error()
	}
	return f.problem + ": " + f.remedy
}

// Unwrap returns the cause.
func (f *fault) Unwrap() error { return f.cause }

var errForeign = &fault{problem: "it replicates another primary than the shard's", remedy: "correct the address, or make it a replica of that (REPLICAOF)"}

var errUnsynced = errors.New("it does not have its primary's data, and its link to it is down")

// The faults that an inspection finds.
const (
	faultAccess = iota
	faultVersion
	faultPolicy
	faultRole
	faultClock
	faultKinds
)

// sight is what the last inspection of a server found: its run ID, which is new
// after each start, and its faults.
type sight struct {
	id     string
	faults [faultKinds]error
}

// look inspects a server and emits the faults that have come or gone.
func (s *Shard) look(ctx context.Context, l *lane, isReplica bool) (i info, ok bool) {
	before := time.Now()
	i, err := l.info(ctx)
	middle := before.Add(time.Since(before) / 2)
	s.mu.Lock()
	was, met := s.met[l.addr]
	s.mu.Unlock()
	now := was
	if err == nil {
		now = sight{id: i["run_id"], faults: faultsOf(i, isReplica, s.finder != nil)}
		if now.faults[faultClock] = was.faults[faultClock]; !met || now.id != was.id {
			// Once for each start: a difference near the tolerance would be reported
			// repeatedly.
			if skew, ok := i.skew(middle); ok {
				now.faults[faultClock] = clockFault(skew)
			}
		}
	} else if now.faults[faultAccess] = accessFault(err); now.faults[faultAccess] == nil {
		// The breaker decides whether it answers at all.
		return nil, false
	}
	s.mu.Lock()
	s.met[l.addr] = now
	s.mu.Unlock()
	if err == nil && (!met || now.id != was.id) {
		s.emit(Event{Kind: Met, Addr: l.addr, ID: now.id})
	}
	for what, problem := range now.faults {
		switch before := was.faults[what]; {
		case problem == nil && before != nil:
			s.emit(Event{Kind: Mended, Addr: l.addr, Err: before})
		case problem != nil && (before == nil || before.Error() != problem.Error()):
			s.emit(Event{Kind: Misconfigured, Addr: l.addr, Err: problem})
		}
	}
	return i, err == nil
}

// accessFault returns the fault that made INFO fail with err; nil if INFO may work
// at another time.
func accessFault(err error) error {
	switch m, isReply := meaningOf(err); {
	case m.kind == KindAuth && m.hint&shut != 0:
		return &fault{loginRefused, "check username and password", err}
	case m.kind == KindAuth:
		return &fault{infoRefused, "allow it (+info)", err}
	case isReply && m.fate != later:
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
	if i.isBefore(oldestMajor, oldestMinor) {
		found[faultVersion] = &fault{problem: "it is Redis " + i["redis_version"], remedy: fmt.Sprintf("use %d.%d or later", oldestMajor, oldestMinor)}
	}
	if policy := i["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		found[faultPolicy] = &fault{problem: fmt.Sprintf("its maxmemory-policy is %s, which lets it forget counts", policy), remedy: "set it to noeviction"}
	}
	switch {
	case isFound:
		// Servers that are found change their roles by themselves.
	case isReplica && !i.isReplica():
		found[faultRole] = &fault{problem: "it is given as a replica and is a primary", remedy: "make it a replica (REPLICAOF), or remove it"}
	case !isReplica && i.isReplica():
		found[faultRole] = &fault{
			problem: fmt.Sprintf("it is given as a primary and is a replica of %s:%s", i["master_host"], i["master_port"]),
			remedy:  "give that one, or use sentinel",
		}
	}
	return found
}

// clockFault returns the fault of a server's clock with that lead, or nil.
func clockFault(skew time.Duration) error {
	if skew.Abs() <= clockTolerance {
		return nil
	}
	return &fault{problem: "its clock differs from this machine's by " + skew.Round(time.Millisecond).String(), remedy: "let both follow a time server (NTP)"}
}

// info is the reply to INFO.
type info map[string]string

func parseInfo(text string) info {
	fields := info{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

func (l *lane) info(ctx context.Context) (info, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	i, err := infoOf(ctx, l.client.Load())
	if err != nil {
		return nil, fmt.Errorf("ask %s for INFO: %w", l.addr, err)
	}
	return i, nil
}

func infoOf(ctx context.Context, client *goredis.Client) (info, error) {
	text, err := client.Info(ctx).Result()
	if err != nil {
		return nil, err
	}
	return parseInfo(text), nil
}

func (i info) isReplica() bool { return i["role"] == "slave" }

// isDetached reports whether a replica does not follow its primary now.
func (i info) isDetached() bool { return i["master_link_status"] == "down" }

// history returns the IDs of the server's replication history: offsets of servers
// that share one are comparable.
func (i info) history() []string { return []string{i["master_replid"], i["master_replid2"]} }

// offset is the server's position in its primary's history; -1 if unknown.
func (i info) offset() int64 {
	name := "master_repl_offset"
	if i.isReplica() {
		name = "slave_repl_offset"
	}
	n, err := strconv.ParseInt(i[name], 10, 64)
	if err != nil {
		return -1
	}
	return n
}

func (i info) isBefore(major, minor int) bool {
	version := i["redis_version"]
	if valkey := i["valkey_version"]; valkey != "" {
		version = valkey
	}
	var has [2]int
	if n, _ := fmt.Sscanf(version, "%d.%d", &has[0], &has[1]); n < 2 {
		return false
	}
	return has[0] < major || has[0] == major && has[1] < minor
}

// version names the server's version, and the server if it is Valkey.
func (i info) version() string {
	if valkey := i["valkey_version"]; valkey != "" {
		return "Valkey " + valkey
	}
	return i["redis_version"]
}

// isTested reports whether the tests run with this version, whatever its patches.
func (i info) isTested() bool { return strings.HasPrefix(i.version(), testedVersion+".") }

// skew is the lead of the server's clock over this machine's at an instant.
func (i info) skew(at time.Time) (skew time.Duration, ok bool) {
	micros, err := strconv.ParseInt(i["server_time_usec"], 10, 64)
	if err != nil {
		return 0, false
	}
	return time.UnixMicro(micros).Sub(at), true
}

// offsets are the positions of a primary in its history over time. They date the
// data of a replica.
type offsets struct {
	mu      sync.Mutex
	history []string
	samples []sample
	// before is the primary's previous history, as before a restart; until
	// forgiven, replicas may still have it.
	before   []string
	forgiven time.Time
}

type sample struct {
	at     time.Time
	offset int64
}

// note adds a primary's position at an instant. It keeps one sample that is older
// than keep.
func (o *offsets) note(i info, at time.Time, keep time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !shareHistory(o.history, i.history()) {
		o.before, o.forgiven, o.samples = o.history, at.Add(keep/2), nil
	}
	o.history = i.history()
	for len(o.samples) > 1 && at.Sub(o.samples[1].at) > keep {
		o.samples = o.samples[1:]
	}
	o.samples = append(o.samples, sample{at, i.offset()})
}

const (
	// foreign is the lag of a replica with another primary's data.
	foreign = time.Duration(1<<63 - 1)
	// unsynced is the lag of a replica with other data than the primary's whose link is
	// down, as it is while it copies the primary's for the first time.
	unsynced = foreign - 1
	// unknownLag is the lag of a replica that was not inspected yet.
	unknownLag = time.Duration(-1)
)

// lagOf returns the least lag of a replica, if it can be known. The lag does not
// grow while the primary does not answer.
func (o *offsets) lagOf(i info) (lag time.Duration, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	has := i.offset()
	if len(o.samples) == 0 || has < 0 {
		return 0, false
	}
	last := o.samples[len(o.samples)-1]
	// In a failover a replica may follow the new primary before this process knows
	// it: it then has the previous history as well.
	if !shareHistory(o.history, i.history()) {
		if lag = foreign; i.isDetached() {
			lag = unsynced
		}
		return lag, !shareHistory(o.before, i.history()) || last.at.After(o.forgiven)
	}
	for _, s := range slices.Backward(o.samples) {
		if s.offset <= has {
			return last.at.Sub(s.at), true
		}
	}
	return last.at.Sub(o.samples[0].at), true
}

// noHistory is the ID of a history that does not exist.
const noHistory = "0000000000000000000000000000000000000000"

// shareHistory reports whether two servers' offsets are comparable.
func shareHistory(one, other []string) bool {
	return slices.ContainsFunc(one, func(id string) bool { return id != noHistory && id != "" && slices.Contains(other, id) })
}
