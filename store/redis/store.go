// Package redis keeps buckets in sharded, replicated Redis. A client's buckets
// live on one shard; checks go to its replicas, charges to its primary. Redis
// 7.0 is needed. Valkey 7.2 is meant to work and was not tested.
package redis

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// DefaultKeyPrefix starts every key in Redis.
	DefaultKeyPrefix = "rl"
	// DefaultCheckTimeout bounds what a check adds to a request.
	DefaultCheckTimeout = 50 * time.Millisecond
	// DefaultChargeTimeout bounds how long a charge is tried again.
	DefaultChargeTimeout = 250 * time.Millisecond
)

// Options configures a Store.
type Options struct {
	// Members are the shards; at least one.
	Members []Member
	// Former, if not empty, are the shards before a resharding: client keys that
	// were another one's keep what they have spent.
	Former []Member
	// Migrations remembers what was brought from the former shards. Stores that
	// follow each other with the same Members and Former may share it, so that
	// nothing is brought again; nil means that the store has its own.
	Migrations *Migrations
	// KeyPrefix starts every key; empty means DefaultKeyPrefix.
	KeyPrefix string
	// KeySecret, if not empty, replaces client keys by their HMAC, so that
	// Redis never sees them.
	KeySecret []byte
	// ReadPrimary makes checks ask the primary instead of the replicas.
	ReadPrimary bool
	// LocalClock makes Now decide which window is open, not the primary's
	// clock.
	LocalClock bool
	// Now is the clock of LocalClock; nil means time.Now.
	Now func() time.Time
	// CheckTimeout bounds a check and a take; 0 means DefaultCheckTimeout.
	CheckTimeout time.Duration
	// ChargeTimeout bounds how long a charge, a refund or a penalty is tried
	// again that surely did not run; 0 means DefaultChargeTimeout. Once it is
	// sent, the reply is waited for a little longer.
	ChargeTimeout time.Duration
	// OnUndelivered, if set, is told of everything detached that failed, with
	// the name of the shard, the operation, and an error that wraps
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
	// Shard is the connections to it.
	Shard *Shard
	// Observe, if set, is told of every command that the store has run there.
	Observe Observer
}

// Store keeps buckets on its shards.
type Store struct {
	opts    Options
	keys    bucketKeys
	shards  []*Shard
	sharder *rendezvous
	// former are the shards before a resharding, or nil.
	former *former
	// fixed is set if the servers of all shards are given.
	fixed bool
	// reports, one for each shard and operation, end a detached call.
	reports [][]func(*call)
	// observers are told of commands, by the shard that runs them.
	observers map[*Shard]Observer
}

// New returns a store. It does not own its shards: closing them is the
// caller's, after the last use of the store.
func New(opts Options) *Store {
	s := &Store{opts: opts, fixed: true, keys: bucketKeys{prefix: opts.KeyPrefix, secret: opts.KeySecret}}
	if s.keys.prefix == "" {
		s.keys.prefix = DefaultKeyPrefix
	}
	if s.opts.Now == nil {
		s.opts.Now = time.Now
	}
	if s.opts.CheckTimeout == 0 {
		s.opts.CheckTimeout = DefaultCheckTimeout
	}
	if s.opts.ChargeTimeout == 0 {
		s.opts.ChargeTimeout = DefaultChargeTimeout
	}
	s.sharder, s.shards = shardersOf(opts.Members)
	s.observers = observersOf(opts.Former, opts.Members)
	for _, m := range opts.Members {
		s.fixed = s.fixed && m.Shard.finder == nil
		reports := make([]func(*call), algorithm.Penalize+1)
		for op := range reports {
			reports[op] = func(c *call) { s.report(m, algorithm.Operation(op), c) }
		}
		s.reports = append(s.reports, reports)
	}
	if len(opts.Former) > 0 {
		s.former = newFormer(opts.Former, opts.Migrations)
	}
	return s
}

