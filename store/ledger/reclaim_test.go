package ledger

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// newOvertaken returns some batches of which 2 tokens are left here and 1 in the
// store.
func newOvertaken(t *testing.T) *batches {
	b := newBatches(t, 1, 1, 10, 5)
	b.take(b.ledgers[0], 3)
	b.sim.others(algorithm.Charge, b.request(4))
	return b
}

// refusedTake is a take that the store has refused when that much was left of it.
func (b *batches) refusedTake(remaining int64, reqs ...store.Request) *taking {
	t := &taking{ledger: b.ledgers[0], ctx: context.Background(), reqs: reqs}
	for range reqs {
		t.states = append(t.states, store.State{Limit: b.events, Used: b.events - remaining, Remaining: remaining, RetryAfter: 1})
	}
	return t
}

func (b *batches) requireLeft(here, there int64) {
	b.Helper()
	r := b.request(1)
	e := b.ledgers[0].find(&r)
	tokens := e.reservation.tokens
	e.page.mu.Unlock()
	if spent := b.spent(); tokens != here || b.events-spent != there {
		b.Errorf("%d are left here and %d in the store, want %d and %d", tokens, b.events-spent, here, there)
	}
}

// TestReclaim of what was refused while there was room.
func TestReclaim(t *testing.T) {
	for name, c := range map[string]struct {
		cost        int64
		beside      bool
		served      bool
		here, there int64
	}{
		"here":                   {cost: 2, served: true, here: 0, there: 1},
		"here and in the store":  {cost: 3, served: true, here: 0, there: 0},
		"more than there is":     {cost: 4, here: 2, there: 1},
		"refused by another too": {cost: 2, beside: true, here: 2, there: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newOvertaken(t)
				reqs := []store.Request{b.request(c.cost)}
				if c.beside {
					other := b.request(1)
					other.ClientKey, other.Batch = "other", 0
					reqs = append(reqs, other)
				}
				k := b.refusedTake(1, reqs...)
				k.reclaim()
				if st := k.states[0]; st.Err != nil || st.Allowed != c.served {
					t.Errorf("a request that costs %d: %+v", c.cost, st)
				}
				b.requireLeft(c.here, c.there)
				b.leave()
			})
		})
	}
}

// TestRefusalStands where a batch is waited for, or the rest asked for, in vain.
func TestRefusalStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newOvertaken(t)
		l := b.ledgers[0]
		fetch := b.request(5)
		e := l.find(&fetch)
		e.reservation.coming, e.reservation.claimed = 5, 1
		e.page.mu.Unlock()
		k := b.refusedTake(0, b.request(4))
		go k.reclaim()
		synctest.Wait()
		l.fetched(b.refusedTake(0, b.request(1)), 0, &fetch, &store.State{Err: store.ErrUncertain})
		synctest.Wait()
		if st := k.states[0]; st.Err != nil || st.Allowed || st.RetryAfter != 1 {
			t.Errorf("the batch was lost: %+v", st)
		}
		b.sim.setDown(true, false)
		k = b.refusedTake(1, b.request(3))
		k.reclaim()
		if st := k.states[0]; st.Err != nil || st.Allowed || st.RetryAfter != 1 {
			t.Errorf("the store is away: %+v", st)
		}
		b.sim.setDown(false, false)
		b.requireLeft(2, 1)
		b.leave()
	})
}
