package adversary

import (
	"math"
	"slices"
	"time"
)

// Span has two instants in microseconds since the epoch. Something happened between them.
type Span struct{ Lo, Hi int64 }

// SpanOf returns the span between two times.
func SpanOf(before, after time.Time) Span { return Span{before.UnixMicro(), after.UnixMicro()} }

func (s Span) plus(d time.Duration) Span {
	return Span{s.Lo + d.Microseconds(), s.Hi + d.Microseconds()}
}

// Has reports whether a time in seconds, rounded up to whole ones if so, may be that instant.
func (s Span) Has(seconds float64, rounded bool) bool {
	const second = 1e6
	lo, hi := float64(s.Lo)/second, float64(s.Hi)/second
	if rounded {
		return math.Ceil(lo-slack) <= seconds && seconds <= math.Ceil(hi+slack)
	}
	return lo-slack <= seconds && seconds <= hi+slack
}

// slack is what clocks and roundings may differ by, in seconds.
const slack = .03

// Count is the least and the most that an amount can be.
type Count struct{ Lo, Hi int64 }

func (c Count) plus(n int64) Count { return Count{c.Lo + n, c.Hi + n} }

// Has reports whether n may be the amount.
func (c Count) Has(n int64) bool { return c.Lo <= n && n <= c.Hi }

// spend is a cost that counts.
type spend struct {
	id, cost int64
	at       Span
	// window is the number of its window.
	window int64
}

// bucket is what a client has spent in a zone.
type bucket struct {
	zone   *Zone
	spends []spend
	// open is set while a window is known, whose beginning and number these are.
	open   bool
	start  Span
	window int64
	// level has, for gcra, what has not drained: the least and the most.
	level [2]fluid
	// penalty is when it ends; the zero value is none.
	penalty Span
	// running are the requests that hold something.
	running []*hold
}

// fluid is what has not drained of each spend, in order, at an instant.
type fluid struct {
	at   int64
	left []drop
}

type drop struct {
	id   int64
	left float64
}

// rate is how many events drain in a microsecond.
func (z *Zone) rate() float64 { return float64(z.Events) / float64(z.Window.Microseconds()) }

func (f *fluid) drain(rate float64, now int64) {
	amount := rate * float64(max(now-f.at, 0))
	f.at = max(now, f.at)
	for len(f.left) > 0 && amount > 0 {
		first := &f.left[0]
		gone := min(first.left, amount)
		if first.left, amount = first.left-gone, amount-gone; first.left > 0 {
			return
		}
		f.left = f.left[1:]
	}
}

func (f *fluid) total() (sum float64) {
	for _, d := range f.left {
		sum += d.left
	}
	return sum
}

// of returns what has not drained of a spend.
func (f *fluid) of(id int64) float64 {
	for _, d := range f.left {
		if d.id == id {
			return d.left
		}
	}
	return 0
}

// change adds to a spend, or takes from it what has not drained.
func (f *fluid) change(id int64, by float64) {
	for i := range f.left {
		if f.left[i].id == id {
			f.left[i].left = max(f.left[i].left+by, 0)
			return
		}
	}
	if by > 0 {
		f.left = append(f.left, drop{id, by})
	}
}

// low returns the least that has not drained, at an instant to which the bucket was moved.
func (b *bucket) low(now Span) *fluid {
	low := &fluid{b.level[0].at, slices.Clone(b.level[0].left)}
	low.drain(b.zone.rate(), now.Hi)
	return low
}

// end returns when the window ends that is open at an instant.
func (b *bucket) end() Span {
	if b.zone.byClock() {
		return edge(b.zone, b.start.Lo)
	}
	return b.start.plus(b.zone.Window)
}

// byClock reports whether windows begin at multiples of their length, or with a day or month.
func (z *Zone) byClock() bool { return z.Align != "" || z.Algorithm == SlidingWindow }

