// Package identity identifies buckets in this process's memory, with little of it.
//
// An [ID] is a bucket's identity; [Limits] numbers the limits that IDs name.
package identity

import (
	"hash/maphash"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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
// zero value is empty.
type Limits struct {
	// InUse calls note with the number of each limit that is in use, under the locks under which
	// users call [Limit.HasEnded]. Other numbers end, and are reused, if there are many and another
	// limit needs one, at most once in Pause: a limit may be in use now and then. Without InUse,
	// numbers last.
	InUse func(note func(number uint32))
	Pause time.Duration

	// table is replaced as a whole, so that readers need no lock.
	table atomic.Pointer[limitTable]

	mu sync.Mutex
	// fresh are limits that the table lacks, and misses counts the lookups of them. The table takes
	// them in after as many misses as there are limits, so that each limit is copied a few times
	// however many there are.
	fresh  map[store.Limit]*Limit
	misses int
	// free are numbers that have ended, the last time when numbers were swept.
	free  []uint32
	swept time.Time
}

// Limit is a limit with its number, for as long as that has not ended.
type Limit struct {
	store.Limit
	Number uint32
	ended  atomic.Bool
}

// HasEnded reports whether the number may be another limit's. A new user of it asks under the lock
// under which [Limits.InUse] finds its use.
func (l *Limit) HasEnded() bool { return l.ended.Load() }

const (
	// fewLimits is how many limits are compared one by one.
	fewLimits = 4
	// minLimits is up to how many limits no number ends.
	minLimits = 64

	// ReusePause is the Pause of limits that requests look up.
	ReusePause = time.Minute
)

type limitTable struct {
	few     []*Limit
	numbers map[store.Limit]*Limit
	// byNumber is shared with earlier tables, whose readers look up no number that has ended.
	byNumber []*Limit
}

// none is the limit of lookups that find no number.
var none = &Limit{Number: math.MaxUint32}

// Of returns the limit with its number. A limit without one gets one if adds is set, and otherwise
// the result is one that no bucket has.
func (l *Limits) Of(limit *store.Limit, adds bool) *Limit {
	if t := l.table.Load(); t != nil {
		// Comparing the first few is quicker than a lookup.
		for _, known := range t.few {
			if known.Limit == *limit && !known.HasEnded() {
				return known
			}
		}
		if known := t.numbers[*limit]; known != nil && !known.HasEnded() {
			return known
		}
	}
	return l.find(limit, adds)
}

// Number returns the number of the limit. It is for Limits without InUse: another limit may get the
// number at once.
func (l *Limits) Number(limit *store.Limit) uint32 { return l.Of(limit, true).Number }

// Asked are the places of requests by the numbers of their limits.
type Asked map[uint32]asked

type asked struct {
	limit *Limit
	place int
}

// Asked returns the places of requests whose limits differ.
func (l *Limits) Asked(reqs []store.Request) Asked {
	all := make(Asked, len(reqs))
	for i := range reqs {
		limit := l.Of(reqs[i].Limit, false)
		all[limit.Number] = asked{limit, i}
	}
	return all
}

// Find returns the place of the request that asks for the limit of that number, which is in use.
func (a Asked) Find(number uint32) (place int, found bool) {
	of, found := a[number]
	return of.place, found && !of.limit.HasEnded()
}

// Limit returns the limit of that number, which is in use.
func (l *Limits) Limit(number uint32) *store.Limit { return &l.table.Load().byNumber[number].Limit }

// find returns a limit that the table may lack. Without one it adds it, or returns none.
func (l *Limits) find(limit *store.Limit, adds bool) *Limit {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.table.Load()
	if t == nil {
		t, l.fresh, l.swept = new(limitTable), map[store.Limit]*Limit{}, time.Now()
	}
	if known := t.numbers[*limit]; known != nil {
		return known
	}
	if known := l.fresh[*limit]; known != nil {
		if l.misses++; l.misses >= len(t.byNumber) {
			maps.Copy(l.fresh, t.numbers)
			l.replace(limitTable{t.few, l.fresh, t.byNumber})
		}
		return known
	}
	if !adds {
		return none
	}
	if l.InUse != nil && len(l.free) == 0 && len(t.byNumber) >= minLimits && time.Since(l.swept) >= l.Pause {
		t = l.sweep(t)
	}
	return l.add(*t, limit)
}

// add gives a limit a number. mu is held.
func (l *Limits) add(t limitTable, limit *store.Limit) *Limit {
	added := &Limit{Limit: *limit}
	if last := len(l.free) - 1; last >= 0 {
		added.Number, l.free = l.free[last], l.free[:last]
		t.byNumber[added.Number] = added
	} else {
		added.Number = uint32(len(t.byNumber)) //nolint:gosec // few
		t.byNumber = append(t.byNumber, added)
	}
	if len(t.few) < fewLimits {
		t.few = append(slices.Clip(t.few), added)
	}
	l.fresh[added.Limit] = added
	l.table.Store(&t)
	return added
}

// replace makes t the table, which has all limits. mu is held.
func (l *Limits) replace(t limitTable) *limitTable {
	l.table.Store(&t)
	l.fresh, l.misses = map[store.Limit]*Limit{}, 0
	return &t
}

// sweep ends the numbers that are not in use. mu is held.
func (l *Limits) sweep(t *limitTable) *limitTable {
	used := make([]bool, len(t.byNumber))
	note := func(number uint32) { used[number] = true }
	l.InUse(note)
	for n, known := range t.byNumber {
		known.ended.Store(!used[n])
	}
	// A number whose use began before it ended does not end.
	l.InUse(note)
	next := limitTable{numbers: map[store.Limit]*Limit{}, byNumber: make([]*Limit, len(t.byNumber))}
	for n, known := range t.byNumber {
		if !used[n] {
			l.free = append(l.free, uint32(n)) //nolint:gosec // few
			continue
		}
		known.ended.Store(false)
		next.byNumber[n], next.numbers[known.Limit] = known, known
		if len(next.few) < fewLimits {
			next.few = append(next.few, known)
		}
	}
	l.swept = time.Now()
	return l.replace(next)
}
