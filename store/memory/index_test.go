package memory

import (
	"strconv"
	"testing"
)

func TestIndexGivesMemoryBack(t *testing.T) {
	const most = 10_000
	var x index
	buckets := make([]*bucket, most)
	for i := range buckets {
		buckets[i] = &bucket{key: strconv.Itoa(i)}
		x.add(buckets[i])
	}
	for i, b := range buckets {
		x.remove(b)
		left := most - 1 - i
		if len(x.buckets) != left {
			t.Fatalf("%d buckets, want %d", len(x.buckets), left)
		}
		if x.peak >= minIndex && x.peak >= 4*max(left, 1) {
			t.Fatalf("memory for %d buckets is held by %d", x.peak, left)
		}
		if left > 0 && x.buckets[buckets[most-1].key] != buckets[most-1] {
			t.Fatalf("with %d buckets left, the last is not found", left)
		}
	}
	if x.buckets != nil {
		t.Error("an empty index holds a map")
	}
}
