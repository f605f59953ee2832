package algorithm

import "github.com/shardlimit/caddy-shardlimit/store"

// Known is a copy of a bucket, from the content in a store's answer. The zero
// value is a bucket in which nothing counts. Buckets of single events
// ([store.SlidingLog], [store.Concurrency]) cannot be copied.
type Known struct{ Content store.Content }

// Copies reports whether buckets of the algorithm can be copied.
func Copies(a store.Algorithm) bool {
	return a != store.SlidingLog && a != store.Concurrency
}

func fixedWindowOf(c *store.Content) *FixedWindow {
	return &FixedWindow{c[0], c[1], penalty{c[2]}}
}

func slidingWindowOf(c *store.Content) *SlidingWindow {
	return &SlidingWindow{Start: c[0], Current: c[1], Previous: c[2], penalty: penalty{c[3]}}
}

func gcraOf(c *store.Content) *GCRA {
	return &GCRA{TAT: c[0], Rest: c[1], Events: c[2], Busy: c[3], Refunded: c[4], penalty: penalty{c[5]}}
}

// View is [Bucket.View] of a bucket by its content or, where events are kept one by
// one, by what the scripts of the Redis store reply.
func View(c *store.Content, r *store.Request, now int64, spent bool) store.State {
	switch r.Limit.Algorithm {
	case store.SlidingWindow:
		return slidingWindowOf(c).View(r, now, spent)
	case store.SlidingLog:
		return logSummary{used: c[0], newest: c[1], other: c[2], blocking: c[3]}.view(r, now, spent)
	case store.GCRA:
		return gcraOf(c).View(r, now, spent)
	case store.Concurrency:
		return viewLeases(c[0], r, now, spent)
	default:
		return fixedWindowOf(c).View(r, now, spent)
	}
}

// IsOpen reports whether a charge at now counts in the window of the copy. Only
// windows of [store.FixedWindow] close.
func (k *Known) IsOpen(limit *store.Limit, now int64) bool {
	if limit.Algorithm == store.FixedWindow {
		return k.WindowEnd() > now
	}
	return Copies(limit.Algorithm)
}

// WindowEnd is the end of the last known window of [store.FixedWindow], or 0.
func (k *Known) WindowEnd() int64 { return k.Content[1] }

// View is [Bucket.View] before anything is spent. now may be an estimate, behind
// the clock of the bucket.
func (k *Known) View(r *store.Request, now int64) store.State {
	at := now
	if r.Limit.Algorithm == store.GCRA {
		// Events do not drain before they are spent.
		at = max(now, k.Content[3])
	}
	s := View(&k.Content, r, at, false)
	s.Now = now
	return s
}

// Charge is [Bucket.Charge].
func (k *Known) Charge(r *store.Request, now int64) {
	switch r.Limit.Algorithm {
	case store.FixedWindow:
		b := fixedWindowOf(&k.Content)
		b.Charge(r, now)
		k.Content = store.Content{b.Used, b.Reset, b.Penalty}
	case store.SlidingWindow:
		b := slidingWindowOf(&k.Content)
		b.Charge(r, now)
		k.Content = store.Content{b.Start, b.Current, b.Previous, b.Penalty}
	default:
		b := gcraOf(&k.Content)
		b.Charge(r, now)
		k.Content = store.Content{b.TAT, b.Rest, b.Events, b.Busy, b.Refunded, b.Penalty}
	}
}

func (k *Known) penalty(limit *store.Limit) *int64 {
	switch limit.Algorithm {
	case store.FixedWindow:
		return &k.Content[2]
	case store.SlidingWindow:
		return &k.Content[3]
	default:
		return &k.Content[5]
	}
}

// Penalize is [Bucket.Penalize].
func (k *Known) Penalize(r *store.Request, now int64) {
	if p := k.penalty(r.Limit); *p <= now {
		*p = r.Until
	}
}

// KeepPenalty keeps the penalty of another copy: the reply to a charge lacks one that
// is still on its way.
func (k *Known) KeepPenalty(limit *store.Limit, other Known) {
	p := k.penalty(limit)
	*p = max(*p, *other.penalty(limit))
}

// Expiry is [Bucket.Expiry].
func (k *Known) Expiry(limit *store.Limit) int64 {
	switch limit.Algorithm {
	case store.FixedWindow:
		return fixedWindowOf(&k.Content).Expiry(limit)
	case store.SlidingWindow:
		return slidingWindowOf(&k.Content).Expiry(limit)
	default:
		return gcraOf(&k.Content).Expiry(limit)
	}
}

// Raise merges another copy of the bucket into this one: of the same window the
// higher count, of two windows the later one. It reports whether the other copy
// has less of what still counts at now.
func (k *Known) Raise(limit *store.Limit, other Known, now int64) (less bool) {
	switch limit.Algorithm {
	case store.FixedWindow:
		return k.raiseFixedWindow(&other.Content, now)
	case store.SlidingWindow:
		return k.raiseSlidingWindow(limit, &other.Content, now)
	default:
		return k.raiseGCRA(&other.Content, now)
	}
}

func (k *Known) raiseFixedWindow(other *store.Content, now int64) (less bool) {
	c := &k.Content
	switch {
	case other[1] > c[1]:
		c[0], c[1] = other[0], other[1]
	case other[1] == c[1]:
		less = other[0] < c[0] && c[1] > now
		c[0] = max(c[0], other[0])
	default:
		less = c[1] > now
	}
	return raisePenalty(&c[2], other[2], now) || less
}

func raisePenalty(own *int64, other, now int64) (less bool) {
	less = other < *own && *own > now
	*own = max(*own, other)
	return less
}

func (k *Known) raiseSlidingWindow(limit *store.Limit, other *store.Content, now int64) (less bool) {
	window := limit.Window.Microseconds()
	own := SlidingWindow{Start: k.Content[0], Current: k.Content[1], Previous: k.Content[2]}
	their := SlidingWindow{Start: other[0], Current: other[1], Previous: other[2]}
	// Both roll to the window of now, or to the later one.
	at := max(now, own.Start, their.Start)
	own.roll(at, window)
	their.roll(at, window)
	less = their.Current < own.Current || their.Previous < own.Previous
	own.Current, own.Previous = max(own.Current, their.Current), max(own.Previous, their.Previous)
	less = raisePenalty(&k.Content[3], other[3], now) || less
	k.Content[0], k.Content[1], k.Content[2] = own.Start, own.Current, own.Previous
	return less
}

func (k *Known) raiseGCRA(other *store.Content, now int64) (less bool) {
	c := &k.Content
	ahead := other[0] > c[0] || other[0] == c[0] && other[1] > c[1]
	behind := other[0] < c[0] || other[0] == c[0] && other[1] < c[1]
	if ahead {
		copy(c[:5], other[:5])
	}
	return raisePenalty(&c[5], other[5], now) || behind && c[0] > now
}