// edge returns the end of the window on the clock in which an instant is.
func edge(z *Zone, at int64) Span {
	if z.Algorithm == SlidingWindow || z.Align == "aligned" {
		w := z.Window.Microseconds()
		return Span{(at/w + 1) * w, (at/w + 1) * w}
	}
	unit, in := z.calendar()
	t := time.UnixMicro(at).In(in)
	next := time.Date(t.Year(), t.Month()+1, 1, 0, 0, 0, 0, in)
	if unit == "day" {
		next = time.Date(t.Year(), t.Month(), t.Day()+1, 0, 0, 0, 0, in)
	}
	return Span{next.UnixMicro(), next.UnixMicro()}
}

// hasWindows reports whether what counts depends on the window in which it was spent.
func (z *Zone) hasWindows() bool { return z.Algorithm == FixedWindow || z.Algorithm == SlidingWindow }

// pass moves the bucket on to an instant. It returns false if it cannot tell in which window that is.
func (b *bucket) pass(now Span) bool {
	if b.penalty != (Span{}) {
		switch {
		case b.penalty.Hi+margin <= now.Lo:
			b.penalty = Span{}
		case b.penalty.Lo-margin <= now.Hi:
			return false
		}
	}
	if b.zone.Algorithm == GCRA {
		b.level[0].drain(b.zone.rate(), now.Lo)
		b.level[1].drain(b.zone.rate(), now.Lo)
	}
	if b.zone.byClock() && edge(b.zone, now.Lo-margin) != edge(b.zone, now.Hi+margin) {
		return false
	}
	for b.open && b.zone.hasWindows() {
		end := b.end()
		switch {
		case now.Hi+margin < end.Lo:
			return true
		case now.Lo < end.Hi+margin:
			return false
		}
		b.window++
		if b.start = end; b.zone.Algorithm == FixedWindow || end.plus(b.zone.Window).Lo <= now.Lo {
			b.open, b.window = false, b.window+1
		}
	}
	return true
}

// margin keeps calls away from ends, in microseconds, because clocks are read with some error.
const margin = 20_000

// begin opens a window, which a check does as well.
func (b *bucket) begin(now Span) {
	if b.open || !b.zone.hasWindows() {
		return
	}
	b.open, b.start, b.window = true, now, b.window+1
	switch {
	case b.zone.Algorithm == SlidingWindow:
		b.start = edge(b.zone, now.Lo).plus(-b.zone.Window)
	case b.zone.byClock():
		b.start = Span{now.Lo, now.Lo}
	}
}

// spent returns what counts, at an instant to which the bucket was moved.
func (b *bucket) spent(now Span) (n Count) {
	z := b.zone
	switch z.Algorithm {
	case GCRA:
		low := b.low(now)
		return Count{int64(math.Ceil(low.total() - rounding)), int64(math.Ceil(b.level[1].total() - rounding))}
	case Concurrency:
		for _, h := range b.running {
			n = n.plus(h.cost)
		}
		return n
	}
	previous := int64(0)
	for _, s := range b.spends {
		switch {
		case z.Algorithm == SlidingLog:
			if ends := s.at.plus(z.Window); ends.Hi > now.Lo {
				n.Hi += s.cost
				if ends.Lo > now.Hi {
					n.Lo += s.cost
				}
			}
		case s.window == b.window:
			n = n.plus(s.cost)
		case s.window == b.window-1 && z.Algorithm == SlidingWindow:
			previous += s.cost
		}
	}
	return Count{n.Lo + b.fading(previous, now.Hi-b.start.Lo, -1), n.Hi + b.fading(previous, now.Lo-b.start.Hi, 1)}
}

// rounding is more than what floating point makes of an event, and less than what can be seen of it.
const rounding = 1e-6

// fading returns what counts of the previous window, whose overlap is rounded by as many steps, upwards.
func (b *bucket) fading(previous, elapsed, steps int64) int64 {
	overlap := min(1-float64(elapsed)/float64(b.zone.Window.Microseconds())+float64(steps)/(1<<20), 1)
	return int64(math.Ceil(float64(previous)*max(overlap, 0) - rounding))
}

