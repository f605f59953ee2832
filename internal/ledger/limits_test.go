package ledger

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

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
			for _, accounts := range []interface {
				admitter
				Settle(reqs []*store.Request, held []int64)
			}{l, local} {
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
		if n, flying := l.registry.limits.Number(next), flights.limits.Number(next); n > most || flying > 64 {
			t.Errorf("after %d limits, the next has number %d in the ledger and %d in flights", many, n, flying)
		}
	})
}
