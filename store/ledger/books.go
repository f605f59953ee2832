package ledger

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	pageBits  = 8
	pageCount = 1 << pageBits
	// sweepSize is how many entries an insertion looks at, to remove those that
	// say nothing any more. Above 1, such entries become fewer.
	sweepSize = 2
	// evictSize is how many entries of a page are looked at for one to evict.
	evictSize = 32
)

// Books are the state that views share, and that outlives them.
type Books struct {
	seed   maphash.Seed
	limits identity.Limits
	clock  func() time.Time
	start  time.Time
	count  atomic.Int64
	// owing is how many entries have charges that are on their way or wait, and how
	// many refunds are on their way.
	owing atomic.Int64
	pages [pageCount]page

	// latest is the latest view whose config runs, or nil.
	latest atomic.Pointer[Ledger]

	mu sync.Mutex
	// attached is how many views there have been.
	attached int64
	// views are in use, in the order in which they came.
	views []*Ledger
	// retryQueues hold, by shard, the entries whose charges wait for it, those
	// first that wait longest. While there is one, a goroutine tries them. Without
	// a view all are empty.
	retryQueues map[string][]*entry
	// reserved are the entries that hold what was taken in advance.
	reserved map[*entry]bool
}

// page is a part of the books with a lock of its own.
type page struct {
	mu      sync.Mutex
	entries map[identity.ID]*entry
	// ring has the same entries, for a hand that goes round.
	ring   []*entry
	hand   int
	counts counts
}

// NewBooks returns empty books. The clock is for durations; nil means time.Now.
func NewBooks(clock func() time.Time) *Books {
	if clock == nil {
		clock = time.Now
	}
	b := &Books{seed: maphash.MakeSeed(), clock: clock, start: clock(), retryQueues: map[string][]*entry{}, reserved: map[*entry]bool{}}
	for i := range b.pages {
		b.pages[i].entries = map[identity.ID]*entry{}
	}
	return b
}

// Len is how many buckets are remembered.
func (b *Books) Len() int { return int(b.count.Load()) }

// now is how long the books exist, in microseconds. It begins at 1, so that 0
// is before everything.
func (b *Books) now() int64 { return b.clock().Sub(b.start).Microseconds() + 1 }

func (b *Books) attach(l *Ledger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attached++
	l.serial = b.attached
	b.views = append(b.views, l)
}

// current is the view through which charges are delivered that waited: the
// latest whose config runs or, if there is none, the oldest, for the others may
// be of a config that is yet to be rejected. Without a view it is nil.
func (b *Books) current() *Ledger {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.currentLocked()
}

// currentLocked is current, with mu held.
func (b *Books) currentLocked() *Ledger {
	if l := b.latest.Load(); l != nil || len(b.views) == 0 {
		return l
	}
	for _, l := range slices.Backward(b.views) {
		if l.runs {
			return l
		}
	}
	return b.views[0]
}

// writer returns the view through which l changes buckets without being waited
// for: the latest whose config runs, unless l is of one that comes after that.
// Requests outlast their config, and the shards of the next one may have taken over
// their buckets.
func (l *Ledger) writer() *Ledger {
	if latest := l.books.latest.Load(); latest != nil && (latest.serial > l.serial || l.stopped.Load()) {
		return latest
	}
	return l
}

// Run says that the view's config runs. What waits is delivered through it from
// now on, although requests of an older one may go on for long.
func (l *Ledger) Run() {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	l.runs = true
	l.books.noteLatest()
}

// Stop says that the view's config has ended, or was rejected after it had begun,
// for good. Another view delivers what waits if it runs; requests of the config may
// go on.
func (l *Ledger) Stop() {
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	l.runs = false
	l.stopped.Store(true)
	l.books.noteLatest()
}

// Leave ends the view. What waits is delivered through the other views; if there
// is none, it is given up and reported. [Ledger.Flush] avoids that. The store must
// not be closed before.
func (l *Ledger) Leave() {
	l.leave(func(other *Ledger) bool { return other == l })
}

// End delivers what waits, at the end of the process, until ctx ends, although
// requests may still use views. The rest is given up and reported, and so is what
// cannot be delivered from then on.
func (b *Books) End(ctx context.Context) {
	if l := b.current(); l != nil {
		l.Flush(ctx)
		l.leave(func(*Ledger) bool { return true })
	}
}

// leave ends some views, l among them.
func (l *Ledger) leave(ends func(*Ledger) bool) {
	l.membership.leave()
	b := l.books
	// An entry begins to wait with its page locked: none does in between.
	for i := range b.pages {
		b.pages[i].mu.Lock()
	}
	loses := b.detach(ends) && b.owing.Load() > 0
	for i := range b.pages {
		if loses {
			l.giveUpAll(&b.pages[i])
		}
		b.pages[i].mu.Unlock()
	}
}

// detach removes views, and reports whether none is left.
func (b *Books) detach(ends func(*Ledger) bool) (last bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.views = slices.DeleteFunc(b.views, ends)
	b.noteLatest()
	if last = len(b.views) == 0; last {
		for owner := range b.retryQueues {
			// The goroutine that tries them finds that and ends.
			b.retryQueues[owner] = nil
		}
	}
	return last
}

// noteLatest sets latest. mu is held.
func (b *Books) noteLatest() {
	for _, l := range slices.Backward(b.views) {
		if l.runs {
			b.latest.Store(l)
			return
		}
	}
	b.latest.Store(nil)
}

func (b *Books) pageOf(id identity.ID) *page {
	return &b.pages[placeOf(b.seed, id)]
}