// Warm implements [store.Warmer].
func (s *Store) Warm(ctx context.Context) {
	var wg sync.WaitGroup
	for _, sh := range s.shards {
		wg.Go(func() { sh.warm(ctx) })
	}
	wg.Wait()
}

// Check implements [store.Store]. Replicas answer in turn, and the primary
// where they cannot or where they see no open window.
func (s *Store) Check(ctx context.Context, reqs []store.Request) []store.State {
	deadline := time.Now().Add(s.opts.CheckTimeout)
	if s.former != nil {
		return s.moved(ctx, algorithm.Check, reqs, deadline, s.checkReady)
	}
	return s.checkReady(ctx, reqs, deadline)
}

// checkReady is Check of buckets that are where they belong.
func (s *Store) checkReady(ctx context.Context, reqs []store.Request, deadline time.Time) []store.State {
	states := make([]store.State, len(reqs))
	s.awaitServers(ctx, reqs, deadline)
	if only, ok := s.onlyOwner(reqs); ok {
		s.check(ctx, only.servers, whole(reqs, states), deadline)
		return states
	}
	s.perOwner(reqs, states, func(at owner, g group) { s.check(ctx, at.servers, g, deadline) })
	return states
}

// Take implements [store.Store].
func (s *Store) Take(ctx context.Context, reqs []store.Request) []store.State {
	deadline := time.Now().Add(s.opts.CheckTimeout)
	if s.former != nil {
		return s.moved(ctx, algorithm.Take, reqs, deadline, s.takeReady)
	}
	return s.takeReady(ctx, reqs, deadline)
}

// takeReady is Take from buckets that are where they belong.
func (s *Store) takeReady(ctx context.Context, reqs []store.Request, deadline time.Time) []store.State {
	states := make([]store.State, len(reqs))
	s.awaitServers(ctx, reqs, deadline)
	if only, ok := s.onlyOwner(reqs); ok {
		s.take(ctx, only.servers, whole(reqs, states), deadline)
		return states
	}
	s.perOwner(reqs, states, func(at owner, g group) { s.take(ctx, at.servers, g, deadline) })
	return states
}

func (s *Store) take(ctx context.Context, at *servers, g group, deadline time.Time) {
	if at == nil {
		g.fail(notExecuted(errNoServers))
		return
	}
	s.ask(ctx, at.checks, g, deadline, s.writing(algorithm.Take, at))
}

// Charge implements [store.Store].
func (s *Store) Charge(ctx context.Context, reqs []store.Request) []store.State {
	return s.settle(ctx, algorithm.Charge, reqs)
}

// Refund implements [store.Store].
func (s *Store) Refund(ctx context.Context, reqs []store.Request) []store.State {
	return s.settle(ctx, algorithm.Refund, reqs)
}

// Penalize implements [store.Penalizer].
func (s *Store) Penalize(ctx context.Context, reqs []store.Request) []store.State {
	return s.settle(ctx, algorithm.Penalize, reqs)
}

func (s *Store) settle(ctx context.Context, op algorithm.Operation, reqs []store.Request) []store.State {
	deadline := time.Now().Add(s.opts.ChargeTimeout)
	if s.former != nil {
		return s.moved(ctx, op, reqs, deadline, func(ctx context.Context, ready []store.Request, deadline time.Time) []store.State {
			return s.settleReady(ctx, op, ready, deadline)
		})
	}
	return s.settleReady(ctx, op, reqs, deadline)
}

// settleReady is settle for buckets that are where they belong.
func (s *Store) settleReady(ctx context.Context, op algorithm.Operation, reqs []store.Request, deadline time.Time) []store.State {
	states := make([]store.State, len(reqs))
	s.awaitServers(ctx, reqs, deadline)
	s.perOwner(reqs, states, func(at owner, g group) {
		if at.servers == nil {
			g.fail(notExecuted(errNoServers))
			return
		}
		s.ask(ctx, at.servers.charges, g, deadline, s.writing(op, at.servers))
	})
	return states
}

