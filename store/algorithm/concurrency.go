package algorithm

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// slotRetry is how long a client is told to wait for a slot: when one becomes
// free is not known.
const slotRetry = time.Second

// Concurrency is the content of a bucket of [store.Concurrency].
type Concurrency struct {
	noWindow
	noPenalty
	// leases are members whose instant is that of their expiry.
	leases members
}

// Charge implements [Bucket]. A lease that is there is renewed.
func (b *Concurrency) Charge(r *store.Request, now int64) {
	b.prune(now)
	b.leases.put(now+r.Limit.Window.Microseconds(), r.ID, count(r))
}

// Take implements [Bucket].
func (b *Concurrency) Take(r *store.Request, now int64) bool {
	b.prune(now)
	if int64(len(b.leases))+r.Need() > r.Capacity() {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. It ends the leases of the request.
func (b *Concurrency) Refund(r *store.Request, now int64) {
	b.prune(now)
	b.leases.remove(r.ID, count(r))
}

// prune lets go of the leases that have expired.
func (b *Concurrency) prune(now int64) { b.leases.keep(b.leases.after(now)) }

// View implements [Bucket].
func (b *Concurrency) View(r *store.Request, now int64, spent bool) store.State {
	return LeaseSummary{int64(len(b.leases.after(now)))}.View(r, now, spent)
}

// LeaseSummary is what a request needs to know of the leases.
type LeaseSummary struct {
	// Used is how many there are.
	Used int64
}

// View is [Bucket.View] of the leases that l describes.
func (l LeaseSummary) View(r *store.Request, now int64, spent bool) store.State {
	s := newState(r, now, l.Used, spent)
	wait(&s, r, now+slotRetry.Microseconds(), spent)
	return s
}

// Expiry implements [Bucket].
func (b *Concurrency) Expiry(*store.Limit) int64 { return b.leases.newest() }

// Weight implements [Bucket].
func (b *Concurrency) Weight(*store.Limit) int64 { return int64(len(b.leases)) }