// placeOf spreads buckets over pages.
func placeOf(seed maphash.Seed, id identity.ID) uint64 {
	return id.Hash(seed) >> (64 - pageBits)
}

// find returns the bucket's entry, whose page is then locked, or nil.
func (l *Ledger) find(r *store.Request) *entry {
	id := identity.New(l.books.limits.Number(r.Limit), r.ClientKey)
	p := l.books.pageOf(id)
	p.mu.Lock()
	e, ok := p.entries[id]
	if !ok {
		p.mu.Unlock()
		return nil
	}
	return e
}

// enter returns the bucket's entry, which is made if there is none. Its page is
// then locked.
func (l *Ledger) enter(r *store.Request, now int64) *entry {
	id := identity.New(l.books.limits.Number(r.Limit), r.ClientKey)
	p := l.books.pageOf(id)
	p.mu.Lock()
	if e, ok := p.entries[id]; ok {
		return e
	}
	l.books.sweep(p, now)
	if l.books.count.Load() >= l.maxBuckets {
		l.evict(p)
	}
	e := &entry{id: id, page: p, place: len(p.ring), until: now}
	p.entries[id] = e
	p.ring = append(p.ring, e)
	l.books.count.Add(1)
	return e
}

// sweep removes entries that say nothing any more. p is locked.
func (b *Books) sweep(p *page, now int64) {
	for range sweepSize {
		if e := p.next(); e != nil && e.isIdle() && e.until <= now {
			b.remove(p, e)
		}
	}
}

// evict makes room in p, which is locked: by forgetting what is known of a
// bucket or, if there is none of which no more than that would be forgotten, by
// giving up charges that wait.
func (l *Ledger) evict(p *page) {
	var owing *entry
	for range min(evictSize, len(p.ring)) {
		e := p.next()
		if e.isIdle() {
			l.books.remove(p, e)
			return
		}
		if owing == nil && e.mayBeGivenUp() {
			owing = e
		}
	}
	if owing != nil {
		l.giveUp(owing, errNoRoom)
		l.books.remove(p, owing)
	}
}

// next is the entry that the hand comes to, or nil if there is none.
func (p *page) next() *entry {
	if len(p.ring) == 0 {
		return nil
	}
	p.hand = (p.hand + 1) % len(p.ring)
	return p.ring[p.hand]
}

func (b *Books) remove(p *page, e *entry) {
	e.noteUnsure(false)
	last := len(p.ring) - 1
	p.ring[e.place] = p.ring[last]
	p.ring[e.place].place = e.place
	p.ring[last] = nil
	p.ring = p.ring[:last]
	delete(p.entries, e.id)
	b.count.Add(-1)
}

// Figures tell how the books are, and what was done with them. Those that count
// what happened begin with the books.
type Figures struct {
	// Buckets are those that are remembered.
	Buckets int64
	// InFlight is the cost of the requests that were admitted and are not
	// settled.
	InFlight int64
	// Unsent is how many requests' charges wait to be sent.
	Unsent int64
	// Uncertain is of how many buckets something may have been spent or not,
	// which the primary has not been asked yet.
	Uncertain int64
	// LocalRefusals are requests that were refused without a call,
	// UnaskedAdmissions those that were admitted without a check.
	LocalRefusals, UnaskedAdmissions int64
	// Fetches are the batches that the store was asked for. TokensFetched are the
	// events that it gave, TokensReturned those that went back to it, and
	// TokensExpired those that were lost with their window.
	Fetches, TokensFetched, TokensReturned, TokensExpired int64
}

// counts are those of one page. Its lock guards them.
type counts struct {
	inFlight, unsent, unsure            int64
	refusals, admissions                int64
	fetches, fetched, returned, expired int64
}

// Figures adds up those of all pages.
func (b *Books) Figures() Figures {
	f := Figures{Buckets: b.count.Load()}
	now := b.now()
	for i := range b.pages {
		p := &b.pages[i]
		p.mu.Lock()
		p.settleUnsure(now)
		c := &p.counts
		f.InFlight += c.inFlight
		f.Unsent += c.unsent
		f.Uncertain += c.unsure
		f.LocalRefusals += c.refusals
		f.UnaskedAdmissions += c.admissions
		f.Fetches += c.fetches
		f.TokensFetched += c.fetched
		f.TokensReturned += c.returned
		f.TokensExpired += c.expired
		p.mu.Unlock()
	}
	return f
}

// Figures are those of the books.
func (l *Ledger) Figures() Figures { return l.books.Figures() }

// settleUnsure ends the doubt about what no longer counts. p is locked.
func (p *page) settleUnsure(now int64) {
	if p.counts.unsure == 0 {
		return
	}
	for _, e := range p.ring {
		if e.unsure && e.until <= now {
			e.noteUnsure(false)
		}
	}
}

// noteUnsure notes whether something may have been spent or not.
func (e *entry) noteUnsure(unsure bool) {
	switch {
	case e.unsure == unsure:
	case unsure:
		e.page.counts.unsure++
	default:
		e.page.counts.unsure--
	}
	e.unsure = unsure
}

// hold adds to what is in flight.
func (e *entry) hold(cost int64) {
	e.flight += cost
	e.page.counts.inFlight += cost
}

// setWaiting makes a charge wait, or none.
func (e *entry) setWaiting(w *mergedCharge) {
	d := e.pending
	if d.waiting != nil {
		e.page.counts.unsent -= d.waiting.requests
	}
	if d.waiting = w; w != nil {
		e.page.counts.unsent += w.requests
	}
}

// addWaiting adds to the charge that waits.
func (e *entry) addWaiting(cost, requests, expires int64) {
	e.pending.waiting.add(cost, requests, expires)
	e.page.counts.unsent += requests
}
