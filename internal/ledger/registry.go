package ledger

import (
	"cmp"
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	stripeBits  = 8
	stripeCount = 1 << stripeBits
	// sweepSize is how many entries an insertion examines for expired ones.
	// Above 1, expired entries become fewer.
	sweepSize = 2
	// evictSize is how many entries of a stripe an eviction examines.
	evictSize = 32
)

// Registry is the state that views share. It outlives views.
type Registry struct {
	seed   maphash.Seed
	limits identity.Limits
	shards identity.Shards
	clock  func() time.Time
	start  time.Time
	count  atomic.Int64
	// owing counts the entries with pending charges and the refunds in flight.
	owing   atomic.Int64
	stripes [stripeCount]stripe
	// tick is when the delayed charges are sent next, or 0.
	tick atomic.Int64
	// delivery is how long charges commonly take until they are answered, in microseconds: a
	// moving average, or 0 before the first answer. Updates that coincide may get lost.
	delivery atomic.Int64
	// inUse counts the views. It changes with all stripes locked, or grows.
	inUse atomic.Int32

	// latest is the latest view whose config runs, or nil.
	latest atomic.Pointer[Ledger]

	mu sync.Mutex
	// attached counts the views there have ever been.
	attached int64
	// views are in use, oldest first.
	views []*Ledger
	// retryQueues hold, by shard, the entries whose charges the shard did not
	// execute, oldest first. A goroutine works on each queue for as long as it
	// is in the map. Without a view all queues are empty.
	retryQueues map[string]*retryQueue
	// reserved are the entries with tokens in their batch, or of which the store holds one.
	reserved map[*entry]bool

	repeats repeats
}

// stripe is a part of the registry with a lock of its own.
type stripe struct {
	mu       sync.Mutex
	registry *Registry
	entries  table
	// counts and gauges sum up those of the stripe; before are the gauges of the entry that is
	// locked, as they were then.
	counts         core.Counts
	gauges, before core.Gauges
	// delayed are entries whose charges wait for the next tick, and some whose charges
	// were sent before it.
	delayed []*entry
	// now is the instant of the last event.
	now int64
}

// entry is a bucket in the registry.
type entry struct {
	core.Bucket
	id     identity.ID
	stripe *stripe
	// asked is the limit of the last request that asked or, if none has, of the first other one.
	asked store.Asked
}

// acquire locks the entry's stripe for an event of the entry.
func (e *entry) acquire(m *core.Moment) {
	e.stripe.mu.Lock()
	e.begin(m)
}

// begin begins an event of the entry, whose stripe is locked. Its instant was read before the lock, and
// others may have overtaken it since: an event is no earlier than the one before it.
func (e *entry) begin(m *core.Moment) {
	m.Now = max(m.Now, e.stripe.now)
	e.stripe.now, e.stripe.before = m.Now, e.Gauges()
}

// release ends an event: it counts it, tells others what it brings about for them, and
// unlocks the stripe.
func (e *entry) release(m *core.Moment) {
	e.stripe.note(e, e.stripe.before, m)
	for i := range m.Turns {
		e.pass(&m.Turns[i])
	}
	m.Turns = nil
	e.stripe.mu.Unlock()
}

// note counts what an event has changed in an entry since its gauges were as before.
func (p *stripe) note(e *entry, before core.Gauges, m *core.Moment) {
	after := e.Gauges()
	p.gauges.InFlight += after.InFlight - before.InFlight
	p.gauges.Unsent += after.Unsent - before.Unsent
	p.gauges.Uncertain += after.Uncertain - before.Uncertain
	if d := after.Owing - before.Owing; d != 0 {
		p.registry.owing.Add(d)
	}
	if after.Reserves && !before.Reserves {
		p.registry.noteReserved(e)
	}
	p.counts.Add(m.Counts)
	m.Counts = core.Counts{}
}

