package limiter

import (
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

// takenBucket counts how often a bucket was emptied, and which times failed.
type takenBucket struct {
	users   int
	emptied int
	failed  []int
}

// take is one request's take from a bucket that had been emptied so often.
type take struct {
	id      identity.ID
	bucket  *takenBucket
	emptied int
}

func (t *runningTakes) idOf(r *store.Request) identity.ID {
	return identity.New(t.limits.Number(r.Limit), r.ClientKey)
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
	// Times that failed emptied nothing.
	times := k.bucket.emptied - k.emptied
	for _, failed := range k.bucket.failed {
		if failed > k.emptied {
			times--
		}
	}
	return times > 0
}

// empty notes that the bucket of r is being emptied. The function that it returns notes that
// this has failed.
func (t *runningTakes) empty(r *store.Request) (failed func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[t.idOf(r)]
	if b == nil {
		return func() {}
	}
	b.emptied++
	emptied := b.emptied
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		b.failed = append(b.failed, emptied)
	}
}
