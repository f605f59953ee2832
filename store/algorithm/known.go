package algorithm

import "github.com/shardlimit/caddy-shardlimit/store"

// Known is a copy of a bucket, from the content in a store's answer. The zero
// value is a bucket in which nothing counts. Its methods but WindowEnd are for
// algorithms whose [Traits.Copies] is true, IsOpen for all.
type Known struct{ Content store.Content }

// View is [Bucket.View] of a bucket by its content or, where events are kept one by
// one, by what the scripts of the Redis store reply.
func View(c *store.Content, r *store.Request, now int64, spent bool) store.State {
	t, content := Of(r.Limit.Algorithm), *c
	if t.Copies() {
		content = t.copies.believe(content, *r, now)
	}
	return t.view(content, *r, 0, now, spent)
}

// IsOpen reports whether a charge at now counts in the window of the copy. Only
// windows that end close.
func (k *Known) IsOpen(limit *store.Limit, now int64) bool {
	t := Of(limit.Algorithm)
	return t.Copies() && (!t.Windowed() || k.WindowEnd() > now && Believes(k.WindowEnd(), now, limit.Window))
}

// WindowEnd is the end of the last known window, or 0. Algorithms with windows that end
// keep it in this place.
func (k *Known) WindowEnd() int64 { return k.Content[1] }

// Left is how long the window is still open at now, or how long what drains takes to; 0 if it is closed, or empty.
func (k Known) Left(limit *store.Limit, now int64) int64 {
	t := Of(limit.Algorithm)
	switch {
	case t.Windowed() && k.IsOpen(limit, now):
		return k.WindowEnd() - now
	case t.Drains():
		return max(k.Content[0]-now, 0)
	}
	return 0
}

// View is [Bucket.View] before anything is spent, with so much more ahead of the request.
// now may be an estimate, behind the clock of the bucket.
func (k *Known) View(r *store.Request, ahead, now int64) (s store.State) {
	t, at := Of(r.Limit.Algorithm), now
	content := t.copies.believe(k.Content, *r, now)
	if busy := t.copies.busy; busy > 0 {
		// Events do not drain before they are spent.
		at = max(now, content[busy])
	}
	s = t.view(content, *r, ahead, at, false)
	s.Now = now
	return s
}

// Charge is [Bucket.Charge] of a cost that settles at now.
func (k *Known) Charge(r *store.Request, cost, now int64) {
	settled := *r
	settled.Ends = 0
	k.ChargeLate(&settled, cost, now)
}

// ChargeLate is [Bucket.Charge] of a cost that counts as long as r says.
func (k *Known) ChargeLate(r *store.Request, cost, now int64) {
	t := Of(r.Limit.Algorithm).copies
	k.Content = t.charge(t.believe(k.Content, *r, now), *r, cost, now)
}

// Penalize is [Bucket.Penalize].
func (k *Known) Penalize(r *store.Request, now int64) {
	if at := Of(r.Limit.Algorithm).copies.penalty; at > 0 && k.Content[at] <= now {
		k.Content[at] = r.Until
	}
}

// Move makes up for a clock, which says now, and is that far ahead of what was taken for it.
func (k *Known) Move(limit *store.Limit, by, now int64) {
	t := Of(limit.Algorithm)
	for _, at := range t.copies.instants {
		if k.Content[at] != 0 {
			k.Content[at] += by
		}
	}
	if window := limit.Window.Microseconds(); t.Clocked() && k.Content[0] > now-window {
		// The windows of both clocks overlap. The count is taken for that of the present one.
		k.Content[0] = now - now%window
	}
}

// KeepPenalty keeps the penalty of another copy: the reply to a charge lacks one that
// is still on its way.
func (k *Known) KeepPenalty(limit *store.Limit, other Known) {
	if at := Of(limit.Algorithm).copies.penalty; at > 0 {
		k.Content[at] = max(k.Content[at], other.Content[at])
	}
}

// Expiry is [Bucket.Expiry].
func (k *Known) Expiry(limit *store.Limit) int64 {
	return Of(limit.Algorithm).copies.expiry(k.Content, limit)
}

// ChargeExpiry is the instant from which nothing of a cost counts that is charged at now.
func (k Known) ChargeExpiry(r *store.Request, cost, now int64) int64 {
	if at := Of(r.Limit.Algorithm).copies.penalty; at > 0 {
		k.Content[at] = 0
	}
	k.Charge(r, cost, now)
	return k.Expiry(r.Limit)
}

// Raise merges another copy of the bucket into this one: of the same window the
// higher count, of two windows the later one. It reports whether the other copy
// has less of the events that still count at now.
func (k *Known) Raise(limit *store.Limit, other Known, now int64) (less bool) {
	t := Of(limit.Algorithm).copies
	mine := t.believe(k.Content, store.Request{Limit: limit}, now)
	theirs := t.believe(other.Content, store.Request{Limit: limit}, now)
	c, less := t.raise(mine, theirs, limit, now)
	if at := t.penalty; at > 0 {
		c[at] = max(mine[at], theirs[at])
	}
	k.Content = c
	return less
}
