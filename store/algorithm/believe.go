package algorithm

import (
	"math"
	"slices"
	"sort"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Grace is by how much the clocks that decide about one bucket, such as those of two
// servers that take over from each other, may differ without a stored instant being
// disbelieved. The scripts have the same number.
const Grace = 5 * time.Second

// Believes reports whether a stored instant can be true at now, if it was at most span
// ahead of the clock when it was stored. One that cannot was stored by a clock that was
// wrong for a while, and would refuse its client for as long.
func Believes(instant, now int64, span time.Duration) bool {
	return instant-now <= (span + Grace).Microseconds()
}

// othersPenalty is how long a penalty may last of another config, such as the one before a
// reload, or of another Caddy, for which a shorter one of the zone does not end it.
const othersPenalty = 24 * time.Hour

// LongestPenalty returns how long penalties that are believed last: as long as those of the
// zone, or a day if that is more; where r does not know that, as long as any may.
func LongestPenalty(r *store.Request) time.Duration {
	if r.Penalty == 0 {
		return store.MaxWindow
	}
	return max(r.Penalty, othersPenalty)
}

func (p *penalty) believe(r *store.Request, now int64) {
	if !Believes(p.Penalty, now, LongestPenalty(r)) {
		p.Penalty = 0
	}
}

// Believe implements [Bucket]. Nothing of a bucket is believed whose window cannot be.
func (b *FixedWindow) Believe(r *store.Request, now int64) {
	if !Believes(b.Reset, now, r.Limit.Window) {
		*b = FixedWindow{}
	}
	b.believe(r, now)
}

// Believe implements [Bucket].
func (b *SlidingWindow) Believe(r *store.Request, now int64) {
	if !Believes(b.Start, now, 0) {
		*b = SlidingWindow{}
	}
	b.believe(r, now)
}

// Believe implements [Bucket]. Costs above the capacity may take any time to drain, but
// the busy time began at an instant that has passed, and no more has to drain than was
// spent in it. Without a rate nothing counts. The rest is less than a microsecond.
func (b *GCRA) Believe(r *store.Request, now int64) {
	if !Believes(b.Busy, now, 0) {
		*b = GCRA{}
	}
	if b.Rest >= b.Events || b.Span == 0 || !Believes(b.TAT, now, b.spentSpan()) {
		*b = GCRA{penalty: b.penalty}
	}
	b.believe(r, now)
}

// spentSpan is how long what was spent in the busy time takes to drain.
func (b *GCRA) spentSpan() time.Duration {
	each := float64(float64(b.Span)/float64(b.Events)) * (1 + exactness)
	return micros(int64(min(math.Ceil(float64(float64(b.Spent)*each)), store.MaxInteger)))
}

// Believe implements [Bucket].
func (b *SlidingLog) Believe(_ *store.Request, now int64) { b.members.believe(now, 0) }

// Believe implements [Bucket].
func (b *Concurrency) Believe(r *store.Request, now int64) { b.leases.believe(now, r.Limit.Window) }

// believe removes the members whose instants cannot be.
func (l *members) believe(now int64, span time.Duration) {
	*l = slices.Delete(*l, sort.Search(len(*l), func(i int) bool { return !Believes((*l)[i].at, now, span) }), len(*l))
}
