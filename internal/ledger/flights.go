package ledger

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Flights are the costs in flight by bucket: all that a store without other
// writers needs of a ledger. Views share them, and they outlive views.
type Flights struct {
	seed    maphash.Seed
	limits  identity.Limits
	stripes [stripeCount]flightStripe
}

type flightStripe struct {
	mu      sync.Mutex
	flights map[identity.ID]*flight
	// inFlight is the cost of all flights.
	inFlight int64
}

// flight is the cost in flight of one bucket.
type flight struct {
	// mu makes an answer of the store and what follows from it one step.
	mu sync.Mutex
	// cost was admitted and is not settled.
	cost int64
	// users hold some of the cost or look at it. The stripe's lock guards the
	// number.
	users int
	// asked has room for what the store is asked, and room for the asks.
	asked store.Ask
	room  [1]*store.Ask
}

var idleFlights = sync.Pool{New: func() any { return new(flight) }}

// NewFlights returns flights of no bucket.
func NewFlights() *Flights {
	f := &Flights{seed: maphash.MakeSeed()}
	for i := range f.stripes {
		f.stripes[i].flights = map[identity.ID]*flight{}
	}
	f.limits.Pause = identity.ReusePause
	f.limits.InUse = func(note func(number uint32)) {
		for i := range f.stripes {
			p := &f.stripes[i]
			p.mu.Lock()
			for id := range p.flights {
				note(id.Limit)
			}
			p.mu.Unlock()
		}
	}
	return f
}

// Figures returns the number of buckets with requests in flight, and their cost.
// The other figures are 0.
func (f *Flights) Figures() (sum Figures) {
	for i := range f.stripes {
		p := &f.stripes[i]
		p.mu.Lock()
		sum.Buckets += int64(len(p.flights))
		sum.InFlight += p.inFlight
		p.mu.Unlock()
	}
	return sum
}

// use returns the bucket's flight, locked.
func (f *Flights) use(r *store.Request) (*flightStripe, identity.ID, *flight) {
	p, id := f.lock(r, true)
	fl, ok := p.flights[id]
	if !ok {
		fl = idleFlights.Get().(*flight)
		p.flights[id] = fl
	}
	fl.users++
	p.mu.Unlock()
	fl.mu.Lock()
	return p, id, fl
}

// lock locks the bucket's stripe, and returns it and the bucket's identity. A flight is only added
// if adds is set.
func (f *Flights) lock(r *store.Request, adds bool) (*flightStripe, identity.ID) {
	for {
		limit := f.limits.Of(r.Limit, adds)
		id := identity.ID{Limit: limit.Number, Key: r.ClientKey}
		p := &f.stripes[stripeOf(id.Hash(f.seed))]
		p.mu.Lock()
		if !limit.HasEnded() {
			return p, id
		}
		p.mu.Unlock()
	}
}

// leave unlocks a flight, drops users references and adds cost.
func (p *flightStripe) leave(id identity.ID, fl *flight, users int, cost int64) {
	fl.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight += cost
	if fl.users -= users; fl.users == 0 {
		delete(p.flights, id)
		*fl = flight{}
		idleFlights.Put(fl)
	}
}

func (f *Flights) held(r *store.Request) int64 {
	p, id := f.lock(r, false)
	fl := p.flights[id]
	if fl == nil {
		p.mu.Unlock()
		return 0
	}
	fl.users++
	p.mu.Unlock()
	fl.mu.Lock()
	cost := fl.cost
	p.leave(id, fl, 1, 0)
	return cost
}

// Local is a view of flights on a store that answers at once: a client's requests
// wait for each other's answers. It is the counterpart of a [Ledger]; its other methods are
// the store's.
type Local struct {
	store.Store
	flights *Flights
}

// NewLocal returns a view of flights on s.
func NewLocal(flights *Flights, s store.Store) *Local { return &Local{Store: s, flights: flights} }

