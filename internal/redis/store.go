// Package redis implements [store.Store] on sharded, replicated Redis. All
// buckets of a client live on one shard: charges go to its primary, checks to
// its replicas. A [Store] routes requests to its [Shard]s; a Shard holds the
// connections to one primary and its replicas, which it is given or finds
// through Sentinel or a Redis Cluster.
//
// Package ask knows what is asked of a bucket and what replies mean, package wire brings
// commands to servers and replies back, and package operate does what operators and upkeep
// need. This one puts them together, and chooses owners.
//
// docs/servers.md says which servers it works with.
package redis

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/operate"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
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
	// Previous are the shards before each step of a resharding, the latest step first. Clients whose
	// owner changed have several: see [Store.Owners].
	Previous [][]Member
	// KeyPrefix starts every key; empty means DefaultKeyPrefix.
	KeyPrefix string
	// KeySecret, if not empty, replaces client keys by their HMAC, so that
	// Redis never sees them.
	KeySecret []byte
	// ReadPrimary sends checks to the primary instead of the replicas.
	ReadPrimary bool
	// Now is this machine's clock, for Diagnose; nil means time.Now.
	Now func() time.Time
	// Overrides is the state that earlier stores with this prefix and secret left; nil means none.
	Overrides *Overrides
	// clock, in tests, takes the place of the primary's clock.
	clock func() time.Time
	// CheckTimeout bounds a check and a take; 0 means DefaultCheckTimeout.
	CheckTimeout time.Duration
	// ChargeTimeout bounds the retries of a charge, refund or penalty that did
	// not run; 0 means DefaultChargeTimeout. Once sent, it waits for the reply
	// a little longer.
	ChargeTimeout time.Duration
	// OnUndelivered, if set, receives each failure of a detached operation: the
	// name of the shard, the limit, the operation, and an error that wraps
	// store.ErrNotExecuted or store.ErrUncertain. It must be quick.
	OnUndelivered func(shard string, limit *store.Limit, op algorithm.Operation, err error)
}

// operator has this name so that no field of a Store is exported.
type operator = operate.Operator

// Store keeps buckets on its shards. It is safe for concurrent use.
type Store struct {
	// operator does what operators ask for that concerns all shards.
	*operator
	opts    Options
	sharder *rendezvous
	// previous choose among the shards before each step of a resharding, the latest first.
	previous []*rendezvous
	// all are the members, and those that were, by name.
	all map[string]*Member
	// names are those of the members, each as the only owner.
	names [][]string
	asker *ask.Asker
	// static is set if the servers of all shards are given.
	static bool
	// opened is when the store was opened.
	opened time.Time
}

// New returns a store. The caller keeps the shards and closes them after the
// last use of the store.
func New(opts Options) *Store {
	opts.Members = slices.Clone(opts.Members)
	opts.KeyPrefix = cmp.Or(opts.KeyPrefix, DefaultKeyPrefix)
	opts.CheckTimeout = cmp.Or(opts.CheckTimeout, DefaultCheckTimeout)
	opts.ChargeTimeout = cmp.Or(opts.ChargeTimeout, DefaultChargeTimeout)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	observers := map[*wire.Shard]ask.Observer{}
	s := &Store{
		sharder: newRendezvous(opts.Members),
		all:     map[string]*Member{},
		opened:  opts.Now(),
		static:  true,
		asker: &ask.Asker{
			Keys:          ask.Keys{Prefix: opts.KeyPrefix, Secret: opts.KeySecret},
			CheckTimeout:  opts.CheckTimeout,
			ChargeTimeout: opts.ChargeTimeout,
			ReadPrimary:   opts.ReadPrimary,
			Time:          opts.clock,
			Observers:     observers,
		},
	}
	s.asker.OnUndelivered = func(r *store.Request, op algorithm.Operation, err error) {
		if s.opts.OnUndelivered != nil {
			s.opts.OnUndelivered(cmp.Or(r.Shard(), s.Owner(r.ClientKey)), r.Limit, op, err)
		}
	}
	var were []Member
	opts.Previous = slices.Clone(opts.Previous)
	for n := range opts.Previous {
		step := slices.Clone(opts.Previous[n])
		opts.Previous[n], s.previous = step, append(s.previous, newRendezvous(step))
		for i := range step {
			if m := &step[i]; s.all[m.Name] == nil {
				were, s.all[m.Name] = append(were, *m), m
			}
		}
	}
	for i := range opts.Members {
		m := &opts.Members[i]
		s.all[m.Name], s.names = m, append(s.names, []string{m.Name})
	}
	for _, m := range slices.Concat(were, opts.Members) {
		observers[m.Shard.Shard] = m.Observe
		s.static = s.static && !m.Shard.Finds()
	}
	s.operator = operate.NewOperator(opts.Members, were, s.asker, opts.Now, cmp.Or(opts.Overrides, &Overrides{}))
	if opts.Overrides == nil {
		s.Follow()
	}
	s.opts = opts
	return s
}

