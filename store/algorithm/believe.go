package algorithm

import (
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

func (p *penalty) believe(r *store.Request, now int64) {
	if r.Penalty > 0 && !Believes(p.Penalty, now, r.Penalty) {
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
// the busy time began at an instant that has passed.
func (b *GCRA) Believe(r *store.Request, now int64) {
	if !Believes(b.Busy, now, 0) {
		*b = GCRA{}
	}
	b.believe(r, now)
}

// Believe implements [Bucket].
func (b *SlidingLog) Believe(_ *store.Request, now int64) { b.members.believe(now, 0) }

// Believe implements [Bucket].
func (b *Concurrency) Believe(r *store.Request, now int64) { b.leases.believe(now, r.Limit.Window) }

// believe removes the members whose instants cannot be.
func (l *members) believe(now int64, span time.Duration) {
	*l = slices.Delete(*l, sort.Search(len(*l), func(i int) bool { return !Believes((*l)[i].at, now, span) }), len(*l))
}
