package memory

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestQueue holds the queue to a plain slice.
func TestQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q queue
		var model []*bucket
		pick := func(t *rapid.T) *bucket {
			if len(model) == 0 {
				t.Skip("empty")
			}
			return rapid.SampledFrom(model).Draw(t, "bucket")
		}
		due := rapid.Int64Range(0, 20)
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				b := &bucket{}
				b.due = due.Draw(t, "due")
				q.push(b)
				model = append(model, b)
			},
			"fix": func(t *rapid.T) {
				b := pick(t)
				b.due = due.Draw(t, "due")
				q.fix(int(b.place))
			},
			"remove": func(t *rapid.T) {
				b := pick(t)
				q.remove(b)
				model = slices.DeleteFunc(model, func(m *bucket) bool { return m == b })
				if b.place != removed {
					t.Fatalf("removed bucket believes to be at %d", b.place)
				}
			},
			"": func(t *rapid.T) {
				if err := q.verify(); err != nil {
					t.Fatal(err)
				}
				if len(q) != len(model) {
					t.Fatalf("%d buckets, want %d", len(q), len(model))
				}
			},
		})
	})
}

func TestQueueGivesMemoryBack(t *testing.T) {
	var q queue
	for i := range 10_000 {
		q.push(&bucket{due: int64(i)})
	}
	for i := 0; len(q) > 0; i++ {
		if q[0].due != int64(i) {
			t.Fatalf("due %d comes first, want %d", q[0].due, i)
		}
		q.remove(q[0])
		if c := cap(q); c >= minQueue && c > 4*len(q) {
			t.Fatalf("capacity %d for %d buckets", c, len(q))
		}
	}
}
