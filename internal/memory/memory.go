// Package memory is a store that keeps its buckets in this process. It shares
// nothing with other processes, and nothing outlives the process.
//
// [Buckets] are the state, which outlives configs; a [Store] is a view of them
// with settings of its own.
package memory

import (
	"cmp"
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// DefaultMaxBuckets is the default of [Options.MaxBuckets].
const DefaultMaxBuckets = 1_000_000

// Options are the settings of one view of the buckets.
type Options struct {
	// MaxBuckets bounds the number of buckets whenever a view inserts one, from
	// [Store.Run] on; zero or less means DefaultMaxBuckets. [Buckets] describes evictions.
	MaxBuckets int
	// Now is the clock that decides; nil means time.Now.
	Now func() time.Time
	// OnEvict, if set, is called for each bucket that is evicted although it counts, with
	// its zone. OnJump, if set, is called when the clock was set, with by how much. They
	// must be quick.
	OnEvict func(zone string)
	OnJump  func(by time.Duration)
}

// Store is a view of buckets. It holds nothing to release, ignores contexts,
// because it never waits, and never fails.
type Store struct {
	buckets    *Buckets
	maxBuckets int64
	now        func() time.Time
	onEvict    func(zone string)
	onJump     func(by time.Duration)
}

// New returns a view of buckets.
func New(buckets *Buckets, opts Options) *Store {
	if opts.MaxBuckets <= 0 {
		opts.MaxBuckets = DefaultMaxBuckets
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Store{buckets: buckets, maxBuckets: int64(opts.MaxBuckets), now: opts.Now, onEvict: opts.OnEvict, onJump: opts.OnJump}
}

// Run makes the view's bound that of all views.
func (s *Store) Run() { s.buckets.most.Store(s.maxBuckets) }

// most is how many buckets there may be. Before any view runs, each has its own bound.
func (s *Store) most() int64 { return cmp.Or(s.buckets.most.Load(), s.maxBuckets) }

// Check implements [store.Store].
func (s *Store) Check(_ context.Context, asks []*store.Ask) {
	s.run(algorithm.Check, asks)
}

// Charge implements [store.Store].
func (s *Store) Charge(_ context.Context, asks []*store.Ask) {
	s.run(algorithm.Charge, asks)
}

// Take implements [store.Store].
func (s *Store) Take(_ context.Context, asks []*store.Ask) {
	s.run(algorithm.Take, asks)
}

// Refund implements [store.Store].
func (s *Store) Refund(_ context.Context, asks []*store.Ask) {
	s.run(algorithm.Refund, asks)
}

// Penalize implements [store.Store].
func (s *Store) Penalize(_ context.Context, asks []*store.Ask) {
	s.run(algorithm.Penalize, asks)
}

// Peek implements [store.Store].
func (s *Store) Peek(_ context.Context, asks []*store.Ask) {
	s.run(algorithm.Peek, asks)
}

func (s *Store) run(op algorithm.Operation, asks []*store.Ask) {
	now := s.instant()
	for _, a := range asks {
		a.State = s.buckets.run(op, &a.Request, now, s)
	}
}

// instant reads the clock.
func (s *Store) instant() int64 {
	at := s.now()
	if by := s.buckets.clock.observe(at); by != 0 && s.onJump != nil {
		s.onJump(by)
	}
	return at.UnixMicro()
}

// LastJump implements [store.Operable].
func (s *Store) LastJump() (by time.Duration, at time.Time) { return s.buckets.clock.lastJump() }

// Shards implements [store.Operable]: there are none.
func (*Store) Shards() []store.ShardFigures { return nil }

// Inspect implements [store.Operable].
func (s *Store) Inspect(ctx context.Context, r store.Request) store.Inspection {
	st := store.Answers(ctx, s.Peek, []store.Request{r})[0]
	return store.Inspection{Copies: []store.Copy{{Role: store.RolePrimary, Exists: st.Holds(r.Limit), State: st}}}
}

// Recall implements [store.Operable].
func (s *Store) Recall(r *store.Request) bool { return s.buckets.Recall(r) }

// Walk implements [store.Operable].
func (s *Store) Walk(reqs []store.Request, about func(i int, r *store.Request) bool, visit func(i int, clientKey string, st *store.State)) {
	asked := s.buckets.limits.Asked(reqs)
	now := s.instant()
	var r store.Request
	look := func(b *bucket) {
		i, ok := asked.Find(b.limit)
		if !ok {
			return
		}
		r = reqs[i]
		r.ClientKey = b.key
		b.asked.Recall(&r)
		if about(i, &r) {
			st := algorithm.Peek.Run(b.content, &r, now)
			visit(i, b.key, &st)
		}
	}
	for n := range s.buckets.stripes {
		for from, more := 0, true; more; from += walkSize {
			more = s.buckets.stripes[n].walk(from, look)
		}
	}
}

// Reset implements [store.Store].
func (s *Store) Reset(_ context.Context, r store.Request) error {
	s.buckets.forget(&r)
	return nil
}

// Len implements [store.Operable]: it counts the buckets of all views.
func (s *Store) Len() int { return s.buckets.Len() }

func (b *Buckets) forget(r *store.Request) {
	s, id := b.lock(r, false)
	found := s.find(id)
	s.mu.Unlock()
	if found != nil && s.evict(found) {
		b.count.Add(-1)
	}
}

// Diagnose implements [store.Operable].
func (s *Store) Diagnose(context.Context) store.Diagnosis {
	return store.Diagnosis{Findings: []store.Finding{{
		Severity: store.SeverityNote, Code: "memory",
		Problem: "it counts in the memory of each Caddy process, so there is no server to call; the counts are lost when the process exits",
		Remedy:  "use a redis store if several Caddys should share counts, or counts should outlive a restart",
	}}}
}

// Interface guard.
var _ store.Operable = (*Store)(nil)