// ChargeDetached implements [store.Detacher].
func (s *Store) ChargeDetached(reqs []store.Request) { s.detach(algorithm.Charge, reqs, nil) }

// RefundDetached implements [store.Detacher].
func (s *Store) RefundDetached(reqs []store.Request) { s.detach(algorithm.Refund, reqs, nil) }

// PenalizeDetached implements [store.Penalizer].
func (s *Store) PenalizeDetached(reqs []store.Request) { s.detach(algorithm.Penalize, reqs, nil) }

// ChargeReported implements [store.Reporter].
func (s *Store) ChargeReported(reqs []store.Request, report func(i int, st store.State)) {
	s.detach(algorithm.Charge, reqs, report)
}

// RefundReported implements [store.Reporter].
func (s *Store) RefundReported(reqs []store.Request, report func(i int, st store.State)) {
	s.detach(algorithm.Refund, reqs, report)
}

// detach runs an operation without waiting. report, if not nil, is told of each
// request; otherwise what fails is undelivered.
func (s *Store) detach(what algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	if s.former != nil {
		if arriving := s.arriving(reqs); arriving != nil {
			go s.detachArriving(arriving, what, reqs, report)
			return
		}
	}
	s.detachReady(what, reqs, report)
}

// detachReady is detach for buckets that are where they belong.
func (s *Store) detachReady(what algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	if only, ok := s.onlyOwner(reqs); ok {
		s.post(what, only, whole(reqs, nil), report)
		return
	}
	s.perOwner(reqs, nil, func(at owner, g group) { s.post(what, at, g, report) })
}

func (s *Store) post(what algorithm.Operation, at owner, g group, report func(i int, st store.State)) {
	if at.servers == nil {
		s.refuse(what, at, g, report)
		return
	}
	strays := &at.servers.charges.shard.strays
	if ends := strays.of(what, g); len(ends) > 0 {
		strays.after(ends, func() { s.send(what, at, g, report) })
		return
	}
	s.send(what, at, g, report)
}

// send is post for what nothing has to wait for.
func (s *Store) send(what algorithm.Operation, at owner, g group, report func(i int, st store.State)) {
	op := s.writing(what, at.servers)
	c := s.call(g, time.Now().Add(s.opts.ChargeTimeout), op)
	c.detached = s.reports[at.shard][what]
	if report != nil {
		c.detached = func(c *call) {
			s.opts.Members[at.shard].Observe.tellAll(op.role(), what, c)
			for _, cmd := range c.cmds {
				report(cmd.place, op.state(cmd, &g.reqs[cmd.place]))
			}
			c.release()
		}
	}
	at.servers.charges.post(c)
}

// refuse tells that nothing was sent, for nobody knows where to.
func (s *Store) refuse(what algorithm.Operation, at owner, g group, report func(i int, st store.State)) {
	err := notExecuted(errNoServers)
	for _, i := range g.members {
		switch {
		case report != nil:
			report(i, store.State{Err: err})
		case s.opts.OnUndelivered != nil:
			s.opts.OnUndelivered(s.opts.Members[at.shard].Name, what, err)
		}
	}
}

// Owner implements [store.Reporter].
func (s *Store) Owner(clientKey string) string {
	return s.opts.Members[s.sharder.owner(clientKey)].Name
}

// report tells what of c failed, and ends it.
func (s *Store) report(shard Member, op algorithm.Operation, c *call) {
	shard.Observe.tellAll(store.RolePrimary, op, c)
	for _, cmd := range c.cmds {
		if cmd.outcome != nil && s.opts.OnUndelivered != nil {
			s.opts.OnUndelivered(shard.Name, op, cmd.outcome)
		}
	}
	c.release()
}

