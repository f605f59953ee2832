package memory

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// limits numbers limits from 0 on, so that a bucket need not carry its limit.
// The zero value has numbered none. Numbers are never taken back: limits come
// from configs, so there are few.
type limits struct {
	mu sync.Mutex
	// numbers is replaced as a whole, so that reading takes no lock.
	numbers atomic.Pointer[map[store.Limit]uint32]
}

func (l *limits) number(limit *store.Limit) uint32 {
	if m := l.numbers.Load(); m != nil {
		if n, ok := (*m)[*limit]; ok {
			return n
		}
	}
	return l.add(limit)
}

func (l *limits) add(limit *store.Limit) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	next := map[store.Limit]uint32{}
	if m := l.numbers.Load(); m != nil {
		if n, ok := (*m)[*limit]; ok {
			return n
		}
		next = maps.Clone(*m)
	}
	n := uint32(len(next))
	next[*limit] = n
	l.numbers.Store(&next)
	return n
}