// Admit is [Ledger.Admit].
func (l *Local) Admit(ctx context.Context, asks []*store.Ask) {
	n := 0
	defer func() {
		if n < len(asks) {
			l.release(asks[:n])
		}
	}()
	for ; n < len(asks); n++ {
		l.admit(ctx, asks[n])
	}
}

// release ends the flights of requests that were admitted before the store panicked.
func (l *Local) release(asks []*store.Ask) {
	for _, a := range asks {
		if r := a.Request; a.Err == nil && a.Allowed {
			r.Cost = 0
			l.settle([]*store.Request{&r}, a.Cost)
		}
	}
}

func (l *Local) admit(ctx context.Context, a *store.Ask) {
	r, st := &a.Request, &a.State
	stripe, id, fl := l.flights.use(r)
	users, cost := 1, int64(0)
	// Deferred, because a panic of the store must not leave the flight locked.
	defer func() { stripe.leave(id, fl, users, cost) }()
	check := func(ahead int64) {
		fl.asked.Request, fl.room[0] = *r, &fl.asked
		fl.asked.Ahead += ahead
		l.Check(ctx, fl.room[:])
		*st = fl.asked.State
	}
	check(fl.cost)
	switch {
	case st.Err != nil:
	case st.Allowed:
		core.ShowFlight(st, fl.cost)
		fl.cost += r.Cost
		users, cost = 0, r.Cost
	case fl.cost > 0:
		if check(0); st.Err != nil {
			return
		}
		if st.Allowed {
			core.RefuseForFlight(st, r, algorithm.Known{Content: st.Content}, fl.cost)
		}
		core.ShowFlight(st, fl.cost)
	}
}

// Foresee is [Ledger.Foresee].
func (l *Local) Foresee(r store.Request, takes bool, peek PeekFunc) store.State {
	held := int64(0)
	if !takes {
		held = l.flights.held(&r)
	}
	asked := r
	asked.Ahead += held
	st := peek(asked)
	if takes && st.Allowed {
		ShowTaken(&st, r.Cost)
	}
	if st.Err != nil || held == 0 {
		return st
	}
	if !st.Allowed {
		if st = peek(r); st.Err != nil {
			return st
		}
		if st.Allowed {
			core.RefuseForFlight(&st, &r, algorithm.Known{Content: st.Content}, held)
		}
	}
	core.ShowFlight(&st, held)
	return st
}

// CheckAhead is [Ledger.CheckAhead]. What is in flight counts as well.
func (l *Local) CheckAhead(ctx context.Context, r store.Request, _ time.Duration) store.State {
	return l.Foresee(r, false, func(r store.Request) store.State {
		return store.Answers(ctx, l.Check, []store.Request{r})[0]
	})
}

// AdmitAlone is [Ledger.AdmitAlone]. The store decides, because it is in memory, and spends the cost.
func (l *Local) AdmitAlone(r *store.Request) store.State {
	return store.Answers(context.Background(), l.Take, []store.Request{*r})[0]
}

// ForeseeAlone is [Ledger.ForeseeAlone].
func (l *Local) ForeseeAlone(r *store.Request) store.State {
	return l.Foresee(*r, true, func(r store.Request) store.State {
		return store.Answers(context.Background(), l.Peek, []store.Request{r})[0]
	})
}

// Figures are those of the flights.
func (l *Local) Figures() Figures { return l.flights.Figures() }

// RefuseKnown is [Ledger.RefuseKnown]. It refuses nothing: the store is as quick.
func (*Local) RefuseKnown([]*store.Ask) bool { return false }

// IsFull is [Ledger.IsFull]. The store is as quick.
func (l *Local) IsFull(r *store.Request) bool {
	st := store.Answers(context.Background(), l.Peek, []store.Request{*r})[0]
	return st.Err == nil && !st.Allowed
}

// ForeseeKnown is [Ledger.ForeseeKnown].
func (*Local) ForeseeKnown([]*store.Ask) bool { return false }