// table holds entries by their identity: a hash table with open addressing. A map, with a
// slice beside it for sweeps, took 40 bytes more for each of 100,000 buckets, and 76 for
// each of a million.
type table struct {
	// slots are a power of two, or none. At most three quarters are in use and, unless
	// they are few, more than an eighth: a sweep passes over few empty ones, and memory
	// comes back after a flood.
	slots []*entry
	count int
	hand  int // goes round the slots for sweeps and evictions
}

const smallestTable = 8

// find returns the entry with an identity, or nil, and the slot in which it is or would be.
func (t *table) find(id identity.ID, hash uint64) (e *entry, slot int) {
	if len(t.slots) == 0 {
		return nil, 0
	}
	mask := len(t.slots) - 1
	for slot = int(hash) & mask; ; slot = (slot + 1) & mask {
		if e = t.slots[slot]; e == nil || e.id == id {
			return e, slot
		}
	}
}

// insert adds an entry whose identity is not in the table.
func (t *table) insert(e *entry, seed maphash.Seed) {
	if 4*(t.count+1) > 3*len(t.slots) {
		t.resize(max(smallestTable, 2*len(t.slots)), seed)
	}
	_, slot := t.find(e.id, e.id.Hash(seed))
	t.slots[slot] = e
	t.count++
}

// remove removes an entry that is in the table. Entries behind it move up, so that
// each is found from its own slot without a gap.
func (t *table) remove(e *entry, seed maphash.Seed) {
	mask := len(t.slots) - 1
	_, gap := t.find(e.id, e.id.Hash(seed))
	for slot := (gap + 1) & mask; t.slots[slot] != nil; slot = (slot + 1) & mask {
		own := int(t.slots[slot].id.Hash(seed)) & mask
		if (slot-own)&mask >= (slot-gap)&mask {
			t.slots[gap], gap = t.slots[slot], slot
		}
	}
	t.slots[gap] = nil
	t.count--
	if len(t.slots) > smallestTable && 8*t.count <= len(t.slots) {
		t.resize(len(t.slots)/2, seed)
	}
}

func (t *table) resize(slots int, seed maphash.Seed) {
	before := *t
	*t = table{slots: make([]*entry, slots)}
	for e := range before.all {
		t.insert(e, seed)
	}
}

// next returns the next entry in the round of sweeps, or nil if there is none.
func (t *table) next() *entry {
	for range t.slots {
		t.hand = (t.hand + 1) & (len(t.slots) - 1)
		if e := t.slots[t.hand]; e != nil {
			return e
		}
	}
	return nil
}

// all yields the entries. None may be inserted or removed meanwhile.
func (t *table) all(yield func(*entry) bool) {
	for _, e := range t.slots {
		if e != nil && !yield(e) {
			return
		}
	}
}

// NewRegistry returns an empty registry. The clock measures durations; nil means time.Now.
func NewRegistry(clock func() time.Time) *Registry {
	if clock == nil {
		clock = time.Now
	}
	b := &Registry{seed: maphash.MakeSeed(), clock: clock, start: clock(), retryQueues: map[string]*retryQueue{}, reserved: map[*entry]bool{}}
	for i := range b.stripes {
		b.stripes[i].registry = b
	}
	b.limits.Pause = identity.ReusePause
	b.limits.InUse = func(note func(number uint32)) {
		for i := range b.stripes {
			p := &b.stripes[i]
			p.mu.Lock()
			for e := range p.entries.all {
				note(e.id.Limit)
			}
			p.mu.Unlock()
		}
	}
	return b
}

// now is the age of the registry in microseconds. It begins at 1, so that 0 is
// before everything.
func (b *Registry) now() int64 { return b.clock().Sub(b.start).Microseconds() + 1 }

func (b *Registry) attach(l *Ledger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attached++
	l.serial = b.attached
	b.views = append(b.views, l)
	b.inUse.Add(1)
}

// current returns the view that delivers charges from the retry queues: the
// latest whose config runs or, without one, the oldest whose config ran or, without
// that, the oldest: others may yet be rejected. Without a view it is nil.
func (b *Registry) current() *Ledger {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.currentLocked()
}

