package core

import (
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// age is how much of charges that wait would count by now, had they arrived at once: a long
// outage must not end with all that was spent in it at one instant. Charges of a window
// that ends expire together, and have no age.
type age struct {
	// clock is how far the store's clock is ahead of the process's, as heard when age began.
	clock int64
	// known is a copy of the bucket or, where buckets cannot be copied, a wheel.
	known algorithm.Known
	// least are the fewest events of the requests: what is left may be theirs.
	least int64
}

// newAge begins an age with a request that was to be charged at now, on top of what is known. What
// drains in order has to wait for what was before it.
func (b *Bucket) newAge(r *store.Request, known algorithm.Known, now int64) age {
	a := age{clock: b.clock, least: r.Events}
	if r.Limit.Algorithm.HasBurst() {
		a.known = known
	}
	a.add(r, now)
	return a
}

// add notes that a request was to be charged at now.
func (a *age) add(r *store.Request, now int64) {
	a.least = min(a.least, r.Events)
	switch t := algorithm.Of(r.Limit.Algorithm); {
	case t.Windowed:
	case t.Copies():
		a.known.Charge(r, r.Cost, now+a.clock)
	default:
		addToWheel(&a.known.Content, r.Limit, r.Cost, now)
	}
}

// A wheel is a content that has what was spent in each part of the last window, which is known
// of a log: the first number is that of the present part, the next ones are the costs of this
// part and those before it, of a window and the part in which it began.
const wheelParts = int64(len(store.Content{}) - 2)

// wheelPart is the length of a part.
func wheelPart(limit *store.Limit) int64 { return limit.Window.Microseconds()/wheelParts + 1 }

// turn makes the part of now the first one.
func turn(c *store.Content, limit *store.Limit, now int64) {
	part := now / wheelPart(limit)
	costs := c[1:]
	for n := min(max(part-c[0], 0), int64(len(costs))); n > 0; n-- {
		copy(costs[1:], costs)
		costs[0] = 0
	}
	c[0] = max(c[0], part)
}

func addToWheel(c *store.Content, limit *store.Limit, cost, now int64) {
	turn(c, limit, now)
	c[1] += min(cost, store.MaxInteger-c[1])
}

// inWheel is how much of a wheel still counts.
func inWheel(c store.Content, limit *store.Limit, now int64) (sum int64) {
	turn(&c, limit, now)
	for _, cost := range c[1:] {
		sum += cost
	}
	return sum
}

// wheelFrees is the instant at which no more than most of a wheel counts.
func wheelFrees(c store.Content, limit *store.Limit, most, now int64) int64 {
	left := inWheel(c, limit, now)
	turn(&c, limit, now)
	at := now
	for age := len(c) - 2; age >= 0 && left > most; age-- {
		left -= c[1+age]
		at = (c[0] - int64(age) + int64(len(c)) - 1) * wheelPart(limit)
	}
	return at
}

// shrink makes the merged charges cost what still counts of them.
func (w *mergedCharge) shrink(now int64) {
	if left := w.left(now); left < w.req[0].Cost {
		w.req[0].Cost, w.req[0].Events = left, w.age.least
	}
}

// left is how much of the merged charges still counts, and 1 at least, because charges of which
// nothing counts expire. What drains is charged as it was, up to a full bucket.
func (w *mergedCharge) left(now int64) int64 {
	left := w.req[0].Cost
	switch t := algorithm.Of(w.req[0].Limit.Algorithm); {
	case t.Windowed:
		return left
	case t.Copies():
		asked := w.req[0]
		asked.Cost = 0
		left = w.age.known.View(&asked, 0, now+w.age.clock).Used
		if w.req[0].Limit.Algorithm.HasBurst() {
			left = max(left, w.req[0].Capacity())
		}
	default:
		left = inWheel(w.age.known.Content, w.req[0].Limit, now)
	}
	return min(w.req[0].Cost, max(left, 1))
}
