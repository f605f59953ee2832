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
	shardBits  = 6
	shardCount = 1 << shardBits

	// sampleSize is how many live buckets are compared to evict one of them.
	sampleSize = 8
	// sweepSize is how many expired buckets are removed at a time. Above 1, expired buckets become fewer however many are inserted.
	sweepSize = 8
	// trimSize is how many buckets an insertion evicts at most, beside the one
	// it replaces, to get below a bound that was lowered.
	trimSize = 64
)

// Buckets are the state that views share, and that outlives them. A bucket in
// which nothing counts any more, such as one whose window is closed, is
// expired: it says nothing, and memory is all that it costs.
//
// Where a bucket is inserted, or an expired one comes into use again, a few
// expired buckets are removed, so that memory follows the number of live ones;
// nothing runs in the background.
//
// Where a bucket is inserted into a view that is full, an expired one goes if
// there is any in any shard. If there is none, a live one goes: out of a few
// taken at random the one that has spent least, because the least is forgotten
// with it and because a flood of new clients then mostly evicts itself; among
// equals the one that resets first. If the bound is lower than it was, every
// insertion evicts some more until it is met.
type Buckets struct {
	seed   maphash.Seed
	limits identity.Limits

	// count is how many places are taken: one is taken before the bucket is
	// inserted, and given up after it is removed, so the buckets in the shards
	// are never more than that.
	count atomic.Int64

	// nearest holds each shard's earliest due, so that whether a shard may have
	// expired buckets is known without its lock. They lie side by side to be
	// read in a few cache lines.
	nearest [shardCount]atomic.Int64
	shards  [shardCount]shard
}

// NewBuckets returns no buckets yet.
func NewBuckets() *Buckets {
	b := &Buckets{seed: maphash.MakeSeed()}
	for i := range b.shards {
		b.shards[i].nearest, b.shards[i].limits = &b.nearest[i], &b.limits
		b.shards[i].publish()
	}
	return b
}

// Len is the number of buckets, expired ones that were not removed yet
// included.
func (b *Buckets) Len() int { return int(b.count.Load()) }

// run does op to the bucket that r asks about. An insertion leaves at most
// maxKeys buckets, or fewer than there were.
func (b *Buckets) run(op algorithm.Operation, r *store.Request, now, maxKeys int64) store.State {
	id := identity.New(b.limits.Number(r.Limit), r.ClientKey)
	s := &b.shards[b.shardOf(id)]
	st, found, revived := s.run(op, id, r, now)
	switch {
	case revived:
		b.sweep(now)
	case !found && keeps(op, r.Limit):
		b.reserve(now, maxKeys)
		var inserted bool
		if st, inserted = s.insertAndRun(op, id, r, now); !inserted {
			b.count.Add(-1)
		}
		b.sweep(now)
	case !found:
		st = op.Run(algorithm.New(r.Limit), r, now)
	}
	return st
}

// keeps tells whether op leaves something to remember in a bucket that is not
// there yet.
func keeps(op algorithm.Operation, limit *store.Limit) bool {
	switch op {
	case algorithm.Check:
		// A reset that is told has to stay.
		return limit.Algorithm == store.FixedWindow && !limit.Align
	case algorithm.Refund, algorithm.Peek:
		return false
	default:
		return true
	}
}

func (b *Buckets) shardOf(id identity.ID) uint64 {
	return id.Hash(b.seed) >> (64 - shardBits)
}

// reserve takes a place for a bucket, evicting one if there are maxKeys.
func (b *Buckets) reserve(now, maxKeys int64) {
	for {
		n := b.count.Load()
		if n < maxKeys {
			if b.count.CompareAndSwap(n, n+1) {
				return
			}
			continue
		}
		if b.evict(now) {
			break // into the place of the evicted one
		}
		// Others are about to insert into all places there are, or were
		// faster to evict.
		runtime.Gosched()
	}
	for range trimSize {
		if b.count.Load() <= maxKeys || !b.evict(now) {
			return
		}
		b.count.Add(-1)
	}
}

// evict removes one bucket, whose place then is the caller's. It tells whether
// it did.
func (b *Buckets) evict(now int64) bool {
	// From a random shard on, lest everybody meet at the same lock.
	start := rand.IntN(shardCount)
	for i := range shardCount {
		i = (start + i) % shardCount
		if b.nearest[i].Load() <= now && b.shards[i].expire(now, 1, math.MaxInt) == 1 {
			return true
		}
	}
	var victim candidate
	for i, seen := 0, 0; i < shardCount && seen < sampleSize; i++ {
		seen += b.shards[(start+i)%shardCount].sample(sampleSize-seen, &victim)
	}
	return victim.bucket != nil && victim.shard.evict(victim.bucket)
}

// sweep removes a few expired buckets of one shard.
func (b *Buckets) sweep(now int64) {
	i := rand.IntN(shardCount)
	if b.nearest[i].Load() <= now {
		b.count.Add(-int64(b.shards[i].expire(now, sweepSize, sweepSize)))
	}
}