func (b *Registry) currentLocked() *Ledger {
	if l := b.latest.Load(); l != nil || len(b.views) == 0 {
		return l
	}
	return b.views[max(slices.IndexFunc(b.views, func(l *Ledger) bool { return !l.isTrial() }), 0)]
}

// writer returns the view that makes the detached writes of l: the latest whose
// config runs, unless the config of l comes after it and may be rejected, or was.
// Requests outlast their config, and the next config may have moved their buckets
// to other shards.
func (l *Ledger) writer() *Ledger {
	if latest := l.registry.latest.Load(); latest != nil && (latest.serial > l.serial || l.stopped.Load()) {
		return latest
	}
	return l
}

// Run notes that the view's config runs, and will not be rejected any more. From
// now on the view delivers pending charges, although requests of an older config
// may still be served.
func (l *Ledger) Run() { l.note(&l.hasRun) }

// Stop notes that the view's config, which has run, has ended. Another view delivers
// pending charges if its config runs; requests of the stopped config may go on.
func (l *Ledger) Stop() { l.note(&l.stopped) }

func (l *Ledger) note(state *atomic.Bool) {
	l.registry.mu.Lock()
	defer l.registry.mu.Unlock()
	state.Store(true)
	l.registry.noteLatest()
}

// isTrial reports whether the view's config may yet be rejected, or was.
func (l *Ledger) isTrial() bool { return !l.hasRun.Load() && !l.stopped.Load() }

// senders are the views that send the charges waiting in buckets, where several configs add theirs up: the current
// view and, for shards that it lacks, the views on trial, the latest first.
type senders struct {
	current *Ledger
	trials  []*Ledger
}

func (b *Registry) senders() senders {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sendersLocked()
}

func (b *Registry) sendersLocked() senders {
	s := senders{current: b.currentLocked()}
	for _, l := range slices.Backward(b.views) {
		if l != s.current && l.isTrial() {
			s.trials = append(s.trials, l)
		}
	}
	return s
}

// of returns the view that sends the charges waiting in an entry. Without a view it is nil.
func (s *senders) of(e *entry) *Ledger {
	if len(s.trials) > 0 && !s.current.has(e) {
		for _, l := range s.trials {
			if l.has(e) {
				return l
			}
		}
	}
	return s.current
}

// sender returns the view that sends the charges waiting in an entry. It is another view than l if l is on trial and
// the other one has the shard.
func (l *Ledger) sender(e *entry) *Ledger {
	senders := l.registry.senders()
	return cmp.Or(senders.of(e), l)
}

// has reports whether the view's store keeps the bucket of an entry at the same shard.
func (l *Ledger) has(e *entry) bool {
	return e.id.Shard == 0 || slices.ContainsFunc(l.Owners(e.id.Key), func(owner string) bool { return l.number(owner) == e.id.Shard })
}

// number returns the number of a shard of the view. A shard of that name with other servers has another number, so
// that their counts and charges are not mixed.
func (l *Ledger) number(shard string) uint32 {
	return l.registry.shards.Number(shard, l.opts.Servers[shard])
}

// numberAt returns the number of the shard at a place, or 0 without one.
func (l *Ledger) numberAt(place *store.Place) uint32 {
	if place == nil {
		return 0
	}
	if n := l.registry.shards.Of(place); n > 0 {
		return n
	}
	return l.number(place.Shard)
}

// by returns entries by the view that sends their waiting charges. Without a view there are none.
func (s *senders) by(entries []*entry) map[*Ledger][]*entry {
	all := map[*Ledger][]*entry{}
	if s.current == nil {
		return all
	}
	if len(s.trials) == 0 {
		all[s.current] = entries
		return all
	}
	for _, e := range entries {
		l := s.of(e)
		all[l] = append(all[l], e)
	}
	return all
}

// Leave ends the view. The other views deliver pending charges; without another
// view the charges are given up and reported, which [Ledger.Flush] avoids. The
// store must still be open.
func (l *Ledger) Leave() {
	l.leave(func(other *Ledger) bool { return other == l })
}

