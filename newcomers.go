package shardlimit

import (
	"context"
	"sync"
	"time"

	"github.com/maypok86/otter/v2"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// overflowKey is the client key of the bucket that new clients share who come
// when there are too many of them. No client has it: theirs begin otherwise.
const overflowKey = "*overflow"

// maxAcquainted bounds the memory for clients that have been seen: to forget one
// costs a question.
const maxAcquainted = 1_000_000

// newcomers bounds how many buckets a second are opened in each zone of a store
// for clients that have none, so that made-up client keys cannot fill it.
type newcomers struct {
	store  string
	most   int
	peeker store.Peeker
	logger *zap.Logger
	// acquainted are the clients that have been let in, for a window.
	acquainted *otter.Cache[bucketID, time.Duration]
	reports    throttle

	mu    sync.Mutex
	zones map[string]*rate.Limiter
}

// newcomerConfig is a store module that bounds new buckets.
type newcomerConfig interface {
	// maxNewBuckets is how many a second, in each zone; 0 for any number.
	maxNewBuckets() int
}

// boundNewcomers sets the bound that the module wants, if it does and the store
// can tell clients that have a bucket from those that have none.
func (open *openedStore) boundNewcomers(name string, module StoreModule, logger *zap.Logger) {
	m, ok := module.(newcomerConfig)
	peeker, canPeek := open.store.(store.Peeker)
	if !ok || !canPeek || m.maxNewBuckets() == 0 {
		return
	}
	open.newcomers = &newcomers{
		store: name, most: m.maxNewBuckets(), peeker: peeker, logger: logger, zones: map[string]*rate.Limiter{},
		acquainted: otter.Must(&otter.Options[bucketID, time.Duration]{
			MaximumSize:      maxAcquainted,
			ExpiryCalculator: otter.ExpiryCreatingFunc(func(e otter.Entry[bucketID, time.Duration]) time.Duration { return e.Value }),
		}),
	}
}

// divert makes new clients beyond the bound share a bucket of their zone. Nobody
// is diverted who has a bucket, nor while the store cannot say who does.
func (n *newcomers) divert(ctx context.Context, reqs []store.Request, now time.Time) {
	var doubtful []int
	var asked []store.Request
	for i := range reqs {
		r := &reqs[i]
		if r.Limit.Algorithm == store.Concurrency || r.Events == 0 {
			// Leases are there only while requests run, and a limit of 0 needs no
			// bucket.
			continue
		}
		if _, ok := n.acquainted.GetIfPresent(idOf(r)); ok {
			continue
		}
		if n.limiterOf(r.Limit.Zone).AllowN(now, 1) {
			n.admit(r)
			continue
		}
		doubtful, asked = append(doubtful, i), append(asked, *r)
	}
	if len(asked) == 0 {
		return
	}
	for k, st := range n.peeker.Peek(ctx, asked) {
		r := &reqs[doubtful[k]]
		switch {
		case st.Err != nil:
		case st.Used > 0 || st.Penalty > 0:
			n.admit(r)
		default:
			n.report(r.Limit.Zone, now)
			r.ClientKey = overflowKey
		}
	}
}

// admit notes that a client has a bucket, or is about to.
func (n *newcomers) admit(r *store.Request) { n.acquainted.Set(idOf(r), r.Limit.Window) }

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
	metrics.overflowed.WithLabelValues(zone).Inc()
	if times, log := n.reports.report(now); log {
		n.logger.Warn("too many new clients: those beyond the bound share one bucket of their zone",
			zap.String("store", n.store), zap.String("zone", zone), zap.Int("max_new_buckets", n.most), zap.Int64("times", times))
	}
}

// divert sees to new clients in each store in which the part counts.
func (p *part) divert(ctx context.Context) {
	for in := range p.visits {
		open := p.visits[in].open
		if open == nil || open.newcomers == nil {
			continue
		}
		if !p.split {
			open.newcomers.divert(ctx, p.reqs, p.handler.now())
			continue
		}
		for i, z := range p.zones {
			if z.in == in {
				open.newcomers.divert(ctx, p.reqs[i:i+1], p.handler.now())
			}
		}
	}
}