// add spends a cost.
func (b *bucket) add(id, cost int64, now Span) {
	b.begin(now)
	if cost == 0 {
		return
	}
	b.spends = append(b.spends, spend{id, cost, now, b.window})
	b.pour(id, cost, now)
}

// refund takes back a part of a spend that still counts.
func (b *bucket) refund(id, cost int64, now Span) {
	for i := range b.spends {
		if b.spends[i].id == id {
			b.spends[i].cost -= cost
			b.pour(id, -cost, now)
		}
	}
}

// pour adds to a spend of gcra, or takes from it what has not drained: the later, the less.
func (b *bucket) pour(id, cost int64, now Span) {
	if b.zone.Algorithm != GCRA {
		return
	}
	for i, at := range [...]int64{now.Lo, now.Hi} {
		b.level[i].drain(b.zone.rate(), at)
		b.level[i].change(id, float64(cost))
	}
}

// still returns what still counts of a spend.
func (b *bucket) still(id int64, now Span) (n Count) {
	for _, s := range b.spends {
		if s.id != id {
			continue
		}
		ends := s.at.plus(b.zone.Window)
		isLo, isHi := ends.Lo > now.Hi, ends.Hi > now.Lo
		switch b.zone.Algorithm {
		case FixedWindow:
			isLo, isHi = s.window == b.window, s.window == b.window
		case SlidingWindow:
			isLo, isHi = s.window == b.window, s.window >= b.window-1
		case GCRA:
			const drained = 1e-3 // of an event: hardly anything
			isLo, isHi = b.low(now).of(id) > float64(s.cost)-drained, b.level[1].total() > 0
		}
		if isHi {
			n.Hi = s.cost
		}
		if isLo {
			n.Lo = s.cost
		}
	}
	return n
}

// empty forgets what was spent.
func (b *bucket) empty() {
	*b = bucket{zone: b.zone, running: b.running, window: b.window + 2}
}

// fits returns when a cost will fit beside what is spent, if nothing else is spent.
func (b *bucket) fits(cost, limit int64, now Span) Span {
	z := b.zone
	switch z.Algorithm {
	case FixedWindow:
		return b.end()
	case GCRA:
		low := b.low(now)
		wait := func(level float64) int64 { return int64((level + float64(cost-limit)) / z.rate()) }
		return Span{now.Lo + max(wait(low.total()), 0), now.Hi + max(wait(b.level[1].total()), 0)}
	case SlidingLog:
		left, at := b.spent(now).Hi, now
		for _, s := range b.spends {
			if ends := s.at.plus(z.Window); left+cost > limit && ends.Hi > now.Lo {
				left, at = left-s.cost, ends
			}
		}
		return at
	}
	current, previous := int64(0), int64(0)
	for _, s := range b.spends {
		switch s.window {
		case b.window:
			current += s.cost
		case b.window - 1:
			previous += s.cost
		}
	}
	// share is the part of a window after which a count has faded to what is left.
	share := func(from Span, count, left int64) Span {
		d := time.Duration(float64(z.Window) * max(1-float64(left)/float64(count), 0))
		step := z.Window>>20 + time.Microsecond
		return Span{from.plus(d - step).Lo, from.plus(d + step).Hi}
	}
	if left := limit - cost - current; left >= 0 && previous > 0 {
		return share(b.start, previous, left)
	}
	return share(b.end(), current, limit-cost)
}

// gone returns when nothing counts any more once a request has spent something. With gcra, what it
// spends drains after that.
func (b *bucket) gone(now Span) Span {
	z := b.zone
	switch {
	case z.Algorithm == SlidingWindow:
		return edge(z, now.Lo).plus(z.Window)
	case z.Algorithm == GCRA:
		low := b.low(now)
		drains := func(level float64) int64 { return int64(level / z.rate()) }
		return Span{now.Lo + drains(low.total()), now.Hi + drains(b.level[1].total())}
	case z.Algorithm == FixedWindow && b.open:
		return b.end()
	case z.byClock():
		return edge(z, now.Lo)
	}
	return now.plus(z.Window)
}