// End delivers pending charges at the end of the process, until ctx ends, although
// requests may still use views. It gives up and reports the remaining charges, as
// well as later ones that the store does not execute.
func (b *Registry) End(ctx context.Context) {
	if l := b.current(); l != nil {
		l.Flush(ctx)
		l.leave(func(*Ledger) bool { return true })
	}
	b.giveUpRefunds()
}

// leave ends some views, l among them.
func (l *Ledger) leave(ends func(*Ledger) bool) {
	l.membership.end()
	l.membership.ended.Wait()
	b := l.registry
	// Entries are queued with their stripe locked, so none is queued in between.
	for i := range b.stripes {
		b.stripes[i].mu.Lock()
	}
	senders, isLast := b.detach(ends)
	senders.current = cmp.Or(senders.current, l)
	loses := isLast && b.owing.Load() > 0
	last := map[*Ledger]*outgoing{}
	for i := range b.stripes {
		if loses {
			senders.giveUpAll(&b.stripes[i], last)
		}
		b.stripes[i].mu.Unlock()
	}
	for through, out := range last {
		through.send(out)
	}
}

// giveUpAll sends the delayed charges of p, which is locked, and gives up the others.
func (s *senders) giveUpAll(p *stripe, last map[*Ledger]*outgoing) {
	m := s.current.moment()
	for e := range p.entries.all {
		before := e.Gauges()
		n := core.Next{}
		if e.IsDelayed() {
			n = e.Send(&m)
		} else {
			n = e.GiveUp(errEnded)
		}
		l := s.of(e)
		if last[l] == nil {
			last[l] = new(outgoing)
		}
		l.carry(e, &n, last[l])
		p.note(e, before, &m)
	}
}

// detach removes views. It returns the senders until then, and whether no view is left.
func (b *Registry) detach(ends func(*Ledger) bool) (before senders, last bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before = b.sendersLocked()
	b.views = slices.DeleteFunc(b.views, ends)
	b.inUse.Store(int32(len(b.views))) //nolint:gosec // a handful
	b.noteLatest()
	if last = len(b.views) == 0; last {
		for owner := range b.retryQueues {
			// The queue's goroutine finds it empty and ends.
			b.retryQueues[owner].entries = nil
		}
	}
	return before, last
}

// noteLatest sets latest. mu is held.
func (b *Registry) noteLatest() {
	var latest *Ledger
	for _, l := range b.views {
		if l.hasRun.Load() && !l.stopped.Load() {
			latest = l
		}
	}
	b.latest.Store(latest)
}

// stripeOf returns the number of the stripe of a bucket whose identity has this hash.
func stripeOf(hash uint64) uint64 { return hash >> (64 - stripeBits) }

// moment is when an event happens that the view drives.
func (l *Ledger) moment() core.Moment {
	b := l.registry
	m := core.Moment{Now: b.now(), Trust: l.trust, Delivery: b.delivery.Load()}
	if b.inUse.Load() > 0 {
		// Otherwise no tick is to come.
		m.Delay = l.opts.ChargeDelay.Microseconds()
	}
	return m
}

// look returns the bucket's entry, whose stripe is locked, or nil.
func (l *Ledger) look(r *store.Request) *entry {
	e, p, _ := l.lock(r, false)
	if e == nil {
		p.mu.Unlock()
	}
	return e
}

// find is look, and begins an event of the bucket.
func (l *Ledger) find(r *store.Request, m *core.Moment) *entry {
	e := l.look(r)
	if e != nil {
		e.begin(m)
	}
	return e
}

// lock locks the bucket's stripe, and returns the bucket's entry, or nil, and its identity. An entry is
// only inserted if inserts is set.
func (l *Ledger) lock(r *store.Request, inserts bool) (*entry, *stripe, identity.ID) {
	for {
		limit := l.registry.limits.Of(r.Limit, inserts)
		id := identity.ID{Limit: limit.Number, Shard: l.numberAt(r.At), Key: r.ClientKey}
		hash := id.Hash(l.registry.seed)
		p := &l.registry.stripes[stripeOf(hash)]
		p.mu.Lock()
		if !limit.HasEnded() {
			e, _ := p.entries.find(id, hash)
			return e, p, id
		}
		p.mu.Unlock()
	}
}

