package shardlimit

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// A client is remembered for so many windows, and for at least so long, after
	// its last request. One that comes regularly has no bucket between two windows,
	// and must not be a newcomer each time.
	acquaintanceWindows = 3
	leastAcquaintance   = time.Minute

	// maxAcquaintances bounds the clients of one store that are remembered, at
	// less than 50 bytes each, whatever their keys.
	maxAcquaintances = 1_000_000

	acquaintancePages = 64
	// acquaintanceSweep is how many entries are looked at when one is added, in
	// search of those whose time is over.
	acquaintanceSweep = 4
)

// acquaintances remembers which clients of a store this process has let in.
// Nobody is forgotten to make room for another: while there is none, newcomers
// are not remembered, so made-up keys cannot push out clients that come
// regularly.
type acquaintances struct {
	began time.Time
	seed  maphash.Seed
	most  int // in each page
	pages [acquaintancePages]acquaintancePage
}

type acquaintancePage struct {
	mu sync.Mutex
	// until is, for the hash of a client's bucketID, the time since began at which
	// it is forgotten. Hashes have a secret seed: that a newcomer passes for one of
	// a million others is as likely as one in 10^13, and costs a bucket.
	until map[uint64]time.Duration
}

func newAcquaintances(most int, now time.Time) *acquaintances {
	a := &acquaintances{began: now, seed: maphash.MakeSeed(), most: most / acquaintancePages}
	for i := range a.pages {
		a.pages[i].until = map[uint64]time.Duration{}
	}
	return a
}

func (a *acquaintances) pageOf(r *store.Request) (*acquaintancePage, uint64) {
	hash := maphash.Comparable(a.seed, idOf(r))
	return &a.pages[hash%acquaintancePages], hash
}

// until is when the client of r is forgotten if it does not come again.
func (a *acquaintances) until(r *store.Request, now time.Time) time.Duration {
	// A window lasts a century at most.
	return now.Sub(a.began) + max(min(r.Limit.Window, store.MaxWindow/acquaintanceWindows)*acquaintanceWindows, leastAcquaintance)
}

// renew reports whether the client of r is remembered, and if so remembers it
// anew.
func (a *acquaintances) renew(r *store.Request, now time.Time) bool {
	p, hash := a.pageOf(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	until, ok := p.until[hash]
	switch {
	case !ok:
		return false
	case until <= now.Sub(a.began):
		delete(p.until, hash)
		return false
	}
	p.until[hash] = a.until(r, now)
	return true
}

// add remembers the client of r, if there is room.
func (a *acquaintances) add(r *store.Request, now time.Time) {
	p, hash := a.pageOf(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	// Iteration begins at random.
	looked := 0
	for other, until := range p.until {
		if until <= now.Sub(a.began) {
			delete(p.until, other)
		}
		if looked++; looked == acquaintanceSweep {
			break
		}
	}
	if len(p.until) < a.most {
		p.until[hash] = a.until(r, now)
	}
}

// acquaintancesKey is the key in the pool of the acquaintances of the store with
// that name.
type acquaintancesKey string

// Destruct implements [caddy.Destructor].
func (*acquaintances) Destruct() error { return nil }

func acquireAcquaintances(store string) *acquaintances {
	pooled, _ := pool.LoadOrStore(acquaintancesKey(store), newAcquaintances(maxAcquaintances, time.Now()))
	return pooled.(*acquaintances)
}

func releaseAcquaintances(store string) { _, _ = pool.Delete(acquaintancesKey(store)) }

var _ caddy.Destructor = (*acquaintances)(nil)
