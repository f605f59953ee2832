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
	base   Accounts
	logger *zap.Logger
	// known are the clients that have been let in.
	known   *knownClients
	reports telemetry.LogThrottle
	// zones has a *newcomerRate for each zone, by name.
	zones sync.Map
}

// newNewcomers returns nil if the module wants no bound.
func (h *Handle) newNewcomers(s Accounts) *newcomers {
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

// overflow lets clients in, and returns the requests of those beyond the bound. Clients that
// have a bucket are not new. If it only foresees that, it lets nobody in.
func (n *newcomers) overflow(ctx context.Context, asks []*store.Ask, now time.Time, foresees bool) (beyond []Overflow) {
	var unknown []int
	var asked []store.Request
	for i := range asks {
		r := &asks[i].Request
		// Leases last only while requests run, and a limit of 0 needs no bucket.
		if !algorithm.Of(r.Limit.Algorithm).Lease && r.Events != 0 && !n.letIn(r, now, foresees) {
			unknown, asked = append(unknown, i), append(asked, *r)
			asked[len(asked)-1].Hold = 0
		}
	}
	if len(asked) == 0 {
		return nil
	}
	for k, st := range store.Answers(ctx, n.base.Peek, asked) {
		isNew := st.Err != nil || !st.Holds(asked[k].Limit)
		if isNew {
			beyond = append(beyond, Overflow{unknown[k], st.Err})
		}
		switch {
		case foresees || st.Err != nil:
		case isNew:
			n.report(asked[k].Limit.Zone, now)
		default:
			n.known.add(&asked[k], now)
		}
	}
	return beyond
}

// letIn lets in the client of r if it is known or the rate allows it, and reports whether it
// did. From then on it is known. If it only foresees that, nothing changes.
func (n *newcomers) letIn(r *store.Request, now time.Time, foresees bool) bool {
	switch {
	case foresees:
		return n.known.has(r, now) || n.rateOf(r.Limit.Zone).allows(now)
	case n.known.renew(r, now):
		return true
	case !n.rateOf(r.Limit.Zone).spend(now):
		return false
	}
	n.known.add(r, now)
	return true
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

// allows reports whether another client may be let in.
func (r *newcomerRate) allows(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.limiter.TokensAt(r.inOrder(now)) >= 1
}

// spend counts another client if it may be let in, and reports whether it did.
func (r *newcomerRate) spend(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latest = r.inOrder(now)
	return r.limiter.AllowN(r.latest, 1)
}

// inOrder returns now, or the latest time if that is later. mu is held.
func (r *newcomerRate) inOrder(now time.Time) time.Time {
	if now.Before(r.latest) {
		return r.latest
	}
	return now
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

	knownStripes = 64
	// knownSweep is how many entries are examined for expiry when one is
	// added.
	knownSweep = 4
)

// knownClients remembers which clients of a store this process has let in. No
// client is forgotten to make room for another: without room, new clients are not
// remembered, so made-up keys cannot push out regular clients.
type knownClients struct {
	began   time.Time
	seed    maphash.Seed
	most    int // in each stripe
	stripes [knownStripes]knownStripe
}

// client is a client of one zone.
type client struct{ zone, key string }

type knownStripe struct {
	mu sync.Mutex
	// until maps the hash of a client to the time since began at which
	// the client is forgotten. The seed is secret: the chance that a new client
	// passes for one of a million others is one in 10^13, and costs a bucket.
	until map[uint64]time.Duration
}

func newKnownClients(most int, now time.Time) *knownClients {
	c := &knownClients{began: now, seed: maphash.MakeSeed(), most: most / knownStripes}
	for i := range c.stripes {
		c.stripes[i].until = map[uint64]time.Duration{}
	}
	return c
}

func (c *knownClients) stripeOf(r *store.Request) (*knownStripe, uint64) {
	hash := maphash.Comparable(c.seed, client{r.Limit.Zone, r.ClientKey})
	return &c.stripes[hash%knownStripes], hash
}

// until returns when the client of r is forgotten unless it comes again.
func (c *knownClients) until(r *store.Request, now time.Time) time.Duration {
	// A window lasts a century at most.
	return now.Sub(c.began) + max(min(r.Limit.Window, store.MaxWindow/knownWindows)*knownWindows, leastKnown)
}

// has reports whether the client of r is remembered.
func (c *knownClients) has(r *store.Request, now time.Time) bool {
	s, hash := c.stripeOf(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.has(hash, now.Sub(c.began))
}

// renew remembers the client of r for longer if it is remembered, and reports whether it is.
func (c *knownClients) renew(r *store.Request, now time.Time) bool {
	s, hash := c.stripeOf(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.has(hash, now.Sub(c.began)) {
		delete(s.until, hash)
		return false
	}
	s.until[hash] = c.until(r, now)
	return true
}

// has reports whether a client is remembered at that time since began. mu is held.
func (s *knownStripe) has(hash uint64, at time.Duration) bool {
	until, ok := s.until[hash]
	return ok && until > at
}

// add remembers the client of r, if there is room.
func (c *knownClients) add(r *store.Request, now time.Time) {
	s, hash := c.stripeOf(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	// Iteration begins at random.
	looked := 0
	for other, until := range s.until {
		if until <= now.Sub(c.began) {
			delete(s.until, other)
		}
		if looked++; looked == knownSweep {
			break
		}
	}
	if len(s.until) < c.most {
		s.until[hash] = c.until(r, now)
	}
}

// knownClientsKey is the key in the pool of the knownClients of the store with
// that name.
type knownClientsKey string
