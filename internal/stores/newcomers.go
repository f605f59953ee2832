package stores

import (
	"context"
	"hash/maphash"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The client keys of buckets that clients share. No client has one: theirs begin with a tag.
const (
	// OverflowKey counts new clients beyond the bound.
	OverflowKey = "*overflow"
	// UnknownKey counts clients beyond the bound while the store does not say whether they
	// are new. Its count decides nothing.
	UnknownKey = "*unknown"
)

// IsShared reports whether clients share the bucket with that client key.
func IsShared(clientKey string) bool { return clientKey == OverflowKey || clientKey == UnknownKey }

// NewcomerConfig is a [Module] that bounds new buckets.
type NewcomerConfig interface {
	// NewBuckets returns how many buckets a second new clients may open in each
	// zone; 0 for any number.
	NewBuckets() int
}

// newcomers bounds how many buckets a second are opened in each zone of a store
// for clients that have none, so that made-up client keys cannot fill the store.
type newcomers struct {
	store  string
	most   int
	base   store.Store
	logger *zap.Logger
	// known are the clients that have been let in.
	known   *knownClients
	reports telemetry.LogThrottle
	// zones has a *newcomerRate for each zone, by name.
	zones sync.Map
}

// newNewcomers returns nil if the module wants no bound.
func (h *Handle) newNewcomers(s store.Store) *newcomers {
	m, ok := h.Module.(NewcomerConfig)
	if !ok || m.NewBuckets() == 0 {
		return nil
	}
	pooled, _ := Pool.LoadOrStore(knownClientsKey(h.Name), newKnownClients(maxKnownClients, time.Now()))
	return &newcomers{
		store: h.Name, most: m.NewBuckets(), base: s, logger: h.Logger,
		known: pooled.(*knownClients),
	}
}

// Overflow is a request that counts in a bucket that clients share.
type Overflow struct {
	Index int
	// Err is why the store did not say whether the client is new, or nil if it is.
	Err error
}

// overflow returns the requests of clients beyond the bound, unless the store says that they
// are not new: that they have a bucket. If it is foreseen, nobody is let in.
func (n *newcomers) overflow(ctx context.Context, reqs []store.Request, now time.Time, isForeseen bool) (beyond []Overflow) {
	var unknown []int
	var asked []store.Request
	for i := range reqs {
		r := &reqs[i]
		// Leases last only while requests run, and a limit of 0 needs no bucket.
		if !algorithm.Of(r.Limit.Algorithm).Lease && r.Events != 0 && !n.letIn(r, now, isForeseen) {
			unknown, asked = append(unknown, i), append(asked, *r)
		}
	}
	if len(asked) == 0 {
		return nil
	}
	for k, st := range store.Answers(ctx, n.base.Peek, asked) {
		r := &asked[k]
		hasBucket := st.Err == nil && st.Holds(r.Limit)
		if !hasBucket {
			beyond = append(beyond, Overflow{unknown[k], st.Err})
		}
		switch {
		case isForeseen, st.Err != nil:
		case hasBucket:
			n.known.add(r, now)
		default:
			n.report(r.Limit.Zone, now)
		}
	}
	return beyond
}

// letIn reports whether the client of r is known, or let in now. If that is foreseen, it stays
// unknown.
func (n *newcomers) letIn(r *store.Request, now time.Time, isForeseen bool) bool {
	if n.known.has(r, now, !isForeseen) {
		return true
	}
	isLetIn := n.rateOf(r.Limit.Zone).allows(now, !isForeseen)
	if isLetIn && !isForeseen {
		n.known.add(r, now)
	}
	return isLetIn
}

func (n *newcomers) rateOf(zone string) *newcomerRate {
	r, ok := n.zones.Load(zone)
	if !ok {
		r, _ = n.zones.LoadOrStore(zone, &newcomerRate{limiter: rate.NewLimiter(rate.Limit(n.most), n.most)})
	}
	return r.(*newcomerRate)
}

// newcomerRate limits how many new clients of a zone are let in. Requests read the clock
// before they get here, so their times come out of order, and a rate.Limiter that goes back
// in time counts the same time twice. Times have a monotonic reading, which no change of the
// system's clock moves.
type newcomerRate struct {
	mu      sync.Mutex
	latest  time.Time
	limiter *rate.Limiter
}

// allows reports whether another client may be let in, and counts it if counts is set.
func (r *newcomerRate) allows(now time.Time, counts bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Before(r.latest) {
		now = r.latest
	}
	if !counts {
		return r.limiter.TokensAt(now) >= 1
	}
	r.latest = now
	return r.limiter.AllowN(now, 1)
}

func (n *newcomers) report(zone string, now time.Time) {
	telemetry.Default.Overflowed.WithLabelValues(zone).Inc()
	if times, log := n.reports.Report(now); log {
		n.logger.Warn("too many new clients: those beyond the bound share one bucket of their zone",
			zap.String("store", n.store), zap.String("zone", zone), zap.Int("max_new_buckets", n.most), zap.Int64("times", times))
	}
}

const (
	// A client is remembered for that many windows after its last request, and for
	// at least leastKnown. One that comes regularly has no bucket between two
	// windows, and must not be new each time.
	knownWindows = 3
	leastKnown   = time.Minute

	// maxKnownClients bounds the clients of one store that are remembered. Each
	// takes less than 50 bytes, whatever its key.
	maxKnownClients = 1_000_000

	knownPages = 64
	// knownSweep is how many entries are examined for expiry when one is
	// added.
	knownSweep = 4
)

// knownClients remembers which clients of a store this process has let in. No
// client is forgotten to make room for another: without room, new clients are not
// remembered, so made-up keys cannot push out regular clients.
type knownClients struct {
	began time.Time
	seed  maphash.Seed
	most  int // in each page
	pages [knownPages]knownPage
}

// client is a client of one zone.
type client struct{ zone, key string }

type knownPage struct {
	mu sync.Mutex
	// until maps the hash of a client to the time since began at which
	// the client is forgotten. The seed is secret: the chance that a new client
	// passes for one of a million others is one in 10^13, and costs a bucket.
	until map[uint64]time.Duration
}

func newKnownClients(most int, now time.Time) *knownClients {
	a := &knownClients{began: now, seed: maphash.MakeSeed(), most: most / knownPages}
	for i := range a.pages {
		a.pages[i].until = map[uint64]time.Duration{}
	}
	return a
}

func (a *knownClients) pageOf(r *store.Request) (*knownPage, uint64) {
	hash := maphash.Comparable(a.seed, client{r.Limit.Zone, r.ClientKey})
	return &a.pages[hash%knownPages], hash
}

// until returns when the client of r is forgotten unless it comes again.
func (a *knownClients) until(r *store.Request, now time.Time) time.Duration {
	// A window lasts a century at most.
	return now.Sub(a.began) + max(min(r.Limit.Window, store.MaxWindow/knownWindows)*knownWindows, leastKnown)
}

// has reports whether the client of r is remembered, and extends that if extends is set.
func (a *knownClients) has(r *store.Request, now time.Time, extends bool) bool {
	p, hash := a.pageOf(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	until, ok := p.until[hash]
	ok = ok && until > now.Sub(a.began)
	switch {
	case !extends:
	case ok:
		p.until[hash] = a.until(r, now)
	default:
		delete(p.until, hash)
	}
	return ok
}

// add remembers the client of r, if there is room.
func (a *knownClients) add(r *store.Request, now time.Time) {
	p, hash := a.pageOf(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	// Iteration begins at random.
	looked := 0
	for other, until := range p.until {
		if until <= now.Sub(a.began) {
			delete(p.until, other)
		}
		if looked++; looked == knownSweep {
			break
		}
	}
	if len(p.until) < a.most {
		p.until[hash] = a.until(r, now)
	}
}

// knownClientsKey is the key in the pool of the knownClients of the store with
// that name.
type knownClientsKey string
