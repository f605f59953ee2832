package ledger

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Of a bucket that cannot be copied, the place of its content is taken by the
// last refusal, which holds for every request of as much or more.
const (
	refusalUntil = iota
	refusalCost
	refusalCapacity
	refusalUsed
	refusalReset
	// confirmedUsed is what was spent when the primary was last heard.
	confirmedUsed
)

// noteRefusal remembers what the store said about a bucket of
// [store.SlidingLog]. When a slot of [store.Concurrency] becomes free is not
// known, so nothing can be remembered of it.
func (e *entry) noteRefusal(r *store.Request, st *store.State) {
	e.known.Content = store.Content{confirmedUsed: e.known.Content[confirmedUsed]}
	if r.Limit.Algorithm == store.SlidingLog && !st.Allowed && st.RetryAfter != store.Never {
		e.known.Content = store.Content{
			refusalUntil: st.Now + st.RetryAfter.Microseconds(), refusalCost: r.Need(),
			refusalCapacity: r.Capacity(), refusalUsed: st.Used, refusalReset: st.Reset,
			confirmedUsed: e.known.Content[confirmedUsed],
		}
	}
}

// refusesAsBefore sets the state of a request to which the last refusal
// applies.
func (e *entry) refusesAsBefore(r *store.Request, st *store.State, storeNow int64) bool {
	c := &e.known.Content
	left := c[refusalUntil] - storeNow
	if left <= 0 || r.Need() < c[refusalCost] || r.Capacity() > c[refusalCapacity] {
		return false
	}
	*st = store.State{
		Limit: max(r.Capacity(), 0), Used: c[refusalUsed], Remaining: max(r.Capacity()-c[refusalUsed], 0),
		Reset: c[refusalReset], ResetOtherwise: max(c[refusalReset], storeNow+r.Limit.Window.Microseconds()),
		RetryAfter: time.Duration(left) * time.Microsecond, Now: storeNow,
	}
	if r.Cost > r.Capacity() {
		st.RetryAfter = store.Never
	}
	return true
}
