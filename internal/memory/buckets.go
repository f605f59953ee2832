package memory

import (
	"hash/maphash"
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	stripeBits  = 6
	stripeCount = 1 << stripeBits

	// sampleSize is how many live buckets are compared to evict one of them, at least;
	// and fullSample, if all of those are full.
	sampleSize = 8
	fullSample = 64
	// sweepSize is how many expired buckets are removed at a time. Above 1,
	// expired buckets become fewer however many are inserted.
	sweepSize = 8
	// trimSize is how many further buckets an insertion evicts at most, to get
	// below a bound that was lowered.
	trimSize = 64
)

// Buckets are the state that views share. They outlive views. A bucket in which
// nothing counts any more, such as one whose window is over, is expired.
//
// An insertion, and the revival of an expired bucket, remove a few expired
// buckets, so that memory follows the number of live ones. Nothing runs in the
// background.
//
// An insertion into a full view removes an expired bucket of any stripe. Without
// one it evicts a live bucket: of a random sample the one that has spent the least share
// of its capacity, among equals the one that resets first. Least is lost with that
// bucket, a flood of new clients mostly evicts itself, and limits of different size
// compare. Full and penalized buckets, and those of running requests, go last. Above a
// bound that was lowered, every insertion evicts some more buckets.
type Buckets struct {
	seed   maphash.Seed
	limits identity.Limits
	// overrides and records are kept as long as buckets.
	overrides overrides
	records   records
	clock     wallClock

	// count is the number of places in use. A bucket takes its place before it is
	// inserted, and leaves it after it is removed.
	count atomic.Int64
	// most is the bound of the latest view that runs, or 0.
	most atomic.Int64

	// nearest has each stripe's earliest due, readable without the stripe's lock.
	// The values lie side by side in a few cache lines.
	nearest [stripeCount]atomic.Int64
	stripes [stripeCount]stripe
}

// NewBuckets returns an empty set of buckets.
func NewBuckets() *Buckets {
	b := &Buckets{seed: maphash.MakeSeed()}
	for i := range b.stripes {
		b.stripes[i].nearest, b.stripes[i].limits = &b.nearest[i], &b.limits
		b.stripes[i].publish()
	}
	b.limits.Pause = identity.ReusePause
	b.limits.InUse = func(note func(number uint32)) {
		for i := range b.stripes {
			b.stripes[i].noteLimits(note)
		}
	}
	return b
}

// Len returns the number of buckets, including expired ones not removed yet.
func (b *Buckets) Len() int { return int(b.count.Load()) }

// Recall makes r ask for what the bucket's last request did, and reports whether there was one.
func (b *Buckets) Recall(r *store.Request) bool {
	s, id := b.lock(r, false)
	defer s.mu.Unlock()
	found := s.find(id)
	return found != nil && found.asked.Recall(r)
}

// run runs op on the bucket of r. An insertion leaves at most maxBuckets buckets, or
// fewer than before.
func (b *Buckets) run(op algorithm.Operation, r *store.Request, now int64, by *Store) store.State {
	s, id := b.lock(r, op != algorithm.Peek && op != algorithm.Refund)
	st, found, revived := s.run(op, id, r, now, false)
	switch {
	case revived:
		b.sweep(now)
	case !found && keeps(op, r.Limit):
		b.reserve(now, by)
		s, id = b.lock(r, true)
		if st, found, _ = s.run(op, id, r, now, true); found {
			b.count.Add(-1)
		}
		b.sweep(now)
	}
	return st
}

// keeps reports whether op leaves something to remember in a missing bucket.
func keeps(op algorithm.Operation, limit *store.Limit) bool {
	switch op {
	case algorithm.Check:
		// The reset in the answer has to last.
		return algorithm.Of(limit.Algorithm).Windowed() && !limit.Align
	case algorithm.Refund, algorithm.Peek:
		return false
	default:
		return true
	}
}

// lock locks the bucket's stripe, and returns it and the bucket's identity. A bucket is only inserted if
// inserts is set.
func (b *Buckets) lock(r *store.Request, inserts bool) (*stripe, identity.ID) {
	for {
		limit := b.limits.Of(r.Limit, inserts)
		id := identity.ID{Limit: limit.Number, Key: r.ClientKey}
		s := &b.stripes[b.stripeOf(id)]
		s.mu.Lock()
		if !limit.HasEnded() {
			return s, id
		}
		s.mu.Unlock()
	}
}

func (b *Buckets) stripeOf(id identity.ID) uint64 {
	return id.Hash(b.seed) >> (64 - stripeBits)
}

// reserve takes a place for a bucket, evicting one if there are as many as the view allows.
func (b *Buckets) reserve(now int64, by *Store) {
	for {
		n := b.count.Load()
		if n < by.most() {
			if b.count.CompareAndSwap(n, n+1) {
				return
			}
			continue
		}
		if b.evict(now, by) {
			break // into the place of the evicted one
		}
		// Other insertions hold the places, or were faster to evict.
		runtime.Gosched()
	}
	for range trimSize {
		if b.count.Load() <= by.most() || !b.evict(now, by) {
			return
		}
		b.count.Add(-1)
	}
}

// evict removes one bucket, whose place is then the caller's, and reports whether
// it did.
func (b *Buckets) evict(now int64, by *Store) bool {
	// A random start spreads evictions over the locks.
	start := rand.IntN(stripeCount)
	for i := range stripeCount {
		i = (start + i) % stripeCount
		if b.nearest[i].Load() <= now && b.stripes[i].expire(now, 1, math.MaxInt) == 1 {
			return true
		}
	}
	var victim candidate
	for i, seen := 0, 0; i < stripeCount && (seen < sampleSize || victim.isFull() && seen < fullSample); i++ {
		seen += b.stripes[(start+i)%stripeCount].sample(now, &victim)
	}
	if victim.bucket == nil || !victim.stripe.evict(victim.bucket) {
		return false
	}
	if by.onEvict != nil && victim.counts(now) {
		by.onEvict(victim.limit.Zone)
	}
	return true
}

func (b *Buckets) sweep(now int64) {
	i := rand.IntN(stripeCount)
	if b.nearest[i].Load() <= now {
		b.count.Add(-int64(b.stripes[i].expire(now, sweepSize, sweepSize)))
	}
}
