package memory

import (
	"container/heap"
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// stripe holds some of the buckets behind one lock. No method takes another
// stripe's lock.
type stripe struct {
	mu      sync.Mutex
	indexes []index // by the limit's number
	queue   queue
	// nearest is the due of the first in the queue, or never.
	nearest *atomic.Int64
	limits  *identity.Limits
	// asked is a copy of the request that runs. Algorithms get a pointer to it, so
	// that callers can keep their requests on the stack.
	asked store.Request
	// A stripe fills whole cache lines, so that its lock does not slow its
	// neighbours down.
	_ [56]byte
}

// never is the due of an empty stripe.
const never = math.MaxInt64

// run runs op on the bucket, and reports whether it was found, and due. It inserts a
// missing one if inserts is set; an op that leaves nothing to remember runs without.
// It unlocks the stripe.
func (s *stripe) run(op algorithm.Operation, id identity.ID, r *store.Request, now int64, inserts bool) (st store.State, found, revived bool) {
	defer s.mu.Unlock()
	s.asked = *r
	// A request may pin its client's headers, and its limit a config.
	defer func() { s.asked = store.Request{} }()
	b := s.find(id)
	switch {
	case b != nil:
		b.note(op, r, now)
		st = b.run(op, &s.asked, now)
		if revived = b.due <= now; revived || b.isLate(r.Limit, now) {
			s.postpone(b)
			s.publish()
		}
	case inserts:
		// The caller's key may pin a larger string.
		b = &bucket{key: strings.Clone(id.Key), limit: id.Limit, content: algorithm.New(r.Limit)}
		b.note(op, r, now)
		st = b.run(op, &s.asked, now)
		b.due = b.expiry(r.Limit)
		s.insert(b)
		return st, false, false
	case !keeps(op, r.Limit):
		st = op.Run(algorithm.New(r.Limit), &s.asked, now)
	}
	return st, b != nil, revived
}

func (s *stripe) postpone(b *bucket) {
	b.due = b.expiry(s.limits.Limit(b.limit))
	heap.Fix(&s.queue, int(b.place))
}

// expire removes up to most expired buckets, and returns their number. It
// postpones up to spare buckets that are due and have not expired.
func (s *stripe) expire(now int64, most, spare int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < most && len(s.queue) > 0 && s.queue[0].due <= now {
		b := s.queue[0]
		if b.expiry(s.limits.Limit(b.limit)) <= now {
			s.remove(b)
			n++
			continue
		}
		if spare--; spare < 0 {
			break
		}
		s.postpone(b)
	}
	s.publish()
	return n
}

// sample offers up to sampleSize buckets to c, and returns their number.
func (s *stripe) sample(now int64, c *candidate) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) <= sampleSize {
		for _, b := range s.queue {
			c.offer(s, b, now)
		}
		return len(s.queue)
	}
	for range sampleSize {
		c.offer(s, s.queue[rand.IntN(len(s.queue))], now)
	}
	return sampleSize
}

// walkSize is how many buckets of a stripe are visited at a time, so that requests need not
// wait for long.
const walkSize = 256

// walk visits the buckets from a place in the queue on, up to walkSize of them, and reports
// whether there are more.
func (s *stripe) walk(from int, visit func(*bucket)) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.queue[min(from, len(s.queue)):min(from+walkSize, len(s.queue))] {
		visit(b)
	}
	return from+walkSize < len(s.queue)
}

// noteLimits calls note with the numbers of the limits that have buckets.
func (s *stripe) noteLimits(note func(number uint32)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.indexes {
		if len(s.indexes[n].buckets) > 0 {
			note(uint32(n)) //nolint:gosec // few
		}
	}
}

func (s *stripe) evict(b *bucket) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.place == removed {
		return false
	}
	s.remove(b)
	s.publish()
	return true
}

func (s *stripe) find(id identity.ID) *bucket {
	if int(id.Limit) >= len(s.indexes) {
		return nil
	}
	return s.indexes[id.Limit].buckets[id.Key]
}

func (s *stripe) insert(b *bucket) {
	if missing := int(b.limit) + 1 - len(s.indexes); missing > 0 {
		s.indexes = append(s.indexes, make([]index, missing)...)
	}
	s.indexes[b.limit].add(b)
	heap.Push(&s.queue, b)
	s.publish()
}

func (s *stripe) remove(b *bucket) {
	s.indexes[b.limit].remove(b)
	heap.Remove(&s.queue, int(b.place))
}

func (s *stripe) publish() {
	nearest := int64(never)
	if len(s.queue) > 0 {
		nearest = s.queue[0].due
	}
	if s.nearest.Load() != nearest {
		s.nearest.Store(nearest)
	}
}