// Warm implements [store.Remote].
func (s *Store) Warm(ctx context.Context) {
	var wg sync.WaitGroup
	for _, m := range s.opts.Members {
		wg.Go(func() { m.Shard.Warm(ctx, ask.Scripts()) })
	}
	wg.Wait()
}

// Check implements [store.Store]. Replicas answer in turn; the primary answers
// where they cannot or see no open window.
func (s *Store) Check(ctx context.Context, asks []*store.Ask) {
	s.run(ctx, algorithm.Check, asks, s.opts.CheckTimeout)
}

// Peek implements [store.Store].
func (s *Store) Peek(ctx context.Context, asks []*store.Ask) {
	s.run(ctx, algorithm.Peek, asks, s.opts.CheckTimeout)
}

// Take implements [store.Store].
func (s *Store) Take(ctx context.Context, asks []*store.Ask) {
	s.run(ctx, algorithm.Take, asks, s.opts.CheckTimeout)
}

// Charge implements [store.Store].
func (s *Store) Charge(ctx context.Context, asks []*store.Ask) {
	s.run(ctx, algorithm.Charge, asks, s.opts.ChargeTimeout)
}

// Refund implements [store.Store].
func (s *Store) Refund(ctx context.Context, asks []*store.Ask) {
	s.run(ctx, algorithm.Refund, asks, s.opts.ChargeTimeout)
}

// Penalize implements [store.Store].
func (s *Store) Penalize(ctx context.Context, asks []*store.Ask) {
	s.run(ctx, algorithm.Penalize, asks, s.opts.ChargeTimeout)
}

// run runs an operation. Only goroutines that it waits for write answers: the worker of an
// abandoned call has commands of its own.
func (s *Store) run(ctx context.Context, op algorithm.Operation, asks []*store.Ask, timeout time.Duration) {
	deadline := time.Now().Add(timeout)
	if isGone := func(a *store.Ask) bool { return s.isGone(op, &a.Request) }; slices.ContainsFunc(asks, isGone) {
		for _, a := range asks {
			a.State = store.State{Err: store.ErrGone}
		}
		asks = slices.DeleteFunc(slices.Clone(asks), isGone)
	}
	s.awaitServers(ctx, asks, deadline)
	request := func(i int) *store.Request { return &asks[i].Request }
	if only, ok := s.onlyServers(len(asks), request); ok {
		s.asker.Run(ctx, op, only, asks, deadline)
		return
	}
	s.perServers(len(asks), request, func(at *wire.Servers, places []int) {
		there := make([]*store.Ask, len(places))
		for n, i := range places {
			there[n] = asks[i]
		}
		s.asker.Run(ctx, op, at, there, deadline)
	})
}

// PenalizeDetached implements [store.Remote].
func (s *Store) PenalizeDetached(reqs []*store.Request) { s.detach(algorithm.Penalize, reqs, nil) }

// ChargeReported implements [store.Remote].
func (s *Store) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.detach(algorithm.Charge, reqs, report)
}

// RefundReported implements [store.Remote].
func (s *Store) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.detach(algorithm.Refund, reqs, report)
}

// detach runs an operation without waiting. report receives the state of each
// request; if it is nil, OnUndelivered receives the failures.
func (s *Store) detach(op algorithm.Operation, reqs []*store.Request, report func(i int, st store.State)) {
	if isGone := func(r *store.Request) bool { return s.isGone(op, r) }; slices.ContainsFunc(reqs, isGone) {
		for i, r := range reqs {
			if isGone(r) {
				s.asker.Report(report, op, r, i, store.State{Err: store.ErrGone})
			} else {
				s.detach(op, reqs[i:i+1], func(_ int, st store.State) { s.asker.Report(report, op, r, i, st) })
			}
		}
		return
	}
	request := func(i int) *store.Request { return reqs[i] }
	if only, ok := s.onlyServers(len(reqs), request); ok {
		s.asker.Post(op, only, ask.Group{Reqs: reqs}, report)
		return
	}
	s.perServers(len(reqs), request, func(at *wire.Servers, places []int) {
		s.asker.Post(op, at, ask.Group{Reqs: reqs, Places: places}, report)
	})
}

// Hurry implements [store.Remote]: what waits joins a pipeline.
func (s *Store) Hurry(clientKey string) {
	for _, name := range s.Owners(clientKey) {
		if at := s.asker.Keys.Servers(s.all[name].Shard.Shard, clientKey); at != nil {
			at.Charges.Hurry()
		}
	}
}

// Interface guards.
var (
	_ store.Remote   = (*Store)(nil)
	_ store.Operable = (*Store)(nil)
	_ store.Shared   = (*Store)(nil)
)
