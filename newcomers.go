package shardlimit

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// overflowKey is the client key of the bucket that new clients share who come
// when there are too many of them. No client has it: theirs begin otherwise.
const overflowKey = "*overflow"

// newcomers bounds how many buckets a second are opened in each zone of a store
// for clients that have none, so that made-up client keys cannot fill it.
type newcomers struct {
	store  string
	most   int
	peeker store.Peeker
	logger *zap.Logger
	// acquainted are the clients that have been let in.
	acquainted *acquaintances
	reports    throttle

	mu    sync.Mutex
	zones map[string]*rate.Limiter
}

// newcomerConfig is a store module that bounds new buckets.
type newcomerConfig interface {
	// NewBuckets is how many a second, in each zone; 0 for any number.
	NewBuckets() int
}

// boundNewcomers sets the bound that the module wants, if it does and the store
// can tell clients that have a bucket from those that have none.
func (open *openedStore) boundNewcomers(name string, module StoreModule, logger *zap.Logger) {
	m, ok := module.(newcomerConfig)
	peeker, canPeek := open.store.(store.Peeker)
	if !ok || !canPeek || m.NewBuckets() == 0 {
		return
	}
	open.newcomers = &newcomers{
		store: name, most: m.NewBuckets(), peeker: peeker, logger: logger,
		acquainted: acquireAcquaintances(name), zones: map[string]*rate.Limiter{},
	}
}

// leaveNewcomers ends what boundNewcomers began.
func (open *openedStore) leaveNewcomers() {
	if open.newcomers != nil {
		releaseAcquaintances(open.newcomers.store)
	}
}

// strangers returns the places of the requests of new clients beyond the bound,
// which are to share a bucket of their zone. A client that has a bucket is none,
// nor is any while the store cannot say who has.
func (n *newcomers) strangers(ctx context.Context, reqs []store.Request, now time.Time) (places []int) {
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
	metrics.overflowed.WithLabelValues(zone).Inc()
	if times, log := n.reports.report(now); log {
		n.logger.Warn("too many new clients: those beyond the bound share one bucket of their zone",
			zap.String("store", n.store), zap.String("zone", zone), zap.Int("max_new_buckets", n.most), zap.Int64("times", times))
	}
}