// bucket is the state of one limit for one client key. It fits into 80 bytes, one of the
// allocator's size classes.
type bucket struct {
	key     string
	limit   uint32
	place   int32 // in its stripe's queue, or removed
	content algorithm.Bucket
	// due is when to check the content for expiry. Later use postpones the expiry,
	// not due.
	due int64
	// capacity is the least of the requests that were not settling since the bucket was last
	// empty: requests of one limit may differ in it, and one for which the bucket is full is
	// not to be admitted because another has more.
	capacity int64
	// asked is the limit of the last request that asked or, if none has, of the first other one.
	asked store.Asked
	// held is nil until a take holds something.
	held *algorithm.Held
}

// expiry is the end of what counts, and of what is held: refunds may leave only that.
func (b *bucket) expiry(limit *store.Limit) int64 {
	return max(b.content.Expiry(limit), b.held.Expiry())
}

func (b *bucket) run(op algorithm.Operation, r *store.Request, now int64) store.State {
	st := op.Run(b.content, r, now)
	b.held = b.held.After(op, r, &st)
	return st
}

// note notes the limit of a request before op runs.
func (b *bucket) note(op algorithm.Operation, r *store.Request, now int64) {
	asks := op == algorithm.Check || op == algorithm.Take
	if asks || op != algorithm.Peek && b.asked == (store.Asked{}) {
		b.asked.Note(r)
	}
	capacity := r.Capacity() + r.Reserved
	if b.capacity == 0 || asks && (capacity < b.capacity || b.content.Expiry(r.Limit) <= now) {
		b.capacity = capacity
	}
}

// isLate reports whether the bucket is due later than it expires, and later than what is
// counted now does: a clock that was ahead made it due.
func (b *bucket) isLate(limit *store.Limit, now int64) bool {
	return !algorithm.Believes(b.due, now, 2*limit.Window) && b.due > b.expiry(limit)
}

const removed = -1

// candidate is a bucket that may be evicted, as of when it was sampled. It is live, unless a
// clock that was ahead made it due later than it expires.
type candidate struct {
	stripe *stripe
	bucket *bucket
	limit  *store.Limit
	share  float64
	expiry int64
}

// offer makes b the candidate if less of its capacity is used than of the candidate's so
// far.
func (c *candidate) offer(s *stripe, b *bucket, now int64) {
	limit := s.limits.Limit(b.limit)
	s.asked = store.Request{Limit: limit}
	b.content.Believe(&s.asked, now)
	s.asked = store.Request{}
	share, expiry := b.content.Share(limit, b.capacity, now), b.content.Expiry(limit)
	if c.bucket == nil || share < c.share || share == c.share && expiry < c.expiry {
		*c = candidate{stripe: s, bucket: b, limit: limit, share: share, expiry: expiry}
	}
}

// counts reports whether anything counts in the candidate.
func (c *candidate) counts(now int64) bool { return c.expiry > now }

// isFull reports whether the candidate, and so all that were offered, refuse requests or
// count running ones.
func (c *candidate) isFull() bool { return c.share >= 1 }

// index finds the buckets of one limit in one stripe. The zero value is empty.
type index struct {
	buckets map[string]*bucket
	// peak is the most that buckets has held. Maps do not shrink, so it is what
	// they have memory for.
	peak int
}

// minIndex is the peak below which a map is not worth shrinking.
const minIndex = 64

func (x *index) add(b *bucket) {
	if x.buckets == nil {
		x.buckets = make(map[string]*bucket)
	}
	x.buckets[b.key] = b
	x.peak = max(x.peak, len(x.buckets))
}

// remove removes b. After a flood it copies the map to give memory back: a copy
// comes after three times as many removals.
func (x *index) remove(b *bucket) {
	delete(x.buckets, b.key)
	n := len(x.buckets)
	switch {
	case n == 0:
		*x = index{}
	case x.peak >= minIndex && n <= x.peak/4:
		smaller := make(map[string]*bucket, n)
		maps.Copy(smaller, x.buckets)
		*x = index{buckets: smaller, peak: n}
	}
}

// queue is a heap of buckets, earliest due first. Each bucket knows its place.
type queue []*bucket

// minQueue is the capacity below which a queue is not worth shrinking.
const minQueue = 64

func (q queue) Len() int { return len(q) }

func (q queue) Less(i, j int) bool { return q[i].due < q[j].due }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = int32(i), int32(j)
}

func (q *queue) Push(x any) {
	b := x.(*bucket)
	b.place = int32(len(*q))
	*q = append(*q, b)
}

// Pop implements [heap.Interface]. It gives memory back, and marks the bucket
// removed.
func (q *queue) Pop() any {
	old := *q
	last := len(old) - 1
	b := old[last]
	b.place = removed
	old[last] = nil
	*q = old[:last]
	if c := cap(old); c >= minQueue && last <= c/4 {
		*q = append(make(queue, 0, c/2), *q...)
	}
	return b
}
