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

// Shards numbers shards, of which there are few, by their names and, where several have one, by their servers.
type Shards struct {
	mu     sync.Mutex
	places atomic.Pointer[[]shard]
}

type shard struct {
	*store.Place
	server string
}

// Number returns the number of a shard. It is not 0.
func (s *Shards) Number(name, server string) uint32 {
	is := func(known shard) bool { return known.Shard == name && known.server == server }
	if n := s.find(is); n > 0 {
		return n
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.find(is); n > 0 {
		return n
	}
	next := []shard{{&store.Place{Shard: name}, server}}
	if known := s.places.Load(); known != nil {
		next = append(slices.Clone(*known), next...)
	}
	s.places.Store(&next)
	return uint32(len(next)) //nolint:gosec // few
}

// Of returns the number of the shard with a place, or 0 if the place is none of [Shards.Place].
func (s *Shards) Of(place *store.Place) uint32 {
	return s.find(func(known shard) bool { return known.Place == place })
}

// find returns the number of a shard, or 0 if it has none.
func (s *Shards) find(is func(shard) bool) uint32 {
	known := s.places.Load()
	if known == nil {
		return 0
	}
	return uint32(slices.IndexFunc(*known, is) + 1) //nolint:gosec // few
}

// Place returns the shard of that number, which is not 0.
func (s *Shards) Place(number uint32) *store.Place { return (*s.places.Load())[number-1].Place }

// Limits numbers limits from 0 on, so that a bucket need not carry its limit. The
// zero value is empty. Numbers last.
type Limits struct {
	// table is replaced as a whole, so that readers need no lock.
	table atomic.Pointer[limitTable]

	mu sync.Mutex
	// fresh are numbers that the table lacks, and misses counts the lookups of them. The table
	// takes them in after as many as there are limits, so that each limit is copied a few times
	// however many there are.
	fresh  map[store.Limit]uint32
	misses int
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
	return l.find(limit)
}

// Limit returns the limit of that number.
func (l *Limits) Limit(number uint32) *store.Limit { return l.table.Load().limits[number] }

// find returns the number of a limit that the table may lack, or gives it one.
func (l *Limits) find(limit *store.Limit) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.table.Load()
	if t == nil {
		t, l.fresh = new(limitTable), map[store.Limit]uint32{}
	}
	if n, ok := t.numbers[*limit]; ok {
		return n
	}
	if n, ok := l.fresh[*limit]; ok {
		if l.misses++; l.misses >= len(t.limits) {
			maps.Copy(l.fresh, t.numbers)
			l.table.Store(&limitTable{l.fresh, t.limits})
			l.fresh, l.misses = map[store.Limit]uint32{}, 0
		}
		return n
	}
	n := uint32(len(t.limits)) //nolint:gosec // few
	own := *limit
	l.fresh[own] = n
	// Readers see no more of a shared array than their table has.
	l.table.Store(&limitTable{t.numbers, append(t.limits, &own)})
	return n
}
