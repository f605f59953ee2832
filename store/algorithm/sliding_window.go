package algorithm

import "github.com/shardlimit/caddy-shardlimit/store"

// SlidingWindow is the content of a bucket of [store.SlidingWindow].
type SlidingWindow struct {
	noWindow
	// Start is when the current window began. Current was spent in it, Previous
	// in the window before it.
	Start, Current, Previous int64
	penalty
	// Born is when something was spent in the bucket that had been empty.
	Born int64
}

var slidingWindow = Traits{
	Aging: ByClock, Penalties: true, MostEvents: store.MaxWeighted, MostWords: "2^32-1 with sliding_window",
	empty: func() Bucket { return new(SlidingWindow) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return slidingWindowOf(c).View(&r, now, spent)
	},
	copies: &copies{
		penalty: 3, instants: []int{0, 3},
		charge: func(c store.Content, r store.Request, cost, now int64) store.Content {
			r.Cost = cost
			b := slidingWindowOf(c)
			b.Charge(&r, now)
			return b.copy()
		},
		believe: func(c store.Content, r store.Request, now int64) store.Content {
			b := slidingWindowOf(c)
			b.Believe(&r, now)
			return b.copy()
		},
		expiry: func(c store.Content, limit *store.Limit) int64 { return slidingWindowOf(c).Expiry(limit) },
		raise:  raiseSlidingWindow,
	},
}

func slidingWindowOf(c store.Content) *SlidingWindow {
	return &SlidingWindow{Start: c[0], Current: c[1], Previous: c[2], penalty: penalty{c[3]}}
}

func (b *SlidingWindow) copy() store.Content {
	return store.Content{b.Start, b.Current, b.Previous, b.Penalty}
}

func raiseSlidingWindow(c, other store.Content, limit *store.Limit, now int64) (merged store.Content, less bool) {
	window := limit.Window.Microseconds()
	own, their := slidingWindowOf(c), slidingWindowOf(other)
	// Both roll to the window of now, or to the later one.
	at := max(now, own.Start, their.Start)
	own.roll(at, window)
	their.roll(at, window)
	less = their.Current < own.Current || their.Previous < own.Previous
	return store.Content{own.Start, max(own.Current, their.Current), max(own.Previous, their.Previous), own.Penalty}, less
}

// weightSteps bounds the parts of a window by which the previous one is weighted,
// so that a product with [store.MaxWeighted] is exact.
const weightSteps = 1 << 20

// WeightUnit is the length of such a part.
func WeightUnit(window int64) int64 { return (window + weightSteps - 1) / weightSteps }

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

func (b *SlidingWindow) roll(now, window int64) {
	start := now - now%window
	switch {
	case start <= b.Start:
		return
	case start == b.Start+window:
		b.Previous, b.Current = b.Current, 0
	default:
		b.Previous, b.Current = 0, 0
	}
	b.Start = start
}

// weighted is how much of Previous still counts at now, rounded up.
func (b *SlidingWindow) weighted(now, window int64) int64 {
	unit := WeightUnit(window)
	left := min(b.Start+window-now, window)
	return ceilDiv(min(b.Previous, store.MaxWeighted)*ceilDiv(left, unit), ceilDiv(window, unit))
}

// Charge implements [Bucket].
func (b *SlidingWindow) Charge(r *store.Request, now int64) {
	if r.Cost == 0 {
		return
	}
	window := r.Limit.Window.Microseconds()
	end := endOf(r, now, 2*window)
	if end <= now {
		return
	}
	if b.roll(now, window); b.Current == 0 && b.Previous == 0 {
		b.Born = now
	}
	switch start := end - 2*window; {
	case start-start%window >= b.Start || r.Ends == 0:
		b.Current = add(b.Current, r.Cost)
	case start >= b.Start-window:
		b.Previous = add(b.Previous, r.Cost)
	}
}

