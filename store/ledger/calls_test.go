package ledger

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestOwnClientsCostTheirChargesAlone: clients that come to one process cost no
// checks, and those that come to two in turn as many as they make requests.
func TestOwnClientsCostTheirChargesAlone(t *testing.T) {
	const clients, perSecond, seconds = 20, 200, 5
	for _, shared := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(1)
			ledgers := []*Ledger{New(NewBooks(nil), s, Options{}), New(NewBooks(nil), s, Options{})}
			var wg sync.WaitGroup
			// come makes so many requests, each client's at two processes in turn if
			// they are shared.
			come := func(n int) {
				for i := range n {
					l := ledgers[0]
					if shared {
						l = ledgers[i/clients%2]
					}
					r := requestOf(fmt.Sprint(i%clients), 1_000_000_000)
					r.Limit = &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
					wg.Go(func() {
						if st := admit(l, r); st.Err != nil || !st.Allowed {
							t.Errorf("%+v", st)
						}
						time.Sleep(2 * time.Millisecond)
						l.Settle([]store.Request{r}, nil)
					})
					time.Sleep(time.Second / perSecond)
				}
				wg.Wait()
			}
			// A trusted second later it is known whether they come here alone.
			come(3 * perSecond)
			s.mu.Lock()
			before := s.checks
			s.mu.Unlock()
			come(seconds * perSecond)
			checks := float64(s.checks-before) / (seconds * perSecond)
			if !shared && checks > 0.01 {
				t.Errorf("%.3f checks a request of clients that come to one process", checks)
			}
			if shared && checks < 0.6 {
				t.Errorf("%.3f checks a request of clients that come to two", checks)
			}
			for _, l := range ledgers {
				l.Leave()
			}
			time.Sleep(time.Second)
		})
	}
}

// TestBatchesSaveCalls: of steady traffic, by requests at random instants through
// four processes, most cost no call, and of heavy traffic nearly the whole limit
// is admitted.
func TestBatchesSaveCalls(t *testing.T) {
	const processes = 4
	for _, events := range []int64{1_000, 10_000} {
		for _, batch := range []int64{store.BatchAuto, events / 100} {
			synctest.Test(t, func(t *testing.T) {
				b := newBatches(t, 1, processes, events, batch)
				b.limit.Window, b.limit.Align = time.Second, true
				rng := rand.New(rand.NewPCG(uint64(events), 1))
				// send makes requests of one aligned window, a part of the limit, and
				// returns the calls that each cost, and what was admitted.
				send := func(percent int64) (calls float64, admitted int64) {
					var wg sync.WaitGroup
					now := b.sim.now()
					end := (now/1_000_000 + 1) * 1_000_000
					time.Sleep(time.Duration(end-now) * time.Microsecond)
					b.sim.mu.Lock()
					before := b.sim.checks + b.sim.writes
					b.sim.mu.Unlock()
					was, requests := b.served.Load(), events*percent/100
					pause := float64(time.Second) / float64(requests)
					for n, left := int64(0), time.Second; n < requests; n++ {
						p := min(time.Duration(rng.ExpFloat64()*pause), left)
						time.Sleep(p)
						left -= p
						wg.Go(func() { b.take(b.ledgers[n%processes], 1) })
					}
					wg.Wait()
					b.sim.mu.Lock()
					defer b.sim.mu.Unlock()
					return float64(b.sim.checks+b.sim.writes-before) / float64(requests), b.served.Load() - was
				}
				for range 5 {
					send(80)
				}
				steady, served := send(80)
				heavy, admitted := send(120)
				again, _ := send(80)
				what := fmt.Sprintf("limit %d, batch %d", events, batch)
				t.Logf("%s: %.3f, %.3f and %.3f calls a request, %d and %d admitted", what, steady, heavy, again, served, admitted)
				if most := 0.5; steady > most || again > most {
					t.Errorf("%s: %.3f calls a request, and %.3f after heavy traffic, want at most %.1f", what, steady, again, most)
				}
				if admitted < events*9/10 {
					t.Errorf("%s: %d admitted of heavy traffic", what, admitted)
				}
				b.leave()
			})
		}
	}
}
