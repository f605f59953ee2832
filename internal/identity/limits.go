package identity

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
)

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
