package memory

import (
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

// shard holds the buckets of some identities behind one lock. No method takes
// another shard's lock.
type shard struct {
	mu      sync.Mutex
	indexes []index // by the limit's number
	queue   queue
	// nearest is the due of the first in the queue, or never.
	nearest *atomic.Int64
	limits  *identity.Limits
	// Two cache lines each, lest one shard's lock slow its neighbours down.
	_ [48]byte
}

// never is the due of an empty shard.
const never = math.MaxInt64

// run does op to the bucket, if it is found. An expired one may have been
// revived by that.
func (s *shard) run(op algorithm.Operation, id identity.ID, r *store.Request, now int64) (st store.State, found, revived bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.find(id)
	if b == nil {
		return st, false, false
	}
	st = op.Run(b.content, r, now)
	if b.due <= now {
		s.postpone(b)
		s.publish()
		revived = true
	}
	return st, true, revived
}

// insertAndRun does op to the bucket, and tells whether it took its insertion.
func (s *shard) insertAndRun(op algorithm.Operation, id identity.ID, r *store.Request, now int64) (st store.State, inserted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.find(id)
	if inserted = b == nil; inserted {
		// The caller's key may be a part of something large.
		id.Key = strings.Clone(id.Key)
		b = newBucket(id, r.Limit)
	}
	st = op.Run(b.content, r, now)
	if inserted {
		b.due = b.content.Expiry(r.Limit)
		s.insert(b)
	}
	return st, inserted
}

// postpone makes b due when it will have expired, as far as is known now.
func (s *shard) postpone(b *bucket) {
	b.due = b.content.Expiry(s.limits.Limit(b.limit))
	s.queue.fix(int(b.place))
}

// expire removes up to most buckets that are expired at now, and returns how
// many it did. On the way it postpones up to spare buckets that are due and
// have not expired.
func (s *shard) expire(now int64, most, spare int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < most && len(s.queue) > 0 && s.queue[0].due <= now {
		b := s.queue[0]
		if b.content.Expiry(s.limits.Limit(b.limit)) <= now {
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

// sample offers up to most buckets to c, and returns how many it did.
func (s *shard) sample(most int, c *candidate) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) <= most {
		for _, b := range s.queue {
			c.offer(s, b)
		}
		return len(s.queue)
	}
	for range most {
		c.offer(s, s.queue[rand.IntN(len(s.queue))])
	}
	return most
}

// evict removes b, and tells whether it was still there.
func (s *shard) evict(b *bucket) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.place == removed {
		return false
	}
	s.remove(b)
	s.publish()
	return true
}

func (s *shard) find(id identity.ID) *bucket {
	if int(id.Limit) >= len(s.indexes) {
		return nil
	}
	return s.indexes[id.Limit].buckets[id.Key]
}

func (s *shard) insert(b *bucket) {
	if missing := int(b.limit) + 1 - len(s.indexes); missing > 0 {
		s.indexes = append(s.indexes, make([]index, missing)...)
	}
	s.indexes[b.limit].add(b)
	s.queue.push(b)
	s.publish()
}

func (s *shard) remove(b *bucket) {
	s.indexes[b.limit].remove(b)
	s.queue.remove(b)
}

func (s *shard) publish() {
	nearest := int64(never)
	if len(s.queue) > 0 {
		nearest = s.queue[0].due
	}
	if s.nearest.Load() != nearest {
		s.nearest.Store(nearest)
	}
}

// bucket is the state of one limit for one client key. The fields fill one of
// the allocator's sizes, 48 bytes, to the last.
type bucket struct {
	key     string
	limit   uint32
	place   int32 // in its shard's queue, or removed
	content algorithm.Bucket
	// due is when to look whether the content has expired. Content that was
	// used since may last longer.
	due int64
}

const removed = -1

func newBucket(id identity.ID, limit *store.Limit) *bucket {
	return &bucket{key: id.Key, limit: id.Limit, content: algorithm.New(limit)}
}

// candidate is a live bucket that may be evicted, as it was when it was seen.
type candidate struct {
	shard          *shard
	bucket         *bucket
	weight, expiry int64
}

// offer makes b the candidate if it is to go rather than the candidate so far.
func (c *candidate) offer(s *shard, b *bucket) {
	limit := s.limits.Limit(b.limit)
	weight, expiry := b.content.Weight(limit), b.content.Expiry(limit)
	if c.bucket == nil || weight < c.weight || weight == c.weight && expiry < c.expiry {
		*c = candidate{shard: s, bucket: b, weight: weight, expiry: expiry}
	}
}

// index finds the buckets of one limit in one shard. The zero value is empty.
type index struct {
	buckets map[string]*bucket
	// peak is the most that buckets has held. Maps do not shrink: this is what
	// its memory is made for.
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

// remove takes b out. After a flood it gives the memory back: every copy comes
// after three times as many removals.
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

// queue is a binary heap of buckets, the one with the earliest due first.
// Each bucket knows its place, so that any can be removed.
type queue []*bucket

// minQueue is the capacity below which a queue is not worth shrinking.
const minQueue = 64

func (q *queue) push(b *bucket) {
	*q = append(*q, b)
	q.up(len(*q) - 1)
}

// remove takes b out and marks it removed.
func (q *queue) remove(b *bucket) {
	old := *q
	i, last := int(b.place), len(old)-1
	old[i] = old[last]
	old[last] = nil
	*q = old[:last]
	if i < last {
		q.fix(i)
	}
	b.place = removed
	if c := cap(old); c >= minQueue && last <= c/4 {
		*q = append(make(queue, 0, c/2), *q...)
	}
}

// fix restores the order after the bucket at i got another due.
func (q *queue) fix(i int) {
	if q.down(i) == i {
		q.up(i)
	}
}

func (q *queue) up(i int) {
	h := *q
	b := h[i]
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].due <= b.due {
			break
		}
		h.put(i, h[parent])
		i = parent
	}
	h.put(i, b)
}

// down returns where the bucket at i went.
func (q *queue) down(i int) int {
	h := *q
	b := h[i]
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if right := child + 1; right < len(h) && h[right].due < h[child].due {
			child = right
		}
		if h[child].due >= b.due {
			break
		}
		h.put(i, h[child])
		i = child
	}
	h.put(i, b)
	return i
}

func (q queue) put(i int, b *bucket) {
	q[i] = b
	b.place = int32(i)
}
