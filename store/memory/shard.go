package memory

import (
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