// Settle is [Ledger.Settle].
func (l *Local) Settle(reqs []*store.Request, held []int64) {
	if len(reqs) > 1 {
		// Deferred, because a panic of the store must not leave the other requests in flight.
		defer l.Settle(reqs[1:], held[min(1, len(held)):])
	}
	switch {
	case len(reqs) == 0:
	case held == nil:
		l.settle(reqs[:1], reqs[0].Cost)
	default:
		l.settle(reqs[:1], held[0])
	}
}

// SettleUnknown is [Ledger.SettleUnknown].
func (l *Local) SettleUnknown(reqs []*store.Request, held []int64, _ []*store.Late) {
	for i := range reqs {
		r := *reqs[i]
		r.Cost = 0
		l.settle([]*store.Request{&r}, held[i])
	}
}

// settle charges one request, whose flight is locked until the charge counts.
func (l *Local) settle(req []*store.Request, hold int64) {
	stripe, id, fl := l.flights.use(req[0])
	defer stripe.leave(id, fl, 2, -hold)
	fl.cost -= hold
	if req[0].Cost > 0 {
		l.ChargeDetached(req)
	}
}

// ChargeDetached is [Ledger.ChargeDetached]; it charges at once.
func (l *Local) ChargeDetached(reqs []*store.Request) { discard(l.Charge, reqs) }

// ChargeByID is [Ledger.ChargeByID].
func (l *Local) ChargeByID(reqs []*store.Request) { l.ChargeDetached(reqs) }

// RefundDetached is [Ledger.RefundDetached]; it refunds at once.
func (l *Local) RefundDetached(reqs []*store.Request) { discard(l.Refund, reqs) }

// PenalizeDetached is [Ledger.PenalizeDetached].
func (l *Local) PenalizeDetached(reqs []*store.Request) { discard(l.Penalize, reqs) }

// PenalizeAlone is [Ledger.PenalizeAlone].
func (l *Local) PenalizeAlone(r *store.Request) { l.PenalizeDetached([]*store.Request{r}) }

// RefundReported is [Ledger.RefundReported].
func (l *Local) RefundReported(r store.Request, report func(st store.State)) {
	report(store.Answers(context.Background(), l.Refund, []store.Request{r})[0])
}

// unread has room for answers that nobody reads.
var unread = sync.Pool{New: func() any { return new(unreadAnswers) }}

type unreadAnswers struct {
	room []store.Ask
	asks []*store.Ask
}

// discard makes an operation, and discards the answers.
func discard(op func(context.Context, []*store.Ask), reqs []*store.Request) {
	u := unread.Get().(*unreadAnswers)
	u.room, u.asks = slices.Grow(u.room[:0], len(reqs))[:len(reqs)], u.asks[:0]
	for i := range reqs {
		u.room[i].Request = *reqs[i]
		u.asks = append(u.asks, &u.room[i])
	}
	op(context.Background(), u.asks)
	clear(u.room) // errors, and keys of clients
	unread.Put(u)
}

// Account is [Ledger.Account]. The store says all that is known.
func (*Local) Account(*store.Request) *store.Account { return nil }

// Recall returns false: the store does that.
func (*Local) Recall(*store.Request) bool { return false }

// Walk is [Ledger.Walk]. The store walks.
func (*Local) Walk([]store.Request, func(i int, r *store.Request) bool, func(i int, clientKey string, st *store.State)) {
}

// Owner is [Ledger.Owner]. There are no shards.
func (*Local) Owner(string) string { return "" }

// Delays is [Ledger.Delays]. No charge waits.
func (*Local) Delays(string) error { return nil }

// Warm is [Ledger.Warm].
func (*Local) Warm(context.Context) {}

// Run is [Ledger.Run]. Nothing is ever to be delivered.
func (*Local) Run() {}

// Stop is [Ledger.Stop].
func (*Local) Stop() {}

// IsNeeded is [Ledger.IsNeeded].
func (*Local) IsNeeded() bool { return false }

// Flush is [Ledger.Flush].
func (*Local) Flush(context.Context) {}

// Leave is [Ledger.Leave].
func (*Local) Leave() {}
