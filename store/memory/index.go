package memory

import "maps"

// index finds the buckets of one limit in one shard. The zero value is empty.
type index struct {
	buckets map[string]*bucket
	// peak is the most that buckets has held. Maps do not shrink: this is what
	// its memory is made for.
	peak int
}

// minIndex is the peak below which a map is not worth shrinking.
const minIndex = 64

func (x *index) add(b *bucket) {
	if x.buckets == nil {
		x.buckets = make(map[string]*bucket)
	}
	x.buckets[b.key] = b
	x.peak = max(x.peak, len(x.buckets))
}

// remove takes b out. After a flood it gives the memory back: every copy comes
// after three times as many removals.
func (x *index) remove(b *bucket) {
	delete(x.buckets, b.key)
	n := len(x.buckets)
	switch {
	case n == 0:
		*x = index{}
	case x.peak >= minIndex && n <= x.peak/4:
		smaller := make(map[string]*bucket, n)
		maps.Copy(smaller, x.buckets)
		*x = index{buckets: smaller, peak: n}
	}
}
