package limiter

import "sync"

// runningTakes has the buckets of a zone that forgives from which requests have taken that
// still run. A response that has emptied a bucket makes the takes before it void. A bucket is in it for
// as long as such a request runs, so that none is forgotten that decides a charge.
type runningTakes struct {
	mu      sync.Mutex
	buckets map[bucketID]*takenBucket
}

// takenBucket numbers the responses that empty a bucket; emptied is the latest that has done so.
type takenBucket struct{ users, begun, emptied int }

// take is one request's take from a bucket, which so many responses had begun to empty.
type take struct {
	id     bucketID
	bucket *takenBucket
	begun  int
}

// begin notes a take. The caller ends it.
func (t *runningTakes) begin(id bucketID) take {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[id]
	if b == nil {
		b = new(takenBucket)
		if t.buckets == nil {
			t.buckets = map[bucketID]*takenBucket{}
		}
		t.buckets[id] = b
	}
	b.users++
	return take{id, b, b.begun}
}

func (t *runningTakes) end(k take) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.bucket.users--; k.bucket.users == 0 {
		delete(t.buckets, k.id)
	}
}

// isVoid reports whether a response that came after the take, if there is one, has emptied the bucket.
func (t *runningTakes) isVoid(k take) bool {
	if k.bucket == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return k.bucket.emptied > k.begun
}

// empty notes that a response begins to empty a bucket. The caller calls the function that it returns
// once that is done.
func (t *runningTakes) empty(id bucketID) (emptied func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[id]
	if b == nil {
		return func() {}
	}
	b.begun++
	n := b.begun
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		b.emptied = max(b.emptied, n)
	}
}

// beginTake notes the take from a zone that forgives, for as long as the request runs.
func (z *inZone) beginTake() {
	taken, running := &z.ensureRare().taken, &z.running
	if taken.bucket != nil {
		// The request has waited since.
		running.end(*taken)
	}
	*taken = running.begin(bucketID{limit: z.limit, clientKey: z.decidedBy()})
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
	if z.isTaken() && z.running.isVoid(z.taken()) {
		z.lose()
	}
}

// taken returns the take of the request from a zone that forgives, if there is one.
func (z *inZone) taken() take {
	if z.rare == nil {
		return take{}
	}
	return z.rare.taken
}