// enter is find, and inserts a missing entry.
func (l *Ledger) enter(r *store.Request, m *core.Moment) *entry {
	e, p, id := l.lock(r, true)
	if e == nil {
		l.registry.sweep(p, m)
		if l.registry.count.Load() >= l.mostBuckets() {
			l.evict(p, m)
		}
		e = &entry{id: id, stripe: p, Bucket: core.New(l.registry.start.UnixMicro()-1, m)}
		p.entries.insert(e, l.registry.seed)
		l.registry.count.Add(1)
	}
	if e.asked == (store.Asked{}) {
		e.asked.Note(r)
	}
	e.begin(m)
	return e
}

// mostBuckets bounds the buckets: a config that may be rejected evicts none of others.
func (l *Ledger) mostBuckets() int64 {
	if latest := l.registry.latest.Load(); latest != nil {
		l = latest
	}
	return int64(l.opts.MaxBuckets)
}

// findFor and enterFor are find and enter for a request of a client: operators are shown its limit,
// whatever the answer.
func (l *Ledger) findFor(r *store.Request, m *core.Moment) *entry {
	e := l.find(r, m)
	if e != nil {
		e.asked.Note(r)
	}
	return e
}

func (l *Ledger) enterFor(r *store.Request, m *core.Moment) *entry {
	e := l.enter(r, m)
	e.asked.Note(r)
	return e
}

// sweep removes expired entries. p is locked.
func (b *Registry) sweep(p *stripe, m *core.Moment) {
	for range sweepSize {
		if e := p.entries.next(); e != nil && e.Worth(m) == core.Expired {
			b.remove(p, e)
		}
	}
}

// evict makes room in p, which is locked: it removes the entry of least worth of some, and
// gives up its charges.
func (l *Ledger) evict(p *stripe, m *core.Moment) {
	var least *entry
	worth := core.InUse
	for n := min(evictSize, p.entries.count); n > 0 && worth > core.Idle; n-- {
		e := p.entries.next()
		if w := e.Worth(m); w < worth {
			least, worth = e, w
		}
	}
	if least == nil {
		return
	}
	before := least.Gauges()
	if n := least.GiveUp(errNoRoom); n.Lost > 0 {
		l.lose(&n)
	}
	p.note(least, before, m)
	l.registry.remove(p, least)
}

// remove removes an entry that is not in use.
func (b *Registry) remove(p *stripe, e *entry) {
	p.gauges.Uncertain -= e.Gauges().Uncertain
	p.entries.remove(e, b.seed)
	b.count.Add(-1)
}

// Figures describe the registry. Counts of events begin with the registry.
type Figures struct {
	// Buckets is the number of buckets in the registry.
	Buckets int64
	// InFlight is the cost of the requests that were admitted and are not
	// settled.
	InFlight int64
	// Unsent is the number of requests whose charges are not sent yet, apart from those
	// that wait for the next tick.
	Unsent int64
	// Uncertain is the number of buckets with a charge of unknown outcome, which
	// the primary has not cleared up yet.
	Uncertain int64
	core.Counts
}

// Figures sums up the figures of all stripes.
func (b *Registry) Figures() Figures {
	f := Figures{Buckets: b.count.Load()}
	m := core.Moment{Now: b.now()}
	for i := range b.stripes {
		p := &b.stripes[i]
		p.mu.Lock()
		p.forgetUncertainty(&m)
		f.InFlight += p.gauges.InFlight
		f.Unsent += p.gauges.Unsent
		f.Uncertain += p.gauges.Uncertain
		f.Add(p.counts)
		p.mu.Unlock()
	}
	return f
}

// forgetUncertainty drops uncertainty about expired charges. p is locked.
func (p *stripe) forgetUncertainty(m *core.Moment) {
	if p.gauges.Uncertain == 0 {
		return
	}
	for e := range p.entries.all {
		before := e.Gauges()
		e.ForgetUncertainty(m)
		p.note(e, before, m)
	}
}
