// Package identity identifies buckets in this process's memory, with little of it.
//
// An [ID] is a bucket's identity; [Limits] numbers the limits that IDs name.
package identity

import (
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// ID is a bucket's identity.
type ID struct {
	// Limit is the limit's number, and Shard that of the bucket's shard, where there are any.
	Limit, Shard uint32
	// Key is the client key.
	Key string
}

// Hash returns a hash that is spread over the upper bits.
func (id ID) Hash(seed maphash.Seed) uint64 {
	// The limit takes part so that one client key in many zones has many hashes.
	// The multiplier, 2^64 divided by the golden ratio, spreads consecutive numbers
	// over the upper bits.
	return maphash.String(seed, id.Key) + uint64(id.Limit)*0x9e3779b97f4a7c15
}

// Shards numbers shards by their names, of which there are few. The empty name is 0.
type Shards struct {
	mu     sync.Mutex
	places atomic.Pointer[[]*store.Place]
}

// Number returns the number of a shard.
func (s *Shards) Number(name string) uint32 {
	if name == "" {
		return 0
	}
	if n := s.find(name); n > 0 {
		return n
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.find(name); n > 0 {
		return n
	}
	next := []*store.Place{{Shard: name}}
	if known := s.places.Load(); known != nil {
		next = append(slices.Clone(*known), next...)
	}
	s.places.Store(&next)
	return uint32(len(next)) //nolint:gosec // few
}

// find returns the number of a shard, or 0 if it has none yet.
func (s *Shards) find(name string) uint32 {
	known := s.places.Load()
	if known == nil {
		return 0
	}
	return uint32(slices.IndexFunc(*known, func(p *store.Place) bool { return p.Shard == name }) + 1) //nolint:gosec // few
}

// Place returns the shard of that number, which is not 0.
func (s *Shards) Place(number uint32) *store.Place { return (*s.places.Load())[number-1] }

// Limits numbers limits from 0 on, so that a bucket need not carry its limit. The
// zero value is empty. Numbers last: limits come from configs, so there are few.
type Limits struct {
	mu sync.Mutex
	// table is replaced as a whole, so that readers need no lock.
	table atomic.Pointer[limitTable]
}

// fewLimits is how many limits are compared one by one.
const fewLimits = 4

type limitTable struct {
	numbers map[store.Limit]uint32
	limits  []*store.Limit // by number
}

// Number returns the number of the limit.
func (l *Limits) Number(limit *store.Limit) uint32 {
	if t := l.table.Load(); t != nil {
		// Comparing the first few is quicker than a lookup.
		for n, known := range t.limits[:min(len(t.limits), fewLimits)] {
			if *known == *limit {
				return uint32(n) //nolint:gosec // few
			}
		}
		if n, ok := t.numbers[*limit]; ok {
			return n
		}
	}
	return l.add(limit)
}

// Limit returns the limit of that number.
func (l *Limits) Limit(number uint32) *store.Limit { return l.table.Load().limits[number] }

func (l *Limits) add(limit *store.Limit) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	next := limitTable{numbers: map[store.Limit]uint32{}}
	if t := l.table.Load(); t != nil {
		if n, ok := t.numbers[*limit]; ok {
			return n
		}
		next.numbers, next.limits = maps.Clone(t.numbers), slices.Clone(t.limits)
	}
	n := uint32(len(next.limits))
	own := *limit
	next.numbers[own] = n
	next.limits = append(next.limits, &own)
	l.table.Store(&next)
	return n
}