// Take implements [Bucket].
func (b *SlidingWindow) Take(r *store.Request, now int64) bool {
	window := r.Limit.Window.Microseconds()
	after := *b
	after.roll(now, window)
	used := add(after.Current, after.weighted(now, window))
	if b.isPenalized(now) || !fitsIn(r, used) {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. It ignores costs of windows before the previous one, and of other buckets.
func (b *SlidingWindow) Refund(r *store.Request, now int64) {
	window := r.Limit.Window.Microseconds()
	after := *b
	after.roll(now, window)
	switch {
	case r.Cost == 0, r.Receipt.Position != b.Born:
	case r.Receipt.Period == after.Start && after.Current > 0:
		*b = after
		b.Current = max(b.Current-r.Cost, 0)
	case r.Receipt.Period == after.Start-window && after.Previous > 0:
		*b = after
		b.Previous = max(b.Previous-r.Cost, 0)
	}
}

// Penalize implements [Bucket].
func (b *SlidingWindow) Penalize(r *store.Request, now int64) {
	if !b.isPenalized(now) {
		b.roll(now, r.Limit.Window.Microseconds())
		b.penalty.Penalize(r, now)
	}
}

// View implements [Bucket].
func (b *SlidingWindow) View(r *store.Request, now int64, spent bool) store.State {
	window := r.Limit.Window.Microseconds()
	after := *b
	after.roll(now, window)
	s := newState(r, now, add(after.Current, after.weighted(now, window)), spent)
	s.Reset = after.reset(now, window)
	s.Content = after.content(now)
	otherwise := after
	if spent {
		otherwise.Current -= min(r.Cost, after.Current)
	} else {
		otherwise.Current = add(after.Current, r.Cost)
	}
	s.ResetOtherwise = otherwise.reset(now, window)
	if !s.Allowed {
		at := add(now, othersTurn(r, s.Used, spent))
		need := int64(0)
		if !spent {
			need = r.Cost
		}
		if s.Used+need > r.Capacity() {
			at = max(at, after.fitsAt(r.Capacity()-need, window))
		}
		wait(&s, r, at, spent)
	}
	if spent {
		if s.Receipt.Period = after.Start; after.Current > 0 || after.Previous > 0 {
			s.Receipt.Position = b.Born
		}
	} else {
		b.apply(&s)
	}
	return s
}

// content is what counts at now of a bucket that has rolled: start, current,
// previous, penalty.
func (b *SlidingWindow) content(now int64) (c store.Content) {
	if b.Current > 0 || b.Previous > 0 {
		c[0], c[1], c[2] = b.Start, b.Current, b.Previous
	}
	c[3] = b.live(now)
	return c
}

func (b *SlidingWindow) reset(now, window int64) int64 {
	switch {
	case b.Current > 0:
		return b.Start + 2*window
	case b.Previous > 0:
		return b.Start + window
	default:
		return now
	}
}

// fitsAt is the instant from which no more than room counts.
func (b *SlidingWindow) fitsAt(room, window int64) int64 {
	unit := WeightUnit(window)
	end := b.Start + window
	weighs, most := min(b.Previous, store.MaxWeighted), room-b.Current
	if most < 0 {
		// The current window has to become the previous one first.
		end += window
		weighs, most = min(b.Current, store.MaxWeighted), max(room, 0)
	}
	if weighs == 0 {
		return end
	}
	// So many parts of the previous window may still count.
	parts, _ := mulDiv(most, ceilDiv(window, unit), weighs)
	return max(end-min(parts, weightSteps)*unit, end-window)
}

// Expiry implements [Bucket].
func (b *SlidingWindow) Expiry(limit *store.Limit) int64 {
	return max(b.Start+2*limit.Window.Microseconds(), b.Penalty)
}

// Share implements [Bucket].
func (b *SlidingWindow) Share(limit *store.Limit, capacity, now int64) float64 {
	window := limit.Window.Microseconds()
	at := *b
	at.roll(now, window)
	return b.raise(shareOf(add(at.Current, at.weighted(now, window)), capacity), now)
}
