package memory

import (
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// shard holds the buckets of some identities behind one lock. No method takes
// another shard's lock.
type shard struct {
	mu      sync.Mutex
	indexes []index // by the limit's number
	queue   queue
	// nearest is the reset of the first in the queue, or never.
	nearest *atomic.Int64
	// Two cache lines each, lest one shard's lock slow its neighbours down.
	_ [56]byte
}

// never is the nearest reset of an empty shard.
const never = math.MaxInt64

// charge spends cost in the bucket's window if that is open at now, and tells
// whether it is.
func (s *shard) charge(id identity, now, window, cost int64) (algorithm.FixedWindow, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.find(id)
	if b == nil || !b.IsOpen(now) {
		return algorithm.FixedWindow{}, false
	}
	b.FixedWindow = b.Charge(now, window, cost)
	return b.FixedWindow, true
}

// open spends cost in the window that is open at now, or in a new one. It
// tells whether that took the insertion of a bucket.
func (s *shard) open(id identity, now, window, cost int64) (algorithm.FixedWindow, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.find(id)
	if b == nil {
		// The caller's key may be a part of something large.
		id.key = strings.Clone(id.key)
		b = &bucket{identity: id, FixedWindow: algorithm.FixedWindow{}.Charge(now, window, cost)}
		s.insert(b)
		return b.FixedWindow, true
	}
	b.FixedWindow = b.Charge(now, window, cost)
	s.queue.fix(b.place)
	s.publish()
	return b.FixedWindow, false
}

// expire removes up to most buckets that are expired at now, and returns how
// many it did.
func (s *shard) expire(now int64, most int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < most && len(s.queue) > 0 && !s.queue[0].IsOpen(now) {
		s.remove(s.queue[0])
		n++
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

func (s *shard) find(id identity) *bucket {
	if int(id.limit) >= len(s.indexes) {
		return nil
	}
	return s.indexes[id.limit].buckets[id.key]
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
		nearest = s.queue[0].Reset
	}
	if s.nearest.Load() != nearest {
		s.nearest.Store(nearest)
	}
}
