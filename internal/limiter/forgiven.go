package limiter

import (
	"slices"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// runningTakes has the buckets of a zone that forgives from which requests have taken that
// still run. A response that empties a bucket makes their takes void. A bucket is in it for
// as long as such a request runs, so that none is forgotten that decides a charge.
type runningTakes struct {
	mu      sync.Mutex
	limits  identity.Limits
	buckets map[identity.ID]*takenBucket
}

// takenBucket counts how often a bucket was being emptied.
type takenBucket struct {
	users   int
	emptied int
	// done is the latest of these times that has emptied it; times that fail leave no trace.
	done int
	// underWay are the times that are not over. They are at most as many as resets of the store run
	// at a time, 256 or 2 KB, because further ones fail at once; however many requests run, and
	// however long, and whatever fails meanwhile.
	underWay []int
}

// take is one request's take from a bucket that had been emptied so often.
type take struct {
	id      identity.ID
	bucket  *takenBucket
	emptied int
}

func (t *runningTakes) idOf(r *store.Request) identity.ID {
	return identity.ID{Limit: t.limits.Number(r.Limit), Key: r.ClientKey}
}

// begin notes a take. The caller ends it.
func (t *runningTakes) begin(r *store.Request) take {
	id := t.idOf(r)
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[id]
	if b == nil {
		b = new(takenBucket)
		if t.buckets == nil {
			t.buckets = map[identity.ID]*takenBucket{}
		}
		t.buckets[id] = b
	}
	b.users++
	return take{id, b, b.emptied}
}

func (t *runningTakes) end(k take) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.bucket.users--; k.bucket.users == 0 {
		delete(t.buckets, k.id)
	}
}

// isVoid reports whether the bucket was emptied since the take.
func (t *runningTakes) isVoid(k take) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := k.bucket
	return b.done > k.emptied || slices.ContainsFunc(b.underWay, func(time int) bool { return time > k.emptied })
}

// empty notes that the bucket of r is being emptied. The caller calls the function that it returns
// once that is over.
func (t *runningTakes) empty(r *store.Request) (end func(err error)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[t.idOf(r)]
	if b == nil {
		return func(error) {}
	}
	b.emptied++
	time := b.emptied
	b.underWay = append(b.underWay, time)
	return func(err error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		b.underWay = slices.DeleteFunc(b.underWay, func(other int) bool { return other == time })
		if err == nil {
			b.done = max(b.done, time)
		}
	}
}

// beginTake notes the take from a zone that forgives, for as long as the request runs.
func (z *inZone) beginTake() {
	taken, running := &z.ensureRare().taken, &z.running
	if taken.bucket != nil {
		// The request has waited since.
		running.end(*taken)
	}
	req := z.ask.Request
	req.ClientKey = z.decidedBy()
	*taken = running.begin(&req)
}

func (e *evaluation) endTakes() {
	for _, z := range e.zones {
		if z.rare != nil && z.rare.taken.bucket != nil {
			z.running.end(z.rare.taken)
			z.rare.taken = take{}
		}
	}
}

// noteForgiven notes that what the request took has gone with a bucket that
// was emptied since. A request that is running counts when it ends.
func (z *inZone) noteForgiven() {
	if z.Forgives.IsEmpty() || !z.isTaken() || z.rare == nil {
		return
	}
	if k := z.rare.taken; k.bucket != nil && z.running.isVoid(k) {
		z.lose()
	}
}
