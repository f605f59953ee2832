package ledger

import (
	"context"
	"hash/maphash"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Flights are what is in flight, by bucket: all that has to be known of a store
// that no other process writes to. Views share them, and they outlive views.
type Flights struct {
	seed   maphash.Seed
	limits identity.Limits
	pages  [pageCount]flightPage
}

type flightPage struct {
	mu      sync.Mutex
	flights map[identity.ID]*flight
	// inFlight is the cost of all of them.
	inFlight int64
}

// localTimeout bounds a charge of a store that cannot charge by itself.
const localTimeout = 5 * time.Second

// flight is what is in flight of one bucket.
type flight struct {
	// mu makes an answer of the store and what follows from it one step.
	mu sync.Mutex
	// cost was admitted and is not settled.
	cost int64
	// users are those that hold some of it or look at it; the page's lock
	// guards the number.
	users int
	// asked is what the store is asked.
	asked [1]store.Request
}

// idle are flights that nobody uses.
var idle = sync.Pool{New: func() any { return new(flight) }}

// NewFlights returns none.
func NewFlights() *Flights {
	f := &Flights{seed: maphash.MakeSeed()}
	for i := range f.pages {
		f.pages[i].flights = map[identity.ID]*flight{}
	}
	return f
}

// Len is of how many buckets something is in flight.
func (f *Flights) Len() int { return int(f.Figures().Buckets) }

// Figures tell of how many buckets something is in flight, and how much. There
// are no others.
func (f *Flights) Figures() (sum Figures) {
	for i := range f.pages {
		p := &f.pages[i]
		p.mu.Lock()
		sum.Buckets += int64(len(p.flights))
		sum.InFlight += p.inFlight
		p.mu.Unlock()
	}
	return sum
}

// use returns the bucket's flight, locked.
func (f *Flights) use(r *store.Request) (*flightPage, identity.ID, *flight) {
	id := identity.New(f.limits.Number(r.Limit), r.ClientKey)
	p := &f.pages[placeOf(f.seed, id)]
	p.mu.Lock()
	fl, ok := p.flights[id]
	if !ok {
		fl = idle.Get().(*flight)
		p.flights[id] = fl
	}
	fl.users++
	p.mu.Unlock()
	fl.mu.Lock()
	return p, id, fl
}

// leave unlocks a flight that so many no longer use, and to which so much was
// added.
func (p *flightPage) leave(id identity.ID, fl *flight, users int, cost int64) {
	fl.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight += cost
	if fl.users -= users; fl.users == 0 {
		delete(p.flights, id)
		*fl = flight{}
		idle.Put(fl)
	}
}

// Local is a view of flights on a store that answers at once: a client's
// requests wait for each other while it does. What it does not add is the
// store's.
type Local struct {
	store.Store
	flights  *Flights
	detacher store.Detacher
}

// NewLocal returns a view of flights on s.
func NewLocal(flights *Flights, s store.Store) *Local {
	l := &Local{Store: s, flights: flights}
	l.detacher, _ = s.(store.Detacher)
	return l
}

// Admit is [Ledger.Admit].
func (l *Local) Admit(ctx context.Context, reqs []store.Request, states []store.State) {
	for i := range reqs {
		states[i] = l.admit(ctx, &reqs[i])
	}
}

func (l *Local) admit(ctx context.Context, r *store.Request) store.State {
	page, id, fl := l.flights.use(r)
	asked := fl.asked[:]
	asked[0] = *r
	asked[0].Ahead += fl.cost
	st := l.Check(ctx, asked)[0]
	switch {
	case st.Err != nil:
	case st.Allowed:
		showFlight(&st, fl.cost)
		fl.cost += r.Cost
		page.leave(id, fl, 0, r.Cost)
		return st
	case fl.cost > 0:
		asked[0].Ahead = r.Ahead
		if st = l.Check(ctx, asked)[0]; st.Err == nil && st.Allowed {
			refuseForFlight(&st)
			showFlight(&st, fl.cost)
		}
	}
	page.leave(id, fl, 1, 0)
	return st
}

// Hold is [Ledger.Hold].
func (l *Local) Hold(reqs []store.Request) {
	for i := range reqs {
		page, id, fl := l.flights.use(&reqs[i])
		fl.cost += reqs[i].Cost
		page.leave(id, fl, 0, reqs[i].Cost)
	}
}

// Figures are those of the flights.
func (l *Local) Figures() Figures { return l.flights.Figures() }

// RefuseKnown is [Ledger.RefuseKnown]. What would be known the store says as
// quickly.
func (*Local) RefuseKnown([]store.Request, []store.State) bool { return false }

// Settle is [Ledger.Settle].
func (l *Local) Settle(reqs []store.Request, held []int64) {
	for i := range reqs {
		page, id, fl := l.flights.use(&reqs[i])
		if reqs[i].Cost > 0 {
			l.charge(reqs[i : i+1])
		}
		hold := holdOf(reqs, held, i)
		fl.cost -= hold
		page.leave(id, fl, 2, -hold)
	}
}

func (l *Local) charge(reqs []store.Request) {
	if l.detacher != nil {
		l.detacher.ChargeDetached(reqs)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), localTimeout)
	defer cancel()
	l.Charge(ctx, reqs)
}
