package ledger

import (
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestDifferingLimits sends requests of different limits through a [Local]. The tests of
// the Redis store do so through a Ledger.
func TestDifferingLimits(t *testing.T) {
	storetest.DifferingLimits(t, func(_ *testing.T, clock *storetest.Clock) store.Store {
		return NewLocal(NewFlights(), memory.New(memory.NewBuckets(), memory.Options{Now: clock.Now}))
	})
}

// TestLimitsOfThePastLeaveNothing: limits without buckets give up their numbers, in a ledger and in flights.
func TestLimitsOfThePastLeaveNothing(t *testing.T) {
	const many, most = 3000, 1500
	simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
		flights := NewFlights()
		local := NewLocal(flights, memory.New(memory.NewBuckets(), memory.Options{}))
		for i := range many {
			r := requestOf(strconv.Itoa(i), 10)
			r.Limit = &store.Limit{Zone: strconv.Itoa(i), Window: time.Second}
			for _, accounts := range []storetest.Admitter{l, local} {
				if st := admit(accounts, r); !st.Allowed {
					t.Fatalf("the first request of zone %s gets %+v", r.Limit.Zone, st)
				}
				accounts.Settle([]*store.Request{&r}, nil)
			}
			if i%10 == 0 {
				pass(time.Second)
				synctest.Wait()
			}
		}
		pass(time.Second)
		synctest.Wait()
		next := &store.Limit{Zone: "next", Window: time.Second}
		if n, flying := l.registry.limits.Number(next), flights.limits.Number(next); n > most || flying > most {
			t.Errorf("after %d limits, the next has number %d in the ledger and %d in flights", many, n, flying)
		}
	})
}

// TestRequestIsOvertaken by the end of its limit's number: another limit gets the number.
func TestRequestIsOvertaken(t *testing.T) {
	r := requestOf("alice", 10)
	l, f := New(NewRegistry(nil), new(instant), Options{}), NewFlights()
	for name, c := range map[string]struct {
		limits  *identity.Limits
		lockAll func(lock func(mu *sync.Mutex))
		begin   func()
		isFound func() bool
	}{
		"Ledger": {&l.registry.limits, func(lock func(mu *sync.Mutex)) {
			for i := range l.registry.stripes {
				lock(&l.registry.stripes[i].mu)
			}
		}, func() {
			m := l.moment()
			l.enter(&r, &m).stripe.mu.Unlock()
		}, func() bool {
			e := l.look(&r)
			if e != nil {
				e.stripe.mu.Unlock()
			}
			return e != nil
		}},
		"Flights": {&f.limits, func(lock func(mu *sync.Mutex)) {
			for i := range f.stripes {
				lock(&f.stripes[i].mu)
			}
		}, func() {
			_, _, fl := f.use(&r)
			fl.cost = 1
			fl.mu.Unlock()
		}, func() bool { return f.held(&r) == 1 }},
	} {
		t.Run(name, func(t *testing.T) {
			inUse := c.limits.InUse
			c.limits.InUse, c.limits.Pause = func(func(uint32)) {}, 0
			c.lockAll((*sync.Mutex).Lock)
			var begun sync.WaitGroup
			begun.Go(c.begin)
			storetest.AwaitLock(t, "TestRequestIsOvertaken", "(*"+name+").lock")
			for n := range 1000 {
				c.limits.Of(&store.Limit{Zone: strconv.Itoa(n), Window: time.Hour}, true)
			}
			c.lockAll((*sync.Mutex).Unlock)
			begun.Wait()
			if c.limits.InUse = inUse; !c.isFound() {
				t.Error("the request's bucket is not found by its limit")
			}
		})
	}
}

// TestFlightsOfManyZones: flights are not walked for requests of many zones in turn, and these take no memory.
func TestFlightsOfManyZones(t *testing.T) {
	const many = 1000
	f := NewFlights()
	walks, inUse := 0, f.limits.InUse
	f.limits.Pause = time.Hour
	f.limits.InUse = func(note func(uint32)) {
		walks++
		inUse(note)
	}
	reqs := make([]store.Request, many)
	for i := range reqs {
		reqs[i] = requestOf("alice", 10)
		reqs[i].Limit = &store.Limit{Zone: strconv.Itoa(i), Window: time.Hour}
	}
	round := func() {
		for i := range reqs {
			p, id, fl := f.use(&reqs[i])
			p.leave(id, fl, 1, 0)
		}
	}
	round()
	round()
	// The pool of flights may be emptied meanwhile, and with the race detector it drops one in four.
	if n := testing.AllocsPerRun(10, round); n > many/2 || walks > 0 {
		t.Errorf("the requests of %d zones take %v allocations, and %d walks", many, n, walks)
	}
	unknown := requestOf("alice", 10)
	unknown.Limit = &store.Limit{Zone: "unknown"}
	if held := f.held(&unknown); held != 0 || f.limits.Of(unknown.Limit, true).Number != many {
		t.Errorf("a look at a bucket without a flight finds %d, and gives its limit a number", held)
	}
}
