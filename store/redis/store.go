// Package redis implements [store.Store] on sharded, replicated Redis. All
// buckets of a client live on one shard: charges go to its primary, checks to
// its replicas. A [Store] routes requests to its [Shard]s; a Shard holds the
// connections to one primary and its replicas, which it is given or finds
// through Sentinel or a Redis Cluster.
//
// It requires Redis 7.0. Valkey 7.2 should work but is untested. It imports
// store, store/algorithm and luascripts, and never Caddy.
package redis

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// DefaultKeyPrefix starts every key in Redis.
	DefaultKeyPrefix = "rl"
	// DefaultCheckTimeout bounds the latency that a check adds to a request.
	DefaultCheckTimeout = 50 * time.Millisecond
	// DefaultChargeTimeout bounds the retries of a charge.
	DefaultChargeTimeout = 250 * time.Millisecond
)

// Options configures a Store.
type Options struct {
	// Members are the shards; at least one.
	Members []Member
	// Previous are the shards before a resharding, if any. Buckets whose owner
	// changed migrate from them, so that clients keep what they have spent.
	Previous []Member
	// Migrations remembers the buckets that have migrated. Successive stores
	// with the same Members and Previous may share it, so that no bucket
	// migrates twice; nil gives the store its own.
	Migrations *Migrations
	// KeyPrefix starts every key; empty means DefaultKeyPrefix.
	KeyPrefix string
	// KeySecret, if not empty, replaces client keys by their HMAC, so that
	// Redis never sees them.
	KeySecret []byte
	// ReadPrimary sends checks to the primary instead of the replicas.
	ReadPrimary bool
	// Now is this machine's clock, for Diagnose; nil means time.Now.
	Now func() time.Time
	// clock, in tests, takes the place of the primary's clock.
	clock func() time.Time
	// CheckTimeout bounds a check and a take; 0 means DefaultCheckTimeout.
	CheckTimeout time.Duration
	// ChargeTimeout bounds the retries of a charge, refund or penalty that did
	// not run; 0 means DefaultChargeTimeout. Once sent, it waits for the reply
	// a little longer.
	ChargeTimeout time.Duration
	// OnUndelivered, if set, receives each failure of a detached operation: the
	// name of the shard, the operation, and an error that wraps
	// store.ErrNotExecuted or store.ErrUncertain. It must be quick.
	OnUndelivered func(shard string, op algorithm.Operation, err error)
}

// Member is a shard's place in a store.
type Member struct {
	// Name is the shard's identity: it decides which client keys it owns.
	Name string
	// Weight is its share of the client keys relative to the others'; 0 means
	// 1.
	Weight int
	// Shard holds the connections.
	Shard *Shard
	// Observe, if set, receives every command that the store runs there.
	Observe Observer
}

// Store keeps buckets on its shards. It is safe for concurrent use.
type Store struct {
	opts    Options
	keys    bucketKeys
	sharder *rendezvous
	// previous chooses among the shards before a resharding, or is nil.
	previous *rendezvous
	// newcomers learns where most unknown clients are new.
	newcomers newcomers
	// static is set if the servers of all shards are given.
	static bool
	// observers are those of Members and Previous, by shard.
	observers map[*Shard]Observer
	// awaiting counts the detached calls that wait for buckets to migrate.
	awaiting atomic.Int64
}

// maxAwaiting bounds the detached calls that wait for buckets to migrate, each in a goroutine.
// Others wait in the queue of a lane, which is bounded too.
const maxAwaiting = 1 << 14

// New returns a store. The caller keeps the shards and closes them after the
// last use of the store.
func New(opts Options) *Store {
	opts.KeyPrefix = cmp.Or(opts.KeyPrefix, DefaultKeyPrefix)
	opts.CheckTimeout = cmp.Or(opts.CheckTimeout, DefaultCheckTimeout)
	opts.ChargeTimeout = cmp.Or(opts.ChargeTimeout, DefaultChargeTimeout)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	s := &Store{
		keys:      bucketKeys{prefix: opts.KeyPrefix, secret: opts.KeySecret},
		sharder:   newRendezvous(opts.Members),
		static:    true,
		observers: map[*Shard]Observer{},
	}
	if len(opts.Previous) > 0 {
		s.previous = newRendezvous(opts.Previous)
		if opts.Migrations == nil {
			opts.Migrations = NewMigrations()
		}
	}
	for _, m := range opts.Previous {
		s.observers[m.Shard] = m.Observe
	}
	for _, m := range opts.Members {
		s.observers[m.Shard] = m.Observe
		s.static = s.static && m.Shard.finder == nil
	}
	s.opts = opts
	return s
}

