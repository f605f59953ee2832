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
	"sync/atomic"
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

// info is what a server says about itself.
type info map[string]string

// parseInfo reads the reply to INFO.
func parseInfo(text string) info {
	fields := info{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

// infoTimeout bounds a question about a server's health.
const infoTimeout = time.Second

// info asks the server about itself.
func (l *lane) info(ctx context.Context) (info, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	text, err := l.client.Load().Info(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("ask %s for INFO: %w", l.addr, err)
	}
	return parseInfo(text), nil
}

func (i info) isReplica() bool { return i["role"] == "slave" }

// history is what replication offsets are about: two servers' offsets can be
// compared if they share one.
func (i info) history() []string { return []string{i["master_replid"], i["master_replid2"]} }

// offset is how much of its primary's history the server has; -1 if it does not
// say.
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

// isBefore tells whether the server's version is lower than major.minor.
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

// skew is how much the server's clock was ahead of this machine's at an instant.
func (i info) skew(at time.Time) (skew time.Duration, ok bool) {
	micros, err := strconv.ParseInt(i["server_time_usec"], 10, 64)
	if err != nil {
		return 0, false
	}
	return time.UnixMicro(micros).Sub(at), true
}

// offsets are how much a primary had written, and when: what tells how old the
// data of a replica is.
type offsets struct {
	mu      sync.Mutex
	history []string
	samples []sample
	// before is the history that the primary had until it was changed, as when it
	// restarts, and forgiven is until when replicas may have that still.
	before   []string
	forgiven time.Time
}

type sample struct {
	at     time.Time
	offset int64
}

// note notes that a primary has written so much of its history at an instant. It
// forgets what is older than keep, apart from one.
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

// age is how old the data of a replica is.
type age struct {
	// least is that it is at least so old.
	least time.Duration
	// isKnown is set if it is not older.
	isKnown bool
}

// ageOf tells how old the data of a replica is, if that can be said. While the
// primary does not answer nothing is added to it.
func (o *offsets) ageOf(i info) (a age, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.samples) == 0 || i.offset() < 0 {
		return age{}, false
	}
	last := o.samples[len(o.samples)-1]
	// In a failover a replica may follow the new primary before that is known
	// here: it tells the old history as well.
	if !shareHistory(o.history, i.history()) {
		return age{foreign, true}, !shareHistory(o.before, i.history()) || last.at.After(o.forgiven)
	}
	has := i.offset()
	for n := len(o.samples) - 1; n >= 0; n-- {
		if o.samples[n].offset <= has {
			return age{last.at.Sub(o.samples[n].at), true}, true
		}
	}
	return age{last.at.Sub(o.samples[0].at), false}, true
}

// noHistory is what servers say that have had one history only.
const noHistory = "0000000000000000000000000000000000000000"

// shareHistory tells whether two servers' offsets are about the same.
func shareHistory(one, other []string) bool {
	return slices.ContainsFunc(one, func(id string) bool { return id != noHistory && id != "" && slices.Contains(other, id) })
}

// foreign is the age of a replica's data that is not its primary's.
const foreign = time.Duration(1<<63 - 1)

// unknownLag is the lag of a replica of which nothing is known.
const unknownLag = time.Duration(-1)

const (
	// probePeriod is how often it is looked for servers that are left out.
	probePeriod = 250 * time.Millisecond
	// probeTimeout bounds a ping, beside connecting.
	probeTimeout = 500 * time.Millisecond
)

// probe pings the servers that are left out, until the shard is closed. So
// requests never wait to see whether a server is back.
func (s *Shard) probe() {
	for pause(s.life, probePeriod) {
		var pings sync.WaitGroup
		for _, l := range s.allLanes() {
			if !l.isUp() {
				pings.Go(func() { l.ping(s.life) })
			}
		}
		pings.Wait()
	}
}

// allLanes are those in use, also the ones that only redirections lead to.
func (s *Shard) allLanes() []*lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.lanes))
}

// ping lets the breaker close if the server answers, once it is time to try.
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

// fault is the last error that spoke against a server.
type fault struct{ err atomic.Pointer[error] }

func (f *fault) note(err error) {
	if err != nil {
		f.err.Store(&err)
	}
}

func (f *fault) load() error {
	if err := f.err.Load(); err != nil {
		return *err
	}
	return nil
}
