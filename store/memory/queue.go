package memory

// queue is a binary heap of buckets, the one with the earliest due first.
// Each bucket knows its place, so that any can be removed.
type queue []*bucket

// minQueue is the capacity below which a queue is not worth shrinking.
const minQueue = 64

func (q *queue) push(b *bucket) {
	*q = append(*q, b)
	q.up(len(*q) - 1)
}

// remove takes b out and marks it removed.
func (q *queue) remove(b *bucket) {
	old := *q
	i, last := int(b.place), len(old)-1
	old[i] = old[last]
	old[last] = nil
	*q = old[:last]
	if i < last {
		q.fix(i)
	}
	b.place = removed
	if c := cap(old); c >= minQueue && last <= c/4 {
		*q = append(make(queue, 0, c/2), *q...)
	}
}

// fix restores the order after the bucket at i got another due.
func (q *queue) fix(i int) {
	if q.down(i) == i {
		q.up(i)
	}
}

func (q *queue) up(i int) {
	h := *q
	b := h[i]
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].due <= b.due {
			break
		}
		h.put(i, h[parent])
		i = parent
	}
	h.put(i, b)
}

// down returns where the bucket at i went.
func (q *queue) down(i int) int {
	h := *q
	b := h[i]
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if right := child + 1; right < len(h) && h[right].due < h[child].due {
			child = right
		}
		if h[child].due >= b.due {
			break
		}
		h.put(i, h[child])
		i = child
	}
	h.put(i, b)
	return i
}

func (q queue) put(i int, b *bucket) {
	q[i] = b
	b.place = int32(i)
}
