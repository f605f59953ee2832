package ledger

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestChecksAndTakesTogetherKeepTheLimit: requests that check and are charged afterwards, and others that take, of one
// client in one process, such as those of a site and of rate_limit_service.
func TestChecksAndTakesTogetherKeepTheLimit(t *testing.T) {
	for _, kind := range kinds {
		for seed := range uint64(150) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(seed)
				l := New(NewRegistry(nil), s, Options{})
				defer l.Leave()
				limit := kind
				limit.Zone, limit.Window = "zone", 100*time.Hour
				rng := rand.New(rand.NewPCG(seed, 9))
				events := 2 + rng.Int64N(9)
				var wg sync.WaitGroup
				for i := range 6 * events {
					r := store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1, ID: fmt.Sprint(i)}
					comes, lasts, takes, isFree := rng.IntN(20_000), rng.IntN(8_000), rng.IntN(2) == 0, rng.IntN(6) == 0
					wg.Go(func() {
						pass(time.Duration(comes) * time.Microsecond)
						reqs, states := []store.Request{r}, make([]store.State, 1)
						ask := l.Admit
						if takes {
							ask = l.Take
						}
						if ask(context.Background(), reqs, states); states[0].Err != nil || !states[0].Allowed {
							return
						}
						pass(time.Duration(lasts) * time.Microsecond)
						switch {
						case !takes && isFree:
							reqs[0].Cost = 0
							l.Settle(reqs, []int64{1})
						case !takes:
							l.Settle(reqs, nil)
						case isFree:
							reqs[0].Receipt = states[0].Receipt
							l.RefundDetached(reqs)
						}
					})
				}
				wg.Wait()
				l.Flush(t.Context())
				pass(3 * time.Second)
				synctest.Wait()
				if used := s.used(store.Request{Limit: &limit, ClientKey: "alice", Events: events}); used > events {
					t.Errorf("%s, align %t, seed %d: %d are used of %d", limit.Algorithm, limit.Align, seed, used, events)
				}
			})
		}
	}
}