// Warm implements [store.Remote].
func (s *Store) Warm(ctx context.Context) {
	var wg sync.WaitGroup
	for _, m := range s.opts.Members {
		wg.Go(func() { m.Shard.warm(ctx) })
	}
	wg.Wait()
}

// Check implements [store.Store]. Replicas answer in turn; the primary answers
// where they cannot or see no open window.
func (s *Store) Check(ctx context.Context, reqs []store.Request, states []store.State) {
	s.run(ctx, algorithm.Check, reqs, states, s.opts.CheckTimeout)
}

// Peek implements [store.Store].
func (s *Store) Peek(ctx context.Context, reqs []store.Request, states []store.State) {
	s.run(ctx, algorithm.Peek, reqs, states, s.opts.CheckTimeout)
}

// Take implements [store.Store].
func (s *Store) Take(ctx context.Context, reqs []store.Request, states []store.State) {
	s.run(ctx, algorithm.Take, reqs, states, s.opts.CheckTimeout)
}

// Charge implements [store.Store].
func (s *Store) Charge(ctx context.Context, reqs []store.Request, states []store.State) {
	s.run(ctx, algorithm.Charge, reqs, states, s.opts.ChargeTimeout)
}

// Refund implements [store.Store].
func (s *Store) Refund(ctx context.Context, reqs []store.Request, states []store.State) {
	s.run(ctx, algorithm.Refund, reqs, states, s.opts.ChargeTimeout)
}

// Penalize implements [store.Store].
func (s *Store) Penalize(ctx context.Context, reqs []store.Request, states []store.State) {
	s.run(ctx, algorithm.Penalize, reqs, states, s.opts.ChargeTimeout)
}

// run runs an operation on buckets that may still have to migrate. Only goroutines that
// it waits for write states: the worker of an abandoned call has commands of its own.
func (s *Store) run(ctx context.Context, op algorithm.Operation, reqs []store.Request, states []store.State, timeout time.Duration) {
	deadline := time.Now().Add(timeout)
	if s.previous != nil {
		s.runMigrating(ctx, op, reqs, states, deadline)
		return
	}
	s.runMigrated(ctx, op, reqs, states, deadline)
}

// runMigrated runs an operation on buckets that are at their owners.
func (s *Store) runMigrated(ctx context.Context, op algorithm.Operation, reqs []store.Request, states []store.State, deadline time.Time) {
	s.awaitServers(ctx, reqs, deadline)
	if only, ok := s.onlyOwner(reqs); ok {
		s.runAt(ctx, op, only.servers, whole(reqs, states), deadline)
		return
	}
	s.perOwner(reqs, states, func(at owner, g group) { s.runAt(ctx, op, at.servers, g, deadline) })
}

func (s *Store) runAt(ctx context.Context, op algorithm.Operation, at *servers, g group, deadline time.Time) {
	if at == nil {
		g.fail(notExecuted(errNoServers))
		return
	}
	switch op {
	case algorithm.Check:
		s.check(ctx, at, g, deadline)
	case algorithm.Peek:
		s.peek(ctx, at, g, deadline)
	case algorithm.Take:
		s.ask(ctx, at.checks, g, deadline, s.writing(op, at))
	default:
		s.ask(ctx, at.charges, g, deadline, s.writing(op, at))
	}
}

func (s *Store) check(ctx context.Context, at *servers, g group, deadline time.Time) {
	start := time.Now()
	half := start.Add(deadline.Sub(start) / 2)
	replica := s.replica(at)
	now, age := s.timeAt(at, start)
	if replica != nil && age > clockTrust {
		s.refreshClock(at, start, g)
	}
	switch {
	case replica == nil:
		s.checkPrimary(ctx, at, g, deadline)
	case now == 0 || g.wantsPrimary():
		// A replica that decides by its own clock is only a fallback.
		s.checkPrimary(ctx, at, g, half)
		s.fallBack(ctx, replica, g, deadline, reading(algorithm.Check, store.RoleReplica, now))
	case s.newcomers.expects(g):
		// The replica is not expected to know more, so it gets little of the time.
		s.checkPrimary(ctx, at, g, start.Add(deadline.Sub(start)*7/8))
		s.fallBack(ctx, replica, g, deadline, reading(algorithm.Check, store.RoleReplica, now))
	default:
		// The other half of the time is the primary's.
		s.ask(ctx, replica, g, half, reading(algorithm.Check, store.RoleReplica, now))
		s.newcomers.learn(g)
		if g.members = g.unanswered(at); len(g.members) > 0 && ctx.Err() == nil {
			s.ask(ctx, at.checks, g, deadline, s.writing(algorithm.Check, at))
		}
	}
}