func (s *Store) check(ctx context.Context, at *servers, g group, deadline time.Time) {
	if at == nil {
		g.fail(notExecuted(errNoServers))
		return
	}
	start := time.Now()
	half := start.Add(deadline.Sub(start) / 2)
	replica := s.replica(at)
	now, age := s.timeAt(at, start)
	if replica != nil && age > clockTrust {
		s.refreshClock(at, start, g)
	}
	switch {
	case replica == nil:
		s.ask(ctx, at.checks, g, deadline, s.writing(algorithm.Check, at))
	case now == 0 || g.asksPrimary():
		// By its own clock a replica only stands in.
		s.ask(ctx, at.checks, g, half, s.writing(algorithm.Check, at))
		s.standIn(ctx, replica, g, deadline, reading(algorithm.Check, at, now))
	default:
		// Half of the time is kept for the primary.
		s.ask(ctx, replica, g, half, reading(algorithm.Check, at, now))
		if g.members = g.unanswered(at); len(g.members) > 0 && ctx.Err() == nil {
			s.ask(ctx, at.checks, g, deadline, s.writing(algorithm.Check, at))
		}
	}
}

// replica returns the replica to ask, or nil.
func (s *Store) replica(at *servers) *lane {
	if s.opts.ReadPrimary {
		return nil
	}
	return at.replica()
}

// standIn asks a replica about what the primary could not answer. Where it knows
// no open window either, the error stays.
func (s *Store) standIn(ctx context.Context, replica *lane, g group, deadline time.Time, op operation) {
	if g.members = g.unanswered(nil); len(g.members) == 0 || ctx.Err() != nil {
		return
	}
	failed := make([]store.State, len(g.members))
	for n, i := range g.members {
		failed[n] = g.states[i]
	}
	s.ask(ctx, replica, g, deadline, op)
	for n, i := range g.members {
		if st := &g.states[i]; st.Err != nil || isUnopened(&g.reqs[i], st) {
			*st = failed[n]
		}
	}
}

// refreshClock asks the primary, which has not told its time for long, as when
// all clients of the shard are refused: for the first of g's buckets, which a
// check may open, and without waiting.
func (s *Store) refreshClock(at *servers, start time.Time, g group) {
	if at.clock.claimObservation(start) {
		c := s.call(group{g.reqs, nil, g.members[:1]}, start.Add(s.opts.CheckTimeout), s.writing(algorithm.Check, at))
		c.detached = (*call).release
		at.checks.post(c)
	}
}

// Interface guards.
var (
	_ store.Store     = (*Store)(nil)
	_ store.Reporter  = (*Store)(nil)
	_ store.Penalizer = (*Store)(nil)
	_ store.Warmer    = (*Store)(nil)
)

// Peek implements [store.Peeker].
func (s *Store) Peek(ctx context.Context, reqs []store.Request) []store.State {
	deadline := time.Now().Add(s.opts.CheckTimeout)
	if s.former != nil {
		return s.moved(ctx, algorithm.Check, reqs, deadline, s.peekReady)
	}
	return s.peekReady(ctx, reqs, deadline)
}

func (s *Store) peekReady(ctx context.Context, reqs []store.Request, deadline time.Time) []store.State {
	states := make([]store.State, len(reqs))
	s.awaitServers(ctx, reqs, deadline)
	s.perOwner(reqs, states, func(at owner, g group) { s.peek(ctx, at.servers, g, deadline) })
	return states
}

// peek reads from a replica, or from the primary if there is none.
func (s *Store) peek(ctx context.Context, at *servers, g group, deadline time.Time) {
	if at == nil {
		g.fail(notExecuted(errNoServers))
		return
	}
	start := time.Now()
	now, _ := s.timeAt(at, start)
	if replica := s.replica(at); replica != nil {
		half := start.Add(deadline.Sub(start) / 2)
		s.ask(ctx, replica, g, half, reading(algorithm.Peek, at, now))
		if g.members = g.failed(); len(g.members) == 0 || ctx.Err() != nil {
			return
		}
	}
	s.ask(ctx, at.checks, g, deadline, peeking(at, now))
}

// failed returns the members that have an error.
func (g group) failed() (members []int) {
	for _, i := range g.members {
		if g.states[i].Err != nil {
			members = append(members, i)
		}
	}
	return members
}

var _ store.Peeker = (*Store)(nil)
