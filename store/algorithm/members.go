package algorithm

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// member is a single event: the part-th of the request id.
type member struct {
	at   int64
	id   string
	part int64
}

func (m member) compare(other member) int {
	return cmp.Or(cmp.Compare(m.at, other.at), cmp.Compare(m.id, other.id), cmp.Compare(m.part, other.part))
}

// members are sorted.
type members []member

// put adds the first n members of a request, or moves existing ones.
func (l *members) put(at int64, id string, n int64) {
	l.remove(id, n)
	for part := range n {
		m := member{at, id, part}
		i, _ := slices.BinarySearchFunc(*l, m, member.compare)
		*l = slices.Insert(*l, i, m)
	}
}

// remove removes the first n members of a request.
func (l *members) remove(id string, n int64) {
	*l = slices.DeleteFunc(*l, func(m member) bool { return m.id == id && m.part < n })
}

func (l members) after(at int64) members {
	return l[sort.Search(len(l), func(i int) bool { return l[i].at > at }):]
}

// keep removes all but the last members.
func (l *members) keep(last members) { *l = slices.Delete(*l, 0, len(*l)-len(last)) }

func (l members) newest() int64 {
	if len(l) == 0 {
		return 0
	}
	return l[len(l)-1].at
}

func (l members) without(id string) members {
	for len(l) > 0 && l[len(l)-1].id == id {
		l = l[:len(l)-1]
	}
	return l
}

// Kept bounds the members of a request, or of a log: one more than fit, so that an
// overflow shows.
func Kept(r *store.Request) int64 { return r.Events + 1 }

func count(r *store.Request) int64 { return min(r.Cost, Kept(r), store.MaxMembers) }

// SlidingLog is the content of a bucket of [store.SlidingLog].
type SlidingLog struct {
	noWindow
	noPenalty
	members members
}

var slidingLog = Traits{
	NeedsID: true, Unbatched: oneByOne, MostEvents: store.MaxMembers, MostWords: fmt.Sprintf("%d with sliding_log", store.MaxMembers),
	empty: func() Bucket { return new(SlidingLog) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return logSummary{used: c[0], newest: c[1], other: c[2], blocking: c[3]}.view(&r, now, spent)
	},
}

// oneByOne is why members are not taken in advance.
const oneByOne = "which keeps events one by one"

// logSummary is what the state of a request depends on: the number of events, and
// the instants, or 0, of the newest event, of the newest one of another request, and
// of the newest one that has to expire for the request to fit.
type logSummary struct{ used, newest, other, blocking int64 }

func (b *SlidingLog) live(r *store.Request, now int64) members {
	return b.members.after(now - r.Limit.Window.Microseconds())
}

// Charge implements [Bucket]. It keeps the newest events only: older ones decide
// nothing.
func (b *SlidingLog) Charge(r *store.Request, now int64) {
	if r.Cost == 0 {
		return
	}
	b.members.keep(b.live(r, now))
	b.members.put(now, r.ID, count(r))
	if excess := int64(len(b.members)) - Kept(r); excess > 0 {
		b.members.keep(b.members[excess:])
	}
}

// Take implements [Bucket].
func (b *SlidingLog) Take(r *store.Request, now int64) bool {
	if int64(len(b.live(r, now)))+r.Need() > r.Capacity() {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket].
func (b *SlidingLog) Refund(r *store.Request, _ int64) { b.members.remove(r.ID, count(r)) }

// View implements [Bucket].
func (b *SlidingLog) View(r *store.Request, now int64, spent bool) store.State {
	live := b.live(r, now)
	l := logSummary{used: int64(len(live)), newest: live.newest(), other: live.without(r.ID).newest()}
	need := int64(0)
	if !spent {
		need = r.Need()
	}
	if excess := l.used + need - r.Capacity(); excess > 0 && l.used > 0 {
		l.blocking = live[min(excess, l.used)-1].at
	}
	return l.view(r, now, spent)
}

func (l logSummary) view(r *store.Request, now int64, spent bool) store.State {
	window := r.Limit.Window.Microseconds()
	s := newState(r, now, l.used, spent)
	s.Reset = logReset(l.newest, now, window)
	switch {
	case spent:
		s.ResetOtherwise = logReset(l.other, now, window)
	case r.Cost > 0:
		s.ResetOtherwise = logReset(max(l.newest, now), now, window)
	default:
		s.ResetOtherwise = s.Reset
	}
	wait(&s, r, max(l.blocking+window, add(now, othersTurn(r, l.used, spent))), spent)
	return s
}

func logReset(newest, now, window int64) int64 {
	if newest == 0 {
		return now
	}
	return newest + window
}

// Expiry implements [Bucket].
func (b *SlidingLog) Expiry(limit *store.Limit) int64 {
	return b.members.newest() + limit.Window.Microseconds()
}

// Weight implements [Bucket].
func (b *SlidingLog) Weight(*store.Limit) int64 { return int64(len(b.members)) }

// slotRetry is the time to wait for a slot: when one becomes free is unknown.
const slotRetry = time.Second

// Concurrency is the content of a bucket of [store.Concurrency].
type Concurrency struct {
	noWindow
	noPenalty
	// leases are at their instant of expiry.
	leases members
}

var concurrency = Traits{
	Lease: true, NeedsID: true, Unbatched: oneByOne, MostEvents: store.MaxMembers, MostWords: fmt.Sprintf("%d with concurrency", store.MaxMembers),
	empty: func() Bucket { return new(Concurrency) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return viewLeases(c[0], &r, now, spent)
	},
}

// Charge implements [Bucket]. It renews existing leases.
func (b *Concurrency) Charge(r *store.Request, now int64) {
	b.prune(now)
	b.leases.put(now+r.Limit.Window.Microseconds(), r.ID, count(r))
}

// Take implements [Bucket].
func (b *Concurrency) Take(r *store.Request, now int64) bool {
	b.prune(now)
	if int64(len(b.leases))+r.Need() > r.Capacity() {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. It ends the leases of the request.
func (b *Concurrency) Refund(r *store.Request, now int64) {
	b.prune(now)
	b.leases.remove(r.ID, count(r))
}

func (b *Concurrency) prune(now int64) { b.leases.keep(b.leases.after(now)) }

// View implements [Bucket].
func (b *Concurrency) View(r *store.Request, now int64, spent bool) store.State {
	return viewLeases(int64(len(b.leases.after(now))), r, now, spent)
}

func viewLeases(used int64, r *store.Request, now int64, spent bool) store.State {
	s := newState(r, now, used, spent)
	wait(&s, r, now+slotRetry.Microseconds(), spent)
	return s
}

// Expiry implements [Bucket].
func (b *Concurrency) Expiry(*store.Limit) int64 { return b.leases.newest() }

// Weight implements [Bucket].
func (b *Concurrency) Weight(*store.Limit) int64 { return int64(len(b.leases)) }