// checkPrimary reads buckets at a primary if all their windows are known to be open. The
// script checks others, and what is not there: it opens windows and adopts orphans.
func (s *Store) checkPrimary(ctx context.Context, at *servers, g group, deadline time.Time) {
	now, age := s.timeAt(at, time.Now())
	if now == 0 || age > clockPeriod || at.checks.scripted.Load() || !g.areOpen(now) {
		s.ask(ctx, at.checks, g, deadline, s.writing(algorithm.Check, at))
		return
	}
	s.ask(ctx, at.checks, g, deadline, reading(algorithm.Check, store.RolePrimary, now))
	refused := g.where(func(i int) bool { return says(g.states[i].Err, lacking) })
	g.members = append(g.where(func(i int) bool { return g.states[i].Err == nil && !g.states[i].Holds(g.reqs[i].Limit) }), refused...)
	if len(g.members) == 0 || ctx.Err() != nil {
		return
	}
	s.ask(ctx, at.checks, g, deadline, s.writing(algorithm.Check, at))
	if slices.ContainsFunc(refused, func(i int) bool { return g.states[i].Err == nil }) {
		at.checks.scripted.Store(true)
	}
}

// fallBack asks a replica for what the primary did not answer. Where the replica
// knows no open window either, the error stays.
func (s *Store) fallBack(ctx context.Context, replica *lane, g group, deadline time.Time, op operation) {
	if g.members = g.unanswered(nil); len(g.members) == 0 || ctx.Err() != nil {
		return
	}
	s.askAgain(ctx, replica, g, deadline, op, func(i int) bool { return isUnopened(&g.reqs[i], &g.states[i]) })
}

// askAgain asks another server. A state does not change if that fails or its answer is
// worthless.
func (s *Store) askAgain(ctx context.Context, l *lane, g group, deadline time.Time, op operation, isWorthless func(i int) bool) {
	before := make([]store.State, len(g.members))
	for n, i := range g.members {
		before[n] = g.states[i]
	}
	s.ask(ctx, l, g, deadline, op)
	for n, i := range g.members {
		if g.states[i].Err != nil || isWorthless(i) {
			g.states[i] = before[n]
		}
	}
}

// refreshClock checks one bucket at the primary, without waiting, to learn its time: no
// call may have reached it for long, as when all clients of the shard are refused.
func (s *Store) refreshClock(at *servers, start time.Time, g group) {
	if at.clock.claimObservation(start) {
		c := s.call(at.checks.shard, group{g.reqs, nil, g.members[:1]}, start.Add(s.opts.CheckTimeout), s.writing(algorithm.Check, at))
		c.detached = (*call).release
		at.checks.post(c)
	}
}

// peek reads from a replica, or from the primary if there is none.
func (s *Store) peek(ctx context.Context, at *servers, g group, deadline time.Time) {
	start := time.Now()
	now, _ := s.timeAt(at, start)
	replica, primary := s.replica(at), reading(algorithm.Peek, store.RolePrimary, now)
	if replica == nil {
		s.ask(ctx, at.checks, g, deadline, primary)
		return
	}
	half := start.Add(deadline.Sub(start) / 2)
	s.ask(ctx, replica, g, half, reading(algorithm.Peek, store.RoleReplica, now))
	g.members = g.where(func(i int) bool { return g.states[i].Err != nil || at.mayMiss(&g.states[i]) })
	if len(g.members) > 0 && ctx.Err() == nil {
		s.askAgain(ctx, at.checks, g, deadline, primary, func(int) bool { return false })
	}
}

func (s *Store) replica(at *servers) *lane {
	if s.opts.ReadPrimary {
		return nil
	}
	return at.replica()
}

// timeAt returns the time that decides which windows are over at servers, and how
// long ago their primary reported it; 0 before the primary's first reply.
func (s *Store) timeAt(at *servers, start time.Time) (now int64, age time.Duration) {
	if s.opts.clock != nil {
		return s.opts.clock().UnixMicro(), 0
	}
	now, age, ok := at.clock.estimate(start)
	if !ok {
		return 0, 0
	}
	return now, age
}

