package algorithm

import "github.com/shardlimit/caddy-shardlimit/store"

// FixedWindow is the content of a bucket of [store.FixedWindow].
type FixedWindow struct {
	// Used is what was spent in the window.
	Used int64
	// Reset is the end of the window, chosen when the window opens.
	Reset int64
	penalty
	// Born is when the window was opened, if its end was given or is on the clock, because another bucket may
	// have had that end; 0 for others.
	Born int64
}

var fixedWindow = Traits{
	Aging: AtWindowEnd, Penalties: true, MostEvents: store.MaxEvents, MostWords: mostWords,
	empty: func() Bucket { return new(FixedWindow) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return fixedWindowOf(c).View(&r, now, spent)
	},
	copies: &copies{
		penalty: 2, instants: []int{1, 2},
		charge: func(c store.Content, r store.Request, cost, now int64) store.Content {
			r.Cost = cost
			b := fixedWindowOf(c)
			b.Charge(&r, now)
			return b.copy()
		},
		believe: func(c store.Content, r store.Request, now int64) store.Content {
			b := fixedWindowOf(c)
			b.Believe(&r, now)
			return b.copy()
		},
		expiry: func(c store.Content, limit *store.Limit) int64 { return fixedWindowOf(c).Expiry(limit) },
		raise:  raiseFixedWindow,
	},
}

func fixedWindowOf(c store.Content) *FixedWindow {
	return &FixedWindow{Used: c[0], Reset: c[1], penalty: penalty{c[2]}}
}

func (b *FixedWindow) copy() store.Content { return store.Content{b.Used, b.Reset, b.Penalty} }

func raiseFixedWindow(c, other store.Content, _ *store.Limit, now int64) (merged store.Content, less bool) {
	switch {
	case other[1] > c[1]:
		c[0], c[1] = other[0], other[1]
	case other[1] == c[1]:
		less = other[0] < c[0] && c[1] > now
		c[0] = max(c[0], other[0])
	default:
		less = c[1] > now
	}
	return c, less
}

// IsOpen reports whether the window is open at now. The instant of its reset is
// outside.
func (b *FixedWindow) IsOpen(now int64) bool { return b.Reset > now }

// Open implements [Bucket]. Aligned windows and penalties have a reset already.
func (b *FixedWindow) Open(r *store.Request, now int64) {
	if !r.Limit.Align && !b.isPenalized(now) {
		b.open(r, now)
	}
}

func (b *FixedWindow) open(r *store.Request, now int64) {
	if b.IsOpen(now) {
		return
	}
	next := nextReset(r.Limit, now)
	b.Used, b.Reset, b.Born = 0, next, 0
	end := endOf(r, now, next-now)
	if r.Limit.Align || r.Ends != 0 && end > now {
		b.Born = now
	}
	// The end of an aligned window is known better than the time that is left.
	if end > now && !r.Limit.Align {
		b.Reset = end
	}
}

// nextReset is the end of a window that opens at now.
func nextReset(limit *store.Limit, now int64) int64 {
	if limit.Calendar.Unit != "" {
		return limit.Calendar.End(now)
	}
	window := limit.Window.Microseconds()
	if limit.Align {
		return now - now%window + window
	}
	return now + window
}

// Charge implements [Bucket]. The count stops at [store.MaxInteger].
func (b *FixedWindow) Charge(r *store.Request, now int64) {
	if r.Ends != 0 && endOf(r, now, r.Limit.Window.Microseconds()) <= now {
		return
	}
	b.open(r, now)
	b.Used = add(b.Used, r.Cost)
}

// Take implements [Bucket].
func (b *FixedWindow) Take(r *store.Request, now int64) bool {
	if b.isPenalized(now) {
		return false
	}
	b.open(r, now)
	if !fitsIn(r, b.Used) {
		return false
	}
	b.Used = add(b.Used, r.Cost)
	return true
}

// Refund implements [Bucket]. It ignores costs of other windows and buckets.
func (b *FixedWindow) Refund(r *store.Request, _ int64) {
	if r.Receipt == (store.Receipt{Period: b.Reset, Position: b.Born}) {
		b.Used = max(b.Used-r.Cost, 0)
	}
}

// Penalize implements [Bucket]. There is a window under each penalty that is not of an aligned one,
// because what opens a window without a script does not look at the penalty first.
func (b *FixedWindow) Penalize(r *store.Request, now int64) {
	b.Open(r, now)
	b.penalty.Penalize(r, now)
}

// View implements [Bucket]. The reset is 0 if no window is open and windows are
// not aligned.
func (b *FixedWindow) View(r *store.Request, now int64, spent bool) store.State {
	used, reset := b.Used, b.Reset
	if !b.IsOpen(now) {
		used, reset = 0, 0
		if r.Limit.Align {
			reset = nextReset(r.Limit, now)
		}
	}
	s := newState(r, now, used, spent)
	s.Reset, s.ResetOtherwise = reset, reset
	// Used, reset, penalty.
	s.Content = store.Content{used, reset, b.live(now)}
	wait(&s, r, add(max(reset, now), othersTurn(r, used, spent)), spent)
	if spent {
		s.Receipt = store.Receipt{Period: reset, Position: b.Born}
	} else {
		b.apply(&s)
	}
	return s
}

// Expiry implements [Bucket].
func (b *FixedWindow) Expiry(*store.Limit) int64 { return max(b.Reset, b.Penalty) }

// Share implements [Bucket].
func (b *FixedWindow) Share(_ *store.Limit, capacity, now int64) float64 {
	used := int64(0)
	if b.IsOpen(now) {
		used = b.Used
	}
	return b.raise(shareOf(used, capacity), now)
}
