package algorithm

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// member is one request: what it cost, and when.
type member struct {
	at   int64
	id   string
	cost int64
	// end is what the members cost up to this one, from any place on.
	end int64
}

// members are sorted by their instants.
type members []member

// mostUsed is the highest count of members: more than any request's limit.
const mostUsed = store.MaxMembers + 1

// spentBy is what members count of a cost.
func spentBy(r *store.Request) int64 { return min(r.Cost, store.MaxMembers) }

// put adds a request, or moves it.
func (l *members) put(at int64, id string, cost int64) {
	l.remove(id, math.MaxInt64)
	i := l.placeAfter(at)
	*l = slices.Insert(*l, i, member{at: at, id: id, cost: cost})
	l.sum(i)
}

// remove makes a request cost less, or removes it.
func (l *members) remove(id string, cost int64) {
	for i := len(*l) - 1; i >= 0; i-- {
		m := &(*l)[i]
		if m.id != id {
			continue
		}
		if m.cost -= cost; m.cost <= 0 {
			*l = slices.Delete(*l, i, i+1)
		}
		l.sum(i)
		return
	}
}

// sum sets the sums of the members from a place on.
func (l members) sum(from int) {
	end := int64(0)
	if from > 0 {
		end = l[from-1].end
	}
	for i := from; i < len(l); i++ {
		end += l[i].cost
		l[i].end = end
	}
}

func (l members) placeAfter(at int64) int {
	return sort.Search(len(l), func(i int) bool { return l[i].at > at })
}

func (l members) after(at int64) members { return l[l.placeAfter(at):] }

// keep removes all but the last members.
func (l *members) keep(last members) { *l = slices.Delete(*l, 0, len(*l)-len(last)) }

// since is what the members from a place on cost.
func (l members) since(i int) int64 {
	if i >= len(l) {
		return 0
	}
	return l[len(l)-1].end - l[i].end + l[i].cost
}

func (l members) used() int64 { return min(l.since(0), mostUsed) }

// beyond returns the newest members that cost more than room, which all together do.
func (l members) beyond(room int64) members {
	return l[sort.Search(len(l), func(i int) bool { return l.since(i) <= room })-1:]
}

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

// SlidingLog is the content of a bucket of [store.SlidingLog].
type SlidingLog struct {
	noWindow
	noPenalty
	members members
}

var slidingLog = Traits{
	Aging: OneByOne, NeedsID: true, Unbatched: oneByOne, MostEvents: store.MaxMembers, MostWords: fmt.Sprintf("%d with sliding_log", store.MaxMembers),
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

// Charge implements [Bucket]. It forgets what has expired, and what no limit depends on,
// whatever the limit of the request is.
func (b *SlidingLog) Charge(r *store.Request, now int64) {
	if r.Cost == 0 {
		return
	}
	window := r.Limit.Window.Microseconds()
	end := endOf(r, now, window)
	if end <= now {
		return
	}
	b.members.keep(b.live(r, now))
	b.members.put(end-window, r.ID, spentBy(r))
	if b.members.used() == mostUsed {
		b.members.keep(b.members.beyond(store.MaxMembers))
	}
}

// Take implements [Bucket].
func (b *SlidingLog) Take(r *store.Request, now int64) bool {
	if !fitsIn(r, b.live(r, now).used()) {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket].
func (b *SlidingLog) Refund(r *store.Request, _ int64) {
	if r.Cost > 0 {
		b.members.remove(r.ID, spentBy(r))
	}
}

// View implements [Bucket].
func (b *SlidingLog) View(r *store.Request, now int64, spent bool) store.State {
	live := b.live(r, now)
	l := logSummary{used: live.used(), newest: live.newest(), other: live.without(r.ID).newest()}
	room := r.Capacity()
	if !spent {
		room -= r.Need()
	}
	if l.used > max(room, 0) {
		l.blocking = live.beyond(room)[0].at
	}
	return l.view(r, now, spent)
}

func (l logSummary) view(r *store.Request, now int64, spent bool) store.State {
	window := r.Limit.Window.Microseconds()
	// A reply cannot be true that says more of the future.
	latest := now + Grace.Microseconds()
	l.newest, l.other, l.blocking = min(l.newest, latest), min(l.other, latest), min(l.blocking, latest)
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

// Share implements [Bucket].
func (b *SlidingLog) Share(limit *store.Limit, capacity, now int64) float64 {
	return shareOf(b.members.after(now-limit.Window.Microseconds()).used(), capacity)
}

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
	Aging: OneByOne, Lease: true, NeedsID: true, Unbatched: oneByOne, MostEvents: store.MaxMembers, MostWords: fmt.Sprintf("%d with concurrency", store.MaxMembers),
	empty: func() Bucket { return new(Concurrency) },
	view: func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State {
		r.Ahead += ahead
		return viewLeases(c[0], &r, now, spent)
	},
}

// Charge implements [Bucket]. It renews existing leases.
func (b *Concurrency) Charge(r *store.Request, now int64) {
	b.prune(now)
	if r.Cost > 0 {
		b.leases.put(now+r.Limit.Window.Microseconds(), r.ID, spentBy(r))
	}
}

// Take implements [Bucket].
func (b *Concurrency) Take(r *store.Request, now int64) bool {
	b.prune(now)
	if !fitsIn(r, b.leases.used()) {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket]. It ends the leases of the request.
func (b *Concurrency) Refund(r *store.Request, now int64) {
	b.prune(now)
	if r.Cost > 0 {
		b.leases.remove(r.ID, spentBy(r))
	}
}

func (b *Concurrency) prune(now int64) { b.leases.keep(b.leases.after(now)) }

// View implements [Bucket].
func (b *Concurrency) View(r *store.Request, now int64, spent bool) store.State {
	return viewLeases(b.leases.after(now).used(), r, now, spent)
}

func viewLeases(used int64, r *store.Request, now int64, spent bool) store.State {
	s := newState(r, now, used, spent)
	wait(&s, r, now+slotRetry.Microseconds(), spent)
	return s
}

// Expiry implements [Bucket].
func (b *Concurrency) Expiry(*store.Limit) int64 { return b.leases.newest() }

// Share implements [Bucket]. A running request needs its lease.
func (b *Concurrency) Share(_ *store.Limit, _, now int64) float64 {
	return float64(b.leases.after(now).used())
}
