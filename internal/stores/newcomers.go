package stores

import (
	"context"
	"hash/maphash"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// OverflowKey is the client key of the bucket that new clients share who come
// when there are too many of them. No client has it: theirs begin otherwise.
const OverflowKey = "*overflow"

// newcomers bounds how many buckets a second are opened in each zone of a store
// for clients that have none, so that made-up client keys cannot fill it.
type newcomers struct {
	store  string
	most   int
	peeker store.Peeker
	logger *zap.Logger
	// acquainted are the clients that have been let in.
	acquainted *acquaintances
	reports    telemetry.LogThrottle

	mu    sync.Mutex
	zones map[string]*rate.Limiter
}

// NewcomerConfig is a store module that bounds new buckets.
type NewcomerConfig interface {
	// NewBuckets is how many a second, in each zone; 0 for any number.
	NewBuckets() int
}

// boundNewcomers sets the bound that the module wants, if it does and the store
// can tell clients that have a bucket from those that have none.
func (open *Opened) boundNewcomers(name string, module StoreModule, logger *zap.Logger) {
	m, ok := module.(NewcomerConfig)
	peeker, canPeek := open.Store.(store.Peeker)
	if !ok || !canPeek || m.NewBuckets() == 0 {
		return
	}
	open.Newcomers = &newcomers{
		store: name, most: m.NewBuckets(), peeker: peeker, logger: logger,
		acquainted: acquireAcquaintances(name), zones: map[string]*rate.Limiter{},
	}
}

// leaveNewcomers ends what boundNewcomers began.
func (open *Opened) leaveNewcomers() {
	if open.Newcomers != nil {
		releaseAcquaintances(open.Newcomers.store)
	}
}

// Strangers returns the places of the requests of new clients beyond the bound,
// which are to share a bucket of their zone. A client that has a bucket is none,
// nor is any while the store cannot say who has.
func (n *newcomers) Strangers(ctx context.Context, reqs []store.Request, now time.Time) (places []int) {
	var doubtful []int
	var asked []store.Request
	for i := range reqs {
		r := &reqs[i]
		switch {
		case r.Limit.Algorithm == store.Concurrency || r.Events == 0:
			// Leases are there only while requests run, and a limit of 0 needs no
			// bucket.
		case n.acquainted.renew(r, now):
		case n.limiterOf(r.Limit.Zone).AllowN(now, 1):
			n.acquainted.add(r, now)
		default:
			doubtful, asked = append(doubtful, i), append(asked, *r)
		}
	}
	if len(asked) == 0 {
		return nil
	}
	for k, st := range n.peeker.Peek(ctx, asked) {
		r := &asked[k]
		switch {
		case st.Err != nil:
		case st.Holds(r.Limit):
			n.acquainted.add(r, now)
		default:
			n.report(r.Limit.Zone, now)
			places = append(places, doubtful[k])
		}
	}
	return places
}

func (n *newcomers) limiterOf(zone string) *rate.Limiter {
	n.mu.Lock()
	defer n.mu.Unlock()
	l, ok := n.zones[zone]
	if !ok {
		l = rate.NewLimiter(rate.Limit(n.most), n.most)
		n.zones[zone] = l
	}
	return l
}

func (n *newcomers) report(zone string, now time.Time) {
	telemetry.Default.Overflowed.WithLabelValues(zone).Inc()
	if times, log := n.reports.Report(now); log {
		n.logger.Warn("too many new clients: those beyond the bound share one bucket of their zone",
			zap.String("store", n.store), zap.String("zone", zone), zap.Int("max_new_buckets", n.most), zap.Int64("times", times))
	}
}

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

// AcquaintancesKey is the key in the pool of the acquaintances of the store with
// that name.
type AcquaintancesKey string

// Destruct implements [caddy.Destructor].
func (*acquaintances) Destruct() error { return nil }

func acquireAcquaintances(store string) *acquaintances {
	pooled, _ := Pool.LoadOrStore(AcquaintancesKey(store), newAcquaintances(maxAcquaintances, time.Now()))
	return pooled.(*acquaintances)
}

func releaseAcquaintances(store string) { _, _ = Pool.Delete(AcquaintancesKey(store)) }

var _ caddy.Destructor = (*acquaintances)(nil)