// PenalizeDetached implements [store.Remote].
func (s *Store) PenalizeDetached(reqs []store.Request) { s.detach(algorithm.Penalize, reqs, nil) }

// ChargeReported implements [store.Remote].
func (s *Store) ChargeReported(reqs []store.Request, report func(i int, st store.State)) {
	s.detach(algorithm.Charge, reqs, report)
}

// RefundReported implements [store.Remote].
func (s *Store) RefundReported(reqs []store.Request, report func(i int, st store.State)) {
	s.detach(algorithm.Refund, reqs, report)
}

// detach runs an operation without waiting. report receives the state of each
// request; if it is nil, OnUndelivered receives the failures.
func (s *Store) detach(op algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	if s.previous != nil {
		if migrations := s.migrating(reqs); migrations != nil {
			s.awaitMigrations(migrations, op, reqs, func(i int, st store.State) { s.report(report, op, &reqs[i], i, st) })
			return
		}
	}
	s.detachMigrated(op, reqs, report)
}

// awaitMigrations is detach for buckets some of which have to migrate.
func (s *Store) awaitMigrations(migrations []*migration, op algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	if s.awaiting.Add(1) > maxAwaiting {
		s.awaiting.Add(-1)
		for i := range reqs {
			report(i, store.State{Err: notExecuted(errOverload)})
		}
		return
	}
	go func() {
		defer s.awaiting.Add(-1)
		s.detachMigrating(migrations, op, reqs, report)
	}()
}

// report passes the state of request i to report or, if that is nil, a failure to
// OnUndelivered. Most detached operations have no report, and so need no function of
// their own.
func (s *Store) report(report func(i int, st store.State), op algorithm.Operation, r *store.Request, i int, st store.State) {
	switch {
	case report != nil:
		report(i, st)
	case st.Err != nil && s.opts.OnUndelivered != nil:
		s.opts.OnUndelivered(s.Owner(r.ClientKey), op, st.Err)
	}
}

func (s *Store) detachMigrated(op algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	if only, ok := s.onlyOwner(reqs); ok {
		s.detachAt(op, only, whole(reqs, nil), report)
		return
	}
	s.perOwner(reqs, nil, func(at owner, g group) { s.detachAt(op, at, g, report) })
}

func (s *Store) detachAt(op algorithm.Operation, at owner, g group, report func(i int, st store.State)) {
	if at.servers == nil {
		for _, i := range g.members {
			s.report(report, op, &g.reqs[i], i, store.State{Err: notExecuted(errNoServers)})
		}
		return
	}
	abandoned := &at.servers.charges.shard.abandoned
	if ends := abandoned.refundedBy(op, g); len(ends) > 0 {
		abandoned.after(ends, func() { s.post(op, at, g, report) })
		return
	}
	s.post(op, at, g, report)
}

func (s *Store) post(what algorithm.Operation, at owner, g group, report func(i int, st store.State)) {
	op, now := s.writing(what, at.servers), time.Now()
	if what == algorithm.Charge && !at.servers.charges.scripted.Load() {
		// Without a recent reading of the primary's clock no instant is sure.
		if by, age := s.timeAt(at.servers, now); by != 0 && age <= clockPeriod {
			op.latest = by + (s.opts.ChargeTimeout + replyTimeout).Microseconds()
		}
	}
	c := s.call(at.servers.charges.shard, g, now.Add(s.opts.ChargeTimeout), op)
	c.detached = func(c *call) {
		s.opts.Members[at.member].Observe.observeAll(op.role, what, c)
		for _, cmd := range c.cmds {
			r := &g.reqs[cmd.place]
			st := op.state(cmd, r)
			if left, is := cmd.missedWindow(r.Cost, &st); is {
				s.mend(at, r, cmd, left, report)
				continue
			}
			s.report(report, what, r, cmd.place, st)
		}
		c.release()
	}
	at.servers.charges.post(c)
}

// Hurry implements [store.Remote]: what waits joins a pipeline.
func (s *Store) Hurry(clientKey string) {
	if at := s.ownerOf(clientKey); at.servers != nil {
		at.servers.charges.hurry()
	}
}

// Owner implements [store.Remote].
func (s *Store) Owner(clientKey string) string {
	return s.opts.Members[s.sharder.owner(clientKey)].Name
}

// Interface guards.
var (
	_ store.Remote   = (*Store)(nil)
	_ store.Operable = (*Store)(nil)
)
